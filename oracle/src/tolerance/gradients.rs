//! The limits of the errors of gradients.
//!
//! | result | compared with | largest error | relative norm |
//! |---|---|---|---|
//! | parallel gradients | the same problem on one device | `3 · E_dense + 3 · a · rms + (u + w) · max` | `1.5 · R_dense + (a₂ + w / √n) · ratio` |
//! | a single-device kernel | f32 arithmetic without any care | `3 · E_naive + (u + w) · max + 3 · a · rms` | `2 · R_naive + u + (a + w / √n) · ratio` |
//!
//! with `a` = 1e-6 for f32 and 2e-3 for f16 and bf16, `a₂` = 1e-6 and 2e-4, u the unit roundoff of
//! the storage type, w the larger of a and u, n the number of elements, and max of the right
//! gradient. Each gradient (dQ, dK, dV, …) is compared by itself.
//!
//! `rms` is the size of the numbers whose rounding makes the error: for each element the root of
//! the sum of the squares of its products, with `|dO·v|` and `|δ|` each by their own products.
//! Where `dP − δ` cancels, it is larger than the gradient. The norms' additions are multiplied by
//! its ratio to the gradient. Without it a problem of few pairs would be held to the luck of one
//! f32 computation.
//!
//! The norm of many elements hardly depends on how each of them is rounded. That of few does:
//! dSinks has one element for each head, and a kernel that rounds its weights to 16 bits rounds
//! others on two ranks than on one, because the rows' maxima differ. `w / √n` allows for it, and is
//! nothing for tensors.
//!
//! A kernel for 16-bit types multiplies weights and dS that are rounded to the type. An element
//! that one pair decides, a weight near 1 in dV or a large dS in dK, is then off by u of itself,
//! and by another u when it is stored. On one device these roundings may happen to cancel, so
//! `E_dense` does not always hold them.
//!
//! Every error is the part beyond the slack of its element: how far a right gradient may be off
//! because f32 rounds the logits. Where the limit of a gradient would be a large part of it because
//! nearly all of every sum cancels, the error is compared with the numbers that cancel.
//!
//! Two things differ from the output's rule. The addition is relative to the gradient, because dK
//! and dV grow with the number of queries that see a key: a fixed addition would hide sums in a
//! 16-bit type. And the factor is 3: an element of dK sums as many products as there are queries,
//! with signs, so that its largest error depends more on the order. Gradients have few large
//! elements, of rows that see few keys; `max` allows for the rounding of their weights and of the
//! elements themselves.

use std::fmt;

use super::SIGNAL_FRACTION;
use super::additive;
use super::comparison::{beyond, distance};
use super::naive::{Normaliser, naive_f32_row};
use super::slack::{counted, gradient_slack};
use crate::oracle::{Dtype, Gradients, Oracle, OracleError, RowId, Tensor4, Values};

/// The distance between a gradient and the oracle's.
#[derive(Clone, Debug)]
#[must_use = "a comparison proves nothing until it is held to a limit"]
pub struct GradientComparison {
    /// Which gradient it is, as in `dk`.
    pub name: &'static str,
    /// The largest error beyond the slack.
    pub max_abs_error: f64,
    /// Where it is: linear index, computed value, right value.
    pub worst: Option<(usize, f64, f64)>,
    /// Frobenius norm of the error beyond the slack, relative to the norm of the right gradient.
    pub relative_error: f64,
    /// Root mean square of the right gradient.
    pub rms_signal: f64,
    /// The largest magnitude in the right gradient.
    pub max_abs: f64,
    /// The size of the numbers whose rounding makes the error; see the module.
    pub scale: f64,
    /// Values of which only one side is NaN or infinite.
    pub mismatched_nonfinite: usize,
    /// How many values are compared.
    pub values: usize,
    /// The values among them whose slack is a large part of the gradient: they prove nothing, and
    /// are no part of the signal.
    pub unproved: usize,
}

impl GradientComparison {
    /// Compares all elements. `scale` and `slack` are those of [`NaiveGradients`]. Panics if the
    /// lengths differ.
    pub fn new(name: &'static str, actual: Values<'_>, expected: &[f64], scale: f64, slack: &[f64]) -> Self {
        assert_eq!(actual.len(), expected.len(), "elements of {name}");
        assert_eq!(slack.len(), expected.len(), "slack of {name}");
        let mut comparison = Self {
            name,
            max_abs_error: 0.0,
            worst: None,
            relative_error: 0.0,
            rms_signal: 0.0,
            max_abs: 0.0,
            scale,
            mismatched_nonfinite: 0,
            values: expected.len(),
            unproved: 0,
        };
        let finite = expected.iter().filter(|right| right.is_finite());
        let usual =
            (finite.clone().map(|right| right * right).sum::<f64>() / finite.count().max(1) as f64).sqrt();
        let (mut squared_error, mut squared_signal, mut signals) = (0.0, 0.0, 0_usize);
        for (index, (&right, &slack)) in expected.iter().zip(slack).enumerate() {
            let value = actual.get(index);
            let slack = counted(slack, scale);
            let error = beyond(distance(value, right), slack);
            comparison.mismatched_nonfinite += usize::from(error.is_infinite());
            if error > comparison.max_abs_error {
                comparison.max_abs_error = error;
                comparison.worst = Some((index, value, right));
            }
            squared_error += error * error;
            if slack > SIGNAL_FRACTION * right.abs().max(usual) {
                comparison.unproved += 1;
            } else if right.is_finite() {
                squared_signal += right * right;
                comparison.max_abs = comparison.max_abs.max(right.abs());
                signals += 1;
            }
        }
        comparison.rms_signal = (squared_signal / signals.max(1) as f64).sqrt();
        if squared_error > 0.0 {
            comparison.relative_error = (squared_error / squared_signal).sqrt();
        }
        comparison
    }

    /// How much larger the rounded numbers are than the gradient.
    fn ratio(&self) -> f64 {
        if self.scale > 0.0 { (self.scale / self.rms_signal).max(1.0) } else { 1.0 }
    }

    /// Whether this is within the limit. The text of an error has all details.
    pub fn within(&self, limit: &GradientLimit) -> Result<(), String> {
        let says = |what: &str| Err(format!("{what}\n  limit: {limit}\n  {self}"));
        if self.unproved == self.values && self.values > 0 {
            return says("the limit proves nothing: ties of large logits decide every value");
        }
        // Where nearly all of every sum cancels, as in dQ and dK of rows whose weights are 1 and 0, an
        // error is relative to what cancels.
        let cancels = self.ratio() > limit.cancels_from;
        let signal = if cancels { self.scale } else { self.max_abs };
        if signal > 0.0 && (limit.abs > 0.5 * signal || !cancels && limit.relative > 0.5) {
            return says("the limit proves nothing");
        }
        let close = self.max_abs_error <= limit.abs && (cancels || self.relative_error <= limit.relative);
        if close && self.mismatched_nonfinite == 0 { Ok(()) } else { says("the gradient is wrong") }
    }
}

impl fmt::Display for GradientComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, max_abs_error, relative_error, rms_signal, mismatched_nonfinite, .. } = self;
        write!(
            f,
            "{name} error {max_abs_error:.3e}, relative {relative_error:.3e}, rms signal {rms_signal:.3e}"
        )?;
        write!(f, ", infinite errors {mismatched_nonfinite}")?;
        match self.worst {
            Some((index, actual, expected)) => {
                write!(f, "; at {index} got {actual:?}, expected {expected:?}")
            }
            None => Ok(()),
        }
    }
}

/// How much smaller than the numbers that it sums a gradient is, where only their size decides what
/// a limit proves. In 16 bits it is where their rounding alone is a large part of the gradient.
fn cancels_from(dtype: Dtype) -> f64 {
    (SIGNAL_FRACTION / additive(dtype)).min(1e4)
}

/// The bounds for one gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientLimit {
    abs: f64,
    relative: f64,
    cancels_from: f64,
    rule: &'static str,
}

impl GradientLimit {
    /// The limit of a parallel result, from the comparison of the same gradient on one device.
    pub fn parallel(dtype: Dtype, dense: &GradientComparison) -> Self {
        let small = if dtype == Dtype::F32 { 1e-6 } else { 2e-4 };
        let (u, a, w) = roundings(dtype);
        let few = w / (dense.values.max(1) as f64).sqrt();
        Self {
            abs: 3.0 * dense.max_abs_error + (u + w) * dense.max_abs + 3.0 * a * dense.scale,
            relative: 1.5 * dense.relative_error + (small + few) * dense.ratio(),
            cancels_from: cancels_from(dtype),
            rule: "3 x single device + rounding of the weights and of the gradient + 3 a rms",
        }
    }

    /// The limit of a single-device kernel that stores gradients as `dtype`, from the comparison of
    /// [`naive_f32_gradients`].
    pub fn dense(dtype: Dtype, naive: &GradientComparison) -> Self {
        let (u, a, w) = roundings(dtype);
        let few = w / (naive.values.max(1) as f64).sqrt();
        Self {
            abs: 3.0 * naive.max_abs_error + (u + w) * naive.max_abs + 3.0 * a * naive.scale,
            relative: 2.0 * naive.relative_error + u + (a + few) * naive.ratio(),
            cancels_from: cancels_from(dtype),
            rule: "3 x naive f32 + rounding of the weights and of the gradient + 3 a rms",
        }
    }

    /// This limit for kernels that round the gradients of each block, by the part `error` of the
    /// largest element `max_abs`.
    pub fn with_rounded_blocks(self, error: f64, max_abs: f64) -> Self {
        Self { abs: self.abs + error * max_abs, relative: self.relative + error, ..self }
    }

    /// The largest accepted error.
    pub fn abs(&self) -> f64 {
        self.abs
    }
}

/// u, a and w of the module's table.
fn roundings(dtype: Dtype) -> (f64, f64, f64) {
    let (u, a) = (dtype.unit_roundoff(), additive(dtype));
    (u, a, u.max(a))
}

impl fmt::Display for GradientLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { abs, relative, rule, .. } = self;
        write!(f, "{abs:.3e}, relative {relative:.3e} ({rule})")
    }
}

/// Gradients of plain f32 arithmetic.
#[derive(Clone, Debug)]
pub struct NaiveGradients {
    /// The gradients.
    pub gradients: Gradients,
    /// The size of the rounded numbers of dQ, dK, dV, dSinks and dBias; see the module.
    pub scales: [f64; 5],
    /// How far right gradients may be off, element by element, because the logits are rounded.
    pub slack: Gradients,
}

/// The gradients with every operation in f32, one accumulator for each sum. The output is rounded
/// to `dtype` before it is used, as a forward pass returns it.
pub fn naive_f32_gradients(
    oracle: &Oracle<'_>,
    dtype: Dtype,
    d_o: Values<'_>,
    d_lse: Option<Values<'_>>,
) -> Result<NaiveGradients, OracleError> {
    let slack = gradient_slack(oracle, d_o, d_lse)?;
    let problem = oracle.problem();
    let d_o = Tensor4::new(problem.q_shape(), d_o)?;
    let zeros = |shape: [usize; 4]| vec![0.0_f32; shape.iter().product()];
    let (mut dq, mut dk, mut dv) =
        (zeros(problem.q_shape()), zeros(problem.kv_shape()), zeros(problem.kv_shape()));
    let mut d_sinks = vec![0.0_f32; problem.sinks.len()];
    let mut d_bias = vec![0.0_f32; oracle.bias_elements()];
    let mut squares =
        [dq.len(), dk.len(), dv.len(), d_sinks.len(), d_bias.len()].map(|len| vec![0.0_f64; len]);
    let [q, k, v] = oracle.tensors();
    let dim = problem.head_dim;
    let narrow = |tensor: Tensor4<'_>, batch, token, head| -> Vec<f32> {
        let mut wide = vec![0.0; dim];
        tensor.read_vector(batch, token, head, &mut wide);
        wide.iter().map(|&value| value as f32).collect()
    };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0_f32, |sum, (a, b)| sum + a * b);
    let size =
        |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b).powi(2)).sum::<f64>().sqrt();
    for id in problem.row_ids() {
        let (row, Normaliser { max, sum }) = naive_f32_row(oracle, id);
        let RowId { batch, row: token, head } = row.id;
        if row.lse == f64::NEG_INFINITY {
            continue;
        }
        let o: Vec<f32> = row.o.iter().map(|&o| dtype.round(o as f32)).collect();
        let (query, grad) = (narrow(q, batch, token, head), narrow(d_o, batch, token, head));
        let d_lse = d_lse.map_or(0.0, |d_lse| d_lse.get(problem.lse_index(row.id)) as f32);
        let delta = dot(&grad, &o) - d_lse;
        let delta_size = size(&grad, &o) + f64::from(d_lse.abs());
        if let Some(&sink) = problem.sinks.get(head) {
            let p = (sink as f32 - max).exp() / sum;
            d_sinks[head] -= p * delta;
            squares[3][head] += (f64::from(p) * delta_size).powi(2);
        }
        let (scale, kv_head) = (problem.scale as f32, problem.kv_head(head));
        let dq_at = problem.o_index(row.id);
        for key in 0..problem.kv_len {
            let Some(term) = oracle.term(row.id, key) else { continue };
            let (ks, vs) = (narrow(k, batch, key, kv_head), narrow(v, batch, key, kv_head));
            let score = dot(&query, &ks) * scale;
            let (x, slope) = match problem.softcap {
                None => (score, 1.0),
                Some(cap) => {
                    let c = (score / cap as f32).tanh();
                    (cap as f32 * c, 1.0 - c * c)
                }
            };
            let p = (x + term as f32 - max).exp() / sum;
            let dx = p * (dot(&grad, &vs) - delta);
            let dx_size = f64::from(p.abs()) * (size(&grad, &vs) + delta_size);
            if let Some(at) = oracle.bias_index(row.id, key) {
                d_bias[at] += dx;
                squares[4][at] += dx_size.powi(2);
            }
            let ds = dx * slope * scale;
            let ds_size = f64::from((slope * scale).abs()) * dx_size;
            let kv_at = ((batch * problem.kv_len + key) * problem.kv_heads + kv_head) * dim;
            for d in 0..dim {
                dq[dq_at + d] += ds * ks[d];
                dk[kv_at + d] += ds * query[d];
                dv[kv_at + d] += p * grad[d];
                squares[0][dq_at + d] += (ds_size * f64::from(ks[d])).powi(2);
                squares[1][kv_at + d] += (ds_size * f64::from(query[d])).powi(2);
                squares[2][kv_at + d] += f64::from(p * grad[d]).powi(2);
            }
        }
    }
    let wide = |narrow: Vec<f32>| narrow.into_iter().map(f64::from).collect();
    let [dq, dk, dv, d_sinks, d_bias] = [dq, dk, dv, d_sinks, d_bias].map(wide);
    let rms = |squares: Vec<f64>| {
        let finite: Vec<f64> = squares.into_iter().filter(|square| square.is_finite()).collect();
        (finite.iter().sum::<f64>() / finite.len().max(1) as f64).sqrt()
    };
    let gradients = Gradients { dq, dk, dv, d_sinks, d_bias };
    Ok(NaiveGradients { gradients, scales: squares.map(rms), slack })
}
