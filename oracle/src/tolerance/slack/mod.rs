//! How far a right result may be from the oracle's, because f32 rounds the logits.
//!
//! # The error of a logit
//!
//! A sum of products in f32 is off by the rounding of each partial sum, at most u = 2⁻²⁴ of it.
//! These roundings are spread evenly around 0, so with the partial sums `S` and the products `p`
//! the standard deviation of their sum is at most `σ = u · √((Σ S² + Σ p²) / 3)`. The partial sums
//! depend on the order. Taken are those of the ascending order plus the mean over all orders: of d
//! products with the sum X, `Σ S²` is `d/3 · X² + d/6 · Σ p²` on average. The multiplication by the
//! scale, before or after the sum, counts as one rounding of each product and of the sum. A logit
//! is off by less than `δ = 3 σ`; a softcap and a bias add the roundings of their own results. An
//! addition of a number whose rounding is larger than the other number is off by that number at
//! most: so a stand-in for −∞ that swallows a score of 0 is exact.
//!
//! # The error of a result
//!
//! The bound of a weight P is exact for any δ. It is largest where its own logit is δ more and all
//! others are δ less, and smallest where it is the reverse. So a row with one weight of 1 has no
//! slack, whatever the size of its logits, and a tie whose δ is above 1 leaves the output open
//! between the values that tie. From there the errors are carried through the sums of the
//! definition. The errors of different keys and rows are independent, so a sum has √2 times the
//! root of the sum of the squares of its terms' bounds. For two keys that tie this is half the
//! distance of their values, the most that it can be off.
//!
//! # In a comparison
//!
//! Every element has its own slack, and only what an error exceeds it by counts. A few rows with
//! ties loosen no limit of the other rows. A slack below 2e-6, as where logits are of order one,
//! does not count: the limits add 1e-6 to every error.

use super::additive;
use crate::oracle::{Dtype, Gradients, Oracle, OracleError, RowId, Tensor4, Values};

/// The slack of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowSlack {
    /// Of each element of the output vector.
    pub o: Vec<f64>,
    /// Of the log-sum-exp.
    pub lse: f64,
}

/// The slack of the chosen rows, in the order given.
pub fn row_slacks(oracle: &Oracle<'_>, ids: &[RowId]) -> Vec<RowSlack> {
    ids.iter().map(|&id| row_slack(oracle, id)).collect()
}

/// The slack that counts. What the limits add to every error, `a` times `size`, covers a small one:
/// a right result is off by less than half its slack, except where a tie decides it. A slack that
/// is not a number is none.
pub(super) fn counted(slack: f64, size: f64) -> f64 {
    if slack.is_finite() && slack > 2.0 * additive(Dtype::F32) * size { slack } else { 0.0 }
}

fn row_slack(oracle: &Oracle<'_>, id: RowId) -> RowSlack {
    let weights = Weights::of(oracle, id);
    let mut reader = Reader::new(oracle, id);
    let o = weights.output(&mut reader);
    let mut squares: Vec<f64> = o.iter().map(|o| (weights.sink.off * o).powi(2)).collect();
    for weight in weights.keys.iter().filter(|weight| weight.off > 0.0) {
        let v = reader.value(weight.key);
        for ((square, v), o) in squares.iter_mut().zip(v).zip(&o) {
            *square += (weight.off * (v - o)).powi(2);
        }
    }
    RowSlack { o: squares.into_iter().map(of_squares).collect(), lse: weights.lse_off }
}

/// The slack of each gradient.
pub(super) fn gradient_slack(
    oracle: &Oracle<'_>,
    d_o: Values<'_>,
    d_lse: Option<Values<'_>>,
) -> Result<Gradients, OracleError> {
    let problem = oracle.problem();
    let d_o = Tensor4::new(problem.q_shape(), d_o)?;
    let mut squares = Gradients::zeros(oracle);
    let mut grad = vec![0.0; problem.head_dim];
    for id in problem.row_ids() {
        d_o.read_vector(id.batch, id.row, id.head, &mut grad);
        let d_lse = d_lse.map_or(0.0, |d_lse| d_lse.get(problem.lse_index(id)));
        add_row(oracle, id, &grad, d_lse, &mut squares);
    }
    let Gradients { dq, dk, dv, d_sinks, d_bias } = squares;
    let [dq, dk, dv, d_sinks, d_bias] =
        [dq, dk, dv, d_sinks, d_bias].map(|squares| squares.into_iter().map(of_squares).collect());
    Ok(Gradients { dq, dk, dv, d_sinks, d_bias })
}

/// Adds the squares of one row. The names are those of the oracle's gradients, and `off` bounds the
/// error of each.
fn add_row(oracle: &Oracle<'_>, id: RowId, grad: &[f64], d_lse: f64, squares: &mut Gradients) {
    let problem = oracle.problem();
    let dim = problem.head_dim;
    let weights = Weights::of(oracle, id);
    let mut reader = Reader::new(oracle, id);
    let query = reader.query();
    let o = weights.output(&mut reader);
    let grad_dot_o = dot(grad, &o);
    let delta = grad_dot_o - d_lse;
    let grad_dot_v: Vec<f64> =
        weights.keys.iter().map(|weight| dot(grad, reader.value(weight.key))).collect();
    let terms = weights.keys.iter().zip(&grad_dot_v).map(|(weight, dp)| weight.off * (dp - grad_dot_o));
    let delta_off =
        of_squares(terms.map(|term| term.powi(2)).sum::<f64>() + (weights.sink.off * grad_dot_o).powi(2));
    if let Some(sum) = squares.d_sinks.get_mut(id.head) {
        let Weight { p, off, .. } = weights.sink;
        *sum += (off * (delta.abs() + delta_off) + p * delta_off).powi(2);
    }
    let dq_at = problem.o_index(id);
    // δ is one number of all keys of the row, so its error adds up in dQ.
    let mut in_step = vec![0.0; dim];
    for (weight, dp) in weights.keys.iter().zip(&grad_dot_v) {
        let &Weight { key, p, off, slope, slope_off } = weight;
        if off == 0.0 && p * delta_off == 0.0 {
            continue;
        }
        let inner = (dp - delta).abs();
        let own = off * (inner + delta_off);
        let dx_off = own + p * delta_off;
        if let Some(index) = oracle.bias_index(id, key) {
            squares.d_bias[index] += dx_off.powi(2);
        }
        let of_slope = p * inner * slope_off;
        let ds_own = problem.scale.abs() * (own * (slope + slope_off) + of_slope);
        let ds_off = problem.scale.abs() * (dx_off * (slope + slope_off) + of_slope);
        let kv_at = ((id.batch * problem.kv_len + key) * problem.kv_heads + problem.kv_head(id.head)) * dim;
        let k = reader.key(key);
        let step = problem.scale * p * slope;
        let dq = &mut squares.dq[dq_at..][..dim];
        for ((dq, in_step), k) in dq.iter_mut().zip(&mut in_step).zip(k) {
            *dq += (ds_own * k).powi(2);
            *in_step += step * k;
        }
        add_squares(&mut squares.dk[kv_at..][..dim], ds_off, &query);
        add_squares(&mut squares.dv[kv_at..][..dim], off, grad);
    }
    add_squares(&mut squares.dq[dq_at..][..dim], delta_off, &in_step);
}

fn add_squares(sums: &mut [f64], factor: f64, vector: &[f64]) {
    sums.iter_mut().zip(vector).for_each(|(sum, number)| *sum += (factor * number).powi(2));
}

/// One weight of a row.
struct Weight {
    key: usize,
    p: f64,
    /// How far `p` may be off.
    off: f64,
    /// The slope of the softcap, and how far it may be off.
    slope: f64,
    slope_off: f64,
}

/// The weights of one row.
struct Weights {
    keys: Vec<Weight>,
    /// That of the sink; 0 without one.
    sink: Weight,
    lse_off: f64,
}

/// One logit.
struct Logit {
    x: f64,
    off: f64,
}

impl Weights {
    fn of(oracle: &Oracle<'_>, id: RowId) -> Self {
        let problem = oracle.problem();
        let mut reader = Reader::new(oracle, id);
        let query = reader.query();
        let (mut logits, mut keys) = (Vec::new(), Vec::new());
        for key in 0..problem.kv_len {
            let Some(term) = oracle.term(id, key) else { continue };
            let (score, score_off) = product(&query, reader.key(key), problem.scale);
            let (capped, capped_off, slope, slope_off) = match problem.softcap {
                None => (score, score_off, 1.0, 0.0),
                Some(cap) => softcapped(score, score_off, cap),
            };
            let x = capped + term;
            let added = (U * x.abs()).min(capped.abs()).min(term.abs());
            logits.push(Logit { x, off: capped_off + added });
            keys.push(Weight { key, p: 0.0, off: 0.0, slope, slope_off });
        }
        let mut sink = Weight { key: 0, p: 0.0, off: 0.0, slope: 1.0, slope_off: 0.0 };
        // A sink is an f32 and has no error.
        let sink_logit = problem.sinks.get(id.head).map(|&x| Logit { x, off: 0.0 });
        logits.extend(sink_logit);
        // NaN and infinite logits are held to the oracle's result without any slack.
        let defined =
            |logit: &Logit| logit.x == f64::NEG_INFINITY || logit.x.is_finite() && logit.off.is_finite();
        if !logits.iter().all(defined) {
            return Self { keys: Vec::new(), sink, lse_off: 0.0 };
        }
        logits.iter_mut().filter(|logit| logit.x == f64::NEG_INFINITY).for_each(|logit| logit.off = 0.0);
        let sum = |sign: f64| Sum::of(logits.iter().map(|logit| logit.x + sign * logit.off));
        let (least, right, most) = (sum(-1.0), sum(0.0), sum(1.0));
        let lse_off = (most.lse() - right.lse()).max(right.lse() - least.lse()).max(0.0);
        let weights = keys.iter_mut().chain(problem.sinks.get(id.head).map(|_| &mut sink));
        for (weight, &Logit { x, off }) in weights.zip(&logits) {
            weight.p = (x - right.max).exp() / right.sum;
            let high = share(x + off, &least.without(x - off));
            let low = share(x - off, &most.without(x + off));
            weight.off = (high - weight.p).max(weight.p - low).max(0.0);
        }
        Self { keys, sink, lse_off }
    }

    /// The output vector.
    fn output(&self, reader: &mut Reader<'_, '_>) -> Vec<f64> {
        let mut o = vec![0.0; reader.vector.len()];
        for weight in self.keys.iter().filter(|weight| weight.p > 0.0) {
            o.iter_mut().zip(reader.value(weight.key)).for_each(|(o, v)| *o += weight.p * v);
        }
        o
    }
}

/// A sum of exponentials, relative to the largest of them.
struct Sum {
    max: f64,
    sum: f64,
}

impl Sum {
    fn of(logits: impl Iterator<Item = f64> + Clone) -> Self {
        let max = logits.clone().fold(f64::NEG_INFINITY, f64::max);
        let sum = logits.map(|x| if max == f64::NEG_INFINITY { 0.0 } else { (x - max).exp() }).sum();
        Self { max, sum }
    }

    fn lse(&self) -> f64 {
        self.max + self.sum.ln()
    }

    /// Without one of the exponentials.
    fn without(&self, logit: f64) -> Self {
        Self { max: self.max, sum: (self.sum - (logit - self.max).exp()).max(0.0) }
    }
}

/// The weight of a logit beside others.
fn share(x: f64, others: &Sum) -> f64 {
    let max = x.max(others.max);
    let own = (x - max).exp();
    own / (own + others.sum * (others.max - max).exp())
}

/// `scale · (a · b)`, and how far it is off in f32.
fn product(a: &[f64], b: &[f64], scale: f64) -> (f64, f64) {
    let (mut sum, mut partial, mut squares) = (0.0, 0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        let product = a * b;
        sum += product;
        partial += sum * sum;
        squares += product * product;
    }
    let dim = a.len() as f64;
    let of_orders = (dim / 3.0 + 1.0) * sum * sum + (dim / 6.0 + 2.0) * squares;
    let sigma = U * ((partial + of_orders) / 3.0).sqrt();
    (scale * sum, scale.abs() * LOGIT_SIGMAS * sigma)
}

/// The softcap of a score and its slope, and how far both are off.
fn softcapped(score: f64, off: f64, cap: f64) -> (f64, f64, f64, f64) {
    let of = |score: f64| {
        let c = (score / cap).tanh();
        (cap * c, 1.0 - c * c)
    };
    let size = score.abs();
    let ((right, slope), (less, steeper), (more, flatter)) = (of(size), of(size - off), of(size + off));
    let steeper = if size < off { 1.0 } else { steeper };
    let moved = (right - less).max(more - right);
    let slope_off = (steeper - slope).max(slope - flatter);
    // tanh and the product with the cap.
    (right.copysign(score), moved + 2.0 * U * right, slope, slope_off + 2.0 * U)
}

/// Reads the vectors of one row.
struct Reader<'a, 'b> {
    oracle: &'a Oracle<'b>,
    id: RowId,
    vector: Vec<f64>,
}

impl<'a, 'b> Reader<'a, 'b> {
    fn new(oracle: &'a Oracle<'b>, id: RowId) -> Self {
        Self { oracle, id, vector: vec![0.0; oracle.problem().head_dim] }
    }

    fn query(&mut self) -> Vec<f64> {
        let [q, _, _] = self.oracle.tensors();
        q.read_vector(self.id.batch, self.id.row, self.id.head, &mut self.vector);
        self.vector.clone()
    }

    fn key(&mut self, key: usize) -> &[f64] {
        let [_, k, _] = self.oracle.tensors();
        self.of_kv(k, key)
    }

    fn value(&mut self, key: usize) -> &[f64] {
        let [_, _, v] = self.oracle.tensors();
        self.of_kv(v, key)
    }

    fn of_kv(&mut self, tensor: Tensor4<'_>, key: usize) -> &[f64] {
        let head = self.oracle.problem().kv_head(self.id.head);
        tensor.read_vector(self.id.batch, key, head, &mut self.vector);
        &self.vector
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The bound of a sum, from the sum of the squares of its terms' bounds.
fn of_squares(squares: f64) -> f64 {
    (2.0 * squares).sqrt()
}

const U: f64 = Dtype::F32.unit_roundoff();
/// δ in standard deviations of the rounding of a logit.
const LOGIT_SIGMAS: f64 = 3.0;

#[cfg(test)]
mod tests;
