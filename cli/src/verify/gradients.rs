//! Compares gradients with the f64 oracle: of all tokens of one KV head and of the query heads that
//! read it.

use std::ops::Range;

use bytes::Bytes;
use kyklos::plan::PlanSet;
use kyklos::{Dtype, TokenRuns};
use kyklos_oracle::oracle::{Gradients, Oracle, OracleBias, OracleError, OracleProblem, Values};
use kyklos_oracle::tolerance::{GradientComparison, GradientLimit, NaiveGradients, naive_f32_gradients};

use super::{Sample, WholeKv, oracle_dtype, values};
use crate::failure::{Failure, Result};
use crate::run::resident::WholeGradients;
use crate::tensors::bias::OracleRows;
use crate::tensors::results::HostGradients;
use crate::tensors::{GivenGradient, TensorKind};

/// The gradient that is nearest to its limit.
#[derive(Clone, Debug)]
pub(crate) struct GradientVerdict {
    pub(crate) max_abs_error: f64,
    pub(crate) tolerance: f64,
    /// How many values were compared, and how many of them prove nothing: logits that tie within
    /// the rounding of f32 decide them.
    pub(crate) values: usize,
    pub(crate) unproved: usize,
    /// The first wrong gradient, if there is one.
    pub(crate) failure: Option<String>,
}

impl GradientVerdict {
    /// Of nothing yet.
    pub(crate) const NONE: Self =
        Self { max_abs_error: 0.0, tolerance: f64::MIN_POSITIVE, values: 0, unproved: 0, failure: None };

    /// Takes the other verdict too.
    pub(crate) fn join(&mut self, other: Self) {
        if other.max_abs_error / other.tolerance >= self.max_abs_error / self.tolerance {
            (self.max_abs_error, self.tolerance) = (other.max_abs_error, other.tolerance);
        }
        self.values += other.values;
        self.unproved += other.unproved;
        self.failure = self.failure.take().or(other.failure);
    }

    /// Holds one gradient in `dtype` to the right one, with the tolerance that the `plain` one, its
    /// scale and the slack give.
    pub(super) fn hold(
        &mut self,
        dtype: Dtype,
        (name, actual): (&'static str, &[f32]),
        right: &[f64],
        (plain, scale, slack): (&[f64], f64, &[f64]),
    ) {
        let dtype = oracle_dtype(dtype);
        let read = |index: usize| plain[index];
        let plain = Values::Read { dtype: kyklos_oracle::oracle::Dtype::F32, len: plain.len(), read: &read };
        let limit = GradientLimit::dense(dtype, &GradientComparison::new(name, plain, right, scale, slack));
        let comparison = GradientComparison::new(name, Values::F32(actual), right, scale, slack);
        let failure = comparison.within(&limit).err().map(|failure| format!("wrong gradient: {failure}"));
        let GradientComparison { max_abs_error, values, unproved, .. } = comparison;
        self.join(Self { max_abs_error, tolerance: limit.abs(), values, unproved, failure });
    }
}

/// Elements of one head in the tensors of a problem.
#[derive(Clone, Copy)]
pub(super) struct HeadPart {
    /// Heads of the tensor, and the first and the number of those in the part.
    heads: usize,
    pub(super) first: usize,
    pub(super) count: usize,
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

/// Gradients of one KV head and of the query heads that read it, of all batch entries and tokens,
/// in the problem's dtype.
pub(crate) struct HeadGradients {
    /// `[batch, tokens, group, dim]`.
    pub(crate) dq: Bytes,
    /// `[batch, tokens, 1, dim]`.
    pub(crate) dk: Bytes,
    pub(crate) dv: Bytes,
}

/// The given gradients of the output of some query heads.
pub(super) struct GivenOfHead {
    /// `[batch, tokens, heads, dim]`
    d_o: Vec<f64>,
    /// `[batch, heads, tokens]`
    d_lse: Option<Vec<f64>>,
}

/// What the gradients of one KV head, and of the query heads that read it, are compared with.
#[derive(Debug)]
pub(crate) struct HeadReference {
    /// Of the oracle.
    pub(super) right: Gradients,
    /// Of plain f32 arithmetic, from which the tolerance comes.
    pub(super) plain: NaiveGradients,
}

/// Numbers that are compared with the oracle.
struct Actual {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    d_sinks: Vec<f32>,
}

impl Sample {
    /// The KV head that is verified: the last one.
    pub(crate) fn verified_head(&self) -> u32 {
        self.problem.kv_heads - 1
    }

    /// Holds the gradients of the last KV head, in all batch entries. `None` for a head with so
    /// many pairs that the oracle would take minutes.
    pub(crate) fn judge_gradients(&self, gradients: &WholeGradients) -> Result<Option<GradientVerdict>> {
        let [of_q, of_kv] = self.head_parts(self.verified_head());
        if self.gradient_work() > MOST_WORK {
            return Ok(None);
        }
        let d_o = values(self.problem.dtype, &gradients.d_o);
        let of = |tensor: &Bytes, part: HeadPart| -> Vec<f32> {
            let numbers: Vec<f32> = bytemuck::pod_collect_to_vec(tensor);
            (0..part.len()).map(|index| numbers[part.at(index)]).collect()
        };
        let given =
            GivenOfHead { d_o: (0..of_q.len()).map(|index| d_o.get(of_q.at(index))).collect(), d_lse: None };
        let actual = Actual {
            dq: of(&gradients.dq, of_q),
            dk: of(&gradients.dk, of_kv),
            dv: of(&gradients.dv, of_kv),
            d_sinks: Vec::new(),
        };
        let kv = self.whole_kv()?;
        let reference = self.right_and_plain(self.verified_head(), &given, &kv, &kv)?;
        Ok(Some(self.compare(&reference, &actual)))
    }

    /// Refuses gradients for which the oracle would take minutes.
    pub(crate) fn can_judge_gradients(&self) -> Result<()> {
        if self.gradient_work() <= MOST_WORK {
            return Ok(());
        }
        let (batch, q_len, kv_len) = (self.problem.batch, self.problem.q_len, self.problem.kv_len);
        Err(Failure::request(
            format!("--verify of the gradients of {batch} x {q_len} queries to {kv_len} keys"),
            "use fewer tokens, because the oracle computes a whole head, or leave --verify out",
        ))
    }

    /// KV head `kv_head` and the query heads that read it, out of gradients of all heads.
    pub(crate) fn head_of(&self, kv_head: u32, gradients: &HostGradients) -> HeadGradients {
        let (q_heads, kv_heads, head_dim, dtype) =
            (self.problem.q_heads, self.problem.kv_heads, self.problem.head_dim, self.problem.dtype);
        let group = q_heads / kv_heads;
        let cut = |tensor: &Bytes, heads: u32, count: u32| -> Bytes {
            let head = head_dim as usize * dtype.bytes();
            let (row, kept) = (heads as usize * head, count as usize * head);
            let first = kv_head as usize * kept;
            tensor.chunks_exact(row.max(1)).flat_map(|row| &row[first..first + kept]).copied().collect()
        };
        HeadGradients {
            dq: cut(&gradients.dq, q_heads, group),
            dk: cut(&gradients.dk, kv_heads, 1),
            dv: cut(&gradients.dv, kv_heads, 1),
        }
    }

    /// Holds KV head `kv_head` that the ranks of `shared` computed, and of the gradients of all
    /// sinks those of its query heads.
    pub(crate) fn judge_head(
        &self,
        kv_head: u32,
        head: &HeadGradients,
        d_sinks: &[f64],
        shared: &PlanSet,
    ) -> Result<GradientVerdict> {
        Ok(self.hold_head(kv_head, head, d_sinks, &self.head_reference(kv_head, shared)?))
    }

    /// What [`Self::hold_head`] compares the gradients of a head with. Only where keys are rounded
    /// for the wire does it depend on what the ranks of `shared` send.
    pub(crate) fn head_reference(&self, kv_head: u32, shared: &PlanSet) -> Result<HeadReference> {
        let [of_q, _] = self.head_parts(kv_head);
        let kv = self.whole_kv()?;
        self.right_and_plain(kv_head, &self.given(of_q)?, &kv, &kv.as_on_the_wire(shared))
    }

    /// [`Self::judge_head`] with the reference already computed.
    pub(crate) fn hold_head(
        &self,
        kv_head: u32,
        head: &HeadGradients,
        d_sinks: &[f64],
        reference: &HeadReference,
    ) -> GradientVerdict {
        let problem = &self.problem;
        let [of_q, _] = self.head_parts(kv_head);
        let narrow = |tensor: &Bytes| -> Vec<f32> {
            let numbers = values(problem.dtype, tensor);
            #[expect(clippy::cast_possible_truncation, reason = "all storage types are exact in f32")]
            (0..tensor.len() / problem.dtype.bytes()).map(|index| numbers.get(index) as f32).collect()
        };
        #[expect(clippy::cast_possible_truncation, reason = "compared as the f32 that a file holds")]
        let actual = Actual {
            dq: narrow(&head.dq),
            dk: narrow(&head.dk),
            dv: narrow(&head.dv),
            d_sinks: d_sinks.iter().skip(of_q.first).take(of_q.count).map(|sink| *sink as f32).collect(),
        };
        self.compare(reference, &actual)
    }

    /// The given gradients of the output of the query heads `of_q`.
    pub(super) fn given(&self, of_q: HeadPart) -> Result<GivenOfHead> {
        let problem = &self.problem;
        let all = TokenRuns::contiguous(0..problem.q_len);
        let GivenGradient { d_o, d_lse } = self.source.output_gradient(problem, &all)?;
        let d_o = values(problem.dtype, &d_o);
        // From `[batch, tokens, heads]` to `[batch, group, tokens]`.
        let of_rows = |d_lse: Bytes| -> Vec<f64> {
            let (d_lse, tokens) = (values(Dtype::F32, &d_lse), problem.q_len as usize);
            let heads = (0..problem.batch as usize)
                .flat_map(|batch| (of_q.first..of_q.first + of_q.count).map(move |head| (batch, head)));
            heads
                .flat_map(|(batch, head)| {
                    (0..tokens).map(move |token| d_lse.get((batch * tokens + token) * of_q.heads + head))
                })
                .collect()
        };
        Ok(GivenOfHead {
            d_o: (0..of_q.len()).map(|index| d_o.get(of_q.at(index))).collect(),
            d_lse: d_lse.map(of_rows),
        })
    }

    /// The KV heads that the oracle computes for the gradients: the last one; all of them where the
    /// gradient of a bias is asked for that they share.
    pub(super) fn heads_of_bias(&self) -> Range<u32> {
        let last = self.problem.kv_heads;
        let all = self.problem.bias_gradient && self.problem.bias.is_some_and(|bias| bias.heads == 1);
        if all { 0..last } else { last - 1..last }
    }

    /// Multiply-adds of one product of the heads that are computed.
    fn gradient_work(&self) -> usize {
        let [of_q, _] = self.head_parts(self.verified_head());
        of_q.len().saturating_mul(self.problem.kv_len as usize).saturating_mul(self.heads_of_bias().len())
    }

    /// The part of KV head `kv_head` in tensors of queries, and of keys.
    pub(super) fn head_parts(&self, kv_head: u32) -> [HeadPart; 2] {
        let (batch, q_len, kv_len, q_heads, kv_heads, head_dim) = (
            self.problem.batch,
            self.problem.q_len,
            self.problem.kv_len,
            self.problem.q_heads,
            self.problem.kv_heads,
            self.problem.head_dim,
        );
        let [batch, q_heads, kv_heads, dim] = [batch, q_heads, kv_heads, head_dim].map(|n| n as usize);
        let [q_tokens, kv_tokens] = [q_len, kv_len].map(|tokens| batch * tokens as usize);
        let (group, head) = (q_heads / kv_heads, kv_head as usize);
        [
            HeadPart { heads: q_heads, first: head * group, count: group, dim, tokens: q_tokens },
            HeadPart { heads: kv_heads, first: head, count: 1, dim, tokens: kv_tokens },
        ]
    }

    /// The gradients of the oracle for `kv`, and those of plain f32 arithmetic on `rounded`, the
    /// keys and values as ranks send them. Of one KV head and of the query heads that read it.
    pub(super) fn right_and_plain(
        &self,
        kv_head: u32,
        given: &GivenOfHead,
        kv: &WholeKv,
        rounded: &WholeKv,
    ) -> Result<HeadReference> {
        let [of_q, of_kv] = self.head_parts(kv_head);
        let q = self.read_whole_queries()?;
        let part = |bytes: &Bytes, part: HeadPart| -> Vec<f64> {
            let tensor = values(self.problem.dtype, bytes);
            (0..part.len()).map(|index| tensor.get(part.at(index))).collect()
        };
        let q = part(&q, of_q);
        let [kv, rounded] = [kv, rounded].map(|kv| [part(&kv.k, of_kv), part(&kv.v, of_kv)]);
        let problem = OracleProblem {
            q_heads: of_q.count,
            kv_heads: 1,
            sinks: self.oracle.sinks.iter().skip(of_q.first).take(of_q.count).copied().collect(),
            ..self.oracle.clone()
        };
        let refused = |error: OracleError| Failure::run(format!("the oracle refuses the problem: {error}"));
        let dtype = oracle_dtype(self.problem.dtype);
        let read_of = |numbers: &Vec<f64>| {
            let numbers = numbers.clone();
            move |index: usize| numbers[index]
        };
        let [read_q, read_d_o] = [&q, &given.d_o].map(read_of);
        let read_d_lse = given.d_lse.as_ref().map(read_of);
        let [[read_k, read_v], [rounded_k, rounded_v]] =
            [&kv, &rounded].map(|kv| [read_of(&kv[0]), read_of(&kv[1])]);
        let q = Values::Read { dtype, len: q.len(), read: &read_q };
        let len = kv[0].len();
        let bias = self.bias_of_head(of_q)?;
        let oracle = |read_k, read_v| -> Result<Oracle<'_>> {
            let [k, v] = [read_k, read_v].map(|read| Values::Read { dtype, len, read });
            let oracle = Oracle::new(&problem, q, k, v).map_err(refused)?;
            match &bias {
                Some((rows, shape)) => {
                    let [batch, heads, queries] = *shape;
                    let bias = OracleBias { values: rows.values(), batch, heads, queries };
                    oracle.with_bias(bias).map_err(refused)
                }
                None => Ok(oracle),
            }
        };
        let (right, plain) = (oracle(&read_k, &read_v)?, oracle(&rounded_k, &rounded_v)?);
        let d_o = Values::Read { dtype, len: given.d_o.len(), read: &read_d_o };
        let d_lse = read_d_lse.as_ref().map(|read| {
            let dtype = kyklos_oracle::oracle::Dtype::F32;
            Values::Read { dtype, len: given.d_o.len() / of_q.dim, read }
        });
        let (right, plain) = std::thread::scope(|scope| {
            let plain = scope.spawn(|| naive_f32_gradients(&plain, dtype, d_o, d_lse));
            let right = right.gradients(d_o, d_lse);
            (right, plain.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        Ok(HeadReference { right: right.map_err(refused)?, plain: plain.map_err(refused)? })
    }

    fn compare(&self, reference: &HeadReference, actual: &Actual) -> GradientVerdict {
        let HeadReference { right, plain: NaiveGradients { gradients: plain, scales, slack } } = reference;
        let mut nearest = GradientVerdict::NONE;
        let all = [
            ("dq", &actual.dq, &right.dq, (&plain.dq[..], scales[0], &slack.dq[..])),
            ("dk", &actual.dk, &right.dk, (&plain.dk[..], scales[1], &slack.dk[..])),
            ("dv", &actual.dv, &right.dv, (&plain.dv[..], scales[2], &slack.dv[..])),
            ("dsinks", &actual.d_sinks, &right.d_sinks, (&plain.d_sinks[..], scales[3], &slack.d_sinks[..])),
        ];
        // The bench of one device has no gradients of sinks.
        for (name, actual, right, plain) in all.into_iter().filter(|all| !all.1.is_empty()) {
            nearest.hold(self.problem.dtype, (name, actual), right, plain);
        }
        nearest
    }

    /// The mask or bias tensor for the query heads of `part`, if there is one, and its batch
    /// entries, heads and queries.
    fn bias_of_head(&self, part: HeadPart) -> Result<Option<(OracleRows, [usize; 3])>> {
        let all = TokenRuns::contiguous(0..self.problem.q_len);
        let Some((bytes, tensor)) = self.source.read_bias(&self.problem, &all)?.zip(self.problem.bias) else {
            return Ok(None);
        };
        let [batch, heads] = [tensor.batch, tensor.heads].map(|n| n as usize);
        let queries = if tensor.shared_rows { 1 } else { self.problem.q_len as usize };
        let kept = if heads == 1 { 0..1 } else { part.first..part.first + part.count };
        let keys = self.problem.kv_len as usize;
        let rows: Vec<usize> = (0..batch)
            .flat_map(|entry| kept.clone().map(move |head| (entry, head)))
            .flat_map(|(entry, head)| (0..queries).map(move |query| (entry * queries + query) * heads + head))
            .collect();
        fn pick<T: Copy>(values: &[T], rows: &[usize], keys: usize) -> Vec<T> {
            rows.iter().flat_map(|row| &values[row * keys..(row + 1) * keys]).copied().collect()
        }
        let of_head = match OracleRows::new(tensor, &self.problem, &bytes) {
            OracleRows::Visible(values) => OracleRows::Visible(pick(&values, &rows, keys)),
            OracleRows::Bias(values) => OracleRows::Bias(pick(&values, &rows, keys)),
        };
        Ok(Some((of_head, [batch, kept.len(), queries])))
    }

    fn read_whole_queries(&self) -> Result<Bytes> {
        let all = TokenRuns::contiguous(0..self.problem.q_len);
        self.source.read(&self.problem, TensorKind::Q, &all)
    }
}

/// Multiply-adds of one product of the head: the oracle takes some seconds for so many.
const MOST_WORK: usize = 1 << 31;
