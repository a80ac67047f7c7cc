//! What both passes have as a side of a comparison: a small problem, and what is asked of it.

use kyklos_plan::{AttentionProblem, Dtype};
use pollster::block_on;

use crate::backend::wgpu::backend::WgpuBackend;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::{Backend, Layout, StateShape};
use crate::error::Result;

/// A side of a comparison, with its device and tensors.
pub(super) trait Run: Send {
    /// Whether a difference is relative to the largest element of its tensor.
    const RELATIVE: bool;

    /// Seconds of each of some calls, all into the same results, which are empty at first.
    fn time(&mut self, calls: u32) -> Result<f64>;

    /// The results of the calls of the last [`Self::time`], tensor by tensor.
    fn results(&mut self) -> Result<Vec<Vec<f32>>>;
}

/// Causal: tiles with and without tests.
pub(super) fn problem(head_dim: u32) -> Result<AttentionProblem> {
    Ok(AttentionProblem::new([1, TOKENS, HEADS, HEADS, head_dim], Dtype::F16, "causal".parse()?)?)
}

/// Of q and all tensors like it.
pub(super) fn layout(problem: &AttentionProblem) -> Layout {
    let (dim, heads) = (problem.head_dim as usize, HEADS as usize);
    let row_stride = heads * dim;
    Layout { offset: 0, batch_stride: TOKENS as usize * row_stride, row_stride, head_stride: dim }
}

pub(super) fn floats(backend: &WgpuBackend, buffer: &mut WgpuBuffer, bytes: usize) -> Result<Vec<f32>> {
    Ok(bytemuck::pod_collect_to_vec(&block_on(backend.download(buffer, 0..bytes))?))
}

pub(super) fn shape(problem: &AttentionProblem) -> StateShape {
    StateShape { batch: 1, rows: TOKENS as usize, heads: HEADS as usize, dim: problem.head_dim as usize }
}

/// Values in -1..1 in f16. If they grow, later rows are longer by 2, 4 and 8, so that the maxima of
/// logits move as they do in a model.
pub(super) fn values(problem: &AttentionProblem, grows: bool) -> Vec<u8> {
    let row = (HEADS * problem.head_dim) as usize;
    let factor = |at: usize| if grows { f32::from(1u8 << (at / row * 4 / TOKENS as usize)) } else { 1.0 };
    (0..TOKENS as usize * row)
        .map(|at| ((at * 7919) % 2017) as f32 / 1008.5 - 1.0)
        .map(half::f16::from_f32)
        .enumerate()
        .flat_map(|(at, x)| half::f16::from_f32(x.to_f32() * factor(at)).to_le_bytes())
        .collect()
}

/// Query rows and keys, and heads: enough for many GPUs to be busy, and milliseconds on most.
pub(super) const TOKENS: u32 = 2048;
pub(super) const HEADS: u32 = 4;
