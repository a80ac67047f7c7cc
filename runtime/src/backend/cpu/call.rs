//! The arguments of one `attend` call, as its jobs share them.

use super::pack::Tensor;
use super::pairs::PairRows;
use crate::BlockWork;

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
    pub(super) pairs: Option<PairRows<'a>>,
}

impl<'a> Call<'a> {
    /// Global positions of the keys of a KV tile. The last tile may have fewer keys than the others.
    pub(super) fn positions(&self, tile: u32) -> &'a [u32] {
        let all = &self.work.kv_positions;
        let width = self.work.tile.kv_cols as usize;
        let first = tile as usize * width;
        &all[first..all.len().min(first + width)]
    }
}
