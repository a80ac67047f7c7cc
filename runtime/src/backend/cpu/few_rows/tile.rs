//! A tile of keys: its scores, its weights, and their sum of values.
//!
//! Keys and values come from memory, so the order in which they are read decides the speed. Where each KV head has one row, the
//! token of a key is read whole, all heads, before the next key is. Where it has several rows, their products weigh more: eight keys
//! of a head are used for groups of rows whose sums stay in registers, while the next eight are loaded ahead.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::super::call::Call;
use super::super::elements::{Bf16, Element, F16, F32, Rows};
use super::super::exp::tanh;
use super::super::scratch::{Line, floats, floats_mut, grow};
use super::rows::{GROUP, KEYS, Part, Parts, States};
use super::vectors::{add, add_one, add_seen, score, score_one, weigh};
use crate::{Dtype, RowSpan};

pub(super) struct Tile<'t> {
    pub(super) call: &'t Call<'t>,
    pub(super) parts: &'t Parts,
    pub(super) batch: usize,
    pub(super) rows: usize,
    /// The index of its first key.
    pub(super) first: usize,
    pub(super) positions: &'t [u32],
    /// The span of each row; `None` where every row sees every key of the tile.
    pub(super) spans: Option<&'t [RowSpan]>,
}

/// Computes the scores of all rows. This and the next two run in functions of their own ([`super::super::kernel::alone`]).
pub(super) struct Scores<'a, 't, S> {
    pub(super) simd: S,
    pub(super) tile: &'a Tile<'t>,
    pub(super) states: &'a mut States,
}

/// Makes weights of the scores.
pub(super) struct Weigh<'a, 't, S> {
    pub(super) simd: S,
    pub(super) tile: &'a Tile<'t>,
    pub(super) states: &'a mut States,
    pub(super) terms: &'a mut Vec<Line>,
}

/// Adds the values of the keys, weighted, to all rows.
pub(super) struct Add<'a, 't, S> {
    pub(super) simd: S,
    pub(super) tile: &'a Tile<'t>,
    pub(super) states: &'a mut States,
    pub(super) terms: &'a mut Vec<Line>,
}

impl<S: Simd> WithSimd for Scores<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, tile, states } = self;
        grow(&mut states.weights, tile.parts.places * tile.width::<S>());
        match tile.call.k.dtype() {
            Dtype::F32 => tile.scores::<S, F32, 1>(simd, states),
            Dtype::F16 => tile.scores::<S, F16, 2>(simd, states),
            Dtype::Bf16 => tile.scores::<S, Bf16, 2>(simd, states),
        }
    }
}

impl<S: Simd> WithSimd for Weigh<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        self.tile.weigh(self.simd, self.states, self.terms);
    }
}

impl<S: Simd> WithSimd for Add<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, tile, states, terms } = self;
        match tile.call.v.dtype() {
            Dtype::F32 => tile.add::<S, F32, 1>(simd, states, terms),
            Dtype::F16 => tile.add::<S, F16, 2>(simd, states, terms),
            Dtype::Bf16 => tile.add::<S, Bf16, 2>(simd, states, terms),
        }
    }
}

impl Tile<'_> {
    /// Elements of a row of weights: whole groups of vectors.
    fn width<S: Simd>(&self) -> usize {
        (self.call.work.tile.kv_cols as usize).next_multiple_of(4 * S::F32_LANES)
    }

    #[inline(always)]
    fn scores<S: Simd, E: Element<N>, const N: usize>(&self, simd: S, states: &mut States) {
        let (call, width, padded) = (self.call, self.width::<S>(), states.padded);
        let (q, scores) = (floats(&states.q), floats_mut(&mut states.weights));
        if self.parts.single {
            for key in 0..self.positions.len() {
                let token = call.k.token::<E::Stored>(self.batch, self.first + key);
                let places = q.chunks_exact(padded).zip(scores.chunks_exact_mut(width));
                for (part, (q, scores)) in self.parts.all.iter().zip(places) {
                    scores[key] = score_one::<S, E, N>(simd, q, token.head(part.kv_head, call.dim));
                }
            }
            return;
        }
        for keys in self.few_keys() {
            for part in &self.parts.all {
                let rows = call.k.in_place([self.batch, self.first + keys.start, part.kv_head], call.dim);
                let (q, scores) = (&q[part.first * padded..], &mut scores[part.first * width..]);
                let groups = q.chunks_exact(GROUP * padded).zip(scores.chunks_exact_mut(GROUP * width));
                for (q, scores) in groups.take(part.count.div_ceil(GROUP)) {
                    let scores = &mut scores[keys.start..];
                    // The sums of a group stay in registers.
                    if N == 1 || S::REGISTER_COUNT >= 32 {
                        score::<S, E, N, 2>(simd, q, &rows, keys.len(), scores, width);
                    } else {
                        score::<S, E, N, 1>(simd, q, &rows, keys.len(), scores, width);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn weigh<S: Simd>(&self, simd: S, states: &mut States, terms: &mut Vec<Line>) {
        let &Self { call, positions, spans, rows, .. } = self;
        let (padded, width) = (states.padded, self.width::<S>());
        for part in &self.parts.all {
            let terms = self.terms(part, terms);
            for index in 0..part.count {
                let place = part.first + index;
                let scores = &mut floats_mut(&mut states.weights)[place * width..][..width];
                if let Some(cap) = call.softcap {
                    let cap = simd.splat_f32s(cap * std::f32::consts::LOG2_E);
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
                weigh(simd, scores, &mut states.m[place], &mut states.l[place], o);
            }
        }
    }

    #[inline(always)]
    fn add<S: Simd, E: Element<N>, const N: usize>(
        &self,
        simd: S,
        states: &mut States,
        terms: &mut Vec<Line>,
    ) {
        let (call, width, padded) = (self.call, self.width::<S>(), states.padded);
        if self.parts.single {
            let (weights, o) = (floats(&states.weights), floats_mut(&mut states.o));
            for (key, position) in self.positions.iter().enumerate() {
                if self.spans.is_some_and(|spans| !spans[0].sees(*position)) {
                    continue;
                }
                let token = call.v.token::<E::Stored>(self.batch, self.first + key);
                let places = o.chunks_exact_mut(padded).zip(weights.chunks_exact(width));
                for (part, (o, weights)) in self.parts.all.iter().zip(places) {
                    add_one::<S, E, N>(simd, o, weights[key], token.head(part.kv_head, call.dim));
                }
            }
            return;
        }
        let some_hidden = self.spans.is_some() || call.pairs.is_some();
        for keys in self.few_keys() {
            for part in &self.parts.all {
                let values = call.v.in_place([self.batch, self.first + keys.start, part.kv_head], call.dim);
                if some_hidden && !values.are_finite::<E, N>(keys.len()) {
                    self.add_seen::<S, E, N>(simd, part, states, &keys, &values, terms);
                    continue;
                }
                let (weights, o) = (floats(&states.weights), floats_mut(&mut states.o));
                let (weights, o) = (&weights[part.first * width..], &mut o[part.first * padded..]);
                let groups = o.chunks_exact_mut(GROUP * padded).zip(weights.chunks_exact(GROUP * width));
                for (o, weights) in groups.take(part.count.div_ceil(GROUP)) {
                    let weights = &weights[keys.start..];
                    if N == 1 && S::REGISTER_COUNT >= 32 {
                        add::<S, E, N, 4>(simd, o, weights, width, &values, keys.len());
                    } else if N == 1 || S::REGISTER_COUNT >= 32 {
                        add::<S, E, N, 2>(simd, o, weights, width, &values, keys.len());
                    } else {
                        add::<S, E, N, 1>(simd, o, weights, width, &values, keys.len());
                    }
                }
            }
        }
    }

    /// As [`Tile::add`] for a part, without hidden values: 0 · NaN is NaN.
    #[inline(always)]
    fn add_seen<S: Simd, E: Element<N>, const N: usize>(
        &self,
        simd: S,
        part: &Part,
        states: &mut States,
        keys: &Range<usize>,
        values: &Rows<'_, E::Stored>,
        terms: &mut Vec<Line>,
    ) {
        let (padded, width) = (states.padded, self.width::<S>());
        let terms = self.terms(part, terms);
        for index in 0..part.count {
            let seen = |key: usize| {
                let key = keys.start + key;
                let shown = terms.as_ref().is_none_or(|terms| terms.of(index, key) != f32::NEG_INFINITY);
                shown && self.spans.is_none_or(|spans| spans[index % self.rows].sees(self.positions[key]))
            };
            let place = part.first + index;
            let o = &mut floats_mut(&mut states.o)[place * padded..][..padded];
            let weights = &floats(&states.weights)[place * width + keys.start..];
            add_seen::<S, E, N>(simd, o, weights, values, keys.len(), seen);
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
        let pairs = self.call.pairs.as_ref()?;
        let lanes = self.rows.next_multiple_of(4);
        let of_head = self.call.work.tile.kv_cols as usize * lanes;
        grow(space, part.heads.len() * of_head);
        let terms = &mut floats_mut(space)[..part.heads.len() * of_head];
        for (head, terms) in part.heads.iter().zip(terms.chunks_exact_mut(of_head)) {
            pairs.terms([self.batch, 0, *head], self.rows, self.positions, lanes, terms);
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
