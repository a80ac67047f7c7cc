//! A case with its right result, and the comparison of an output with it.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use kyklos::backend::{Backend, DeviceClass, DeviceInfo};
use kyklos::host::{Tensors, layouts};
use kyklos::plan::PlanSet;
use kyklos::{AttentionProblem, BiasKind, BiasTensor, Dtype, Mask};
use kyklos_oracle::inputs::{BiasInputs, Case, cases};
use kyklos_oracle::oracle::{self, Element, Oracle, OracleProblem, Row, RowId, Values};
use kyklos_oracle::tolerance::{
    Comparison, Context, Expected, Limit, RowSlack, compare, compare_rows, naive_f32_rows, row_slacks,
};
use kyklos_transport::Rank;

use crate::RankOutput;
use crate::kept::Kept;

/// See [`only_head_dim`].
static ONLY_HEAD_DIM: AtomicUsize = AtomicUsize::new(0);

/// From now on only cases of this head dim run on GPUs; `None` runs all cases, as does the start of
/// the process. For drivers that need seconds to compile a kernel.
pub fn only_head_dim(head_dim: Option<usize>) {
    ONLY_HEAD_DIM.store(head_dim.unwrap_or(0), Ordering::Relaxed);
}

/// The cases that run on a device.
pub fn chosen_cases(device: &DeviceInfo) -> impl Iterator<Item = Case> + use<> {
    let only = if device.class == DeviceClass::Cpu { 0 } else { ONLY_HEAD_DIM.load(Ordering::Relaxed) };
    cases().into_iter().filter(move |case| only == 0 || case.problem.head_dim == only)
}

/// The product's types for a case, in storage type `dtype`. No backward pass follows, so kernels
/// for few query rows take part.
pub fn problem_of(case: &Case, dtype: Dtype) -> AttentionProblem {
    let oracle = &case.problem;
    let small = |n: usize| u32::try_from(n).unwrap();
    // The product and the oracle share only the notation.
    let mask: Mask = oracle.mask.to_string().parse().unwrap();
    let shape = [oracle.batch, oracle.kv_len, oracle.q_heads, oracle.kv_heads, oracle.head_dim].map(small);
    AttentionProblem::new(shape, dtype, mask)
        .and_then(|problem| problem.with_queries(small(oracle.q_len), oracle.q_offset as u32))
        .and_then(|problem| problem.with_logits(oracle.scale as f32, oracle.softcap.map(|cap| cap as f32)))
        .and_then(|problem| {
            problem.with_bias(case.bias.map(|bias| BiasTensor {
                kind: if bias.additive { BiasKind::Additive } else { BiasKind::Mask },
                batch: small(bias.batch),
                heads: small(bias.heads),
                shared_rows: bias.shared_rows,
            }))
        })
        .and_then(|problem| problem.with_sinks(oracle.sinks.iter().map(|sink| *sink as f32).collect()))
        .unwrap()
        .with_inference(true)
}

/// A case in one storage type: its tensors, the right result, and the limit for one device.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The case.
    pub case: Case,
    /// The problem in the words of the oracle, with the numbers that the product takes: its f32
    /// scale and softcap.
    pub oracle: OracleProblem,
    /// The same problem in the types of the product.
    pub problem: AttentionProblem,
    /// All tokens of all tensors.
    pub tensors: Tensors,
    /// Rows of the oracle's result: the rows that see no poison.
    pub expected: Vec<Row>,
    /// How far right rows may be off, because f32 rounds the logits.
    pub slack: Vec<RowSlack>,
    /// The error of a plain f32 computation of these rows, from which the limit follows.
    pub naive: Comparison,
}

impl Prepared {
    /// Computes the right result. Elements are rounded to `dtype` before.
    pub fn new(case: Case, dtype: Dtype) -> Self {
        static KEPT: Kept<Prepared> = Kept::new();
        KEPT.of(case, dtype, |case| match dtype {
            Dtype::F32 => Self::typed::<f32>(case, dtype),
            Dtype::F16 => Self::typed::<half::f16>(case, dtype),
            Dtype::Bf16 => Self::typed::<half::bf16>(case, dtype),
        })
    }

    fn typed<E: Element + bytemuck::Pod>(case: Case, dtype: Dtype) -> Self {
        let problem = problem_of(&case, dtype);
        // The oracle takes the same numbers as the product: the f32 scale and softcap.
        let oracle = OracleProblem {
            scale: f64::from(problem.scale),
            softcap: problem.softcap.map(f64::from),
            sinks: problem.sinks.iter().copied().map(f64::from).collect(),
            ..case.problem.clone()
        };
        let inputs = case.inputs::<E>();
        let (q, k, v) = (E::values(&inputs.q), E::values(&inputs.k), E::values(&inputs.v));
        let mut truth = Oracle::new(&oracle, q, k, v).unwrap();
        if let Some(bias) = inputs.oracle_bias(&case) {
            truth = truth.with_bias(bias).unwrap();
        }
        let rows = rows_to_judge(&case, &oracle);
        let (expected, slack) = (truth.rows(&rows), row_slacks(&truth, &rows));
        let right = Expected { rows: &expected, slack: &slack };
        let naive =
            compare_rows(&oracle, E::DTYPE, &naive_f32_rows(&truth, &rows), right, &Context::default());
        let bytes = |values: &[E]| Bytes::copy_from_slice(bytemuck::cast_slice(values));
        let bias = inputs.bias.as_ref().map(|bias| stored_bias(&case, bias));
        let tensors = Tensors { q: bytes(&inputs.q), k: bytes(&inputs.k), v: bytes(&inputs.v), bias };
        Self { case, oracle, problem, tensors, expected, slack, naive }
    }

    /// Compares a whole output with the oracle.
    pub fn judge(&self, output: &Whole, backend: &str) -> Comparison {
        let context = Context {
            case: self.case.name.to_owned(),
            seed: self.case.seed,
            backend: backend.to_owned(),
            rerun: format!("cargo test --release -p {} -- '{backend}'", package()),
        };
        let o = output.o_values(self.problem.dtype);
        let right = Expected { rows: &self.expected, slack: &self.slack };
        compare(&self.oracle, o.values(), Values::F32(&output.lse), right, &context)
    }

    /// The limit for a device that computes the case alone.
    pub fn dense_limit(&self) -> Limit {
        Limit::dense(oracle_dtype(self.problem.dtype), &self.naive)
    }

    /// The same for a device whose kernels may be further off.
    pub fn limit_on(&self, backend: &impl Backend) -> Limit {
        self.dense_limit().with_log_sum_exp_error(backend.accuracy(self.problem.dtype).log_sum_exp)
    }

    /// [`Self::parallel_limit`] for such a device: it may round the output of each block.
    pub fn parallel_limit_on(&self, backend: &impl Backend, dense: &Comparison) -> Limit {
        let of_blocks = backend.accuracy(self.problem.dtype).of_blocks;
        self.parallel_limit(dense).with_rounded_blocks(of_blocks, dense.max_abs_o)
    }

    /// The limit for several ranks; `dense` is the error of one device alone.
    pub fn parallel_limit(&self, dense: &Comparison) -> Limit {
        Limit::parallel(oracle_dtype(self.problem.dtype), &[dense])
    }
}

/// An attention bias tensor `[batch, heads, queries, kv_len]` as the product takes it: `[batch,
/// queries, heads, row]`.
fn stored_bias<E: Element + bytemuck::Pod>(case: &Case, inputs: &BiasInputs<E>) -> Bytes {
    let (bias, problem) = (case.bias.unwrap(), &case.problem);
    let queries = if bias.shared_rows { 1 } else { problem.q_len };
    let mut stored = Vec::new();
    for batch in 0..bias.batch {
        for row in 0..queries {
            for head in 0..bias.heads {
                let from = ((batch * bias.heads + head) * queries + row) * problem.kv_len;
                match inputs {
                    BiasInputs::Visible(all) => {
                        let words = BiasTensor::pack(all[from..from + problem.kv_len].iter().copied());
                        stored.extend_from_slice(bytemuck::cast_slice(&words));
                    }
                    BiasInputs::Bias(all) => {
                        stored.extend_from_slice(bytemuck::cast_slice(&all[from..from + problem.kv_len]));
                        stored.resize(stored.len().next_multiple_of(4), 0xFF);
                    }
                }
            }
        }
    }
    stored.into()
}

/// The package whose test this is, as cargo tells it.
fn package() -> String {
    std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "kyklos-tests".to_owned())
}

/// Rows without a visible NaN or ∞. The other rows have their own test, because their values are
/// mostly unspecified.
fn rows_to_judge(case: &Case, oracle: &OracleProblem) -> Vec<RowId> {
    oracle.row_ids().into_iter().filter(|id| !case.sees_poison(*id)).collect()
}

/// The oracle's word for a storage type.
pub fn oracle_dtype(dtype: Dtype) -> oracle::Dtype {
    match dtype {
        Dtype::F32 => oracle::Dtype::F32,
        Dtype::F16 => oracle::Dtype::F16,
        Dtype::Bf16 => oracle::Dtype::Bf16,
    }
}

/// The whole result, in the input's token order.
#[derive(Debug)]
pub struct Whole {
    /// `[batch, seq, heads, dim]`.
    pub o: Vec<u8>,
    /// `[batch, heads, seq]`.
    pub lse: Vec<f32>,
    /// What the rounding of `lse` has left out.
    pub rest: Vec<f32>,
}

/// Typed elements of an output.
enum Typed {
    F32(Vec<f32>),
    F16(Vec<half::f16>),
    Bf16(Vec<half::bf16>),
}

impl Whole {
    /// An output of poison.
    pub fn new(set: &PlanSet) -> Self {
        let problem = &set.problem;
        let rows = problem.batch as usize * problem.q_heads as usize * problem.q_len as usize;
        // Poison: it makes elements visible that no rank writes.
        let poison = vec![f32::NAN; rows];
        Self { o: vec![0xFF; layouts(set).0.bytes()], lse: poison.clone(), rest: poison }
    }

    /// Writes the rows of one rank.
    pub fn add(&mut self, set: &PlanSet, rank: usize, output: &RankOutput) {
        let (problem, tokens) = (&set.problem, &set.output_tokens(Rank(rank as u32)));
        layouts(set).0.scatter(&output.o, tokens, &mut self.o).unwrap();
        let (batch, heads) = (problem.batch as usize, problem.q_heads as usize);
        for (part, whole) in [(&output.lse, &mut self.lse), (&output.rest, &mut self.rest)] {
            let part: Vec<f32> = bytemuck::pod_collect_to_vec(part);
            kyklos::host::scatter_lse(&part, batch, heads, tokens, whole);
        }
    }

    fn o_values(&self, dtype: Dtype) -> Typed {
        match dtype {
            Dtype::F32 => Typed::F32(bytemuck::pod_collect_to_vec(&self.o)),
            Dtype::F16 => Typed::F16(bytemuck::pod_collect_to_vec(&self.o)),
            Dtype::Bf16 => Typed::Bf16(bytemuck::pod_collect_to_vec(&self.o)),
        }
    }
}

impl Typed {
    fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::F16(values) => Values::F16(values),
            Self::Bf16(values) => Values::Bf16(values),
        }
    }
}
