//! The gradient of an additive bias tensor: dS of each visible pair, before the slope of a softcap,
//! added to the element that the pair reads.
//!
//! Pairs of many heads, batch entries or rows may read the same element. So a job keeps its dS in a
//! block of its own, and the blocks of some jobs are added afterwards: each row of the gradient by
//! one thread, in the order of the jobs, which depends on the arguments only.

use std::ops::Range;

use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::super::CpuBuffer;
use crate::backend::{BiasGradient, Layout};
use crate::error::Result;

/// The gradient of the bias, as the jobs of a call share it.
pub(super) struct BiasSum<'a> {
    elements: &'a mut [f32],
    layout: Layout,
    columns: usize,
}

/// dS of the pairs of a job, f32: `[query row][key]` of its stretches, or their sums over the rows
/// if the bias has one row for all.
#[derive(Debug)]
pub(super) struct BiasBlock {
    sums: Vec<f32>,
    /// The element of the gradient at which its first row begins.
    first: usize,
    rows: usize,
    /// Its keys, by their place in the call.
    keys: Range<usize>,
    shared_rows: bool,
}

impl<'a> BiasSum<'a> {
    pub(super) fn new(gradient: BiasGradient<'a, CpuBuffer>) -> Result<Self> {
        let BiasGradient { buffer, layout, columns } = gradient;
        Ok(Self { elements: bytemuck::cast_slice_mut(buffer.bytes_mut()?), layout, columns })
    }

    /// Zeros for a job with these query rows of a head and these keys.
    pub(super) fn block(
        &self,
        [batch, head]: [usize; 2],
        rows: Range<usize>,
        keys: Range<usize>,
    ) -> BiasBlock {
        let Layout { offset, batch_stride, row_stride, head_stride } = self.layout;
        let first = offset + batch * batch_stride + rows.start * row_stride + head * head_stride;
        let shared_rows = row_stride == 0;
        let rows = if shared_rows { 1 } else { rows.len() };
        BiasBlock { sums: vec![0.0; rows * keys.len()], first, rows, keys, shared_rows }
    }

    /// Adds `blocks`, whose keys are at `positions`.
    pub(super) fn add(&mut self, blocks: &[BiasBlock], positions: &[u32]) {
        let (columns, row_stride) = (self.columns, self.layout.row_stride);
        let end = |block: &BiasBlock| block.first + (block.rows - 1) * row_stride + columns;
        let Some(from) = blocks.iter().map(|block| block.first).min() else { return };
        let to = blocks.iter().map(end).max().unwrap_or(from);
        self.elements[from..to].par_chunks_exact_mut(columns).enumerate().for_each(|(row, sums)| {
            for block in blocks {
                let Some(after) = (from + row * columns).checked_sub(block.first) else { continue };
                let index = after.checked_div(row_stride).unwrap_or(0);
                if index >= block.rows || index * row_stride != after {
                    continue;
                }
                let of_row = &block.sums[index * block.keys.len()..];
                for (value, position) in of_row.iter().zip(&positions[block.keys.clone()]) {
                    sums[*position as usize] += value;
                }
            }
        });
    }
}

impl BiasBlock {
    /// Adds dS of a panel, `[key][lane]`, whose first `rows` lanes are rows: those from `first_row`
    /// on, and the keys from `first_key` on.
    pub(super) fn add(
        &mut self,
        d_scores: &[f32],
        lanes: usize,
        [first_row, rows]: [usize; 2],
        first_key: usize,
    ) {
        let keys = self.keys.len();
        for (key, of_key) in (first_key..).zip(d_scores.chunks_exact(lanes)) {
            if self.shared_rows {
                self.sums[key] += of_key[..rows].iter().sum::<f32>();
                continue;
            }
            let sums = self.sums[first_row * keys + key..].iter_mut().step_by(keys);
            for (sum, value) in sums.zip(&of_key[..rows]) {
                *sum += value;
            }
        }
    }
}
