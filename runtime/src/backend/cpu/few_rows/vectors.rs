//! The inner loops: scores, weights, and the weighted sum of values, with head elements in lanes. Queries and sums are in the order
//! of words (module `elements`).

use pulp::Simd;

use super::super::elements::{Element, Rows, load_ahead};
use super::super::exp::{exp2_each, mul_add};
use super::super::scalar;
use super::rows::{GROUP, KEYS};

/// q · key.
#[inline(always)]
pub(super) fn score_one<S: Simd, E: Element<N>, const N: usize>(
    simd: S,
    q: &[f32],
    key: &[E::Stored],
) -> f32 {
    let q = S::as_simd_f32s(q).0.as_chunks::<N>().0;
    let (vectors, rest) = E::vectors::<S>(key);
    let mut sums = [simd.splat_f32s(0.0); N];
    for (q, words) in q.iter().zip(vectors) {
        let key = E::of_words(simd, *words);
        for (sum, (q, key)) in sums.iter_mut().zip(q.iter().zip(&key)) {
            *sum = mul_add(simd, *q, *key, *sum);
        }
    }
    if !rest.is_empty() {
        let key = E::of_words(simd, E::partial(simd, rest));
        for (sum, (q, key)) in sums.iter_mut().zip(q[vectors.len()].iter().zip(&key)) {
            *sum = mul_add(simd, *q, *key, *sum);
        }
    }
    let mut sum = sums[0];
    for other in &sums[1..] {
        sum = simd.add_f32s(sum, *other);
    }
    simd.reduce_sum_f32s(sum)
}

/// `o += weight · value`.
#[inline(always)]
pub(super) fn add_one<S: Simd, E: Element<N>, const N: usize>(
    simd: S,
    o: &mut [f32],
    weight: f32,
    value: &[E::Stored],
) {
    let o = S::as_mut_simd_f32s(o).0.as_chunks_mut::<N>().0;
    let (vectors, rest) = E::vectors::<S>(value);
    let weight = simd.splat_f32s(weight);
    for (o, words) in o.iter_mut().zip(vectors) {
        // The stores of the sums fill the queue of stores long before the processor sees the loads that far.
        load_ahead(words, BYTES_AHEAD);
        let v = E::of_words(simd, *words);
        for (o, v) in o.iter_mut().zip(&v) {
            *o = mul_add(simd, weight, *v, *o);
        }
    }
    if !rest.is_empty() {
        let v = E::of_words(simd, E::partial(simd, rest));
        for (o, v) in o[vectors.len()].iter_mut().zip(&v) {
            *o = mul_add(simd, weight, *v, *o);
        }
    }
}

/// `scores[row · width + key]` = q of the row · key, for a group of rows, `KEYS_AT_ONCE` keys at a time.
#[inline(always)]
pub(super) fn score<S: Simd, E: Element<N>, const N: usize, const KEYS_AT_ONCE: usize>(
    simd: S,
    q: &[f32],
    keys: &Rows<'_, E::Stored>,
    count: usize,
    scores: &mut [f32],
    width: usize,
) {
    let padded = q.len() / GROUP;
    let mut rows = [S::as_simd_f32s(&q[..0]).0.as_chunks::<N>().0; GROUP];
    for (row, q) in rows.iter_mut().zip(q.chunks_exact(padded)) {
        *row = S::as_simd_f32s(q).0.as_chunks::<N>().0;
    }
    let ahead = keys.ahead(KEYS);
    for first in (0..count).step_by(KEYS_AT_ONCE) {
        let mut vectors = [E::vectors::<S>(keys.row(first)); KEYS_AT_ONCE];
        for (i, vectors) in vectors.iter_mut().enumerate() {
            // Beyond the last key: that key again, whose score is not used.
            *vectors = E::vectors::<S>(keys.row((first + i).min(count - 1)));
        }
        let mut sums = [[simd.splat_f32s(0.0); GROUP]; KEYS_AT_ONCE];
        let whole = vectors[0].0.len();
        for chunk in 0..whole {
            for (sums, (key, _)) in sums.iter_mut().zip(&vectors) {
                load_ahead(&key[chunk], ahead);
                let key = E::of_words(simd, key[chunk]);
                for (sum, q) in sums.iter_mut().zip(&rows) {
                    for (q, key) in q[chunk].iter().zip(&key) {
                        *sum = mul_add(simd, *q, *key, *sum);
                    }
                }
            }
        }
        if whole < rows[0].len() {
            for (sums, (_, rest)) in sums.iter_mut().zip(&vectors) {
                let key = E::of_words(simd, E::partial(simd, rest));
                for (sum, q) in sums.iter_mut().zip(&rows) {
                    for (q, key) in q[whole].iter().zip(&key) {
                        *sum = mul_add(simd, *q, *key, *sum);
                    }
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

/// `o[row] += Σ weight · value` for a group of rows, `WORDS` vectors of words at a time.
#[inline(always)]
pub(super) fn add<S: Simd, E: Element<N>, const N: usize, const WORDS: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    width: usize,
    values: &Rows<'_, E::Stored>,
    count: usize,
) {
    let padded = o.len() / GROUP;
    let (whole, rest) = E::vectors::<S>(values.row(0));
    let (whole, rest) = (whole.len(), !rest.is_empty());
    let mut chunk = 0;
    while chunk + WORDS <= whole {
        add_chunks::<S, E, N, WORDS>(simd, o, weights, width, values, count, chunk);
        chunk += WORDS;
    }
    while chunk < whole {
        add_chunks::<S, E, N, 1>(simd, o, weights, width, values, count, chunk);
        chunk += 1;
    }
    if rest {
        let mut sums = [[simd.splat_f32s(0.0); N]; GROUP];
        for key in 0..count {
            let v = E::of_words(simd, E::partial(simd, E::vectors::<S>(values.row(key)).1));
            for (row, sums) in sums.iter_mut().enumerate() {
                for (sum, v) in sums.iter_mut().zip(&v) {
                    *sum = mul_add(simd, simd.splat_f32s(weights[row * width + key]), *v, *sum);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            let into = &mut S::as_mut_simd_f32s(&mut o[row * padded..][..padded]).0[whole * N..][..N];
            for (into, sum) in into.iter_mut().zip(sums) {
                *into = simd.add_f32s(*into, *sum);
            }
        }
    }
}

#[inline(always)]
fn add_chunks<S: Simd, E: Element<N>, const N: usize, const WORDS: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    width: usize,
    values: &Rows<'_, E::Stored>,
    count: usize,
    chunk: usize,
) {
    let padded = o.len() / GROUP;
    let mut by_row = [&weights[..0]; GROUP];
    for (row, by_row) in by_row.iter_mut().enumerate() {
        *by_row = &weights[row * width..][..count];
    }
    let ahead = values.ahead(KEYS);
    let mut sums = [[[simd.splat_f32s(0.0); N]; WORDS]; GROUP];
    for key in 0..count {
        let words = &E::vectors::<S>(values.row(key)).0[chunk..][..WORDS];
        let mut v = [[simd.splat_f32s(0.0); N]; WORDS];
        for (v, words) in v.iter_mut().zip(words) {
            load_ahead(words, ahead);
            *v = E::of_words(simd, *words);
        }
        for (sums, weights) in sums.iter_mut().zip(&by_row) {
            let p = simd.splat_f32s(weights[key]);
            for (sum, v) in sums.as_flattened_mut().iter_mut().zip(v.as_flattened()) {
                *sum = mul_add(simd, p, *v, *sum);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        let into = S::as_mut_simd_f32s(&mut o[row * padded..][..padded]).0;
        for (into, sum) in into[chunk * N..][..WORDS * N].iter_mut().zip(sums.as_flattened()) {
            *into = simd.add_f32s(*into, *sum);
        }
    }
}

/// As [`add`] for one row, without the keys that it does not see: 0 · NaN is NaN. Where the hidden values are finite, the result
/// is that of [`add`], bit for bit.
#[inline(always)]
pub(super) fn add_seen<S: Simd, E: Element<N>, const N: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    values: &Rows<'_, E::Stored>,
    count: usize,
    seen: impl Fn(usize) -> bool,
) {
    for (chunk, into) in S::as_mut_simd_f32s(o).0.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let mut sums = [simd.splat_f32s(0.0); N];
        for key in (0..count).filter(|key| seen(*key)) {
            let (whole, rest) = E::vectors::<S>(values.row(key));
            let v =
                E::of_words(simd, whole.get(chunk).map_or_else(|| E::partial(simd, rest), |words| *words));
            for (sum, v) in sums.iter_mut().zip(&v) {
                *sum = mul_add(simd, simd.splat_f32s(weights[key]), *v, *sum);
            }
        }
        for (into, sum) in into.iter_mut().zip(&sums) {
            *into = simd.add_f32s(*into, *sum);
        }
    }
}

/// How far ahead of a value the processor is asked to load: more than comes from memory within its latency.
const BYTES_AHEAD: usize = 4096;
