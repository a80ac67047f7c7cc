//! The inner loops: scores, weights, and the weighted sum of values, with head elements in lanes.

use pulp::Simd;

use super::super::exp::{exp2_each, mul_add};
use super::super::pack::Rows;
use super::super::scalar;

/// `scores[row · width + key]` = q of the row · key, for `ROWS` rows, `KEYS` keys at a time.
#[inline(always)]
pub(super) fn score<S: Simd, const ROWS: usize, const KEYS: usize>(
    simd: S,
    q: &[f32],
    keys: &Rows<'_>,
    count: usize,
    scores: &mut [f32],
    width: usize,
) {
    let padded = q.len() / ROWS;
    let dim = keys.dim;
    let chunks = dim / S::F32_LANES;
    let mut rows = [S::as_simd_f32s(&q[..0]).0; ROWS];
    for (row, q) in rows.iter_mut().zip(q.chunks_exact(padded)) {
        *row = S::as_simd_f32s(q).0;
    }
    for first in (0..count).step_by(KEYS) {
        let mut vectors = [S::as_simd_f32s(&q[..0]).0; KEYS];
        let mut rests = [&q[..0]; KEYS];
        for (i, (vectors, rest)) in vectors.iter_mut().zip(&mut rests).enumerate() {
            // Beyond the last key: that key again, whose score is not used.
            (*vectors, *rest) = S::as_simd_f32s(keys.row((first + i).min(count - 1), dim));
        }
        let mut sums = [[simd.splat_f32s(0.0); ROWS]; KEYS];
        for chunk in 0..chunks {
            for (sums, key) in sums.iter_mut().zip(&vectors) {
                for (sum, q) in sums.iter_mut().zip(&rows) {
                    *sum = mul_add(simd, q[chunk], key[chunk], *sum);
                }
            }
        }
        if chunks * S::F32_LANES < dim {
            for (sums, rest) in sums.iter_mut().zip(&rests) {
                let key = simd.partial_load_f32s(rest);
                for (sum, q) in sums.iter_mut().zip(&rows) {
                    *sum = mul_add(simd, q[chunks], key, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate().take(count - first) {
            for (row, sum) in sums.iter().enumerate() {
                scores[row * width + first + i] = simd.reduce_sum_f32s(*sum);
            }
        }
    }
}

/// Scores of one row become weights; its m, l and o follow a larger maximum.
#[inline(always)]
pub(super) fn weigh<S: Simd>(simd: S, scores: &mut [f32], m: &mut f32, l: &mut f32, o: &mut [f32]) {
    let vectors = S::as_mut_simd_f32s(scores).0;
    let mut most = simd.splat_f32s(*m);
    for s in vectors.iter() {
        most = simd.max_f32s(most, *s);
    }
    let most = simd.reduce_max_f32s(most);
    // A NaN does not become the maximum: the weight of its key is NaN anyway.
    if most > *m {
        let keep = scalar::exp2(f64::from(*m - most));
        *l *= keep;
        for o in S::as_mut_simd_f32s(o).0 {
            *o = simd.mul_f32s(*o, simd.splat_f32s(keep));
        }
        *m = most;
    }
    let shift = simd.splat_f32s(*m);
    let mut sum = simd.splat_f32s(0.0);
    // Four side by side, since one exponential is a chain.
    for group in vectors.as_chunks_mut::<4>().0 {
        let mut shifted = [*group];
        for s in shifted.as_flattened_mut() {
            *s = simd.sub_f32s(*s, shift);
        }
        let [weights] = exp2_each(simd, shifted);
        for p in &weights {
            sum = simd.add_f32s(sum, *p);
        }
        *group = weights;
    }
    *l += simd.reduce_sum_f32s(sum);
}

/// `o[row] += Σ weight · value` for `ROWS` rows, `CHUNKS` vectors of head elements at a time.
#[inline(always)]
pub(super) fn add<S: Simd, const ROWS: usize, const CHUNKS: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    width: usize,
    values: &Rows<'_>,
    count: usize,
    dim: usize,
) {
    let lanes = S::F32_LANES;
    let whole = dim / lanes;
    let mut chunk = 0;
    while chunk + CHUNKS <= whole {
        add_chunks::<S, ROWS, CHUNKS>(simd, o, weights, width, values, count, chunk);
        chunk += CHUNKS;
    }
    while chunk < whole {
        add_chunks::<S, ROWS, 1>(simd, o, weights, width, values, count, chunk);
        chunk += 1;
    }
    if whole * lanes < dim {
        let padded = o.len() / ROWS;
        let mut sums = [simd.splat_f32s(0.0); ROWS];
        for key in 0..count {
            let v = simd.partial_load_f32s(&values.row(key, dim)[whole * lanes..]);
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = mul_add(simd, simd.splat_f32s(weights[row * width + key]), v, *sum);
            }
        }
        for (row, sum) in sums.iter().enumerate() {
            let into = &mut S::as_mut_simd_f32s(&mut o[row * padded..][..padded]).0[whole];
            *into = simd.add_f32s(*into, *sum);
        }
    }
}

#[inline(always)]
fn add_chunks<S: Simd, const ROWS: usize, const CHUNKS: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    width: usize,
    values: &Rows<'_>,
    count: usize,
    chunk: usize,
) {
    let padded = o.len() / ROWS;
    let mut by_row = [&weights[..0]; ROWS];
    for (row, by_row) in by_row.iter_mut().enumerate() {
        *by_row = &weights[row * width..][..count];
    }
    let mut sums = [[simd.splat_f32s(0.0); CHUNKS]; ROWS];
    for key in 0..count {
        let row = &values.row(key, values.dim)[chunk * S::F32_LANES..][..CHUNKS * S::F32_LANES];
        let v = S::as_simd_f32s(row).0;
        for (sums, weights) in sums.iter_mut().zip(&by_row) {
            let p = simd.splat_f32s(weights[key]);
            for (sum, v) in sums.iter_mut().zip(v) {
                *sum = mul_add(simd, p, *v, *sum);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        let into = S::as_mut_simd_f32s(&mut o[row * padded..][..padded]).0;
        for (into, sum) in into[chunk..chunk + CHUNKS].iter_mut().zip(sums) {
            *into = simd.add_f32s(*into, *sum);
        }
    }
}

/// As [`add`] for one row, without the keys that it does not see: 0 · NaN is NaN. Where the hidden values are finite, the result
/// is that of [`add`], bit for bit.
#[inline(always)]
pub(super) fn add_seen<S: Simd>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    values: &Rows<'_>,
    count: usize,
    dim: usize,
    seen: impl Fn(usize) -> bool,
) {
    for (chunk, into) in S::as_mut_simd_f32s(o).0.iter_mut().enumerate() {
        let first = chunk * S::F32_LANES;
        let mut sum = simd.splat_f32s(0.0);
        for key in (0..count).filter(|key| seen(*key)) {
            let row = &values.row(key, dim)[first.min(dim)..dim.min(first + S::F32_LANES)];
            let v = simd.partial_load_f32s(row);
            sum = mul_add(simd, simd.splat_f32s(weights[key]), v, sum);
        }
        *into = simd.add_f32s(*into, sum);
    }
}
