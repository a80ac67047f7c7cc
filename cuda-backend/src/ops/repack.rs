//! Copies and additions of strided rows.

use kyklos::backend::{Extent, Layout};
use kyklos::{Error, Result};

use super::arguments::{tensor, to_u32};
use crate::device::{CudaBuffer, LaunchConfig, OpenDevice};
use crate::kernels::{RepackArguments, SMALL_THREADS};

pub(crate) fn repack(
    device: &OpenDevice,
    from: (&CudaBuffer, Layout),
    into: (&CudaBuffer, Layout),
    extent: Extent,
) -> Result<()> {
    rows(device, "repack", from, into, extent)
}

/// Adds f32 rows.
pub(crate) fn accumulate(
    device: &OpenDevice,
    from: (&CudaBuffer, Layout),
    into: (&CudaBuffer, Layout),
    extent: Extent,
) -> Result<()> {
    rows(device, "accumulate", from, into, extent)
}

fn rows(
    device: &OpenDevice,
    kernel: &str,
    (from, from_layout): (&CudaBuffer, Layout),
    (into, into_layout): (&CudaBuffer, Layout),
    extent: Extent,
) -> Result<()> {
    let numbers =
        |layout: Layout| [layout.offset, layout.batch_stride, layout.row_stride, layout.head_stride];
    let all = [numbers(from_layout), numbers(into_layout)].concat();
    if !all.iter().chain([&extent.row_bytes]).all(|bytes| bytes.is_multiple_of(4)) {
        return Err(Error::request(
            format!("a copy or a sum of {extent:?} from {from_layout:?} into {into_layout:?}"),
            "keep rows, offsets and strides on 4-byte boundaries",
        ));
    }
    let words = extent.batch * extent.rows * extent.heads * (extent.row_bytes / 4);
    if words == 0 {
        return Ok(());
    }
    let arguments = RepackArguments {
        from: tensor(from, &from_layout, 1),
        into: tensor(into, &into_layout, 1),
        batch: to_u32("the batch", extent.batch)?,
        rows: to_u32("the number of rows", extent.rows)?,
        heads: to_u32("the number of heads", extent.heads)?,
        row_bytes: to_u32("the bytes of a row", extent.row_bytes)?,
    };
    // Blocks share the words. More blocks than the device can run at a time gain nothing.
    let blocks = words.div_ceil(SMALL_THREADS as usize).min(device.multiprocessors as usize * 16);
    let grid = [to_u32("the number of blocks", blocks)?, 1, 1];
    let launch = LaunchConfig { kernel, grid, threads: SMALL_THREADS, shared_bytes: 0 };
    device.launch(launch, &arguments, &[from], &[into])?;
    Ok(())
}
