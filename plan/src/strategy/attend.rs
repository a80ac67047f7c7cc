//! Attention steps: one for each block of keys, or in a fixed order one for each tile.
//!
//! Floating-point sums depend on their order, and in a ring every rank processes the keys in
//! another order. In a fixed order (`AttentionProblem::fixed_order`) each tile of
//! [`TILE_KEYS`](crate::TILE_KEYS) keys, counted from position 0, is attended separately. The
//! states of tiles are merged along one binary tree over their numbers: two neighbours are
//! merged as soon as both exist, the lower one first. So the order in which blocks arrive does not
//! matter, and for a stretch of consecutive tiles only about log₂ of their number of states are
//! kept. A tile that no query of a rank sees is skipped: merging an empty state changes no bit.

use std::ops::Range;

use super::build::{Inputs, PlanBuilder};
use super::order::whole_tiles;
use crate::lower;
use crate::plan::{BufferId, Content, Slice};

impl PlanBuilder<'_> {
    /// Attention of all queries against all keys; no step where the mask hides every (query, key)
    /// pair.
    pub(super) fn attend(&mut self, inputs: Inputs, state: BufferId) {
        self.attend_part(inputs, self.whole(inputs.kv), state);
    }

    /// Attention of all queries against some of the keys: in a fixed order, whole tiles of them.
    pub(super) fn attend_part(&mut self, inputs: Inputs, kv: Slice, state: BufferId) {
        if self.set.problem.fixed_order {
            return self.attend_tiles(inputs, kv.tokens);
        }
        self.attend_some(inputs, kv, state);
    }

    /// Attention of the queries of `own` against the received keys in `kv`, which are not changed.
    pub(super) fn attend_arrived(&mut self, own: Inputs, kv: BufferId, state: BufferId) {
        if self.buffer(kv).content == Content::KeyValue {
            return self.attend(Inputs { kv, ..own }, state);
        }
        if !lower::any_visible(&self.set.problem, &self.buffer(own.q).tokens, &self.buffer(kv).tokens) {
            return;
        }
        let back = self.converted_back(kv);
        self.attend(Inputs { kv: back, ..own }, state);
        self.free(back);
    }

    /// The keys in `kv` in two halves, each of which can be attended separately.
    pub(super) fn halves(&self, kv: BufferId) -> [Slice; 2] {
        let (tokens, problem) = (&self.buffer(kv).tokens, &self.set.problem);
        let middle = if problem.fixed_order {
            let tiles = whole_tiles(tokens, problem.kv_len);
            tiles.get(tiles.len() / 2).map_or(0, |(_, tile)| tile.start)
        } else {
            tokens.len() / 2
        };
        [0..middle, middle..tokens.len()].map(|half| self.tokens_of(kv, half))
    }

    /// Turns a running state into output and frees it: `state`, or in a fixed order the sum over
    /// all tiles.
    pub(super) fn finalize(&mut self, state: BufferId, into: BufferId) {
        let state = self.total().unwrap_or(state);
        self.finalize_state(state, into);
    }

    /// Attention of all queries against the keys at the list positions `part` of `inputs.kv`, tile
    /// by tile.
    fn attend_tiles(&mut self, inputs: Inputs, part: Range<usize>) {
        let tokens = self.buffer(inputs.kv).tokens.slice(part.clone());
        for (tile, range) in whole_tiles(&tokens, self.set.problem.kv_len) {
            let keys = self.tokens_of(inputs.kv, part.start + range.start..part.start + range.end);
            let (tokens, heads) = (self.buffer(inputs.q).tokens.clone(), self.buffer(inputs.q).heads.clone());
            let state = self.declare(format!("state of tile {tile}"), Content::State, tokens, heads);
            if self.attend_some(inputs, keys, state) {
                self.take((0, tile), state);
            }
        }
    }

    /// The sum over all tiles, if any was attended. No query sees keys of a missing neighbour.
    fn total(&mut self) -> Option<BufferId> {
        loop {
            let (&(height, _), _) = self.waiting.first_key_value()?;
            if self.waiting.len() == 1 {
                return self.waiting.pop_first().map(|(_, state)| state);
            }
            let above = self.waiting.split_off(&(height + 1, 0));
            let lowest = std::mem::replace(&mut self.waiting, above);
            for ((_, number), state) in lowest {
                self.take((height + 1, number / 2), state);
            }
        }
    }

    /// Merges `state` with its neighbour if the neighbour waits, and continues up the tree.
    /// Otherwise `state` waits.
    fn take(&mut self, (mut height, mut number): (u32, u32), mut state: BufferId) {
        while let Some(neighbour) = self.waiting.remove(&(height, number ^ 1)) {
            let (lower, upper) = if number % 2 == 0 { (state, neighbour) } else { (neighbour, state) };
            self.merge(upper, lower);
            self.free(upper);
            (state, height, number) = (lower, height + 1, number / 2);
        }
        self.waiting.insert((height, number), state);
    }
}
