//! Naive attention in f32: measures the rounding error of f32 on given inputs.
//!
//! It is not a reference for the answer, only for the size of the error. If a kernel keeps scores, weights and sums in
//! f32, its error must not be more than twice the error of this module.
//!
//! The last bits of a logit x depend on the order of its sum. In a large logit they are worth much: two logits of 10⁶ that differ
//! by 1 may differ by 1.2 in another order, and their weights follow. One order says little about the others. So rows with a
//! logit from [`LARGE`] on are computed several times, with each logit moved by `±2u·|x|`, and the worst of these counts. The signs are drawn from
//! the pair and the number of the time. This is Monte Carlo arithmetic (Parker, 1997) for one of the operations.

use crate::inputs::{TensorId, normal};
use crate::oracle::{Oracle, OracleProblem, Row, RowId};

/// Keys of one running sum. Without blocks the error of values of one sign grows with the number of keys, and so would every limit.
const BLOCK: usize = 1024;
/// How many times large logits are moved.
pub(super) const MOVES: u64 = 4;
/// Below this, a move changes a weight by less than 1e-5 of itself.
pub(super) const LARGE: f32 = 64.0;

/// Which last bits the logits have: those of ascending sums (`None`), or moved ones.
pub(super) type Moved = Option<u64>;

/// `score` with its last bits moved.
pub(super) fn moved(moved: Moved, problem: &OracleProblem, id: RowId, key: usize, score: f32) -> f32 {
    let Some(time) = moved else { return score };
    let row = (id.batch * problem.q_heads + id.head) * problem.q_len + id.row;
    let sign = normal(time, TensorId::LastBits, (row * problem.kv_len + key) as u64).signum();
    score + sign * score * f32::EPSILON
}

/// Takes the other number where it is farther from the right one.
pub(super) fn take_farther(worst: &mut [f64], other: &[f64], right: &[f64]) {
    for ((worst, other), right) in worst.iter_mut().zip(other).zip(right) {
        if (other - right).abs() > (*worst - right).abs() {
            *worst = *other;
        }
    }
}

/// The chosen rows with every operation in f32: keys in ascending order, one accumulator for each sum of 1024 keys. The output
/// stays in f32 without further rounding. Each element of a row with large logits is the one of several
/// that is farthest from the oracle's.
pub fn naive_f32_rows(oracle: &Oracle<'_>, ids: &[RowId]) -> Vec<Row> {
    ids.iter()
        .map(|&id| {
            let (row, most) = naive_f32_row(oracle, id, None);
            if most < LARGE {
                return row;
            }
            let (o, lse) = oracle.row(id.batch, id.row, id.head);
            (0..MOVES).map(|time| naive_f32_row(oracle, id, Some(time)).0).fold(row, |mut worst, other| {
                take_farther(&mut worst.o, &other.o, &o);
                take_farther(std::slice::from_mut(&mut worst.lse), &[other.lse], &[lse]);
                worst
            })
        })
        .collect()
}

/// The row, and the largest magnitude of its logits.
pub(super) fn naive_f32_row(oracle: &Oracle<'_>, id: RowId, bits: Moved) -> (Row, f32) {
    let problem = oracle.problem();
    let [q, k, v] = oracle.tensors();
    let kv_head = problem.kv_head(id.head);
    let mut wide = vec![0.0; problem.head_dim];
    let mut narrow = |tensor: crate::oracle::Tensor4<'_>, token, head| -> Vec<f32> {
        tensor.read_vector(id.batch, token, head, &mut wide);
        wide.iter().map(|&value| value as f32).collect()
    };

    let query = narrow(q, id.row, id.head);
    let seen: Vec<(usize, f64)> =
        (0..problem.kv_len).filter_map(|key| Some((key, oracle.term(id, key)?))).collect();
    let keys: Vec<usize> = seen.iter().map(|&(key, _)| key).collect();
    let mut most = 0.0_f32;
    let scores: Vec<f32> = seen
        .iter()
        .map(|&(key, term)| {
            let k = narrow(k, key, kv_head);
            let mut dot = 0.0_f32;
            for dim in 0..problem.head_dim {
                dot += query[dim] * k[dim];
            }
            let score = moved(bits, problem, id, key, dot * problem.scale as f32);
            most = most.max(score.abs());
            let capped = match problem.softcap {
                Some(cap) => cap as f32 * (score / cap as f32).tanh(),
                None => score,
            };
            capped + term as f32
        })
        .collect();

    let mut o = vec![0.0_f32; problem.head_dim];
    let sink = problem.sinks.get(id.head).map(|&sink| sink as f32);
    if keys.is_empty() {
        let lse = sink.map_or(f64::NEG_INFINITY, f64::from);
        return (Row { id, o: vec![0.0; problem.head_dim], lse }, 0.0);
    }
    let max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = sink.map_or(0.0_f32, |sink| (sink - max).exp());
    for (keys, scores) in keys.chunks(BLOCK).zip(scores.chunks(BLOCK)) {
        let (mut sum_here, mut o_here) = (0.0_f32, vec![0.0_f32; problem.head_dim]);
        for (&key, score) in keys.iter().zip(scores) {
            let weight = (score - max).exp();
            sum_here += weight;
            for (o, v) in o_here.iter_mut().zip(narrow(v, key, kv_head)) {
                *o += weight * v;
            }
        }
        sum += sum_here;
        o.iter_mut().zip(o_here).for_each(|(o, here)| *o += here);
    }
    (Row { id, o: o.iter().map(|&o| f64::from(o / sum)).collect(), lse: f64::from(max + sum.ln()) }, most)
}
