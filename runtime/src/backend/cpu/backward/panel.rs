//! One panel of query rows against one tile of keys: scores, weights, and their gradients.
//!
//! Query rows are in lanes, as in the forward pass, for S, P, dP, dS and dQ. For dK and dV the
//! elements of a head are in lanes: P and dS, which the other products have left in memory, are
//! broadcast.
//!
//! As in the forward pass, vectors are computed in loops, never in closures for `array::map` or
//! `array::from_fn`: the compiler may leave such a closure out of line, without the kernel's
//! instruction set.

use pulp::Simd;

use super::super::kernel::{Scores, WeightedSum, alone, scale};
use super::super::tiles::{self, PreparedTiles, TileProduct};
use super::TILE;
use super::bias::BiasBlock;
use super::blocks::Blocks;
use super::lanes::Lanes;
use crate::backend::cpu::arithmetic::bf16::{WordProducts, element_of, words_of};
use crate::backend::cpu::arithmetic::exp::{at_most_zero, exp_each, tanh};
use crate::backend::cpu::arithmetic::halves::narrow_bf16;
use kyklos_plan::RowSpan;

/// A panel of `NV` vectors of query rows.
pub(super) struct Panel<'a, S: Simd, const MR: usize, const NV: usize> {
    /// How the rows of `by_row` are cut.
    pub(super) of_rows: Blocks,
    pub(super) softcap: Option<f32>,
    /// On the scores.
    pub(super) factor: f32,
    /// `Some`: q, dO and the keys are in words of two elements.
    pub(super) words: Option<OfWords<'a>>,
    /// `[dim]`: q, with its factor.
    pub(super) q: &'a [[S::f32s; NV]],
    /// `[dim]`
    pub(super) d_o: &'a [[S::f32s; NV]],
    /// q and dO as rows, or words of two rows; zeros in the lanes without a row.
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

/// What a panel of words has beside.
pub(super) struct OfWords<'a> {
    pub(super) products: WordProducts,
    /// `Some`: the words are multiplied by tile registers, for which all operands are packed.
    pub(super) tiles: Option<&'a PreparedTiles>,
    /// Space: dS and P in words of two rows, `[key][row / 2]`; for tile registers `[row /
    /// 32][key][16]`.
    pub(super) of_rows: [&'a mut [f32]; 2],
}

/// The part of a panel in the gradient of the bias: P · (dP − δ), without the slope of a softcap.
pub(super) struct OfBias<'a, S: Simd, const NV: usize> {
    pub(super) block: &'a mut BiasBlock,
    /// The first row and the first key of the panel in the block.
    pub(super) first: [usize; 2],
    /// `[key]`, space: the slopes; unused without a softcap.
    pub(super) slopes: &'a mut [[S::f32s; NV]],
}

/// Rows of a head, as f32 or in words of two rows, in [`Blocks`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) elements: &'a [f32],
    /// Whether they hold neither NaN nor ∞.
    pub(super) finite: bool,
}

/// A tile of keys.
pub(super) struct Keys<'a, const MR: usize> {
    /// k and v, `[key / MR][dim][MR]`; or words of the head dimension, for tile registers `[word /
    /// 16][key][16]`.
    pub(super) in_groups: [&'a [[f32; MR]]; 2],
    /// k, `[dim / MR][stride][MR]`; or words of two keys, half as many, for tile registers `[word /
    /// 16][dim][16]`.
    pub(super) in_columns: &'a [[f32; MR]],
    /// Keys for which there is room.
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

impl<S: Simd, const MR: usize, const NV: usize> Panel<'_, S, MR, NV> {
    /// Adds the gradients of the pairs of the panel and the tile.
    #[inline(always)]
    pub(super) fn attend(mut self, simd: S, keys: &Keys<'_, MR>, sums: Sums<'_, S, NV>) {
        let count = keys.positions.len();
        // One after the other: q and dO of a panel of long rows do not fit the first cache together.
        let [k, v] = keys.in_groups;
        let words = self.words.as_ref();
        products_of_keys(simd, words, (k, keys.stride, count), (self.q, self.factor), self.weights);
        products_of_keys(simd, words, (v, keys.stride, count), (self.d_o, 1.0), self.d_scores);
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
        self.round(simd, keys);
        self.add_dq(simd, keys, sums.dq);
        let [dk, dv] = sums.of_keys;
        self.add_to_keys::<1>(simd, keys, dv, sums.blocks);
        self.add_to_keys::<0>(simd, keys, dk, sums.blocks);
    }

    /// Scores become exponents, and dP becomes (dP − δ) · slope.
    #[inline(always)]
    fn shift(&mut self, simd: S, index: usize) {
        let [lse, _, delta] = &self.stats.stats;
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
                *s = simd.mul_f32s(simd.splat_f32s(cap), c);
            }
        }
        if let Some(terms) = self.terms {
            for (s, term) in scores.iter_mut().zip(&terms[index]) {
                *s = simd.add_f32s(*s, *term);
            }
        }
        for (s, lse) in scores.iter_mut().zip(lse) {
            // Rounded, a logit may be above the log-sum-exp.
            *s = at_most_zero(simd, simd.sub_f32s(*s, *lse));
        }
    }

    /// Exponents become P, and the other factor of dS becomes dS; both are 0 for hidden pairs.
    #[inline(always)]
    fn weigh<const KEYS: usize>(&mut self, simd: S, keys: &Keys<'_, MR>, from: usize) {
        let mut exponents = [[simd.splat_f32s(0.0); NV]; KEYS];
        exponents.copy_from_slice(&self.weights[from..from + KEYS]);
        let powers = exp_each(simd, exponents);
        let zero = simd.splat_f32s(0.0);
        for (key, powers) in powers.iter().enumerate() {
            let index = from + key;
            let pairs = self.weights[index].iter_mut().zip(&mut self.d_scores[index]);
            for ((weight, ds), (power, factor)) in pairs.zip(powers.iter().zip(&self.stats.stats[1])) {
                *weight = simd.mul_f32s(*power, *factor);
                *ds = simd.mul_f32s(*weight, *ds);
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

    /// Adds dS of `count` keys to the gradient of the bias; then applies the slopes that are still
    /// missing.
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

    /// With words: P and dS in words of two rows, and dS in words of two keys.
    #[inline(always)]
    fn round(&mut self, simd: S, keys: &Keys<'_, MR>) {
        let Some(words) = &mut self.words else { return };
        let count = keys.positions.len();
        let groups = count.next_multiple_of(MR);
        for (factors, into) in [&*self.d_scores, &*self.weights].into_iter().zip(&mut words.of_rows) {
            let factors = bytemuck::cast_slice::<S::f32s, f32>(factors[..groups].as_flattened());
            if words.tiles.is_some() {
                for (rows, into) in tiles::blocks_of_rows(factors, into, keys.stride) {
                    narrow_bf16(rows, bytemuck::cast_slice_mut(into));
                }
            } else {
                narrow_bf16(factors, bytemuck::cast_slice_mut(&mut into[..factors.len() / 2]));
            }
        }
        for word in 0..count.div_ceil(2) {
            let mut pair = [self.d_scores[2 * word], [simd.splat_f32s(0.0); NV]];
            if 2 * word + 1 < count {
                pair[1] = self.d_scores[2 * word + 1];
            }
            self.d_scores[word] = words_of(simd, pair);
        }
        if words.tiles.is_some() {
            let padding = count.div_ceil(2)..count.div_ceil(2).next_multiple_of(tiles::SIDE);
            self.d_scores[padding].fill([simd.splat_f32s(0.0); NV]);
        }
    }

    /// Whether a product with a hidden pair may be NaN although the pair's factor is 0.
    pub(super) fn hides(&self, finite: bool) -> bool {
        !finite && (self.masked || self.terms.is_some())
    }

    /// `dq[dim] += Σ k[key][dim] · dS[key]`.
    #[inline(always)]
    fn add_dq(&self, simd: S, keys: &Keys<'_, MR>, dq: &mut [[S::f32s; NV]]) {
        let per_word = if self.words.is_some() { 2 } else { 1 };
        let (v, stride) = (keys.in_columns, keys.stride / per_word);
        let elements = 0..keys.positions.len().div_ceil(per_word);
        let tiles = self.words.as_ref().and_then(|words| words.tiles);
        if let (Some(tiles), false) = (tiles, self.hides(keys.finite)) {
            let p = &self.d_scores[..elements.end.next_multiple_of(tiles::SIDE)];
            return tiles.multiply::<{ tiles::OF_PANEL }>(TileProduct {
                a: v.as_flattened(),
                rows: dq.len(),
                first: 0,
                b: bytemuck::cast_slice(p.as_flattened()),
                c: bytemuck::cast_slice_mut(dq.as_flattened_mut()),
                add: true,
            });
        }
        if !self.hides(keys.finite) {
            let p = &self.d_scores[elements];
            let product = WeightedSum::<S, MR, NV> { simd, v, stride, p, keep: None, o: dq };
            return match &self.words {
                None => alone(simd, product),
                Some(words) => words.products.weighted_sum(product),
            };
        }
        let (rows, mut of_tiles) = (dq.len(), [[0.0; MR]; TILE.kv_cols as usize]);
        for (group, sums) in dq.as_chunks_mut::<MR>().0.iter_mut().enumerate() {
            let k = if tiles.is_some() {
                tiles::columns(v.as_flattened(), rows, group * MR, &elements, &mut of_tiles);
                &of_tiles[..]
            } else {
                &v[group * stride..]
            };
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
        let words = self.words.is_some();
        for (index, position) in positions.iter().enumerate() {
            let seen = self.stats.seen(simd, *position);
            let (at, high) = if words { (index / 2, index % 2 == 1) } else { (index, false) };
            for (sums, k) in sums.iter_mut().zip(&k[at]) {
                let k = simd.splat_f32s(*k);
                let k = if words { element_of(simd, k, high) } else { k };
                for (j, (sum, factor)) in sums.iter_mut().zip(&self.d_scores[at]).enumerate() {
                    let factor = if words { element_of(simd, *factor, high) } else { *factor };
                    let mut next = simd.add_f32s(*sum, simd.mul_f32s(k, factor));
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

    /// Query rows in a word of a factor.
    pub(super) fn rows_in_word(&self) -> usize {
        if self.words.is_some() { 2 } else { 1 }
    }
}

/// The products of the rows of a panel with `count` keys, times a factor: of q with k, and of dO
/// with v.
#[inline(always)]
fn products_of_keys<S: Simd, const MR: usize, const NV: usize>(
    simd: S,
    words: Option<&OfWords<'_>>,
    (k, stride, count): (&[[f32; MR]], usize, usize),
    (q, factor): (&[[S::f32s; NV]], f32),
    into: &mut [[S::f32s; NV]],
) {
    if let Some(tiles) = words.and_then(|words| words.tiles) {
        tiles.multiply::<{ tiles::OF_PANEL }>(TileProduct {
            a: k.as_flattened(),
            rows: stride,
            first: 0,
            b: bytemuck::cast_slice(q.as_flattened()),
            c: bytemuck::cast_slice_mut(into[..tiles::rows_of(count)].as_flattened_mut()),
            add: false,
        });
        return scale(simd, &mut into[..count], &[simd.splat_f32s(factor); NV]);
    }
    let tile = Scores::<S, MR, NV> { simd, k, q, into: &mut into[..count.next_multiple_of(MR)] };
    match words {
        Some(words) => words.products.scores(tile, factor),
        None => {
            alone(simd, tile);
            if factor != 1.0 {
                scale(simd, &mut into[..count], &[simd.splat_f32s(factor); NV]);
            }
        }
    }
}
