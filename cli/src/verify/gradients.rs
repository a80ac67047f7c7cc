//! Compares the gradients of one device with the f64 oracle: of all tokens of one KV head and of the query heads that read it.

use kyklos::AttentionProblem;
use kyklos_oracle::oracle::{Oracle, OracleError, OracleProblem, Values};
use kyklos_oracle::tolerance::{GradientComparison, GradientLimit, NaiveGradients, naive_f32_gradients};

use super::{Sample, oracle_dtype, values};
use crate::failure::{Failure, Result};
use crate::run::resident::WholeGradients;
use bytes::Bytes;

/// The gradient that is nearest to its limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradientVerdict {
    pub(crate) max_abs_error: f64,
    pub(crate) tolerance: f64,
}

/// Elements of one head in the tensors of a problem.
#[derive(Clone, Copy)]
struct HeadPart {
    /// Heads of the tensor, and the first and the number of those in the part.
    heads: usize,
    first: usize,
    count: usize,
    dim: usize,
    /// Of all batch entries.
    tokens: usize,
}

impl HeadPart {
    /// The elements of the part.
    fn len(self) -> usize {
        self.tokens * self.count * self.dim
    }

    /// Where an element of the part is in the tensor.
    fn at(self, index: usize) -> usize {
        let (d, head, token) =
            (index % self.dim, index / self.dim % self.count, index / self.dim / self.count);
        (token * self.heads + self.first + head) * self.dim + d
    }
}

impl Sample {
    /// Holds the gradients of the last KV head, in all batch entries. `None` for a head with so many pairs that the oracle would
    /// take minutes.
    pub(crate) fn judge_gradients(&self, gradients: &WholeGradients) -> Result<Option<GradientVerdict>> {
        let AttentionProblem { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype, .. } = self.problem;
        let [batch, q_heads, kv_heads, dim] = [batch, q_heads, kv_heads, head_dim].map(|n| n as usize);
        let [q_tokens, kv_tokens] = [q_len, kv_len].map(|tokens| batch * tokens as usize);
        let group = q_heads / kv_heads;
        if q_tokens * kv_len as usize * group * dim > MOST_WORK {
            return Ok(None);
        }
        let of_q = HeadPart { heads: q_heads, first: q_heads - group, count: group, dim, tokens: q_tokens };
        let of_kv = HeadPart { heads: kv_heads, first: kv_heads - 1, count: 1, dim, tokens: kv_tokens };
        let q = self.read_whole_queries()?;
        let kv = self.whole_kv()?;
        let [q, d_o, k, v] = [&q, &gradients.d_o, &kv.k, &kv.v].map(|bytes| values(dtype, bytes));
        let part = |tensor: Values<'_>, part: HeadPart| -> Vec<f64> {
            (0..part.len()).map(|index| tensor.get(part.at(index))).collect()
        };
        let [q, d_o] = [q, d_o].map(|tensor| part(tensor, of_q));
        let [k, v] = [k, v].map(|tensor| part(tensor, of_kv));
        let problem = OracleProblem {
            q_heads: group,
            kv_heads: 1,
            sinks: self.oracle.sinks.iter().skip(q_heads - group).copied().collect(),
            ..self.oracle.clone()
        };
        let refused = |error: OracleError| Failure::run(format!("the oracle refuses the problem: {error}"));
        let dtype = oracle_dtype(dtype);
        let [read_q, read_d_o, read_k, read_v] = [&q, &d_o, &k, &v].map(|part| |index: usize| part[index]);
        let read = |len, read| Values::Read { dtype, len, read };
        let oracle =
            Oracle::new(&problem, read(q.len(), &read_q), read(k.len(), &read_k), read(v.len(), &read_v))
                .map_err(refused)?;
        let d_o = read(d_o.len(), &read_d_o);
        let (right, plain) = std::thread::scope(|scope| {
            let plain = scope.spawn(|| naive_f32_gradients(&oracle, dtype, d_o, None));
            let right = oracle.gradients(d_o, None);
            (right, plain.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let (right, NaiveGradients { gradients: plain, scales }) =
            (right.map_err(refused)?, plain.map_err(refused)?);
        let mut nearest = GradientVerdict { max_abs_error: 0.0, tolerance: f64::MIN_POSITIVE };
        let all = [
            ("dq", &gradients.dq, of_q, &right.dq, &plain.dq, scales[0]),
            ("dk", &gradients.dk, of_kv, &right.dk, &plain.dk, scales[1]),
            ("dv", &gradients.dv, of_kv, &right.dv, &plain.dv, scales[2]),
        ];
        for (name, actual, part, right, plain, scale) in all {
            let actual: Vec<f32> = bytemuck::pod_collect_to_vec(actual);
            let actual: Vec<f32> = (0..part.len()).map(|index| actual[part.at(index)]).collect();
            let read = |index: usize| plain[index];
            let plain =
                Values::Read { dtype: kyklos_oracle::oracle::Dtype::F32, len: plain.len(), read: &read };
            let limit = GradientLimit::dense(dtype, &GradientComparison::new(name, plain, right, scale));
            let comparison = GradientComparison::new(name, Values::F32(&actual), right, scale);
            comparison
                .within(&limit)
                .map_err(|failure| Failure::run(format!("wrong gradient: {failure}")))?;
            let (error, tolerance) = (comparison.max_abs_error, limit.abs());
            if error / tolerance > nearest.max_abs_error / nearest.tolerance {
                nearest = GradientVerdict { max_abs_error: error, tolerance };
            }
        }
        Ok(Some(nearest))
    }

    fn read_whole_queries(&self) -> Result<Bytes> {
        let all = kyklos::TokenRuns::contiguous(0..self.problem.q_len);
        self.source.read(&self.problem, crate::tensors::TensorKind::Q, &all)
    }
}

/// Multiply-adds of one product of the head: the oracle takes some seconds for so many.
const MOST_WORK: usize = 1 << 31;
