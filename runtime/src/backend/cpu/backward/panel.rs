//! One panel of query rows against one tile of keys: scores, weights, and their gradients.
//!
//! Query rows are in lanes, as in the forward pass, for S, P, dP, dS and dQ. For dK and dV the elements of a head are in lanes: P and
//! dS, which the other products have left in memory, are broadcast.
//!
//! As in the forward pass, vectors are computed in loops, never in closures for `array::map` or `array::from_fn`: the compiler
//! may leave such a closure out of line, without the kernel's instruction set.

use pulp::Simd;

use super::super::exp::{exp2_each, tanh};
use super::super::kernel::{Scores, WeightedSum, alone};
use super::super::simd::{vectors, vectors_mut};
use super::bias::BiasBlock;
use super::blocks::Blocks;
use super::products::OfKeys;
use crate::RowSpan;
use crate::backend::EMPTY_M;

/// A panel of `NV` vectors of query rows.
pub(super) struct Panel<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) dim: usize,
    pub(super) softcap: Option<f32>,
    /// `[dim]`: q with the factor of the scores.
    pub(super) q: &'a [[S::f32s; NV]],
    /// `[dim]`
    pub(super) d_o: &'a [[S::f32s; NV]],
    /// q and dO as rows, zeros in the lanes without a row.
    pub(super) by_row: [Rows<'a>; 2],
    /// Of the rows; fewer than lanes in the last panel.
    pub(super) spans: &'a [RowSpan],
    pub(super) stats: Lanes<S, NV>,
    /// `[key]`, the terms that are added to the scores; −∞ hides a key.
    pub(super) terms: Option<&'a [[S::f32s; NV]]>,
    /// Whether some pairs are hidden by the mask, or some lanes have no row.
    pub(super) masked: bool,
    /// `[key]`, space: P.
    pub(super) weights: &'a mut [[S::f32s; NV]],
    /// `[key]`, space: dS.
    pub(super) d_scores: &'a mut [[S::f32s; NV]],
    /// Where the gradient of the bias goes, if it is wanted.
    pub(super) bias: Option<OfBias<'a, S, NV>>,
}

/// The part of a panel in the gradient of the bias: P · (dP − δ), without the slope of a softcap.
pub(super) struct OfBias<'a, S: Simd, const NV: usize> {
    pub(super) block: &'a mut BiasBlock,
    /// The first row and the first key of the panel in the block.
    pub(super) first: [usize; 2],
    /// `[key]`, space: the slopes; unused without a softcap.
    pub(super) slopes: &'a mut [[S::f32s; NV]],
}

/// Rows of a head, as f32, in [`Blocks`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) elements: &'a [f32],
    /// Whether they hold neither NaN nor ∞.
    pub(super) finite: bool,
}

/// A tile of keys.
pub(super) struct Keys<'a, const MR: usize> {
    /// k and v, `[key / MR][dim][MR]`.
    pub(super) in_groups: [&'a [[f32; MR]]; 2],
    /// k, `[dim / MR][stride][MR]`.
    pub(super) in_columns: &'a [[f32; MR]],
    /// Keys in a group of the columns.
    pub(super) stride: usize,
    /// Whether k holds neither NaN nor ∞.
    pub(super) finite: bool,
    /// Global positions.
    pub(super) positions: &'a [u32],
}

/// Where the panel adds its gradients, each without the scale.
pub(super) struct Sums<'a, S: Simd, const NV: usize> {
    /// `[dim]`
    pub(super) dq: &'a mut [[S::f32s; NV]],
    /// dK and dV.
    pub(super) of_keys: [&'a mut [f32]; 2],
    /// Their rows.
    pub(super) blocks: Blocks,
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

/// What the mask and the statistics say of the rows of a panel. Lanes without a row see nothing.
pub(super) struct Lanes<S: Simd, const NV: usize> {
    /// First key of each span.
    from: [S::u32s; NV],
    /// Keys of each span.
    width: [S::u32s; NV],
    /// The numbers of [`Stats`].
    stats: [[S::f32s; NV]; 3],
}

impl<S: Simd, const NV: usize> Lanes<S, NV> {
    #[inline(always)]
    pub(super) fn new(simd: S, spans: &[RowSpan], stats: &[Stats]) -> Self {
        let zero = [simd.splat_f32s(0.0); NV];
        let mut lanes = Self {
            from: [simd.splat_u32s(0); NV],
            width: [simd.splat_u32s(0); NV],
            stats: [[simd.splat_f32s(-EMPTY_M); NV], zero, zero],
        };
        for (lane, (span, stats)) in spans.iter().zip(stats).enumerate() {
            put(&mut lanes.from, lane, span.lo);
            put(&mut lanes.width, lane, span.hi - span.lo);
            for (vectors, number) in lanes.stats.iter_mut().zip(stats.0) {
                put(vectors, lane, number);
            }
        }
        lanes
    }

    /// The lanes whose rows see a position.
    #[inline(always)]
    fn seen(&self, simd: S, position: u32) -> [S::m32s; NV] {
        let zero = simd.splat_u32s(0);
        let mut seen = [simd.less_than_u32s(zero, zero); NV];
        let position = simd.splat_u32s(position);
        for (seen, (from, width)) in seen.iter_mut().zip(self.from.iter().zip(&self.width)) {
            *seen = simd.less_than_u32s(simd.sub_u32s(position, *from), *width);
        }
        seen
    }
}

impl<S: Simd, const MR: usize, const NV: usize> Panel<'_, S, MR, NV> {
    /// Adds the gradients of the pairs of the panel and the tile.
    #[inline(always)]
    pub(super) fn attend(mut self, simd: S, keys: &Keys<'_, MR>, sums: Sums<'_, S, NV>) {
        let count = keys.positions.len();
        let groups = count.next_multiple_of(MR);
        // One after the other: q and dO of a panel of long rows do not fit the first cache together.
        let [k, v] = keys.in_groups;
        let (q, into) = (&self.q[..self.dim], &mut self.weights[..groups]);
        alone(simd, Scores::<S, MR, NV> { simd, k, q, into });
        let (q, into) = (&self.d_o[..self.dim], &mut self.d_scores[..groups]);
        alone(simd, Scores::<S, MR, NV> { simd, k: v, q, into });
        for index in 0..count {
            self.shift(simd, index);
        }
        for from in (0..count).step_by(2) {
            if from + 1 < count {
                self.weigh::<2>(simd, keys, from);
            } else {
                self.weigh::<1>(simd, keys, from);
            }
        }
        self.add_to_bias(simd, count);
        self.add_dq(simd, keys, sums.dq);
        let [dk, dv] = sums.of_keys;
        self.add_to_keys::<1>(simd, keys, dv, sums.blocks);
        self.add_to_keys::<0>(simd, keys, dk, sums.blocks);
    }

    /// Scores become exponents of base 2, and dP becomes (dP − δ) · slope.
    #[inline(always)]
    fn shift(&mut self, simd: S, index: usize) {
        let [high, low, delta] = &self.stats.stats;
        let (scores, d_scores) = (&mut self.weights[index], &mut self.d_scores[index]);
        // The gradient of a bias is taken before they are applied.
        let mut slopes = match &mut self.bias {
            Some(bias) if self.softcap.is_some() => Some(&mut bias.slopes[index]),
            _ => None,
        };
        for (vector, ((s, ds), delta)) in scores.iter_mut().zip(d_scores.iter_mut()).zip(delta).enumerate() {
            *ds = simd.sub_f32s(*ds, *delta);
            if let Some(cap) = self.softcap {
                let c = tanh(simd, *s);
                let slope = simd.sub_f32s(simd.splat_f32s(1.0), simd.mul_f32s(c, c));
                match &mut slopes {
                    Some(slopes) => slopes[vector] = slope,
                    None => *ds = simd.mul_f32s(*ds, slope),
                }
                *s = simd.mul_f32s(simd.splat_f32s(cap * std::f32::consts::LOG2_E), c);
            }
        }
        if let Some(terms) = self.terms {
            for (s, term) in scores.iter_mut().zip(&terms[index]) {
                *s = simd.add_f32s(*s, *term);
            }
        }
        for (s, (high, low)) in scores.iter_mut().zip(high.iter().zip(low)) {
            *s = simd.sub_f32s(simd.sub_f32s(*s, *high), *low);
        }
    }

    /// Exponents become P, and the other factor of dS becomes dS; both are 0 for hidden pairs.
    #[inline(always)]
    fn weigh<const KEYS: usize>(&mut self, simd: S, keys: &Keys<'_, MR>, from: usize) {
        let mut exponents = [[simd.splat_f32s(0.0); NV]; KEYS];
        exponents.copy_from_slice(&self.weights[from..from + KEYS]);
        let p = exp2_each(simd, exponents);
        let zero = simd.splat_f32s(0.0);
        for (key, p) in p.iter().enumerate() {
            let index = from + key;
            for ((weight, ds), p) in self.weights[index].iter_mut().zip(&mut self.d_scores[index]).zip(p) {
                *weight = *p;
                *ds = simd.mul_f32s(*p, *ds);
            }
            if self.masked {
                let seen = self.stats.seen(simd, keys.positions[index]);
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

    /// Adds dS of `count` keys to the gradient of the bias; then applies the slopes that are still missing.
    #[inline(always)]
    fn add_to_bias(&mut self, simd: S, count: usize) {
        let Some(OfBias { block, first: [row, key], slopes }) = &mut self.bias else { return };
        let d_scores = &mut self.d_scores[..count];
        let values = bytemuck::cast_slice::<S::f32s, f32>(d_scores.as_flattened());
        block.add(values, NV * S::F32_LANES, [*row, self.spans.len()], *key);
        if self.softcap.is_none() {
            return;
        }
        let zero = simd.splat_f32s(0.0);
        for (d_scores, slopes) in d_scores.iter_mut().zip(slopes.iter()) {
            for (ds, slope) in d_scores.iter_mut().zip(slopes) {
                // The slope of a hidden pair may be NaN.
                let product = simd.mul_f32s(*ds, *slope);
                *ds = simd.select_f32s(simd.equal_f32s(*ds, zero), zero, product);
            }
        }
    }

    /// Whether a product with a hidden pair may be NaN although the pair's factor is 0.
    fn hides(&self, finite: bool) -> bool {
        !finite && (self.masked || self.terms.is_some())
    }

    /// `dq[dim] += Σ k[key][dim] · dS[key]`.
    #[inline(always)]
    fn add_dq(&self, simd: S, keys: &Keys<'_, MR>, dq: &mut [[S::f32s; NV]]) {
        let (v, stride) = (keys.in_columns, keys.stride);
        if !self.hides(keys.finite) {
            let p = &self.d_scores[..keys.positions.len()];
            return alone(simd, WeightedSum::<S, MR, NV> { simd, v, stride, p, keep: None, o: dq });
        }
        for (sums, k) in dq.as_chunks_mut::<MR>().0.iter_mut().zip(v.chunks(stride)) {
            *sums = self.add_where_seen(simd, keys.positions, *sums, k);
        }
    }

    /// As [`WeightedSum`], but leaves hidden pairs out: 0 · NaN is NaN.
    #[inline(always)]
    fn add_where_seen(
        &self,
        simd: S,
        positions: &[u32],
        mut sums: [[S::f32s; NV]; MR],
        k: &[[f32; MR]],
    ) -> [[S::f32s; NV]; MR] {
        let hides = simd.splat_f32s(f32::NEG_INFINITY);
        for (index, (position, k)) in positions.iter().zip(k).enumerate() {
            let seen = self.stats.seen(simd, *position);
            for (sums, k) in sums.iter_mut().zip(k) {
                let k = simd.splat_f32s(*k);
                for (j, (sum, factor)) in sums.iter_mut().zip(&self.d_scores[index]).enumerate() {
                    let mut next = simd.add_f32s(*sum, simd.mul_f32s(k, *factor));
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

    /// `sums[key] += Σ dS[key][row] · q[row]`, or with `TENSOR` 1 `Σ P[key][row] · dO[row]`. Sums behind the last key have no meaning.
    #[inline(always)]
    fn add_to_keys<const TENSOR: usize>(
        &self,
        simd: S,
        keys: &Keys<'_, MR>,
        sums: &mut [f32],
        blocks: Blocks,
    ) {
        let factors: &[[S::f32s; NV]] = if TENSOR == 0 { self.d_scores } else { self.weights };
        let rows = &self.by_row[TENSOR];
        if self.hides(rows.finite) {
            return self.add_to_keys_where_seen(keys.positions, factors, rows.elements, sums, blocks);
        }
        let factors = &factors[..keys.positions.len().next_multiple_of(MR)];
        let (pairs, last) = rows.elements.split_at(self.blocks().of_pairs());
        let (sums_of_pairs, sums_of_last) = sums.split_at_mut(blocks.of_pairs());
        let stride = keys.stride;
        let (rows, sums) = (vectors::<S, 2>(pairs), vectors_mut::<S, 2>(sums_of_pairs));
        alone(simd, OfKeys::<S, MR, NV, 2> { simd, factors, rows, sums, stride });
        if !last.is_empty() {
            let (rows, sums) = (vectors::<S, 1>(last), vectors_mut::<S, 1>(sums_of_last));
            alone(simd, OfKeys::<S, MR, NV, 1> { simd, factors, rows, sums, stride });
        }
    }

    /// How the rows of the panel are cut.
    pub(super) fn blocks(&self) -> Blocks {
        Blocks::new(self.dim, S::F32_LANES, NV * S::F32_LANES)
    }

    /// As [`Self::add_to_keys`], but leaves hidden pairs out. Only for rows with NaN or ∞.
    fn add_to_keys_where_seen(
        &self,
        positions: &[u32],
        factors: &[[S::f32s; NV]],
        rows: &[f32],
        sums: &mut [f32],
        blocks: Blocks,
    ) {
        let lanes = NV * S::F32_LANES;
        let factors = bytemuck::cast_slice::<S::f32s, f32>(factors.as_flattened());
        let terms = self.terms.map(|terms| bytemuck::cast_slice::<S::f32s, f32>(terms.as_flattened()));
        for (index, position) in positions.iter().enumerate() {
            for (lane, span) in self.spans.iter().enumerate() {
                let hidden = terms.is_some_and(|terms| terms[index * lanes + lane] == f32::NEG_INFINITY);
                if hidden || (self.masked && !span.sees(*position)) {
                    continue;
                }
                let factor = factors[index * lanes + lane];
                for block in 0..blocks.count() {
                    let row = &rows[self.blocks().part(lane, block)];
                    for (sum, element) in sums[blocks.part(index, block)].iter_mut().zip(row) {
                        *sum += factor * element;
                    }
                }
            }
        }
    }
}

/// Sets one lane of some vectors.
#[inline(always)]
fn put<V: bytemuck::Pod, T: bytemuck::Pod>(vectors: &mut [V], lane: usize, value: T) {
    bytemuck::cast_slice_mut::<V, T>(vectors)[lane] = value;
}
