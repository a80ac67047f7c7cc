//! The log-sum-exp and δ of each row.

use kyklos_shaders::{Kernel, RowStatsParams};

use super::super::buffer::WgpuBuffer;
use super::super::device::Gpu;
use super::super::dispatch::Bound;
use super::super::numbers::{checked_dim, narrow, storage};
use super::super::ops::row_heads_within;
use super::super::region::cut;
use crate::Result;
use crate::backend::RowStats;

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
        let bytes = (part.start * row_bytes) as u64..(part.end * row_bytes) as u64;
        let o = gpu.window("o", args.o, bytes.clone())?;
        let d_o = gpu.window("d_o", args.d_o, bytes)?;
        let params = RowStatsParams {
            first: narrow("rows times heads", part.start)?,
            end: narrow("rows times heads", part.end)?,
            grid_width: grid.width,
            o_skipped: o.skipped_units()?,
            d_o_skipped: d_o.skipped_units()?,
            ..RowStatsParams::default()
        };
        let mut bound: Vec<Bound<'_>> = [
            o,
            d_o,
            gpu.window("lse", args.lse, 0..(4 * row_heads) as u64)?,
            gpu.window("row statistics", args.stats, 0..(8 * row_heads) as u64)?,
        ]
        .map(Into::into)
        .to_vec();
        if let Some(d_lse) = args.d_lse {
            bound.push(gpu.window("d_lse", d_lse, 0..(4 * row_heads) as u64)?.into());
        }
        gpu.record(&mut encoder, kernel, bytemuck::bytes_of(&params), &bound, grid)?;
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}
