//! The query rows of a call, and their running states over some keys.

use pulp::Simd;

use super::super::call::Call;
use super::super::scratch::{Line, floats, floats_mut, grow};
use crate::backend::EMPTY_M;
use crate::backend::cpu::arithmetic::elements::{in_order, order_of_words};

/// The query heads that share a KV head.
pub(super) struct Part {
    pub(super) kv_head: usize,
    pub(super) heads: Vec<usize>,
    /// The place of its first row among those of all parts. A row has the index `head in heads ·
    /// rows + row` in its part.
    pub(super) first: usize,
    pub(super) count: usize,
}

/// The parts of a call, for the KV heads that have query heads.
pub(super) struct Parts {
    pub(super) all: Vec<Part>,
    /// Places of rows. Those of a part with several rows are padded to whole groups.
    pub(super) places: usize,
}

impl Parts {
    pub(super) fn new(kv_head_of: &[u32], rows: usize) -> Self {
        let kv_heads = kv_head_of.iter().max().map_or(0, |head| *head as usize + 1);
        let mut heads_of = vec![Vec::new(); kv_heads];
        for (head, kv_head) in kv_head_of.iter().enumerate() {
            heads_of[*kv_head as usize].push(head);
        }
        let mut places = 0;
        let mut all = Vec::new();
        for (kv_head, heads) in heads_of.into_iter().enumerate().filter(|(_, heads)| !heads.is_empty()) {
            let count = heads.len() * rows;
            all.push(Part { kv_head, heads, first: places, count });
            places += if count == 1 { 1 } else { count.next_multiple_of(GROUP) };
        }
        Self { all, places }
    }
}

/// The packed queries of a batch entry. Contents of places without a row are unspecified, here and
/// in [`States`].
pub(super) struct Queries {
    /// `[place][words]`, in the order of words of K: queries with their factor; in words without.
    q: Vec<Line>,
    /// Elements of a row in `q`: whole vectors of words.
    words: usize,
    /// Those of a row of [`States`].
    padded: usize,
}

impl Queries {
    #[inline(always)]
    pub(super) fn pack<S: Simd>(call: &Call<'_>, batch: usize, rows: usize, parts: &Parts) -> Self {
        let per_word = 4 / call.k.dtype().bytes();
        let padded = call.dim.next_multiple_of(per_word * S::F32_LANES);
        let words = padded / call.elements_in_word();
        let mut lines = Vec::new();
        grow(&mut lines, parts.places * words);
        let mut space = vec![0.0; words];
        let [factor, _] = call.factors();
        for part in &parts.all {
            let rows = part.heads.iter().flat_map(|head| (0..rows).map(move |row| (*head, row)));
            let q = &mut floats_mut(&mut lines)[part.first * words..];
            for ((head, row), into) in rows.zip(q.chunks_exact_mut(words)) {
                call.q.copy_row([batch, row, head], &mut space[..call.words()]);
                if call.bf16.is_some() {
                    into.copy_from_slice(&space);
                    continue;
                }
                for (at, q) in order_of_words::<S>(words, call.k.dtype()).zip(&space) {
                    into[at] = q * factor;
                }
            }
        }
        Self { q: lines, words, padded }
    }

    /// Those from a place on, and the elements of each.
    pub(super) fn from(&self, place: usize) -> (&[f32], usize) {
        (&floats(&self.q)[place * self.words..], self.words)
    }
}

/// The running state of the rows of all parts over some keys.
pub(super) struct States {
    /// Elements of a row in `o`: whole vectors of words.
    pub(super) padded: usize,
    /// `[place][padded]`, un-normalised; in the order of words of V, until the end.
    pub(super) o: Vec<Line>,
    pub(super) m: Vec<f32>,
    pub(super) l: Vec<f32>,
}

impl States {
    /// Empty states.
    pub(super) fn new(queries: &Queries, parts: &Parts) -> Self {
        let mut o = Vec::new();
        grow(&mut o, parts.places * queries.padded);
        Self { padded: queries.padded, o, m: vec![EMPTY_M; parts.places], l: vec![0.0; parts.places] }
    }

    /// Puts the elements of `o` in their own order.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&mut self, call: &Call<'_>, space: &mut Vec<Line>) {
        if in_order::<S>(call.v.dtype()) {
            return;
        }
        let padded = self.padded;
        grow(space, padded);
        let space = &mut floats_mut(space)[..padded];
        for o in floats_mut(&mut self.o).chunks_exact_mut(padded) {
            space.copy_from_slice(o);
            for (at, o) in order_of_words::<S>(padded, call.v.dtype()).zip(o) {
                *o = space[at];
            }
        }
    }

    /// m, l and o of a row.
    pub(super) fn of(&self, place: usize) -> (f32, f32, &[f32]) {
        (self.m[place], self.l[place], &floats(&self.o)[place * self.padded..][..self.padded])
    }
}

/// Rows that share a load of a key.
pub(super) const GROUP: usize = 4;
/// Keys of a head that are read at a time.
pub(super) const KEYS: usize = 16;
