//! Whether a helper's results are right: a row of them is computed again.
//!
//! The row is chosen by randomness that the helper does not know. Every key/value head of the
//! part may be chosen, and the query heads of it are compared in all batch entries.

use std::hash::{BuildHasher, Hasher, RandomState};

use kyklos::backend::Device;
use kyklos::{Dtype, Result, Saved, Session, Tensor, WireFormat, in_process_group};

use crate::call::{Call, Part, Shape};
use crate::owner::Inputs;

/// Computes rows again, on the processor.
pub(crate) struct Checker {
    session: Session,
    random: RandomState,
    count: u64,
}

impl std::fmt::Debug for Checker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checker").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Checker {
    pub(crate) fn new() -> Self {
        let session = Session::new(in_process_group(1).remove(0), Device::cpu());
        Self { session, random: RandomState::new(), count: 0 }
    }

    /// A number below `end` that nobody can know before.
    pub(crate) fn random(&mut self, end: u32) -> u32 {
        self.count += 1;
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.count);
        u32::try_from(hasher.finish() % u64::from(end.max(1))).unwrap_or(0)
    }

    /// Compares one row of the results of a part, whose options and shape these are. `Some`: what
    /// is wrong, in words. Tensors are dense and in host memory.
    ///
    /// # Errors
    /// Of the processor's kernels.
    pub(crate) fn wrong(
        &mut self,
        (call, shape): (&Call, &Shape),
        inputs: &Inputs,
        keys: &[Tensor; 2],
        results: &[Tensor],
        wire: WireFormat,
    ) -> Result<Option<String>> {
        if shape.q_len == 0 || shape.kv_heads == 0 {
            return Ok(None);
        }
        let (head, row) = (self.random(shape.kv_heads), self.random(shape.q_len));
        let part = Part { kv_heads: head..head + 1, rows: row..row + 1 };
        let q = part.of_queries(&inputs.q, shape)?.copied()?;
        let [k, v] = [part.of_keys(&keys[0])?.copied()?, part.of_keys(&keys[1])?.copied()?];
        let of_row = part.call(call, shape);
        let attention = of_row.attention();
        let output = self.session.attend(&attention, &q, &k, &v)?;
        let numbers = |tensor: &Tensor| numbers(tensor);
        let (wanted, d_o) = match &inputs.d_o {
            Some(d_o) => {
                let d_o = part.of_queries(d_o, shape)?.copied()?;
                let saved =
                    Saved { q: q.clone(), k: k.clone(), v: v.clone(), o: output.o, lse: output.lse_pair };
                (self.session.backward(&attention, &saved, &d_o, None)?.dq, Some(numbers(&d_o)?))
            }
            None => (output.o, None),
        };
        let given = part.of_queries(&results[0], shape)?;
        let bounds = Bounds { call, dim: shape.head_dim as usize, dtype: shape.dtype, wire };
        let tolerance = bounds.tolerance([&numbers(&q)?, &numbers(&k)?, &numbers(&v)?], d_o.as_deref());
        let (wanted, given) = (numbers(&wanted)?, numbers(&given)?);
        let worst =
            wanted.iter().zip(&given).map(|(wanted, given)| difference(*wanted, *given)).fold(0.0, f32::max);
        Ok((tolerance.is_finite() && worst > tolerance).then(|| {
            format!(
                "a row that was computed again differs by {worst:.1e}, where {tolerance:.1e} may be rounding"
            )
        }))
    }
}

/// Infinite where one of the two is no number and the other is.
fn difference(wanted: f32, given: f32) -> f32 {
    if wanted == given || (wanted.is_nan() && given.is_nan()) {
        return 0.0;
    }
    let difference = (wanted - given).abs();
    if difference.is_nan() { f32::INFINITY } else { difference }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(match tensor.dtype() {
        Dtype::F32 => tensor.to_vec::<f32>()?,
        Dtype::F16 => tensor.to_vec::<half::f16>()?.into_iter().map(half::f16::to_f32).collect(),
        Dtype::Bf16 => tensor.to_vec::<half::bf16>()?.into_iter().map(half::bf16::to_f32).collect(),
    })
}

/// How far right results may be from each other.
struct Bounds<'a> {
    call: &'a Call,
    dim: usize,
    dtype: Dtype,
    wire: WireFormat,
}

impl Bounds<'_> {
    /// An output is a mean of values, weighted by exp(logit): rounding of relative size ε changes
    /// it by ε times the largest value, and where logits are as large as L by ε·L times that. A
    /// gradient of a query is a mean of keys, with weights of the size of do·v. Kernels for
    /// 16-bit types round weights to the type.
    fn tolerance(&self, [q, k, v]: [&[f32]; 3], d_o: Option<&[f32]>) -> f32 {
        let longest = |x: &[f32]| x.chunks(self.dim).map(norm).fold(0.0, f32::max);
        #[expect(clippy::cast_precision_loss, reason = "head dims are small")]
        let scale = self.call.scale.unwrap_or(1.0 / (self.dim as f32).sqrt()).abs();
        let logits = (longest(q) * longest(k) * scale).min(self.call.softcap.map_or(f32::INFINITY, f32::abs));
        let rounding: f32 = match (self.wire, self.dtype) {
            (WireFormat::Int8, _) => 1.0 / 8.0,
            (WireFormat::F16, _) | (WireFormat::Same, Dtype::F16) => 1.0 / 256.0,
            (WireFormat::Same, Dtype::Bf16) => 1.0 / 64.0,
            (WireFormat::Same, Dtype::F32) => 1.0 / 16_384.0,
        };
        let values = v.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
        let size = match d_o {
            None => values,
            Some(d_o) => 2.0 * scale * longest(k) * longest(d_o) * longest(v),
        };
        rounding * (1.0 + logits / 8.0) * size
    }
}

fn norm(x: &[f32]) -> f32 {
    x.iter().map(|x| x * x).sum::<f32>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos::Mask;

    fn tensor(shape: [usize; 4], seed: usize) -> Tensor {
        let count = shape.iter().product();
        let value = |i: usize| ((i * 2_654_435_761 + seed * 97) % 1000) as f32 / 500.0 - 1.0;
        Tensor::new(shape, (0..count).map(value).collect::<Vec<f32>>()).unwrap()
    }

    #[test]
    fn right_rows_pass_and_each_wrong_row_is_found_when_it_is_looked_at() {
        let shape = Shape {
            batch: 2,
            q_len: 1,
            kv_len: 40,
            q_heads: 2,
            kv_heads: 1,
            head_dim: 16,
            dtype: Dtype::F32,
        };
        let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
        for call in [
            Call::default(),
            Call { mask: Mask::causal(), q_offset: 30, softcap: Some(2.0), ..Call::default() },
        ] {
            for gradients in [false, true] {
                let call = Call { gradients, ..call.clone() };
                let q = tensor([2, 1, 2, 16], 1);
                let keys = [tensor([2, 40, 1, 16], 2), tensor([2, 40, 1, 16], 3)];
                let d_o = gradients.then(|| tensor([2, 1, 2, 16], 4));
                let output = session.attend(&call.attention(), &q, &keys[0], &keys[1]).unwrap();
                let right = match &d_o {
                    None => output.o,
                    Some(d_o) => {
                        let [k, v] = keys.clone();
                        let saved = Saved { q: q.clone(), k, v, o: output.o, lse: output.lse_pair };
                        session.backward(&call.attention(), &saved, d_o, None).unwrap().dq
                    }
                };
                let right = right.to_vec::<f32>().unwrap();
                let inputs = Inputs { q, keys: Some(keys.clone()), d_o };
                let mut checker = Checker::new();
                let mut wrong = |numbers: Vec<f32>| {
                    let results = [Tensor::new([2, 1, 2, 16], numbers).unwrap()];
                    checker.wrong((&call, &shape), &inputs, &keys, &results, WireFormat::Same).unwrap()
                };
                assert_eq!(wrong(right.clone()), None);
                for at in [0, 17, 63] {
                    for value in [right[at] + 0.1, f32::NAN, f32::INFINITY] {
                        let mut numbers = right.clone();
                        numbers[at] = value;
                        assert!(wrong(numbers).is_some(), "{at} {value}");
                    }
                }
            }
        }
    }
}
