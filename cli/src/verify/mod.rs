//! Compares sampled rows of a result with the f64 oracle.
//!
//! The tolerance is measured, not chosen (`kyklos_oracle::tolerance`). One device of every kind in
//! the run computes the sampled rows alone; its error may be twice that of plain f32 arithmetic.
//! The error of the shared result may be twice the largest of theirs. Both have a rounding
//! allowance. An error is what exceeds the slack of its element: how far it may be off because f32
//! rounds the logits.

mod bias_gradient;
mod every_row;
mod gradients;
mod whole_kv;

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};
use half::{bf16, f16};
use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::plan::PlanSet;
use kyklos::{AttentionProblem, Dtype, RunOptions, TokenRuns, WireFormat, plan_rows};
use kyklos_oracle::inputs::sample_rows;
use kyklos_oracle::oracle::{self, Oracle, OracleBias, OracleError, OracleProblem, Row, RowId, Values};
use kyklos_oracle::tolerance::{
    Comparison, Context, Expected, Limit, RowSlack, compare_rows, naive_f32_rows, row_slacks,
};
use kyklos_transport::Rank;

use crate::failure::{Failure, Result};
use crate::request::Request;
use crate::run::alone;
use crate::tensors::bias::OracleRows;
use crate::tensors::{Source, TensorKind};
pub(crate) use every_row::Whole;
#[cfg(test)]
pub(crate) use gradients::HeadReference;
pub(crate) use gradients::{GradientVerdict, HeadGradients};
pub(crate) use whole_kv::WholeKv;

/// The rows to compare, and the problem for the oracle.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    problem: AttentionProblem,
    source: Source,
    oracle: OracleProblem,
    rows: Vec<RowId>,
}

/// What sampled rows are compared with.
#[derive(Debug)]
pub(crate) struct RightRows {
    /// Of the oracle.
    expected: Vec<Row>,
    slack: Vec<RowSlack>,
    /// Of plain f32 arithmetic, on keys and values that are rounded as ranks send them.
    plain: Vec<Row>,
}

impl RightRows {
    fn expected(&self) -> Expected<'_> {
        Expected { rows: &self.expected, slack: &self.slack }
    }
}

/// The outcome of a comparison.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) rows: usize,
    /// The rows among them that prove nothing: their logits tie within the rounding of f32.
    pub(crate) unproved: usize,
    /// Beyond the slack.
    pub(crate) max_abs_error: f64,
    pub(crate) tolerance: f64,
    /// The largest error of a device alone.
    pub(crate) dense_error: f64,
    /// The first error, if there is one.
    pub(crate) failure: Option<String>,
}

impl Sample {
    pub(crate) fn of(request: &Request) -> Result<Self> {
        Self::new(&request.problem, &request.source)
    }

    pub(crate) fn new(problem: &AttentionProblem, source: &Source) -> Result<Self> {
        Self::of_rows(problem, source, ROWS)
    }

    /// At most this many rows.
    pub(crate) fn of_rows(problem: &AttentionProblem, source: &Source, rows: usize) -> Result<Self> {
        // The oracle reads the notation of masks by itself.
        let mask = problem.mask.to_string().parse();
        let oracle = OracleProblem {
            batch: problem.batch as usize,
            q_len: problem.q_len as usize,
            kv_len: problem.kv_len as usize,
            q_heads: problem.q_heads as usize,
            kv_heads: problem.kv_heads as usize,
            head_dim: problem.head_dim as usize,
            scale: f64::from(problem.scale),
            softcap: problem.softcap.map(f64::from),
            mask: mask.map_err(|error: OracleError| Failure::run(error.to_string()))?,
            q_offset: u64::from(problem.q_offset),
            sinks: problem.sinks.iter().copied().map(f64::from).collect(),
        };
        let rows = sample_rows(&oracle, rows, SEED);
        Ok(Self { problem: problem.clone(), source: source.clone(), oracle, rows })
    }

    /// The sampled rows that `rank` owns.
    pub(crate) fn rows_of(&self, set: &PlanSet, rank: Rank) -> Vec<RowId> {
        let places = self.places(set.q_placement.of_rank(rank));
        self.rows.iter().filter(|id| places.contains_key(&id.row)).copied().collect()
    }

    /// All sampled rows.
    pub(crate) fn rows(&self) -> &[RowId] {
        &self.rows
    }

    /// Bytes of this many rows in a message to rank 0: o, then lse.
    pub(crate) fn row_bytes(&self, rows: usize) -> usize {
        rows * (self.problem.head_dim as usize * self.problem.dtype.bytes() + 4)
    }

    /// The sampled rows out of the output of a rank that owns `tokens`.
    pub(crate) fn extract(&self, tokens: &TokenRuns, o: &Bytes, lse: &Bytes) -> Bytes {
        let places = self.places(tokens);
        let (heads, row_bytes) =
            (self.oracle.q_heads, self.problem.head_dim as usize * self.problem.dtype.bytes());
        let mut out = BytesMut::new();
        for id in &self.rows {
            if let Some(place) = places.get(&id.row) {
                let row = (id.batch * tokens.len() + place) * heads + id.head;
                out.extend_from_slice(&o[row * row_bytes..(row + 1) * row_bytes]);
                out.extend_from_slice(&lse[row * 4..(row + 1) * 4]);
            }
        }
        out.freeze()
    }

    /// What [`Self::extract`] packed.
    pub(crate) fn decode(&self, ids: &[RowId], bytes: &[u8]) -> Vec<Row> {
        let dim = self.oracle.head_dim;
        let element = self.problem.dtype.bytes();
        let row_bytes = self.row_bytes(1).max(1);
        ids.iter()
            .zip(bytes.chunks_exact(row_bytes))
            .map(|(id, row)| Row {
                id: *id,
                o: row[..dim * element]
                    .chunks_exact(element)
                    .map(|bytes| element_value(self.problem.dtype, bytes))
                    .collect(),
                lse: element_value(Dtype::F32, &row[dim * element..]),
            })
            .collect()
    }

    /// Reads all keys and values.
    pub(crate) fn whole_kv(&self) -> Result<WholeKv> {
        let all = TokenRuns::contiguous(0..self.problem.kv_len);
        Ok(WholeKv {
            k: self.source.read(&self.problem, TensorKind::K, &all)?,
            v: self.source.read(&self.problem, TensorKind::V, &all)?,
        })
    }

    /// The sampled rows, computed by one device alone from keys and values that are rounded as in
    /// `shared`.
    pub(crate) fn dense(
        &self,
        device: &Device,
        shared: &PlanSet,
        kv: &WholeKv,
        options: &RunOptions,
    ) -> Result<Bytes> {
        let mut tokens: Vec<u32> = self.rows.iter().filter_map(|id| u32::try_from(id.row).ok()).collect();
        tokens.sort_unstable();
        tokens.dedup();
        let tokens = TokenRuns::from_positions(tokens);
        let set = plan_rows(&self.problem, tokens.clone())?;
        let q = self.source.read(&self.problem, TensorKind::Q, &tokens)?;
        let bias = self.source.read_bias(&self.problem, &tokens)?;
        let WholeKv { k, v } = kv.as_on_the_wire(shared);
        let tensors = Tensors { q, k, v, bias };
        let alone = alone::run(device, set, tensors, 1, options)?;
        Ok(self.extract(&tokens, &alone.output.o, &alone.output.lse))
    }

    /// What the rows of ranks of `shared` are compared with.
    pub(crate) fn right_rows(&self, kv: &WholeKv, shared: &PlanSet) -> Result<RightRows> {
        let (expected, slack) = self.expected(kv)?;
        Ok(RightRows { expected, slack, plain: self.naive(&kv.as_on_the_wire(shared))? })
    }

    /// Compares `actual` with the oracle, within a tolerance from the results of the devices alone,
    /// which are held to that of plain f32 arithmetic.
    pub(crate) fn hold(
        &self,
        mut actual: Vec<Row>,
        dense: &[(String, Vec<Row>)],
        right: &RightRows,
        backend: &str,
    ) -> Verdict {
        actual.sort_by_key(|row| row.id);
        let (dtype, expected) = (oracle_dtype(self.problem.dtype), right.expected());
        let coarse = self.problem.wire == WireFormat::Int8;
        let limit_of = |limit: Limit| if coarse { limit.of_coarse_keys() } else { limit };
        let dense: Vec<Comparison> = dense
            .iter()
            .map(|(device, rows)| compare_rows(&self.oracle, dtype, rows, expected, &self.context(device)))
            .collect();
        let plain = self.compare_plain(right);
        let alone = limit_of(Limit::dense(dtype, &plain));
        let limit = limit_of(Limit::parallel(dtype, &dense.iter().collect::<Vec<_>>()));
        let shared = compare_rows(&self.oracle, dtype, &actual, expected, &self.context(backend));
        let wrong_alone = dense.iter().find_map(|dense| dense.within(&alone).err());
        let failure = match wrong_alone {
            Some(failure) => Some(format!("a device alone: {failure}")),
            None => shared.within(&limit).err().map(|failure| failure.to_string()),
        };
        Verdict {
            rows: shared.rows,
            unproved: shared.unproved,
            max_abs_error: shared.max_abs_error,
            tolerance: limit.o_abs(),
            dense_error: dense.iter().map(|dense| dense.max_abs_error).fold(0.0, f64::max),
            failure,
        }
    }

    fn compare_plain(&self, right: &RightRows) -> Comparison {
        let context = self.context("plain f32");
        compare_rows(&self.oracle, oracle::Dtype::F32, &right.plain, right.expected(), &context)
    }

    /// Compares the rows of one device alone, in the order of [`Self::rows`], with the oracle. The
    /// tolerance comes from plain f32 arithmetic on the same rows.
    fn hold_alone(&self, actual: &[Row], right: &RightRows, backend: &str) -> Verdict {
        let dtype = oracle_dtype(self.problem.dtype);
        let naive = self.compare_plain(right);
        let limit = Limit::dense(dtype, &naive);
        let actual = compare_rows(&self.oracle, dtype, actual, right.expected(), &self.context(backend));
        Verdict {
            rows: actual.rows,
            unproved: actual.unproved,
            max_abs_error: actual.max_abs_error,
            tolerance: limit.o_abs(),
            dense_error: naive.max_abs_error,
            failure: actual.within(&limit).err().map(|failure| failure.to_string()),
        }
    }

    /// As [`Self::hold_alone`], for the whole result of one device.
    pub(crate) fn judge_alone(&self, o: &Bytes, lse: &Bytes, backend: &str) -> Result<Verdict> {
        let kv = self.whole_kv()?;
        let tokens = TokenRuns::contiguous(0..self.problem.q_len);
        let actual = self.decode(&self.rows, &self.extract(&tokens, o, lse));
        let (expected, slack) = self.expected(&kv)?;
        let right = RightRows { expected, slack, plain: self.naive(&kv)? };
        Ok(self.hold_alone(&actual, &right, backend))
    }

    /// What the message of a failed comparison names.
    fn context(&self, backend: &str) -> Context {
        Context {
            case: match self.source.path() {
                Some(path) => path.display().to_string(),
                None => "random tensors".to_owned(),
            },
            seed: match self.source {
                Source::Random { seed } => seed,
                Source::File(_) => 0,
            },
            backend: backend.to_owned(),
            rerun: std::env::args().collect::<Vec<_>>().join(" "),
        }
    }

    /// The oracle's rows, and the slack of each.
    fn expected(&self, kv: &WholeKv) -> Result<(Vec<Row>, Vec<RowSlack>)> {
        let rows = self.by_the_oracle(kv, |oracle, id| {
            let (o, lse) = oracle.row(id.batch, id.row, id.head);
            (Row { id, o, lse }, row_slacks(oracle, &[id]).remove(0))
        })?;
        let with_id = |(id, (row, slack)): (&RowId, _)| (Row { id: *id, ..row }, slack);
        Ok(self.rows.iter().zip(rows).map(with_id).unzip())
    }

    /// The rows in plain f32 arithmetic.
    fn naive(&self, kv: &WholeKv) -> Result<Vec<Row>> {
        let rows = self.by_the_oracle(kv, |oracle, id| naive_f32_rows(oracle, &[id]).remove(0))?;
        Ok(self.rows.iter().zip(rows).map(|(id, row)| Row { id: *id, ..row }).collect())
    }

    /// Calls `compute` for every row, on all cores. It gets each row as that of a problem of one
    /// query.
    fn by_the_oracle<T: Send>(
        &self,
        kv: &WholeKv,
        compute: impl Fn(&Oracle<'_>, RowId) -> T + Sync,
    ) -> Result<Vec<T>> {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let share = self.rows.len().div_ceil(workers).max(1);
        let compute = &compute;
        let compute_all = move |rows: &[RowId]| -> Result<Vec<T>> {
            rows.iter().map(|id| self.one_row(*id, kv, compute)).collect()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                self.rows.chunks(share).map(|rows| scope.spawn(move || compute_all(rows))).collect();
            let mut all = Vec::with_capacity(self.rows.len());
            for thread in threads {
                all.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            }
            Ok(all)
        })
    }

    /// One row as a problem of one query, so that no other query is read.
    fn one_row<T>(&self, id: RowId, kv: &WholeKv, compute: impl Fn(&Oracle<'_>, RowId) -> T) -> Result<T> {
        let token = u32::try_from(id.row).map_err(|_| Failure::run("a row beyond all positions"))?;
        let tokens = TokenRuns::contiguous(token..token + 1);
        let q = self.source.read(&self.problem, TensorKind::Q, &tokens)?;
        let bias = self.source.read_bias(&self.problem, &tokens)?.zip(self.problem.bias);
        let bias = bias.map(|(bytes, tensor)| (tensor, OracleRows::new(tensor, &self.problem, &bytes)));
        let problem =
            OracleProblem { q_len: 1, q_offset: self.oracle.q_offset + id.row as u64, ..self.oracle.clone() };
        let dtype = self.problem.dtype;
        let refused = |error: OracleError| Failure::run(format!("the oracle refuses the problem: {error}"));
        let mut oracle = Oracle::new(&problem, values(dtype, &q), values(dtype, &kv.k), values(dtype, &kv.v))
            .map_err(refused)?;
        if let Some((tensor, rows)) = &bias {
            let (batch, heads) = (tensor.batch as usize, tensor.heads as usize);
            // One query, so one row of each head.
            let bias = OracleBias { values: rows.values(), batch, heads, queries: 1 };
            oracle = oracle.with_bias(bias).map_err(refused)?;
        }
        Ok(compute(&oracle, RowId { row: 0, ..id }))
    }

    /// The index in `tokens` of every sampled token.
    fn places(&self, tokens: &TokenRuns) -> HashMap<usize, usize> {
        let mut wanted: Vec<usize> = self.rows.iter().map(|id| id.row).collect();
        wanted.sort_unstable();
        tokens
            .iter()
            .enumerate()
            .map(|(place, token)| (token as usize, place))
            .filter(|(token, _)| wanted.binary_search(token).is_ok())
            .collect()
    }
}

fn values(dtype: Dtype, bytes: &Bytes) -> Values<'_> {
    match dtype {
        Dtype::F32 => Values::F32(bytemuck::cast_slice(bytes)),
        Dtype::F16 => Values::F16(bytemuck::cast_slice(bytes)),
        Dtype::Bf16 => Values::Bf16(bytemuck::cast_slice(bytes)),
    }
}

fn element_value(dtype: Dtype, bytes: &[u8]) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(bytemuck::pod_read_unaligned::<f32>(bytes)),
        Dtype::F16 => bytemuck::pod_read_unaligned::<f16>(bytes).to_f64(),
        Dtype::Bf16 => bytemuck::pod_read_unaligned::<bf16>(bytes).to_f64(),
    }
}

fn oracle_dtype(dtype: Dtype) -> oracle::Dtype {
    match dtype {
        Dtype::F32 => oracle::Dtype::F32,
        Dtype::F16 => oracle::Dtype::F16,
        Dtype::Bf16 => oracle::Dtype::Bf16,
    }
}

/// Number of rows in a sample.
const ROWS: usize = 256;
/// Fixed, so that every run of a problem has the same sample.
const SEED: u64 = 0x6b79_6b6c_6f73;
