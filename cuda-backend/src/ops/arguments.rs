//! Kernel arguments from sizes, layouts and states.

use kyklos::backend::{Layout, StateShape};
use kyklos::{Error, Result};

use crate::device::{CudaBuffer, LaunchConfig};
use crate::kernels::{SMALL_THREADS, STATE_ROWS, StateArguments, TensorArgument};

/// A size as kernels take it. `what` names it in the error.
pub(crate) fn to_u32(what: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| {
        Error::request(format!("{what} is {value}"), "kernels count in 32 bits: use smaller pieces")
    })
}

/// A tensor in `buffer`. The offset of `layout` counts elements of `element_bytes`.
pub(crate) fn tensor(buffer: &CudaBuffer, layout: &Layout, element_bytes: usize) -> TensorArgument {
    TensorArgument {
        data: buffer.address() + (layout.offset * element_bytes) as u64,
        batch_stride: layout.batch_stride as u64,
        row_stride: layout.row_stride as u64,
        head_stride: layout.head_stride as u64,
    }
}

/// The shape of a running state. All addresses are 0.
pub(crate) fn state_arguments(shape: StateShape) -> Result<StateArguments> {
    Ok(StateArguments {
        batch: to_u32("the batch", shape.batch)?,
        rows: to_u32("the number of rows", shape.rows)?,
        heads: to_u32("the number of heads", shape.heads)?,
        dim: to_u32("the head dim", shape.dim)?,
        ..StateArguments::default()
    })
}

/// The launch of a kernel with one warp for each row of a head. `None` if there are no rows.
pub(crate) fn row_launch_config(kernel: &str, shape: StateShape) -> Result<Option<LaunchConfig<'_>>> {
    let rows = shape.batch * shape.rows * shape.heads;
    let grid = [to_u32("rows times heads", rows.div_ceil(STATE_ROWS as usize))?, 1, 1];
    Ok((rows > 0).then_some(LaunchConfig { kernel, grid, threads: SMALL_THREADS, shared_bytes: 0 }))
}
