//! The loops over values: their weighted sum. Head elements are in lanes, and sums in the order of
//! words (module `elements`).

#![expect(
    clippy::needless_range_loop,
    reason = "with known bounds on all sides the compiler keeps arrays of sums in registers"
)]

use std::marker::PhantomData;

use pulp::Simd;

use super::super::product::Product;
use super::rows::KEYS;
use super::vectors::FewKeys;
use crate::backend::cpu::arithmetic::elements::{Bf16, Element, paired};
use crate::backend::cpu::arithmetic::exp::mul_add;

/// How the values of a few keys are added to rows.
pub(super) trait WeightedSum<const N: usize>: Copy {
    /// The values, and the order of the sums.
    type Of: Element<N>;

    /// Adds them to `ROWS` rows.
    fn add<S: Simd, const ROWS: usize>(
        self,
        simd: S,
        o: &mut [f32],
        weights: &[f32],
        width: usize,
        values: &FewKeys<'_, <Self::Of as Element<N>>::Stored>,
    );

    /// Adds those that it sees to one row.
    fn add_seen<S: Simd>(
        self,
        simd: S,
        o: &mut [f32],
        weights: &[f32],
        values: &FewKeys<'_, <Self::Of as Element<N>>::Stored>,
        seen: &[bool; KEYS],
    );
}

/// One key after the other.
pub(super) struct OfFloats<E, const N: usize>(PhantomData<E>);

impl<E, const N: usize> Clone for OfFloats<E, N> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E, const N: usize> Copy for OfFloats<E, N> {}

impl<E, const N: usize> Default for OfFloats<E, N> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

/// Two keys at a time, with the product of words.
#[derive(Clone, Copy)]
pub(super) struct OfWords<P>(pub(super) P);

impl<E: Element<N>, const N: usize> WeightedSum<N> for OfFloats<E, N> {
    type Of = E;

    #[inline(always)]
    fn add<S: Simd, const ROWS: usize>(
        self,
        simd: S,
        o: &mut [f32],
        weights: &[f32],
        width: usize,
        values: &FewKeys<'_, E::Stored>,
    ) {
        // The sums stay in registers.
        if N == 1 && S::REGISTER_COUNT >= 32 {
            add::<S, E, N, ROWS, 4>(simd, o, weights, width, values);
        } else if N == 1 || S::REGISTER_COUNT >= 32 {
            add::<S, E, N, ROWS, 2>(simd, o, weights, width, values);
        } else {
            add::<S, E, N, ROWS, 1>(simd, o, weights, width, values);
        }
    }

    #[inline(always)]
    fn add_seen<S: Simd>(
        self,
        simd: S,
        o: &mut [f32],
        weights: &[f32],
        values: &FewKeys<'_, E::Stored>,
        seen: &[bool; KEYS],
    ) {
        add_seen::<S, E, N>(simd, o, weights, values, seen);
    }
}

impl<P: Product> WeightedSum<2> for OfWords<P> {
    type Of = Bf16;

    #[inline(always)]
    fn add<S: Simd, const ROWS: usize>(
        self,
        simd: S,
        o: &mut [f32],
        weights: &[f32],
        width: usize,
        values: &FewKeys<'_, u16>,
    ) {
        if S::REGISTER_COUNT >= 32 {
            add_words::<S, P, ROWS, 2>(simd, self.0, o, weights, width, values);
        } else {
            add_words::<S, P, ROWS, 1>(simd, self.0, o, weights, width, values);
        }
    }

    #[inline(always)]
    fn add_seen<S: Simd>(
        self,
        simd: S,
        o: &mut [f32],
        weights: &[f32],
        values: &FewKeys<'_, u16>,
        seen: &[bool; KEYS],
    ) {
        add_seen_words(simd, self.0, o, weights, values, seen);
    }
}

/// `o[row] += Σ weight · value` for `ROWS` rows, `WORDS` vectors of words at a time.
#[inline(always)]
fn add<S: Simd, E: Element<N>, const N: usize, const ROWS: usize, const WORDS: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    width: usize,
    values: &FewKeys<'_, E::Stored>,
) {
    let weights = by_row::<ROWS>(weights, width);
    let (whole, rest) = E::vectors::<S>(values.rows.row(0));
    let (whole, rest) = (whole.len(), !rest.is_empty());
    let mut chunk = 0;
    while chunk + WORDS <= whole {
        add_chunks::<S, E, N, ROWS, WORDS>(simd, o, &weights, values, chunk);
        chunk += WORDS;
    }
    while chunk < whole {
        add_chunks::<S, E, N, ROWS, 1>(simd, o, &weights, values, chunk);
        chunk += 1;
    }
    if rest {
        let mut sums = [[[simd.splat_f32s(0.0); N]; 1]; ROWS];
        for key in 0..values.count {
            let v = E::of_words(simd, E::partial(simd, E::vectors::<S>(values.rows.row(key)).1));
            for row in 0..ROWS {
                let p = simd.splat_f32s(weights[row][key]);
                for n in 0..N {
                    sums[row][0][n] = mul_add(simd, p, v[n], sums[row][0][n]);
                }
            }
        }
        add_to(simd, o, &sums, whole);
    }
}

#[inline(always)]
fn add_chunks<S: Simd, E: Element<N>, const N: usize, const ROWS: usize, const WORDS: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[&[f32; KEYS]; ROWS],
    values: &FewKeys<'_, E::Stored>,
    chunk: usize,
) {
    let mut sums = [[[simd.splat_f32s(0.0); N]; WORDS]; ROWS];
    for key in 0..values.count {
        let words = &E::vectors::<S>(values.rows.row(key)).0[chunk..][..WORDS];
        let mut v = [[simd.splat_f32s(0.0); N]; WORDS];
        for i in 0..WORDS {
            values.load_next(&words[i]);
            v[i] = E::of_words(simd, words[i]);
        }
        for row in 0..ROWS {
            let p = simd.splat_f32s(weights[row][key]);
            for i in 0..WORDS {
                for n in 0..N {
                    sums[row][i][n] = mul_add(simd, p, v[i][n], sums[row][i][n]);
                }
            }
        }
    }
    add_to(simd, o, &sums, chunk);
}

/// As [`add`] for values of bf16, in words of two keys. `weights` has the word of keys 2i and 2i +
/// 1 at 2i.
#[inline(always)]
fn add_words<S: Simd, P: Product, const ROWS: usize, const WORDS: usize>(
    simd: S,
    product: P,
    o: &mut [f32],
    weights: &[f32],
    width: usize,
    values: &FewKeys<'_, u16>,
) {
    let weights = by_row::<ROWS>(weights, width);
    let (whole, rest) = Bf16::vectors::<S>(values.rows.row(0));
    let (whole, rest) = (whole.len(), !rest.is_empty());
    let mut chunk = 0;
    while chunk + WORDS <= whole {
        add_chunks_of_words::<S, P, ROWS, WORDS>(simd, product, o, &weights, values, chunk);
        chunk += WORDS;
    }
    while chunk < whole {
        add_chunks_of_words::<S, P, ROWS, 1>(simd, product, o, &weights, values, chunk);
        chunk += 1;
    }
    if rest {
        let mut sums = [[[simd.splat_f32s(0.0); 2]; 1]; ROWS];
        for key in (0..values.count).step_by(2) {
            let mut words = [bytemuck::Zeroable::zeroed(); 2];
            for (words, key) in words.iter_mut().zip(key..values.count) {
                *words = Bf16::partial(simd, Bf16::vectors::<S>(values.rows.row(key)).1);
            }
            let v = paired(simd, words[0], words[1]);
            for row in 0..ROWS {
                let p = simd.splat_f32s(weights[row][key]);
                for n in 0..2 {
                    sums[row][0][n] = product.mul_add(simd, p, v[n], sums[row][0][n]);
                }
            }
        }
        add_to(simd, o, &sums, whole);
    }
}

#[inline(always)]
fn add_chunks_of_words<S: Simd, P: Product, const ROWS: usize, const WORDS: usize>(
    simd: S,
    product: P,
    o: &mut [f32],
    weights: &[&[f32; KEYS]; ROWS],
    values: &FewKeys<'_, u16>,
    chunk: usize,
) {
    let mut sums = [[[simd.splat_f32s(0.0); 2]; WORDS]; ROWS];
    for key in (0..values.count).step_by(2) {
        let low = &Bf16::vectors::<S>(values.rows.row(key)).0[chunk..][..WORDS];
        let mut v = [[simd.splat_f32s(0.0); 2]; WORDS];
        if key + 1 < values.count {
            let high = &Bf16::vectors::<S>(values.rows.row(key + 1)).0[chunk..][..WORDS];
            for i in 0..WORDS {
                values.load_next(&low[i]);
                values.load_next(&high[i]);
                v[i] = paired(simd, low[i], high[i]);
            }
        } else {
            for i in 0..WORDS {
                v[i] = paired(simd, low[i], bytemuck::Zeroable::zeroed());
            }
        }
        for row in 0..ROWS {
            let p = simd.splat_f32s(weights[row][key]);
            for i in 0..WORDS {
                for n in 0..2 {
                    sums[row][i][n] = product.mul_add(simd, p, v[i][n], sums[row][i][n]);
                }
            }
        }
    }
    add_to(simd, o, &sums, chunk);
}

/// As [`add`] for one row, without the keys that it does not see: 0 · NaN is NaN. Where the hidden
/// values are finite, the result is that of [`add`], bit for bit.
#[inline(always)]
fn add_seen<S: Simd, E: Element<N>, const N: usize>(
    simd: S,
    o: &mut [f32],
    weights: &[f32],
    values: &FewKeys<'_, E::Stored>,
    seen: &[bool; KEYS],
) {
    for (chunk, into) in S::as_mut_simd_f32s(o).0.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let mut sums = [simd.splat_f32s(0.0); N];
        for key in 0..values.count {
            if !seen[key] {
                continue;
            }
            let v = E::of_words(simd, words::<S, E, N>(simd, values, key, chunk));
            for (sum, v) in sums.iter_mut().zip(&v) {
                *sum = mul_add(simd, simd.splat_f32s(weights[key]), *v, *sum);
            }
        }
        for (into, sum) in into.iter_mut().zip(&sums) {
            *into = simd.add_f32s(*into, *sum);
        }
    }
}

/// [`add_seen`] of words: the result is that of [`add_words`].
#[inline(always)]
fn add_seen_words<S: Simd, P: Product>(
    simd: S,
    product: P,
    o: &mut [f32],
    weights: &[f32],
    values: &FewKeys<'_, u16>,
    seen: &[bool; KEYS],
) {
    for (chunk, into) in S::as_mut_simd_f32s(o).0.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let mut sums = [simd.splat_f32s(0.0); 2];
        for key in (0..values.count).step_by(2) {
            // The weight of a hidden key is 0.
            let mut of_keys = [bytemuck::Zeroable::zeroed(); 2];
            for (of_key, key) in of_keys.iter_mut().zip(key..values.count) {
                if seen[key] {
                    *of_key = words::<S, Bf16, 2>(simd, values, key, chunk);
                }
            }
            let v = paired(simd, of_keys[0], of_keys[1]);
            for (sum, v) in sums.iter_mut().zip(&v) {
                *sum = product.mul_add(simd, simd.splat_f32s(weights[key]), *v, *sum);
            }
        }
        for (into, sum) in into.iter_mut().zip(&sums) {
            *into = simd.add_f32s(*into, *sum);
        }
    }
}

/// One vector of words of a key, whole or not.
#[inline(always)]
fn words<S: Simd, E: Element<N>, const N: usize>(
    simd: S,
    values: &FewKeys<'_, E::Stored>,
    key: usize,
    chunk: usize,
) -> E::Words<S> {
    let (whole, rest) = E::vectors::<S>(values.rows.row(key));
    match whole.get(chunk) {
        Some(words) => *words,
        None => E::partial(simd, rest),
    }
}

/// The weights of a few keys, by row.
#[inline(always)]
fn by_row<const ROWS: usize>(weights: &[f32], width: usize) -> [&[f32; KEYS]; ROWS] {
    let mut by_row = [&[0.0; KEYS]; ROWS];
    for (row, by_row) in by_row.iter_mut().enumerate() {
        *by_row = weights[row * width..].first_chunk().expect("tiles hold whole groups of keys");
    }
    by_row
}

/// Adds sums to the vectors of each row from vector of words `chunk` on.
#[inline(always)]
fn add_to<S: Simd, const N: usize, const ROWS: usize, const WORDS: usize>(
    simd: S,
    o: &mut [f32],
    sums: &[[[S::f32s; N]; WORDS]; ROWS],
    chunk: usize,
) {
    let padded = o.len() / ROWS;
    for row in 0..ROWS {
        let into = S::as_mut_simd_f32s(&mut o[row * padded..][..padded]).0.as_chunks_mut::<N>().0;
        let into = &mut into[chunk..][..WORDS];
        for i in 0..WORDS {
            for n in 0..N {
                into[i][n] = simd.add_f32s(into[i][n], sums[row][i][n]);
            }
        }
    }
}
