//! The statistics of each row: its log-sum-exp and δ.

use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::super::CpuBuffer;
use super::super::pack::Tensor;
use crate::backend::cpu::arithmetic::scalar::exp;
use crate::backend::{EMPTY_M, Layout, Operand, RowStats, StateShape};
use crate::error::Result;

/// [`crate::backend::Backend::row_stats`] of this backend.
pub(in super::super) fn row_stats(args: RowStats<'_, CpuBuffer>) -> Result<()> {
    let StateShape { batch, rows, heads, dim } = args.shape;
    if batch * rows * heads * dim == 0 {
        return Ok(());
    }
    let layout = Layout { offset: 0, batch_stride: 0, row_stride: heads * dim, head_stride: dim };
    let tensor = |buffer| Tensor::new(args.dtype, Operand { buffer, layout });
    let (o, d_o) = (tensor(args.o), tensor(args.d_o));
    let lse = args.lse.elements::<f32>().as_chunks::<2>().0;
    let d_lse = args.d_lse.map(CpuBuffer::elements::<f32>);
    let stats: &mut [f32] = bytemuck::cast_slice_mut(args.stats.overwrite()?);
    stats[..batch * rows * heads * 4]
        .par_chunks_exact_mut(heads * 4)
        .with_min_len(ROWS_AT_ONCE)
        .enumerate()
        .for_each_init(
            || [vec![0.0; dim], vec![0.0; dim]],
            |[space, grad_space], (row, stats)| {
                for (head, stats) in stats.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let [lse, rest] = lse[row * heads + head];
                    if lse == f32::NEG_INFINITY {
                        *stats = [-EMPTY_M, 1.0, 0.0, 0.0];
                        continue;
                    }
                    let (o, d_o) = (o.row([0, row, head], space), d_o.row([0, row, head], grad_space));
                    let sum: f64 = o.iter().zip(d_o).map(|(o, d_o)| f64::from(*o) * f64::from(*d_o)).sum();
                    let d_lse = d_lse.map_or(0.0, |d_lse| f64::from(d_lse[row * heads + head]));
                    #[expect(clippy::cast_possible_truncation, reason = "rounded once")]
                    let delta = (sum - d_lse) as f32;
                    *stats = [lse, exp(-rest), delta, rest];
                }
            },
        );
    Ok(())
}

/// Rows that one task takes, so that few rows do not pay for waking threads.
const ROWS_AT_ONCE: usize = 64;
