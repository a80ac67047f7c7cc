//! Naive attention in f32: measures the rounding error of f32 on given inputs.
//!
//! It is not a reference for the answer, only for the size of the error. If a kernel keeps scores,
//! weights and sums in f32, its error must not be more than twice the error of this module.

use crate::oracle::{Oracle, Row, RowId};

/// Keys of one running sum. Without blocks the error of values of one sign grows with the number of
/// keys, and so would every limit.
const BLOCK: usize = 1024;

/// The chosen rows with every operation in f32: keys in ascending order, one accumulator for each
/// sum of 1024 keys. The output stays in f32 without further rounding.
pub fn naive_f32_rows(oracle: &Oracle<'_>, ids: &[RowId]) -> Vec<Row> {
    ids.iter().map(|&id| naive_f32_row(oracle, id).0).collect()
}

/// The largest logit of a row, and the sum of the exponentials relative to it.
#[derive(Clone, Copy)]
pub(super) struct Normaliser {
    pub(super) max: f32,
    pub(super) sum: f32,
}

/// The row and its normaliser.
pub(super) fn naive_f32_row(oracle: &Oracle<'_>, id: RowId) -> (Row, Normaliser) {
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
    let scores: Vec<f32> = seen
        .iter()
        .map(|&(key, term)| {
            let k = narrow(k, key, kv_head);
            let mut dot = 0.0_f32;
            for dim in 0..problem.head_dim {
                dot += query[dim] * k[dim];
            }
            let score = dot * problem.scale as f32;
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
        let max = sink.unwrap_or(f32::NEG_INFINITY);
        return (Row { id, o: vec![0.0; problem.head_dim], lse }, Normaliser { max, sum: 1.0 });
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
    let o = o.iter().map(|&o| f64::from(o / sum)).collect();
    (Row { id, o, lse: f64::from(max + sum.ln()) }, Normaliser { max, sum })
}
