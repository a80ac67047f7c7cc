//! The gradient of an additive bias tensor: dS of each visible pair, before the slope of a softcap, added to the element that the
//! pair reads.
//!
//! Pairs of many heads, batch entries or rows may read the same element. So a job keeps its dS in a block of its own, and the blocks
//! of some jobs are added afterwards: each row of the gradient by one thread, in the order of the jobs, which depends on the
//! arguments only.

use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::super::CpuBuffer;
use super::TILE;
use super::job::Job;
use crate::backend::{BiasGradient, Layout};
use crate::{BlockWork, Result};

/// The gradient of the bias, as the jobs of a call share it.
pub(super) struct BiasSum<'a> {
    elements: &'a mut [f32],
    layout: Layout,
    columns: usize,
}

/// dS of the pairs of a job, f32: `[query row][key]` of its stretches, or their sums over the rows if the bias has one row for all.
#[derive(Debug, Default)]
pub(super) struct BiasBlock {
    sums: Vec<f32>,
    keys: usize,
    shared_rows: bool,
}

impl<'a> BiasSum<'a> {
    pub(super) fn new(gradient: BiasGradient<'a, CpuBuffer>) -> Result<Self> {
        let BiasGradient { buffer, layout, columns } = gradient;
        Ok(Self { elements: bytemuck::cast_slice_mut(buffer.bytes_mut()?), layout, columns })
    }

    /// An empty block for a job of `rows` query rows and `keys` keys.
    pub(super) fn block(&self, rows: usize, keys: usize) -> BiasBlock {
        let shared_rows = self.layout.row_stride == 0;
        BiasBlock { sums: vec![0.0; if shared_rows { keys } else { rows * keys }], keys, shared_rows }
    }

    /// Adds the blocks of `jobs`.
    pub(super) fn add(&mut self, jobs: &mut [Job<'_>], work: &BlockWork) {
        let Layout { offset, batch_stride, row_stride, head_stride } = self.layout;
        let tile = TILE.q_rows as usize;
        let jobs = jobs.iter_mut().filter_map(|job| {
            let block = job.bias.take()?;
            let positions = &work.kv_positions[job.kv_tiles.start * TILE.kv_cols as usize..][..block.keys];
            let first = offset
                + job.batch * batch_stride
                + job.q_tiles.start * tile * row_stride
                + job.q_head * head_stride;
            let rows = if block.shared_rows { 1 } else { job.dq.len() };
            Some((first, rows, block, positions))
        });
        let jobs: Vec<(usize, usize, BiasBlock, &[u32])> = jobs.collect();
        let columns = self.columns;
        let last = |(first, rows, ..): &(usize, usize, _, _)| first + (rows - 1) * row_stride + columns;
        let Some(from) = jobs.iter().map(|(first, ..)| *first).min() else { return };
        let to = jobs.iter().map(last).max().unwrap_or(from);
        self.elements[from..to].par_chunks_exact_mut(columns).enumerate().for_each(|(row, sums)| {
            let start = from + row * columns;
            for (first, rows, block, positions) in &jobs {
                let Some(after) = start.checked_sub(*first) else { continue };
                let index = after.checked_div(row_stride).unwrap_or(0);
                if index >= *rows || index * row_stride != after {
                    continue;
                }
                let of_row = &block.sums[index * block.keys..][..block.keys];
                for (value, position) in of_row.iter().zip(*positions) {
                    sums[*position as usize] += value;
                }
            }
        });
    }
}

impl BiasBlock {
    /// Adds dS of a panel, `[key][lane]`, of which `rows` lanes are rows: the rows from `first_row` on, the keys from `first_key` on.
    pub(super) fn add(
        &mut self,
        d_scores: &[f32],
        lanes: usize,
        [first_row, rows]: [usize; 2],
        first_key: usize,
    ) {
        for (key, of_key) in (first_key..).zip(d_scores.chunks_exact(lanes)) {
            if self.shared_rows {
                self.sums[key] += of_key[..rows].iter().sum::<f32>();
                continue;
            }
            let sums = self.sums[first_row * self.keys + key..].iter_mut().step_by(self.keys);
            for (sum, value) in sums.zip(&of_key[..rows]) {
                *sum += value;
            }
        }
    }
}
