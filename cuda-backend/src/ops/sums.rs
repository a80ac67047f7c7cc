//! Row statistics, and sums of gradients: zeros, and additions.

use kyklos::backend::RowStats;
use kyklos::{Error, Result};

use super::arguments::{row_launch_config, to_u32};
use crate::device::{CudaBuffer, LaunchConfig, OpenDevice};
use crate::kernels::{ClearArguments, RowStatsArguments, SMALL_THREADS, row_stats_kernel};

pub(crate) fn row_stats(device: &OpenDevice, args: &RowStats<'_, CudaBuffer>) -> Result<()> {
    let shape = args.shape;
    let arguments = RowStatsArguments {
        o: args.o.address(),
        d_o: args.d_o.address(),
        lse: args.lse.address(),
        d_lse: args.d_lse.map_or(0, CudaBuffer::address),
        stats: args.stats.address(),
        rows: (shape.batch * shape.rows * shape.heads) as u64,
        dim: to_u32("the head dim", shape.dim)?,
        reserved: 0,
    };
    let mut reads = vec![args.o, args.d_o, args.lse];
    reads.extend(args.d_lse);
    if let Some(launch) = row_launch_config(row_stats_kernel(args.dtype), shape)? {
        device.launch(launch, &arguments, &reads, &[&*args.stats])?;
    }
    Ok(())
}

/// Fills a buffer with zeros. Submitted together with the next kernel, because nothing else reads
/// its result.
pub(crate) fn clear(device: &OpenDevice, buffer: &CudaBuffer) -> Result<()> {
    let bytes = buffer.bytes();
    if !bytes.is_multiple_of(4) {
        return Err(Error::request(format!("zeros for {bytes} bytes"), "use whole 32-bit words"));
    }
    if bytes == 0 {
        return Ok(());
    }
    let arguments = ClearArguments { words: buffer.address(), count: (bytes / 4) as u64 };
    let blocks = (bytes / 4).div_ceil(SMALL_THREADS as usize).min(device.multiprocessors as usize * 16);
    let grid = [to_u32("the number of blocks", blocks)?, 1, 1];
    let launch = LaunchConfig { kernel: "clear_words", grid, threads: SMALL_THREADS, shared_bytes: 0 };
    device.launch_deferred(launch, &arguments, &[], &[buffer])
}
