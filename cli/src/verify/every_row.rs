//! Checks every row of a result; the oracle is too slow for more than a sample.
//!
//! A kernel for f16 or bf16 that is right in the sample may be wrong in a tile without sampled
//! rows. So the same device also computes all rows in f32, with another kernel, from the same
//! tensors. That result is compared with the oracle on the sample; then every row of the f16 or
//! bf16 result is compared with it.

use bytes::Bytes;
use kyklos::Dtype;
use kyklos_oracle::oracle::{Dtype as OracleDtype, OracleProblem, Row, RowId};
use kyklos_oracle::tolerance::{Limit, compare_rows};

use super::{Sample, Verdict, element_value, oracle_dtype};
use crate::failure::Result;

/// The whole `o` and `lse` of one device, tokens in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) o: &'a Bytes,
    pub(crate) lse: &'a Bytes,
}

impl Sample {
    /// Compares every row of `actual` with `wide`, the result of the same device from the same
    /// tensors in f32.
    pub(crate) fn judge_every_row(
        &self,
        actual: Whole<'_>,
        wide: Whole<'_>,
        backend: &str,
    ) -> Result<Verdict> {
        let kv = self.whole_kv()?;
        // Rows without an oracle have no slack that could be computed, so the others get none.
        let ((expected, _), naive) = (self.expected(&kv)?, self.naive(&kv)?);
        let in_f32 = format!("{backend} in f32");
        let sampled: Vec<Row> = self.rows.iter().map(|id| self.row(wide, *id)).collect();
        let hold = |rows: &[Row], context| {
            compare_rows(&self.oracle, OracleDtype::F32, rows, &expected, &self.context(context))
        };
        let (naive, sampled) = (hold(&naive, "plain f32"), hold(&sampled, &in_f32));
        let mut verdict = Verdict {
            rows: 0,
            unproved: 0,
            max_abs_error: 0.0,
            tolerance: 0.0,
            dense_error: naive.max_abs_error,
            failure: sampled
                .within(&Limit::dense(OracleDtype::F32, &naive))
                .err()
                .map(|failure| failure.to_string()),
        };
        let dtype = oracle_dtype(actual.dtype);
        for ids in self.bands() {
            if verdict.failure.is_some() {
                break;
            }
            let [actual, wide] =
                [actual, wide].map(|whole| ids.iter().map(|id| self.row(whole, *id)).collect::<Vec<_>>());
            let band = compare_rows(&self.oracle, dtype, &actual, &wide, &self.context(backend));
            let limit = Limit::beside(dtype, &naive, &sampled, &band);
            verdict.rows += band.rows;
            verdict.max_abs_error = verdict.max_abs_error.max(band.max_abs_error);
            verdict.tolerance = verdict.tolerance.max(limit.o_abs());
            verdict.failure = band.within(&limit).err().map(|failure| failure.to_string());
        }
        Ok(verdict)
    }

    /// All rows in bands of neighbouring tokens. Each band has its own limit: the first rows of a
    /// causal mask are a hundred times as large as the others, and would loosen a common limit.
    fn bands(&self) -> impl Iterator<Item = Vec<RowId>> {
        let &OracleProblem { batch, q_len, q_heads, head_dim, .. } = &self.oracle;
        let tokens = BAND_ELEMENTS.div_ceil(q_heads * head_dim);
        (0..batch).flat_map(move |batch| {
            (0..q_len).step_by(tokens).map(move |first| {
                let rows = first..(first + tokens).min(q_len);
                rows.flat_map(|row| (0..q_heads).map(move |head| RowId { batch, row, head })).collect()
            })
        })
    }

    fn row(&self, Whole { dtype, o, lse }: Whole<'_>, id: RowId) -> Row {
        let OracleProblem { q_len, q_heads, head_dim, .. } = self.oracle;
        let place = (id.batch * q_len + id.row) * q_heads + id.head;
        let bytes = head_dim * dtype.bytes();
        let elements = o[place * bytes..][..bytes].chunks_exact(dtype.bytes());
        Row {
            id,
            o: elements.map(|element| element_value(dtype, element)).collect(),
            lse: element_value(Dtype::F32, &lse[place * 4..][..4]),
        }
    }
}

/// Elements of a band: enough for a stable norm.
const BAND_ELEMENTS: usize = 4096;

#[cfg(test)]
mod tests {
    use kyklos::backend::Control;
    use kyklos::backend::cpu::CpuBackend;
    use kyklos::{AttentionProblem, TokenRuns, plan_rows};

    use super::*;
    use crate::run::resident::Resident;
    use crate::tensors::Source;

    const SEED: u64 = 3;

    /// A causal problem of f16 on the CPU: the sample, the result, and the result in f32.
    fn computed() -> (Sample, [Bytes; 2], [Bytes; 2]) {
        let problem = AttentionProblem::new([2, 700, 3, 1, 16], Dtype::F16, kyklos::Mask::causal()).unwrap();
        let backend = CpuBackend::new();
        let run = |mut resident: Resident<_>| {
            resident.run(&backend, &Control::default()).unwrap();
            let (o, lse) = resident.results(&backend).unwrap();
            [o, lse]
        };
        let narrow = run(Resident::new(&backend, &problem, SEED).unwrap());
        let wide = run(Resident::widened(&backend, &problem, SEED).unwrap());
        (Sample::new(&problem, &Source::Random { seed: SEED }).unwrap(), narrow, wide)
    }

    fn judge(sample: &Sample, [o, lse]: &[Bytes; 2], [wide_o, wide_lse]: &[Bytes; 2]) -> Verdict {
        let actual = Whole { dtype: Dtype::F16, o, lse };
        let wide = Whole { dtype: Dtype::F32, o: wide_o, lse: wide_lse };
        sample.judge_every_row(actual, wide, "cpu").unwrap()
    }

    /// The first row of the second half that is, or is not, in the sample.
    fn place(sample: &Sample, sampled: bool) -> usize {
        let rows = (0..700).flat_map(|row| (0..3).map(move |head| RowId { batch: 1, row, head }));
        let place = rows.into_iter().skip(1050).position(|id| sample.rows().contains(&id) == sampled);
        2100 + 1050 + place.expect("a row")
    }

    #[test]
    fn a_device_that_is_wrong_alone_loosens_no_limit() {
        let (sample, [o, lse], _) = computed();
        let tokens = TokenRuns::contiguous(0..700);
        let set = plan_rows(&sample.problem, tokens.clone()).unwrap();
        let right = sample.right_rows(&sample.whole_kv().unwrap(), &set).unwrap();
        let failure = |o: &Bytes| {
            let rows = sample.decode(sample.rows(), &sample.extract(&tokens, o, &lse));
            sample.hold(rows.clone(), &[("cpu".into(), rows)], &right, "cpu").failure
        };
        assert_eq!(failure(&o), None);
        let elements: Vec<half::f16> = bytemuck::pod_collect_to_vec(&o);
        let off: Vec<half::f16> = elements.iter().map(|o| half::f16::from_f32(o.to_f32() * 1.02)).collect();
        let why = failure(&Bytes::copy_from_slice(bytemuck::cast_slice(&off))).unwrap();
        assert!(why.starts_with("a device alone: "), "{why}");
    }

    #[test]
    fn rows_outside_the_sample_are_checked_too() {
        let (sample, narrow, wide) = computed();
        let verdict = judge(&sample, &narrow, &wide);
        assert_eq!((verdict.failure, verdict.rows), (None, 4200));
        assert!(verdict.max_abs_error > 0.0, "f16 is rounded");

        let row = place(&sample, false);
        let alone = sample.judge_alone(&narrow[0], &narrow[1], "cpu").unwrap();
        // One row of another head's values, one element that is not a number, one lse that is off by a
        // thousandth.
        let mut moved = narrow[0].to_vec();
        moved.copy_within((row + 1) * 32..(row + 2) * 32, row * 32);
        let mut poisoned = narrow[0].to_vec();
        poisoned[row * 32..row * 32 + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
        let mut shifted = narrow[1].to_vec();
        let lse: f32 = bytemuck::pod_read_unaligned(&shifted[row * 4..][..4]);
        shifted[row * 4..][..4].copy_from_slice(&(lse + 1e-3).to_le_bytes());
        for wrong in [
            [moved.into(), narrow[1].clone()],
            [poisoned.into(), narrow[1].clone()],
            [narrow[0].clone(), shifted.into()],
        ] {
            // The sample alone does not detect the error.
            let blind = sample.judge_alone(&wrong[0], &wrong[1], "cpu").unwrap();
            assert_eq!((blind.failure, blind.max_abs_error), (None, alone.max_abs_error));
            let failure = judge(&sample, &wrong, &wide).failure.expect("a wrong row");
            assert!(
                failure.contains("the answer is wrong") && failure.contains("batch 1, row 3"),
                "{failure}"
            );
        }
    }

    #[test]
    fn the_reference_in_f32_is_checked_against_the_oracle() {
        let (sample, narrow, mut wide) = computed();
        let row = place(&sample, true);
        let mut o = wide[0].to_vec();
        o[row * 64..][..4].copy_from_slice(&9.0_f32.to_le_bytes());
        wide[0] = o.into();
        let failure = judge(&sample, &narrow, &wide).failure.expect("a wrong reference");
        assert!(failure.contains("cpu in f32"), "{failure}");
    }
}
