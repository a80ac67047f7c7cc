//! The arguments of one `attend` call, as its jobs share them.

use super::bias::BiasRows;
use super::pack::Tensor;
use super::tiles::{self, TileProducts};
use crate::backend::cpu::arithmetic::bf16::WordProducts;
use kyklos_plan::{BlockWork, TileShape};

/// The tiles of this backend. Q tiles hold whole panels on every instruction set: 96 is a multiple
/// of 8, 12, 16 and 48. KV tiles hold whole groups of 6 or 8 keys.
pub(super) const TILE: TileShape = TileShape { q_rows: 96, kv_cols: 120 };

/// The tensors and settings of one call, which its jobs read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    /// `[batch, rows, heads, dim]`, strided.
    pub(super) q: Tensor<'a>,
    /// `[batch, keys, kv heads, dim]`, strided.
    pub(super) k: Tensor<'a>,
    /// Like `k`.
    pub(super) v: Tensor<'a>,
    pub(super) work: &'a BlockWork,
    pub(super) dim: usize,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    pub(super) bias: Option<BiasRows<'a>>,
    /// `Some`: q, k and v are read and multiplied in words of two elements.
    pub(super) bf16: Option<WordProducts>,
    /// `Some`: panels multiply words by tile registers, for which operands are packed. Only with
    /// `bf16`.
    pub(super) tiles: Option<TileProducts>,
}

impl<'a> Call<'a> {
    /// Elements of a tensor that are packed together.
    pub(super) fn elements_in_word(&self) -> usize {
        if self.bf16.is_some() { 2 } else { 1 }
    }

    /// Packed elements of one head of a row.
    pub(super) fn words(&self) -> usize {
        self.dim / self.elements_in_word()
    }

    /// Packed elements of one head of a row of q in a panel: whole tiles.
    pub(super) fn panel_words(&self) -> usize {
        if self.tiles.is_some() { self.words().next_multiple_of(tiles::SIDE) } else { self.words() }
    }

    /// Rows of a panel's accumulators, of which `dim` count: whole groups of `mr`, or whole tiles.
    pub(super) fn panel_dim(&self, mr: usize) -> usize {
        self.dim.next_multiple_of(if self.tiles.is_some() { tiles::SIDE } else { mr })
    }

    /// Rows, or words of two rows, of a panel of `lanes` rows: whole tiles.
    pub(super) fn words_of_rows(&self, lanes: usize) -> usize {
        let words = lanes / self.elements_in_word();
        if self.tiles.is_some() { words.next_multiple_of(tiles::SIDE) } else { words }
    }

    /// Factors on q and on the scores. On q where it is at most 1 and q is not in words: the
    /// product of an element and a larger one may be out of range. With a softcap, scores are
    /// the argument of its tanh.
    pub(super) fn factors(&self) -> [f32; 2] {
        let factor = f64::from(self.scale) / f64::from(self.softcap.unwrap_or(1.0));
        #[expect(clippy::cast_possible_truncation, reason = "rounded once, on purpose")]
        let factor = factor as f32;
        if factor.abs() <= 1.0 && self.bf16.is_none() { [factor, 1.0] } else { [1.0, factor] }
    }

    /// Global positions of the keys of a KV tile. The last tile may have fewer keys than the
    /// others.
    pub(super) fn positions(&self, tile: u32) -> &'a [u32] {
        let all = &self.work.kv_positions;
        let width = self.work.tile.kv_cols as usize;
        let first = tile as usize * width;
        &all[first..all.len().min(first + width)]
    }
}

/// What `part` is of `all`.
#[expect(clippy::cast_precision_loss, reason = "a share, for people")]
pub(super) fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}
