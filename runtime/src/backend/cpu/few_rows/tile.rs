//! A tile of keys: its scores, its weights, and their sum of values.
//!
//! Keys and values come from memory, so the order in which they are read decides the speed. Eight
//! keys of a head are used for groups of rows whose sums stay in registers, then those of the next
//! head. Pieces of some hundred bytes are too short for the processor to load ahead by itself, so
//! it is asked to, for all heads of the next keys in the order of memory.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::super::call::Call;
use super::super::product::{Floats, Product, WithProduct};
use super::super::scratch::{Line, floats, floats_mut, grow};
use super::rows::{GROUP, KEYS, Part, Parts, Queries, States};
use super::values::{OfFloats, OfWords, WeightedSum};
use super::vectors::{FewKeys, score, weigh};
use crate::backend::cpu::arithmetic::elements::{Bf16, Bf16Words, Element, F16, F32};
use crate::backend::cpu::arithmetic::exp::tanh;
use kyklos_plan::{Dtype, RowSpan};

pub(super) struct Tile<'t> {
    pub(super) call: &'t Call<'t>,
    pub(super) parts: &'t Parts,
    pub(super) batch: usize,
    pub(super) queries: &'t Queries,
    pub(super) rows: usize,
    /// The index of its first key.
    pub(super) first: usize,
    pub(super) positions: &'t [u32],
    /// The span of each row; `None` where every row sees every key of the tile.
    pub(super) spans: Option<&'t [RowSpan]>,
}

/// Computes the scores of all rows. This and the next two run in functions of their own
/// ([`super::super::kernel::alone`]).
pub(super) struct Scores<'a, 't, S> {
    pub(super) simd: S,
    pub(super) tile: &'a Tile<'t>,
    /// `[place][key]`.
    pub(super) scores: &'a mut Vec<Line>,
}

/// Makes weights of the scores.
pub(super) struct Weigh<'a, 't, S> {
    pub(super) simd: S,
    pub(super) tile: &'a Tile<'t>,
    /// Scores; then weights.
    pub(super) weights: &'a mut [Line],
    pub(super) states: &'a mut States,
    pub(super) terms: &'a mut Vec<Line>,
}

/// Adds the values of the keys, weighted, to all rows.
pub(super) struct Add<'a, 't, S> {
    pub(super) simd: S,
    pub(super) tile: &'a Tile<'t>,
    pub(super) weights: &'a [Line],
    pub(super) states: &'a mut States,
    pub(super) terms: &'a mut Vec<Line>,
}

impl<S: Simd> WithSimd for Scores<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, tile, scores } = self;
        match tile.call.k.dtype() {
            Dtype::F32 => tile.scores::<S, F32, Floats, 1>(simd, Floats, scores),
            Dtype::F16 => tile.scores::<S, F16, Floats, 2>(simd, Floats, scores),
            Dtype::Bf16 => tile.scores::<S, Bf16, Floats, 2>(simd, Floats, scores),
        }
    }
}

impl<S: Simd> WithProduct for Scores<'_, '_, S> {
    #[inline(always)]
    fn with_product<T: Simd, P: Product>(self, _: T, product: P) {
        self.tile.scores::<S, Bf16Words, P, 1>(self.simd, product, self.scores);
    }
}

impl<S: Simd> WithSimd for Weigh<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        self.tile.weigh(self.simd, self.weights, self.states, self.terms);
    }
}

impl<S: Simd> WithSimd for Add<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, tile, weights, states, terms } = self;
        match tile.call.v.dtype() {
            Dtype::F32 => tile.add::<S, _, 1>(simd, OfFloats::<F32, 1>::default(), weights, states, terms),
            Dtype::F16 => tile.add::<S, _, 2>(simd, OfFloats::<F16, 2>::default(), weights, states, terms),
            Dtype::Bf16 => tile.add::<S, _, 2>(simd, OfFloats::<Bf16, 2>::default(), weights, states, terms),
        }
    }
}

impl<S: Simd> WithProduct for Add<'_, '_, S> {
    #[inline(always)]
    fn with_product<T: Simd, P: Product>(self, _: T, product: P) {
        self.tile.add::<S, _, 2>(self.simd, OfWords(product), self.weights, self.states, self.terms);
    }
}

impl Tile<'_> {
    /// Elements of a row of weights: whole groups of vectors.
    fn width<S: Simd>(&self) -> usize {
        (self.call.work.tile.kv_cols as usize).next_multiple_of(4 * S::F32_LANES)
    }

    #[inline(always)]
    fn scores<S: Simd, E: Element<N>, P: Product, const N: usize>(
        &self,
        simd: S,
        product: P,
        scores: &mut Vec<Line>,
    ) {
        let (call, width) = (self.call, self.width::<S>());
        grow(scores, self.parts.places * width);
        let scores = floats_mut(scores);
        let [_, factor] = call.factors();
        for keys in self.few_keys() {
            for part in &self.parts.all {
                let first = [self.batch, self.first + keys.start, part.kv_head];
                let rows = call.k.in_place(first, call.dim);
                let of_part = &FewKeys { rows, count: keys.len() };
                let (q, padded) = self.queries.from(part.first);
                let scores = &mut scores[part.first * width + keys.start..];
                if part.count == 1 {
                    if S::REGISTER_COUNT >= 32 {
                        score::<S, E, P, N, 1, 8>(
                            simd,
                            product,
                            &q[..padded],
                            of_part,
                            factor,
                            scores,
                            width,
                        );
                    } else {
                        score::<S, E, P, N, 1, 4>(
                            simd,
                            product,
                            &q[..padded],
                            of_part,
                            factor,
                            scores,
                            width,
                        );
                    }
                    continue;
                }
                // The sums of a group stay in registers.
                for group in (0..part.count).step_by(GROUP) {
                    let q = &q[group * padded..][..GROUP * padded];
                    let scores = &mut scores[group * width..];
                    if S::REGISTER_COUNT >= 32 {
                        score::<S, E, P, N, GROUP, 4>(simd, product, q, of_part, factor, scores, width);
                    } else if N == 1 {
                        score::<S, E, P, N, GROUP, 2>(simd, product, q, of_part, factor, scores, width);
                    } else {
                        score::<S, E, P, N, GROUP, 1>(simd, product, q, of_part, factor, scores, width);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn weigh<S: Simd>(&self, simd: S, scores: &mut [Line], states: &mut States, terms: &mut Vec<Line>) {
        let &Self { call, positions, spans, rows, .. } = self;
        let (padded, width) = (states.padded, self.width::<S>());
        for part in &self.parts.all {
            let terms = self.terms(part, terms);
            for index in 0..part.count {
                let place = part.first + index;
                let scores = &mut floats_mut(scores)[place * width..][..width];
                if let Some(cap) = call.softcap {
                    let cap = simd.splat_f32s(cap);
                    for s in S::as_mut_simd_f32s(scores).0 {
                        *s = simd.mul_f32s(cap, tanh(simd, *s));
                    }
                }
                scores[positions.len()..].fill(f32::NEG_INFINITY);
                if let Some(terms) = &terms {
                    for (key, s) in scores[..positions.len()].iter_mut().enumerate() {
                        let term = terms.of(index, key);
                        // Replaced, not added to: a hidden score may be NaN.
                        *s = if term == f32::NEG_INFINITY { term } else { *s + term };
                    }
                }
                if let Some(spans) = spans {
                    let span = spans[index % rows];
                    for (s, position) in scores.iter_mut().zip(positions) {
                        *s = if span.sees(*position) { *s } else { f32::NEG_INFINITY };
                    }
                }
                let o = &mut floats_mut(&mut states.o)[place * padded..][..padded];
                let (m, l) = (&mut states.m[place], &mut states.l[place]);
                weigh(simd, scores, m, l, o, call.bf16.is_some());
            }
        }
    }

    #[inline(always)]
    fn add<S: Simd, W: WeightedSum<N>, const N: usize>(
        &self,
        simd: S,
        sum: W,
        weights: &[Line],
        states: &mut States,
        terms: &mut Vec<Line>,
    ) {
        let (call, width, padded) = (self.call, self.width::<S>(), states.padded);
        let some_hidden = self.spans.is_some() || call.bias.is_some();
        for keys in self.few_keys() {
            for part in &self.parts.all {
                let first = [self.batch, self.first + keys.start, part.kv_head];
                let rows = call.v.in_place(first, call.dim);
                let values = &FewKeys { rows, count: keys.len() };
                if some_hidden && !values.rows.are_finite::<W::Of, N>(keys.len()) {
                    self.add_seen(simd, sum, part, weights, states, &keys, values, terms);
                    continue;
                }
                let weights = &floats(weights)[part.first * width + keys.start..];
                let o = &mut floats_mut(&mut states.o)[part.first * padded..];
                if part.count == 1 {
                    sum.add::<S, 1>(simd, &mut o[..padded], weights, width, values);
                    continue;
                }
                for group in (0..part.count).step_by(GROUP) {
                    let o = &mut o[group * padded..][..GROUP * padded];
                    sum.add::<S, GROUP>(simd, o, &weights[group * width..], width, values);
                }
            }
        }
    }

    /// As [`Tile::add`] for a part, without hidden values: 0 · NaN is NaN.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "the loop of `add` has all of them")]
    fn add_seen<S: Simd, W: WeightedSum<N>, const N: usize>(
        &self,
        simd: S,
        sum: W,
        part: &Part,
        weights: &[Line],
        states: &mut States,
        keys: &Range<usize>,
        values: &FewKeys<'_, <W::Of as Element<N>>::Stored>,
        terms: &mut Vec<Line>,
    ) {
        let (padded, width) = (states.padded, self.width::<S>());
        let terms = self.terms(part, terms);
        for index in 0..part.count {
            let mut seen = [false; KEYS];
            for (seen, key) in seen.iter_mut().zip(keys.clone()) {
                let shown = terms.as_ref().is_none_or(|terms| terms.of(index, key) != f32::NEG_INFINITY);
                let spans = self.spans;
                *seen = shown && spans.is_none_or(|spans| spans[index % self.rows].sees(self.positions[key]));
            }
            let place = part.first + index;
            let o = &mut floats_mut(&mut states.o)[place * padded..][..padded];
            let weights = &floats(weights)[place * width + keys.start..];
            sum.add_seen(simd, o, weights, values, &seen);
        }
    }

    /// A few keys at a time, as ranges of the tile.
    fn few_keys(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let keys = self.positions.len();
        (0..keys).step_by(KEYS).map(move |first| first..keys.min(first + KEYS))
    }

    /// Terms of an attention bias tensor for the rows of a part.
    #[inline(always)]
    fn terms<'s>(&self, part: &Part, space: &'s mut Vec<Line>) -> Option<Terms<'s>> {
        let bias = self.call.bias.as_ref()?;
        let lanes = self.rows.next_multiple_of(4);
        let of_head = self.call.work.tile.kv_cols as usize * lanes;
        grow(space, part.heads.len() * of_head);
        let terms = &mut floats_mut(space)[..part.heads.len() * of_head];
        for (head, terms) in part.heads.iter().zip(terms.chunks_exact_mut(of_head)) {
            bias.terms([self.batch, 0, *head], self.rows, self.positions, lanes, terms);
        }
        Some(Terms { terms, of_head, lanes, rows: self.rows })
    }
}

/// For each head `[key][lane]`, a lane for each row.
struct Terms<'s> {
    terms: &'s [f32],
    of_head: usize,
    lanes: usize,
    rows: usize,
}

impl Terms<'_> {
    /// The term of a row's logit; −∞ hides the key.
    fn of(&self, index: usize, key: usize) -> f32 {
        let (head, row) = (index / self.rows, index % self.rows);
        self.terms[head * self.of_head + key * self.lanes + row]
    }
}
