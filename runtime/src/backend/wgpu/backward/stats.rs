//! The statistics of each row: its log-sum-exp and δ.

use kyklos_shaders::{Kernel, RowStatsParams};

use super::super::device::Gpu;
use super::super::numbers::{checked_dim, narrow, storage};
use super::super::ops::row_heads_within;
use crate::backend::RowStats;
use crate::backend::wgpu::running::dispatch::Bound;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::cut;
use crate::error::Result;

pub(in super::super) fn row_stats(gpu: &Gpu, args: &RowStats<'_, WgpuBuffer>) -> Result<()> {
    let shape = args.shape;
    let row_heads = shape.batch * shape.rows * shape.heads;
    if row_heads == 0 {
        return Ok(());
    }
    let kernel = Kernel::RowStats {
        storage: storage(args.dtype),
        head_dim: checked_dim(shape.dim)?,
        d_lse: args.d_lse.is_some(),
    };
    let row_bytes = shape.dim * args.dtype.bytes();
    let mut encoder = gpu.encoder("row statistics");
    for part in cut(0..row_heads, row_heads_within(gpu, shape.dim)) {
        let grid = gpu.grid((part.len() as u64).div_ceil(u64::from(kernel.rows_per_workgroup())))?;
        let of_rows = |row_bytes: usize| (part.start * row_bytes) as u64..(part.end * row_bytes) as u64;
        let o = gpu.window("o", args.o, of_rows(row_bytes))?;
        let d_o = gpu.window("d_o", args.d_o, of_rows(row_bytes))?;
        let lse = gpu.window("lse", args.lse, of_rows(8))?;
        let stats = gpu.window("row statistics", args.stats, of_rows(16))?;
        let d_lse = args.d_lse.map(|d_lse| gpu.window("d_lse", d_lse, of_rows(4))).transpose()?;
        let params = RowStatsParams {
            first: narrow("rows times heads", part.start)?,
            end: narrow("rows times heads", part.end)?,
            grid_width: grid.width,
            o_skipped: o.skipped_units()?,
            d_o_skipped: d_o.skipped_units()?,
            // A unit has the log-sum-exps of 2 row-heads, the gradients of 4, or the statistics of 1.
            lse_skipped: lse.skipped_units()? * 2,
            d_lse_skipped: d_lse.map_or(Ok(0), |d_lse| d_lse.skipped_units())? * 4,
            stats_skipped: stats.skipped_units()?,
        };
        let mut bound: Vec<Bound<'_>> = [o, d_o, lse, stats].map(Into::into).to_vec();
        bound.extend(d_lse.map(Bound::from));
        gpu.record(&mut encoder, kernel, bytemuck::bytes_of(&params), &bound, grid)?;
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}
