//! One panel of rows or keys in lanes against one tile of the other side: scores, weights, and their gradients.
//!
//! As in the forward pass, vectors are computed in loops, never in closures for `array::map` or `array::from_fn`: the compiler
//! may leave such a closure out of line, without the kernel's instruction set.

use pulp::Simd;

use super::super::exp::{exp2_each, tanh};
use super::super::kernel::add_outer_products;
use crate::RowSpan;
use crate::backend::EMPTY_M;

/// Which side is in lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fixed {
    /// Query rows: the job adds up dQ.
    Rows,
    /// Keys: the job adds up dK and dV.
    Keys,
}

impl Fixed {
    /// Products for each pair.
    pub(super) fn products(self) -> u64 {
        match self {
            Self::Rows => 3,
            Self::Keys => 4,
        }
    }
}

/// `NV` vectors of one side.
pub(super) struct Panel<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) dim: usize,
    pub(super) softcap: Option<f32>,
    /// `[dim]`: q or k with the factor of the scores; dO or v.
    pub(super) x: [&'a [[S::f32s; NV]]; 2],
    pub(super) lanes: Lanes<S, NV>,
    /// `[row]`, the terms that are added to the scores; −∞ hides a key.
    pub(super) terms: Option<&'a [[S::f32s; NV]]>,
    /// Whether some pairs are hidden by the mask.
    pub(super) masked: bool,
    /// `[row]`, space: P.
    pub(super) weights: &'a mut [[S::f32s; NV]],
    /// `[row]`, space: dS.
    pub(super) d_scores: &'a mut [[S::f32s; NV]],
}

/// What the lanes hold for the mask and for the statistics.
pub(super) struct Lanes<S: Simd, const NV: usize> {
    /// First key of the span of each row, or the position of each key.
    from: [S::u32s; NV],
    /// Keys of the span of each row.
    width: [S::u32s; NV],
    /// [`Stats`] of each row.
    stats: [[S::f32s; NV]; 3],
}

/// The statistics of a row: its log-sum-exp in base-2 units as a sum of two numbers, and δ.
///
/// Rounded to one number, a log-sum-exp of 100 would change every weight by 4e-6.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stats([f32; 3]);

impl Stats {
    /// `None` for a row that sees nothing: with any finite score its weights are 0.
    pub(super) fn new(lse: Option<f32>, delta: f32) -> Self {
        let Some(lse) = lse else { return Self([-EMPTY_M, 0.0, 0.0]) };
        let base_2 = f64::from(lse) * std::f64::consts::LOG2_E;
        #[expect(clippy::cast_possible_truncation, reason = "the rest is kept")]
        let high = base_2 as f32;
        #[expect(clippy::cast_possible_truncation, reason = "far below the other number")]
        let low = if high.is_finite() { (base_2 - f64::from(high)) as f32 } else { 0.0 };
        Self([high, low, delta])
    }
}

/// A tile of the other side.
pub(super) struct Broadcast<'a, const MR: usize> {
    pub(super) fixed: Fixed,
    /// k and v, or q and dO: `[row / MR][dim][MR]`.
    pub(super) by_row: [&'a [[f32; MR]]; 2],
    /// k, or q and dO: `[dim / MR][row][MR]`.
    pub(super) by_dim: [&'a [[f32; MR]]; 2],
    /// Rows in a group of `by_dim`.
    pub(super) stride: usize,
    /// Rows of the tile.
    pub(super) count: usize,
    /// Of the keys of the KV tile.
    pub(super) positions: &'a [u32],
    /// Of the rows of the Q tile, with their statistics.
    pub(super) spans: &'a [RowSpan],
    pub(super) stats: &'a [Stats],
    /// Whether the tensors of `by_dim` hold neither NaN nor ∞.
    pub(super) finite: [bool; 2],
}

impl<S: Simd, const NV: usize> Lanes<S, NV> {
    /// Query rows in lanes; the other lanes see nothing.
    #[inline(always)]
    pub(super) fn rows(simd: S, spans: &[RowSpan], stats: &[Stats]) -> Self {
        let mut lanes = Self::none(simd);
        for (lane, (span, stats)) in spans.iter().zip(stats).enumerate() {
            put(&mut lanes.from, lane, span.lo);
            put(&mut lanes.width, lane, span.hi - span.lo);
            for (vectors, number) in lanes.stats.iter_mut().zip(stats.0) {
                put(vectors, lane, number);
            }
        }
        lanes
    }

    /// Keys in lanes.
    #[inline(always)]
    pub(super) fn keys(simd: S, positions: &[u32]) -> Self {
        let mut lanes = Self::none(simd);
        for (lane, position) in positions.iter().enumerate() {
            put(&mut lanes.from, lane, *position);
        }
        lanes
    }

    #[inline(always)]
    fn none(simd: S) -> Self {
        Self {
            from: [simd.splat_u32s(0); NV],
            width: [simd.splat_u32s(0); NV],
            stats: [[simd.splat_f32s(-EMPTY_M); NV], [simd.splat_f32s(0.0); NV], [simd.splat_f32s(0.0); NV]],
        }
    }

    /// The lanes that row `index` of the tile is paired with visibly.
    #[inline(always)]
    fn seen<const MR: usize>(&self, simd: S, tile: &Broadcast<'_, MR>, index: usize) -> [S::m32s; NV] {
        let zero = simd.splat_u32s(0);
        let mut seen = [simd.less_than_u32s(zero, zero); NV];
        match tile.fixed {
            Fixed::Rows => {
                let position = simd.splat_u32s(tile.positions[index]);
                for (seen, (from, width)) in seen.iter_mut().zip(self.from.iter().zip(&self.width)) {
                    *seen = simd.less_than_u32s(simd.sub_u32s(position, *from), *width);
                }
            }
            Fixed::Keys => {
                let span = tile.spans[index];
                let (lo, width) = (simd.splat_u32s(span.lo), simd.splat_u32s(span.hi - span.lo));
                for (seen, position) in seen.iter_mut().zip(&self.from) {
                    *seen = simd.less_than_u32s(simd.sub_u32s(*position, lo), width);
                }
            }
        }
        seen
    }

    /// [`Stats`] of the pairs of row `index` of the tile.
    #[inline(always)]
    fn stats<const MR: usize>(&self, simd: S, tile: &Broadcast<'_, MR>, index: usize) -> [[S::f32s; NV]; 3] {
        match tile.fixed {
            Fixed::Rows => self.stats,
            Fixed::Keys => {
                let Stats([high, low, delta]) = tile.stats[index];
                [[simd.splat_f32s(high); NV], [simd.splat_f32s(low); NV], [simd.splat_f32s(delta); NV]]
            }
        }
    }
}

impl<S: Simd, const MR: usize, const NV: usize> Panel<'_, S, MR, NV> {
    /// Adds the gradients of the pairs of the panel and the tile: to `first` dQ or dK, both without the scale, to `second` dV.
    #[inline(always)]
    pub(super) fn attend(
        mut self,
        simd: S,
        tile: &Broadcast<'_, MR>,
        first: &mut [[S::f32s; NV]],
        second: Option<&mut [[S::f32s; NV]]>,
    ) {
        let zero = [[simd.splat_f32s(0.0); NV]; MR];
        let groups = tile.by_row[0].chunks_exact(self.dim).zip(tile.by_row[1].chunks_exact(self.dim));
        for (group, (y1, y2)) in groups.enumerate().take(tile.count.div_ceil(MR)) {
            let from = group * MR;
            self.weights[from..from + MR].copy_from_slice(&add_outer_products(simd, zero, y1, self.x[0]));
            self.d_scores[from..from + MR].copy_from_slice(&add_outer_products(simd, zero, y2, self.x[1]));
        }
        for index in 0..tile.count {
            self.shift(simd, tile, index);
        }
        for from in (0..tile.count).step_by(2) {
            if from + 1 < tile.count {
                self.weigh::<2>(simd, tile, from);
            } else {
                self.weigh::<1>(simd, tile, from);
            }
        }
        let hides = self.masked || self.terms.is_some();
        self.add(simd, tile, 0, hides, first);
        if let Some(second) = second {
            self.add(simd, tile, 1, hides, second);
        }
    }

    /// Scores become exponents of base 2, and dP becomes (dP − δ) · slope.
    #[inline(always)]
    fn shift(&mut self, simd: S, tile: &Broadcast<'_, MR>, index: usize) {
        let [high, low, delta] = self.lanes.stats(simd, tile, index);
        let (scores, d_scores) = (&mut self.weights[index], &mut self.d_scores[index]);
        for ((s, ds), delta) in scores.iter_mut().zip(d_scores.iter_mut()).zip(&delta) {
            *ds = simd.sub_f32s(*ds, *delta);
            if let Some(cap) = self.softcap {
                let c = tanh(simd, *s);
                let slope = simd.sub_f32s(simd.splat_f32s(1.0), simd.mul_f32s(c, c));
                *ds = simd.mul_f32s(*ds, slope);
                *s = simd.mul_f32s(simd.splat_f32s(cap * std::f32::consts::LOG2_E), c);
            }
        }
        if let Some(terms) = self.terms {
            for (s, term) in scores.iter_mut().zip(&terms[index]) {
                *s = simd.add_f32s(*s, *term);
            }
        }
        for (s, (high, low)) in scores.iter_mut().zip(high.iter().zip(&low)) {
            *s = simd.sub_f32s(simd.sub_f32s(*s, *high), *low);
        }
    }

    /// Exponents become P, and the other factor of dS becomes dS; both are 0 for hidden pairs.
    #[inline(always)]
    fn weigh<const ROWS: usize>(&mut self, simd: S, tile: &Broadcast<'_, MR>, from: usize) {
        let mut exponents = [[simd.splat_f32s(0.0); NV]; ROWS];
        exponents.copy_from_slice(&self.weights[from..from + ROWS]);
        let p = exp2_each(simd, exponents);
        let zero = simd.splat_f32s(0.0);
        for (row, p) in p.iter().enumerate() {
            let index = from + row;
            for ((weight, ds), p) in self.weights[index].iter_mut().zip(&mut self.d_scores[index]).zip(p) {
                *weight = *p;
                *ds = simd.mul_f32s(*p, *ds);
            }
            if self.masked {
                let seen = self.lanes.seen(simd, tile, index);
                for ((weight, ds), seen) in
                    self.weights[index].iter_mut().zip(&mut self.d_scores[index]).zip(seen)
                {
                    // Replaced, not multiplied: a hidden pair may be NaN or ∞.
                    *weight = simd.select_f32s(seen, *weight, zero);
                    *ds = simd.select_f32s(seen, *ds, zero);
                }
            }
            if let Some(terms) = self.terms {
                let hides = simd.splat_f32s(f32::NEG_INFINITY);
                for ((weight, ds), term) in
                    self.weights[index].iter_mut().zip(&mut self.d_scores[index]).zip(&terms[index])
                {
                    let hidden = simd.equal_f32s(*term, hides);
                    *weight = simd.select_f32s(hidden, zero, *weight);
                    *ds = simd.select_f32s(hidden, zero, *ds);
                }
            }
        }
    }

    /// `sums[dim] += Σ y[dim] · dS`, or with tensor 1 `· P`.
    #[inline(always)]
    fn add(&self, simd: S, tile: &Broadcast<'_, MR>, tensor: usize, hides: bool, sums: &mut [[S::f32s; NV]]) {
        let factors = if tensor == 0 { &*self.d_scores } else { &*self.weights };
        let factors = &factors[..tile.count];
        let slow = hides && !tile.finite[tensor];
        let groups = sums.as_chunks_mut::<MR>().0.iter_mut();
        for (sum, y) in groups.zip(tile.by_dim[tensor].chunks_exact(tile.stride)) {
            let y = &y[..tile.count];
            *sum = if slow {
                self.add_where_seen(simd, tile, *sum, y, factors)
            } else {
                add_outer_products(simd, *sum, y, factors)
            };
        }
    }

    /// As [`add_outer_products`], but leaves hidden pairs out: 0 · NaN is NaN.
    #[inline(always)]
    fn add_where_seen(
        &self,
        simd: S,
        tile: &Broadcast<'_, MR>,
        mut sums: [[S::f32s; NV]; MR],
        y: &[[f32; MR]],
        factors: &[[S::f32s; NV]],
    ) -> [[S::f32s; NV]; MR] {
        let hides = simd.splat_f32s(f32::NEG_INFINITY);
        for (index, (y, factors)) in y.iter().zip(factors).enumerate() {
            let seen = self.lanes.seen(simd, tile, index);
            for (sums, y) in sums.iter_mut().zip(y) {
                let y = simd.splat_f32s(*y);
                for (j, (sum, factor)) in sums.iter_mut().zip(factors).enumerate() {
                    let mut next = simd.add_f32s(*sum, simd.mul_f32s(y, *factor));
                    if self.masked {
                        next = simd.select_f32s(seen[j], next, *sum);
                    }
                    if let Some(terms) = self.terms {
                        next = simd.select_f32s(simd.equal_f32s(terms[index][j], hides), *sum, next);
                    }
                    *sum = next;
                }
            }
        }
        sums
    }
}

/// Sets one lane of some vectors.
#[inline(always)]
fn put<V: bytemuck::Pod, T: bytemuck::Pod>(vectors: &mut [V], lane: usize, value: T) {
    bytemuck::cast_slice_mut::<V, T>(vectors)[lane] = value;
}
