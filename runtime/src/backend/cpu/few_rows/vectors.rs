//! The loops over keys: scores, and weights. Head elements are in lanes; queries are in the order
//! of words (module `elements`).

use bytemuck::Pod;
use pulp::Simd;

use super::super::product::Product;
use super::rows::KEYS;
use crate::backend::cpu::arithmetic::bf16::words_of;
use crate::backend::cpu::arithmetic::elements::{Element, Rows, load_ahead};
use crate::backend::cpu::arithmetic::exp::exp_each;
use crate::backend::cpu::arithmetic::scalar;
use crate::backend::cpu::arithmetic::simd::sums_of_four;

/// A few keys or values of a head.
pub(super) struct FewKeys<'a, T> {
    pub(super) rows: Rows<'a, T>,
    /// At most [`KEYS`].
    pub(super) count: usize,
}

impl<T: Pod> FewKeys<'_, T> {
    /// Lets the processor load the same elements of the next keys.
    #[inline(always)]
    pub(super) fn load_next<W>(&self, words: &W) {
        load_ahead(words, self.rows.bytes_between(KEYS));
    }
}

/// `scores[row · width + key]` = `factor` times q of the row · key, for `ROWS` rows, `AT_ONCE` keys
/// at a time. Either is a multiple of four. Scores up to key [`KEYS`] are overwritten.
#[inline(always)]
pub(super) fn score<
    S: Simd,
    E: Element<N>,
    P: Product,
    const N: usize,
    const ROWS: usize,
    const AT_ONCE: usize,
>(
    simd: S,
    product: P,
    q: &[f32],
    keys: &FewKeys<'_, E::Stored>,
    factor: f32,
    scores: &mut [f32],
    width: usize,
) {
    let padded = q.len() / ROWS;
    let in_vectors = E::vectors::<S>(keys.rows.row(0)).0.len();
    let (mut rows, mut ends) = ([S::as_simd_f32s(&q[..0]).0.as_chunks::<N>().0; ROWS], [None; ROWS]);
    for row in 0..ROWS {
        let vectors = S::as_simd_f32s(&q[row * padded..][..padded]).0.as_chunks::<N>().0;
        (rows[row], ends[row]) = (&vectors[..in_vectors], vectors.get(in_vectors));
    }
    for first in (0..KEYS).step_by(AT_ONCE) {
        if first >= keys.count {
            break;
        }
        let (vectors, rest) = E::vectors::<S>(keys.rows.row(first));
        let (mut vectors, mut rest) = ([&vectors[..in_vectors]; AT_ONCE], [rest; AT_ONCE]);
        for i in 1..AT_ONCE {
            // Beyond the last key: the first one again. The score is not used.
            if first + i < keys.count {
                (vectors[i], rest[i]) = E::vectors::<S>(keys.rows.row(first + i));
                vectors[i] = &vectors[i][..in_vectors];
            }
        }
        let mut sums = [[simd.splat_f32s(0.0); AT_ONCE]; ROWS];
        // First, because what calls a function makes the compiler keep the sums before it in memory.
        if !rest[0].is_empty() {
            for i in 0..AT_ONCE {
                let key = E::of_words(simd, E::partial(simd, rest[i]));
                for row in 0..ROWS {
                    let Some(q) = ends[row] else { continue };
                    for n in 0..N {
                        sums[row][i] = product.mul_add(simd, q[n], key[n], sums[row][i]);
                    }
                }
            }
        }
        for chunk in 0..in_vectors {
            let mut q = [[simd.splat_f32s(0.0); N]; ROWS];
            for row in 0..ROWS {
                q[row] = rows[row][chunk];
            }
            for i in 0..AT_ONCE {
                keys.load_next(&vectors[i][chunk]);
                let key = E::of_words(simd, vectors[i][chunk]);
                for row in 0..ROWS {
                    for n in 0..N {
                        sums[row][i] = product.mul_add(simd, q[row][n], key[n], sums[row][i]);
                    }
                }
            }
        }
        // Sums of four keys, or of four rows. In loops with known bounds: otherwise the compiler keeps the
        // sums in memory.
        if AT_ONCE.is_multiple_of(4) {
            for row in 0..ROWS {
                for four in 0..AT_ONCE / 4 {
                    let mut of_four = [simd.splat_f32s(0.0); 4];
                    for i in 0..4 {
                        of_four[i] = sums[row][4 * four + i];
                    }
                    let of_four = sums_of_four(simd, of_four);
                    let into = &mut scores[row * width + first + 4 * four..][..4];
                    for i in 0..4 {
                        into[i] = of_four[i] * factor;
                    }
                }
            }
        } else {
            for i in 0..AT_ONCE {
                for four in 0..ROWS / 4 {
                    let mut of_four = [simd.splat_f32s(0.0); 4];
                    for row in 0..4 {
                        of_four[row] = sums[4 * four + row][i];
                    }
                    let of_four = sums_of_four(simd, of_four);
                    for row in 0..4 {
                        scores[(4 * four + row) * width + first + i] = of_four[row] * factor;
                    }
                }
            }
        }
    }
}

/// Scores of one row become weights; its m, l and o follow a larger maximum. With `words`, the
/// weights of keys 2i and 2i + 1 become the word at 2i, rounded to bf16.
#[inline(always)]
pub(super) fn weigh<S: Simd>(
    simd: S,
    scores: &mut [f32],
    m: &mut f32,
    l: &mut f32,
    o: &mut [f32],
    words: bool,
) {
    let vectors = S::as_mut_simd_f32s(scores).0;
    let mut most = simd.splat_f32s(*m);
    for s in vectors.iter() {
        most = simd.max_f32s(most, *s);
    }
    let most = simd.reduce_max_f32s(most);
    // A NaN does not become the maximum: the weight of its key is NaN anyway.
    if most > *m {
        let keep = scalar::exp(*m - most);
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
        let [weights] = exp_each(simd, shifted);
        for p in &weights {
            sum = simd.add_f32s(sum, *p);
        }
        *group = weights;
        if words {
            let mut next = weights;
            for next in &mut next {
                *next = simd.rotate_left_f32s(*next, 1);
            }
            *group = words_of(simd, [weights, next]);
        }
    }
    *l += simd.reduce_sum_f32s(sum);
}
