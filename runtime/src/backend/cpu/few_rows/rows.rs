//! The query rows of a call, and their running states over some keys.

use pulp::Simd;

use super::super::call::Call;
use super::super::elements::order_of_words;
use super::super::scratch::{Line, floats, floats_mut, grow};
use crate::backend::EMPTY_M;

/// The query heads that share a KV head.
pub(super) struct Part {
    pub(super) kv_head: usize,
    pub(super) heads: Vec<usize>,
    /// The place of its first row among those of all parts. A row has the index `head in heads · rows + row` in its part.
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

/// The rows of all parts. Contents of places without a row are unspecified.
#[derive(Default)]
pub(super) struct States {
    /// Elements of a row in `o`: whole vectors of words.
    pub(super) padded: usize,
    /// Those in `q`: in words, half as many.
    pub(super) q_padded: usize,
    /// `[place][q_padded]`, in the order of words of K: queries, scaled so that scores are base-2 logits; with a softcap, the argument of
    /// its tanh. In words they are not scaled.
    pub(super) q: Vec<Line>,
    /// `[place][padded]`, un-normalised; in the order of words of V, until the end.
    pub(super) o: Vec<Line>,
    /// Scores, then weights, of the keys of a tile: `[place][key]`.
    pub(super) weights: Vec<Line>,
    /// In base-2 units.
    pub(super) m: Vec<f32>,
    pub(super) l: Vec<f32>,
}

impl States {
    /// Packs the queries, and starts empty states.
    #[inline(always)]
    pub(super) fn begin<S: Simd>(
        &mut self,
        call: &Call<'_>,
        batch: usize,
        rows: usize,
        parts: &Parts,
        space: &mut Vec<Line>,
    ) {
        let per_word = 4 / call.k.dtype().bytes();
        self.padded = call.dim.next_multiple_of(per_word * S::F32_LANES);
        self.q_padded = self.padded / call.elements_in_word();
        let padded = self.q_padded;
        self.m = vec![EMPTY_M; parts.places];
        self.l = vec![0.0; parts.places];
        grow(&mut self.q, parts.places * padded);
        grow(&mut self.o, parts.places * self.padded);
        grow(space, self.padded);
        let space = &mut floats_mut(space)[..padded];
        space.fill(0.0);
        let factor = call.query_factor();
        for part in &parts.all {
            let rows = part.heads.iter().flat_map(|head| (0..rows).map(move |row| (*head, row)));
            let q = &mut floats_mut(&mut self.q)[part.first * padded..];
            for ((head, row), into) in rows.zip(q.chunks_exact_mut(padded)) {
                call.q.copy_row([batch, row, head], &mut space[..call.words()]);
                if call.bf16.is_some() {
                    into.copy_from_slice(space);
                    continue;
                }
                for (at, q) in order_of_words::<S>(padded, call.k.dtype()).zip(&*space) {
                    into[at] = q * factor;
                }
            }
        }
    }

    /// Puts the elements of `o` in their own order.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&mut self, call: &Call<'_>, space: &mut [Line]) {
        let padded = self.padded;
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
