//! The products of a panel and a tile, each a function of its own ([`alone`](super::super::kernel::alone)).

use pulp::{Simd, WithSimd};

use super::super::kernel::{add_products_of_columns, add_products_of_rows};

/// Rows of numbers, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) elements: &'a [f32],
    /// Elements from one row to the next.
    pub(super) stride: usize,
}

/// `into[key][lane] = Σ_d rows[key][d] · panel[d][lane]`: S and dP. `into` has whole groups of `MR` keys.
pub(super) struct OfPairs<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) simd: S,
    pub(super) rows: Rows<'a>,
    /// `[dim]`
    pub(super) panel: &'a [[S::f32s; NV]],
    /// `[key]`
    pub(super) into: &'a mut [[S::f32s; NV]],
}

impl<S: Simd, const MR: usize, const NV: usize> WithSimd for OfPairs<'_, S, MR, NV> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, rows: Rows { elements, stride }, panel, into } = self;
        let zero = [[simd.splat_f32s(0.0); NV]; MR];
        for (group, into) in into.as_chunks_mut::<MR>().0.iter_mut().enumerate() {
            let rows = (&elements[group * MR * stride..], stride);
            *into = add_products_of_rows(simd, zero, rows, (panel.as_flattened(), NV), panel.len());
        }
    }
}

/// `sums[d][lane] += Σ_key rows[key][d] · factors[key][lane]`: dQ.
pub(super) struct OfQueries<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) simd: S,
    pub(super) rows: Rows<'a>,
    /// `[key]`
    pub(super) factors: &'a [[S::f32s; NV]],
    /// `[dim]`
    pub(super) sums: &'a mut [[S::f32s; NV]],
}

impl<S: Simd, const MR: usize, const NV: usize> WithSimd for OfQueries<'_, S, MR, NV> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, rows: Rows { elements, stride }, factors, sums } = self;
        for (group, sums) in sums.as_chunks_mut::<MR>().0.iter_mut().enumerate() {
            *sums = add_products_of_columns(simd, *sums, (&elements[group * MR..], stride), factors);
        }
    }
}

/// `sums[key][d] += Σ_row factors[key][row] · rows[row][d]`: dK and dV, with the elements of a head in lanes.
pub(super) struct OfKeys<'a, S: Simd, const MR: usize> {
    pub(super) simd: S,
    /// By key; `stride` is the number of lanes of a panel.
    pub(super) factors: Rows<'a>,
    /// Vectors of the rows, `of_row` for each, of which `used` count.
    pub(super) rows: &'a [S::f32s],
    pub(super) count: usize,
    pub(super) of_row: usize,
    pub(super) used: usize,
    /// `of_row` vectors for each key, in whole groups of `MR` keys but for the last one.
    pub(super) sums: &'a mut [S::f32s],
}

impl<S: Simd, const MR: usize> WithSimd for OfKeys<'_, S, MR> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(mut self, _: T) {
        let keys = self.sums.len() / self.of_row;
        for from in (0..keys).step_by(MR) {
            let mut at = 0;
            while at + 2 <= self.used {
                self.add::<2>(from, at);
                at += 2;
            }
            if at < self.used {
                self.add::<1>(from, at);
            }
        }
    }
}

impl<S: Simd, const MR: usize> OfKeys<'_, S, MR> {
    /// `W` vectors of the sums of `MR` keys.
    #[inline(always)]
    fn add<const W: usize>(&mut self, from: usize, at: usize) {
        let Self { simd, factors: Rows { elements, stride }, rows, count, of_row, .. } = *self;
        let sums = &mut self.sums[from * of_row + at..];
        let mut c = [[simd.splat_f32s(0.0); W]; MR];
        for (c, sums) in c.iter_mut().zip(sums.chunks(of_row)) {
            c.copy_from_slice(&sums[..W]);
        }
        let factors = (&elements[from * stride..], stride);
        let c = add_products_of_rows(simd, c, factors, (&rows[at..], of_row), count);
        for (c, sums) in c.iter().zip(sums.chunks_mut(of_row)) {
            sums[..W].copy_from_slice(c);
        }
    }
}
