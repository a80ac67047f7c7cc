//! One panel of query rows against one KV tile: scores, online softmax, weighted sum.
//!
//! Vectors are computed in loops, never in closures for `array::map` or `array::from_fn`. The
//! compiler may leave such a closure out of line; it then lacks the kernel's instruction set, and
//! each vector operation becomes a call.

use std::ops::Range;

use pulp::Simd;

use super::call::TILE;
use super::kernel::{Scores, WeightedSum, add_sums, alone, scale};
use super::keys::KeyTile;
use super::tiles::{self, PreparedTiles, TileProduct};
use crate::backend::cpu::arithmetic::bf16::{WordProducts, element_of, words_of};
use crate::backend::cpu::arithmetic::exp::{exp, exp_each, mul_add, tanh};
use kyklos_plan::RowSpan;

/// `NV` vectors of query rows.
pub(super) struct Panel<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) softcap: Option<f32>,
    /// `Some`: q and the tiles hold words (module `bf16`).
    pub(super) words: Option<WordProducts>,
    /// On the scores.
    pub(super) factor: f32,
    /// `Some`: the words are multiplied by tile registers, for which the tile is packed.
    pub(super) tiles: Option<&'a PreparedTiles>,
    /// `[dim]`, with its factor; or `[word]`, as it is.
    pub(super) q: &'a [[S::f32s; NV]],
    /// `[dim]`, un-normalised.
    pub(super) o: &'a mut [[S::f32s; NV]],
    /// `[m, l]`.
    pub(super) ml: &'a mut [[S::f32s; NV]],
    /// `[key]`, space.
    pub(super) scores: &'a mut [[S::f32s; NV]],
    /// `[key]`, the terms that are added to the scores; −∞ hides a key.
    pub(super) terms: Option<&'a [[S::f32s; NV]]>,
    /// The span of each row; `None` where every row sees every key of the tile.
    pub(super) spans: Option<&'a [RowSpan]>,
}

/// The row spans of a panel, as vectors: a lane sees a key if `position − lo < width`, unsigned.
struct Visible<S: Simd, const NV: usize> {
    lo: [S::u32s; NV],
    width: [S::u32s; NV],
    /// The span that all rows see.
    common: RowSpan,
}

impl<S: Simd, const MR: usize, const NV: usize> Panel<'_, S, MR, NV> {
    /// Takes the tile into the panel's state.
    #[inline(always)]
    pub(super) fn attend(mut self, simd: S, keys: &KeyTile<'_, MR>) {
        let Some((range, visible)) = self.visible(simd, keys.positions) else {
            return;
        };
        let groups = range.start / MR..range.end.div_ceil(MR);
        let computed = groups.start * MR..groups.end * MR;
        self.products_of_keys(simd, keys, &groups);
        let mut m = self.ml[0];
        let stored = self.scores[computed.clone()].as_chunks_mut::<MR>().0;
        for (from, stored) in computed.step_by(MR).zip(stored) {
            let positions = &keys.positions[from..keys.positions.len().min(from + MR)];
            let hidden = visible.as_ref().filter(|visible| !visible.common_to(positions));
            if self.softcap.is_none() && hidden.is_none() && self.terms.is_none() && positions.len() == MR {
                for s in stored {
                    for (m, s) in m.iter_mut().zip(s) {
                        *m = simd.max_f32s(*m, *s);
                    }
                }
                continue;
            }
            for (key, (s, position)) in (from..).zip(stored.iter_mut().zip(positions)) {
                if let Some(cap) = self.softcap {
                    let cap = simd.splat_f32s(cap);
                    for s in s.iter_mut() {
                        *s = simd.mul_f32s(cap, tanh(simd, *s));
                    }
                }
                if let Some(terms) = self.terms {
                    let hides = simd.splat_f32s(f32::NEG_INFINITY);
                    for (s, term) in s.iter_mut().zip(&terms[key]) {
                        let hidden = simd.equal_f32s(*term, hides);
                        *s = simd.select_f32s(hidden, hides, simd.add_f32s(*s, *term));
                    }
                }
                if let Some(visible) = hidden {
                    let sees = visible.test(simd, *position);
                    for (s, sees) in s.iter_mut().zip(sees) {
                        // Replaced, not added to: a hidden score may be NaN.
                        *s = simd.select_f32s(sees, *s, simd.splat_f32s(f32::NEG_INFINITY));
                    }
                }
                for (m, s) in m.iter_mut().zip(s) {
                    *m = simd.max_f32s(*m, *s);
                }
            }
        }

        // A small growth of the maximum does not justify a rescaling of o. The weights then exceed 1, by a
        // factor for which f32 has room (the idea of FlashAttention-4).
        let mut grew = false;
        for (m, old) in m.iter_mut().zip(&self.ml[0]) {
            let far = simd.less_than_f32s(simd.add_f32s(*old, simd.splat_f32s(SLACK)), *m);
            grew |= simd.first_true_m32s(far) < S::F32_LANES;
            *m = simd.select_f32s(far, *m, *old);
        }
        let mut sum = [simd.splat_f32s(0.0); NV];
        // The elements of v and of the weights that belong to the range.
        let elements = if self.words.is_some() {
            weigh_words(simd, self.scores, &range, &m, &mut sum);
            range.start / 2..range.end.div_ceil(2)
        } else {
            let (pairs, last) = self.scores[range.clone()].as_chunks_mut::<2>();
            for pair in pairs {
                weigh(simd, pair, &m, &mut sum);
            }
            if let [last] = last {
                weigh(simd, std::array::from_mut(last), &m, &mut sum);
            }
            range.clone()
        };
        let [old_m, l] = self.ml else { unreachable!("m and l") };
        let mut keep = *old_m;
        for ((keep, m), (l, sum)) in keep.iter_mut().zip(&m).zip(l.iter_mut().zip(&sum)) {
            *keep = exp(simd, simd.sub_f32s(*keep, *m));
            *l = mul_add(simd, *l, *keep, *sum);
        }
        *old_m = m;

        let hides = visible.is_some() || self.terms.is_some();
        // Tile registers multiply keys beside the range too: by 0, which removes only finite values.
        let whole = self.tiles.is_none() || range.len() == keys.positions.len();
        if keys.finite || (!hides && whole) {
            return self.add_products_of_values(simd, keys, &elements, grew.then_some(&keep));
        }
        let seen = Seen { visible: visible.as_ref(), terms: self.terms, positions: keys.positions, range };
        let p = &self.scores[elements.clone()];
        let mut of_tiles = [[0.0; MR]; TILE.kv_cols as usize];
        let zero = [[simd.splat_f32s(0.0); NV]; MR];
        for (group, o) in self.o.as_chunks_mut::<MR>().0.iter_mut().enumerate() {
            let v = if self.tiles.is_some() {
                tiles::columns(keys.v.as_flattened(), keys.stride, group * MR, &elements, &mut of_tiles);
                &of_tiles[..p.len()]
            } else {
                &keys.v[group * keys.stride..][elements.clone()]
            };
            let sums = match self.words {
                None => add_where_seen::<S, MR, NV, false>(simd, zero, v, p, &seen),
                Some(_) => add_where_seen::<S, MR, NV, true>(simd, zero, v, p, &seen),
            };
            add_sums(simd, o, &sums, grew.then_some(&keep));
        }
    }

    /// The scores of some groups of `MR` keys.
    #[inline(always)]
    fn products_of_keys(&mut self, simd: S, keys: &KeyTile<'_, MR>, groups: &Range<usize>) {
        let computed = groups.start * MR..groups.end * MR;
        let factors = [simd.splat_f32s(self.factor); NV];
        if let Some(tiles) = self.tiles {
            let room = computed.start..computed.start + tiles::rows_of(computed.len());
            tiles.multiply::<{ tiles::OF_PANEL }>(TileProduct {
                a: keys.k.as_flattened(),
                rows: keys.k.as_flattened().len() / self.q.len(),
                first: computed.start,
                b: bytemuck::cast_slice(self.q.as_flattened()),
                c: bytemuck::cast_slice_mut(self.scores[room].as_flattened_mut()),
                add: false,
            });
            return scale(simd, &mut self.scores[computed], &factors);
        }
        let tile = Scores {
            simd,
            k: &keys.k[groups.start * self.q.len()..groups.end * self.q.len()],
            q: self.q,
            into: &mut self.scores[computed.clone()],
        };
        match self.words {
            Some(products) => products.scores(tile, self.factor),
            None => {
                alone(simd, tile);
                if self.factor != 1.0 {
                    scale(simd, &mut self.scores[computed], &factors);
                }
            }
        }
    }

    /// The weighted sum of the values of some keys, or words of two keys.
    #[inline(always)]
    fn add_products_of_values(
        &mut self,
        simd: S,
        keys: &KeyTile<'_, MR>,
        elements: &Range<usize>,
        keep: Option<&[S::f32s; NV]>,
    ) {
        if let Some(tiles) = self.tiles {
            if let Some(keep) = keep {
                scale(simd, self.o, keep);
            }
            let whole =
                elements.start / tiles::SIDE * tiles::SIDE..elements.end.next_multiple_of(tiles::SIDE);
            for beside in [whole.start..elements.start, elements.end..whole.end] {
                self.scores[beside].fill([simd.splat_f32s(0.0); NV]);
            }
            return tiles.multiply::<{ tiles::OF_PANEL }>(TileProduct {
                a: &keys.v.as_flattened()[whole.start * keys.stride..],
                rows: keys.stride,
                first: 0,
                b: bytemuck::cast_slice(self.scores[whole].as_flattened()),
                c: bytemuck::cast_slice_mut(self.o.as_flattened_mut()),
                add: true,
            });
        }
        let v = &keys.v[elements.start..];
        let p = &self.scores[elements.clone()];
        let tile = WeightedSum { simd, v, stride: keys.stride, p, keep, o: self.o };
        match self.words {
            None => alone(simd, tile),
            Some(products) => products.weighted_sum(tile),
        }
    }

    /// The keys of the tile that any row sees, and the test for keys that some rows do not see.
    #[inline(always)]
    fn visible(&self, simd: S, positions: &[u32]) -> Option<(Range<usize>, Option<Visible<S, NV>>)> {
        let all = 0..positions.len();
        let Some(spans) = self.spans else {
            return Some((all, None));
        };
        let seeing = || spans.iter().filter(|span| **span != RowSpan::EMPTY);
        let union =
            RowSpan { lo: seeing().map(|span| span.lo).min()?, hi: seeing().map(|span| span.hi).max()? };
        let first = positions.iter().position(|p| union.sees(*p))?;
        let last = positions.iter().rposition(|p| union.sees(*p))?;
        let range = first..last + 1;
        let common = RowSpan {
            lo: spans.iter().map(|span| span.lo).max()?,
            hi: spans.iter().map(|span| span.hi).min()?,
        };
        // Scores are computed in groups of MR keys. All groups that begin before the end of the range are
        // computed.
        let looked_at = first / MR * MR..(last + 1).next_multiple_of(MR).min(positions.len());
        if positions[looked_at].iter().all(|p| common.sees(*p)) {
            return Some((range, None));
        }
        let mut lo = [simd.splat_u32s(0); NV];
        let mut width = [simd.splat_u32s(0); NV];
        for (lane, span) in spans.iter().enumerate() {
            let (vector, lane) = (lane / S::U32_LANES, lane % S::U32_LANES);
            bytemuck::cast_slice_mut::<S::u32s, u32>(&mut lo[vector..=vector])[lane] = span.lo;
            bytemuck::cast_slice_mut::<S::u32s, u32>(&mut width[vector..=vector])[lane] = span.hi - span.lo;
        }
        Some((range, Some(Visible { lo, width, common })))
    }
}

impl<S: Simd, const NV: usize> Visible<S, NV> {
    /// Whether every row sees all of `positions`.
    #[inline(always)]
    fn common_to(&self, positions: &[u32]) -> bool {
        positions.iter().all(|position| self.common.sees(*position))
    }

    #[inline(always)]
    fn test(&self, simd: S, position: u32) -> [S::m32s; NV] {
        let position = simd.splat_u32s(position);
        let mut sees = [simd.less_than_u32s(position, position); NV];
        for (sees, (lo, width)) in sees.iter_mut().zip(self.lo.iter().zip(&self.width)) {
            *sees = simd.less_than_u32s(simd.sub_u32s(position, *lo), *width);
        }
        sees
    }
}

/// Scores of some keys become weights, which are added to `sum`.
#[inline(always)]
fn weigh<S: Simd, const NV: usize, const KEYS: usize>(
    simd: S,
    scores: &mut [[S::f32s; NV]; KEYS],
    m: &[S::f32s; NV],
    sum: &mut [S::f32s; NV],
) {
    let mut shifted = *scores;
    for s in &mut shifted {
        for (s, m) in s.iter_mut().zip(m) {
            *s = simd.sub_f32s(*s, *m);
        }
    }
    *scores = exp_each(simd, shifted);
    for p in scores {
        for (sum, p) in sum.iter_mut().zip(p) {
            *sum = simd.add_f32s(*sum, *p);
        }
    }
}

/// [`weigh`] of the keys `range`, whose weights become words of two keys: those of keys 2t and 2t +
/// 1 at index t. A key beside the range has the weight 0.
#[inline(always)]
fn weigh_words<S: Simd, const NV: usize>(
    simd: S,
    scores: &mut [[S::f32s; NV]],
    range: &Range<usize>,
    m: &[S::f32s; NV],
    sum: &mut [S::f32s; NV],
) {
    let words = range.start / 2..range.end.div_ceil(2);
    for beside in [2 * words.start, 2 * words.end - 1] {
        if !range.contains(&beside) {
            scores[beside] = [simd.splat_f32s(f32::NEG_INFINITY); NV];
        }
    }
    for word in words {
        let mut pair = [scores[2 * word], scores[2 * word + 1]];
        weigh(simd, &mut pair, m, sum);
        scores[word] = words_of(simd, pair);
    }
}

/// Which rows see which of the keys `range` of a tile.
struct Seen<'a, S: Simd, const NV: usize> {
    visible: Option<&'a Visible<S, NV>>,
    /// `[key of the tile]`.
    terms: Option<&'a [[S::f32s; NV]]>,
    /// `[key of the tile]`.
    positions: &'a [u32],
    range: Range<usize>,
}

/// As [`super::kernel::add_outer_products`], but skips keys that a row does not see: 0 · NaN is
/// NaN. `v` and `p` begin with the range's first key, or with its word.
#[inline(always)]
fn add_where_seen<S: Simd, const MR: usize, const NV: usize, const WORDS: bool>(
    simd: S,
    mut o: [[S::f32s; NV]; MR],
    v: &[[f32; MR]],
    p: &[[S::f32s; NV]],
    seen: &Seen<'_, S, NV>,
) -> [[S::f32s; NV]; MR] {
    let hides = simd.splat_f32s(f32::NEG_INFINITY);
    for key in seen.range.clone() {
        let at = if WORDS { key / 2 - seen.range.start / 2 } else { key - seen.range.start };
        let sees = seen.visible.map(|visible| visible.test(simd, seen.positions[key]));
        for (o, v) in o.iter_mut().zip(&v[at]) {
            let mut v = simd.splat_f32s(*v);
            if WORDS {
                v = element_of(simd, v, key % 2 == 1);
            }
            for (j, (o, p)) in o.iter_mut().zip(&p[at]).enumerate() {
                let p = if WORDS { element_of(simd, *p, key % 2 == 1) } else { *p };
                let mut sum = mul_add(simd, v, p, *o);
                if let Some(sees) = &sees {
                    sum = simd.select_f32s(sees[j], sum, *o);
                }
                if let Some(terms) = seen.terms {
                    sum = simd.select_f32s(simd.equal_f32s(terms[key][j], hides), *o, sum);
                }
                *o = sum;
            }
        }
    }
    o
}

/// How far a score may lie above `m`: weights are at most e^5.5, a factor of 245.
const SLACK: f32 = 5.5;
