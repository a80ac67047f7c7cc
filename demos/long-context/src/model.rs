//! A made-up model: queries, keys and values of a token depend on its position and its layer only.

use std::ops::Range;

use kyklos::{Result, Tensor};
use kyklos_oracle::inputs::{TensorId, fill};

pub(crate) const LAYERS: usize = 4;
pub(crate) const HEADS: usize = 8;
pub(crate) const KV_HEADS: usize = 2;
pub(crate) const DIM: usize = 64;

/// The tensors of the tokens at `positions`.
pub(crate) fn qkv(layer: usize, positions: Range<usize>) -> Result<[Tensor; 3]> {
    let tensor = |id, heads: usize| {
        let shape = [1, positions.len(), heads, DIM];
        Tensor::new(shape, values(layer, id, heads, positions.clone()))
    };
    Ok([tensor(TensorId::Q, HEADS)?, tensor(TensorId::K, KV_HEADS)?, tensor(TensorId::V, KV_HEADS)?])
}

/// Standard normal numbers `[positions, heads, dim]`, the same however positions are split.
pub(crate) fn values(layer: usize, id: TensorId, heads: usize, positions: Range<usize>) -> Vec<f32> {
    let row = heads * DIM;
    let range = (positions.start * row) as u64..(positions.end * row) as u64;
    let mut values = vec![0.0; positions.len() * row];
    fill(layer as u64, id, range, &mut values);
    values
}
