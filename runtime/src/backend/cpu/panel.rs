//! One panel of query rows against one KV tile: scores, online softmax, weighted sum.
//!
//! Vectors are computed in loops, never in closures for `array::map` or `array::from_fn`. The compiler may leave such a
//! closure out of line; it then lacks the kernel's instruction set, and each vector operation becomes a call.

use pulp::Simd;

use super::exp::{exp2, exp2_each, mul_add, tanh};
use super::kernel::{Scores, WeightedSum, alone, scale};
use super::keys::KeyTile;
use crate::RowSpan;

/// `NV` vectors of query rows.
pub(super) struct Panel<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) dim: usize,
    pub(super) softcap: Option<f32>,
    /// `[dim]`, scaled.
    pub(super) q: &'a [[S::f32s; NV]],
    /// `[dim]`, un-normalised.
    pub(super) o: &'a mut [[S::f32s; NV]],
    /// `[m, l]`, m in base-2 units.
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
    pub(super) fn attend(self, simd: S, keys: &KeyTile<'_, MR>) {
        let Some((range, visible)) = self.visible(simd, keys.positions) else {
            return;
        };
        let groups = range.start / MR..range.end.div_ceil(MR);
        let computed = groups.start * MR..groups.end * MR;
        alone(
            simd,
            Scores {
                simd,
                k: &keys.k[groups.start * self.dim..groups.end * self.dim],
                q: self.q,
                into: &mut self.scores[computed.clone()],
            },
        );
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
                    let cap = simd.splat_f32s(cap * std::f32::consts::LOG2_E);
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

        // A small growth of the maximum does not justify a rescaling of o. The weights then exceed 1, by a factor for
        // which f32 has room (the idea of FlashAttention-4).
        let mut grew = false;
        for (m, old) in m.iter_mut().zip(&self.ml[0]) {
            let far = simd.less_than_f32s(simd.add_f32s(*old, simd.splat_f32s(SLACK)), *m);
            grew |= simd.first_true_m32s(far) < S::F32_LANES;
            *m = simd.select_f32s(far, *m, *old);
        }
        let mut sum = [simd.splat_f32s(0.0); NV];
        let (pairs, last) = self.scores[range.clone()].as_chunks_mut::<2>();
        for pair in pairs {
            weigh(simd, pair, &m, &mut sum);
        }
        if let [last] = last {
            weigh(simd, std::array::from_mut(last), &m, &mut sum);
        }
        let [old_m, l] = self.ml else { unreachable!("m and l") };
        let mut keep = *old_m;
        for ((keep, m), (l, sum)) in keep.iter_mut().zip(&m).zip(l.iter_mut().zip(&sum)) {
            *keep = exp2(simd, simd.sub_f32s(*keep, *m));
            *l = mul_add(simd, *l, *keep, *sum);
        }
        *old_m = m;

        let terms = self.terms.map(|terms| &terms[range.clone()]);
        let select = !keys.finite && (visible.is_some() || terms.is_some());
        let (v, p) = (&keys.v[range.start..], &self.scores[range.clone()]);
        if !select {
            let keep = grew.then_some(&keep);
            alone(simd, WeightedSum { simd, v, stride: keys.stride, p, keep, o: self.o });
            return;
        }
        let positions = &keys.positions[range];
        for (o, v) in self.o.as_chunks_mut::<MR>().0.iter_mut().zip(v.chunks(keys.stride)) {
            if grew {
                scale(simd, o, &keep);
            }
            let v = &v[..p.len()];
            *o = add_where_seen(simd, *o, v, p, visible.as_ref(), terms, positions);
        }
    }

    /// The keys of the tile that any row sees, and the test for keys that some rows do not see.
    #[inline(always)]
    fn visible(
        &self,
        simd: S,
        positions: &[u32],
    ) -> Option<(std::ops::Range<usize>, Option<Visible<S, NV>>)> {
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
        // Scores are computed in groups of MR keys. All groups that begin before the end of the range are computed.
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
    *scores = exp2_each(simd, shifted);
    for p in scores {
        for (sum, p) in sum.iter_mut().zip(p) {
            *sum = simd.add_f32s(*sum, *p);
        }
    }
}

/// As [`add_outer_products`], but skips keys that a row does not see: 0 · NaN is NaN.
#[inline(always)]
fn add_where_seen<S: Simd, const MR: usize, const NV: usize>(
    simd: S,
    mut o: [[S::f32s; NV]; MR],
    v: &[[f32; MR]],
    p: &[[S::f32s; NV]],
    visible: Option<&Visible<S, NV>>,
    terms: Option<&[[S::f32s; NV]]>,
    positions: &[u32],
) -> [[S::f32s; NV]; MR] {
    let hides = simd.splat_f32s(f32::NEG_INFINITY);
    for (key, ((v, p), position)) in v.iter().zip(p).zip(positions).enumerate() {
        let sees = visible.map(|visible| visible.test(simd, *position));
        for (o, v) in o.iter_mut().zip(v) {
            let v = simd.splat_f32s(*v);
            for (j, (o, p)) in o.iter_mut().zip(p).enumerate() {
                let mut sum = mul_add(simd, v, *p, *o);
                if let Some(sees) = &sees {
                    sum = simd.select_f32s(sees[j], sum, *o);
                }
                if let Some(terms) = terms {
                    sum = simd.select_f32s(simd.equal_f32s(terms[key][j], hides), *o, sum);
                }
                *o = sum;
            }
        }
    }
    o
}

/// How far a score may lie above `m`, as a power of two.
const SLACK: f32 = 8.0;
