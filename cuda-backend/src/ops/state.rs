//! Everything but attend: short kernels. All but the reset of a state, which is nothing to anybody by itself, are submitted
//! at once.

use bytemuck::Pod;
use kyklos::backend::{Extent, Layout, State, StateShape};
use kyklos::{Dtype, Error, Result};

use crate::backend::{CudaBackend, narrow};
use crate::device::gpu::Launch;
use crate::device::memory_pool::CudaBuffer;
use crate::kernels::{RepackArguments, SMALL_THREADS, STATE_ROWS, StateArguments, finalize_kernel};
use crate::ops::attend::tensor;

pub(crate) fn reset_state(
    backend: &CudaBackend,
    a: &CudaBuffer,
    ml: &CudaBuffer,
    shape: StateShape,
) -> Result<()> {
    let arguments = StateArguments { a: a.address(), ml: ml.address(), ..state(shape)? };
    let launch = over_rows("reset_state", shape)?;
    launch.map_or(Ok(()), |launch| backend.gpu.hold(launch, &arguments, &[], &[a, ml]))
}

pub(crate) fn merge(
    backend: &CudaBackend,
    a: &CudaBuffer,
    ml: &CudaBuffer,
    from: &State<'_, CudaBuffer>,
) -> Result<()> {
    let arguments = StateArguments {
        a: a.address(),
        ml: ml.address(),
        from_a: from.a.address(),
        from_ml: from.ml.address(),
        ..state(from.shape)?
    };
    launch_rows(backend, "merge_states", from.shape, &arguments, &[from.a, from.ml], &[a, ml])
}

pub(crate) fn finalize(
    backend: &CudaBackend,
    from: &State<'_, CudaBuffer>,
    sinks: &[f32],
    dtype: Dtype,
    o: &CudaBuffer,
    lse: &CudaBuffer,
) -> Result<()> {
    let sinks = match sinks {
        [] => None,
        sinks => Some(backend.gpu.upload(&backend.watch, "sinks", bytemuck::cast_slice(sinks))?),
    };
    let arguments = StateArguments {
        a: from.a.address(),
        ml: from.ml.address(),
        sinks: sinks.as_ref().map_or(0, CudaBuffer::address),
        o: o.address(),
        lse: lse.address(),
        ..state(from.shape)?
    };
    let mut reads = vec![from.a, from.ml];
    reads.extend(&sinks);
    launch_rows(backend, finalize_kernel(dtype), from.shape, &arguments, &reads, &[o, lse])
}

pub(crate) fn repack(
    backend: &CudaBackend,
    (from, from_layout): (&CudaBuffer, Layout),
    (into, into_layout): (&CudaBuffer, Layout),
    extent: Extent,
) -> Result<()> {
    let numbers =
        |layout: Layout| [layout.offset, layout.batch_stride, layout.row_stride, layout.head_stride];
    let all = [numbers(from_layout), numbers(into_layout)].concat();
    if !all.iter().chain([&extent.row_bytes]).all(|bytes| bytes.is_multiple_of(4)) {
        return Err(Error::request(
            format!("a copy of {extent:?} from {from_layout:?} into {into_layout:?}"),
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
        batch: narrow("the batch", extent.batch)?,
        rows: narrow("the number of rows", extent.rows)?,
        heads: narrow("the number of heads", extent.heads)?,
        row_bytes: narrow("the bytes of a row", extent.row_bytes)?,
    };
    // Each block takes a share; more blocks than keep the device busy gain nothing.
    let blocks = words.div_ceil(SMALL_THREADS as usize).min(backend.multiprocessors as usize * 16);
    let grid = [narrow("the number of blocks", blocks)?, 1, 1];
    let launch = Launch { kernel: "repack", grid, threads: SMALL_THREADS, shared_bytes: 0 };
    backend.gpu.launch(launch, &arguments, &[from], &[into])?;
    Ok(())
}

/// The shape of a state, as kernels take it.
pub(crate) fn state(shape: StateShape) -> Result<StateArguments> {
    Ok(StateArguments {
        batch: narrow("the batch", shape.batch)?,
        rows: narrow("the number of rows", shape.rows)?,
        heads: narrow("the number of heads", shape.heads)?,
        dim: narrow("the head dim", shape.dim)?,
        ..StateArguments::default()
    })
}

/// Launches a kernel that has a warp for each row of a head.
fn launch_rows(
    backend: &CudaBackend,
    kernel: &str,
    shape: StateShape,
    arguments: &impl Pod,
    reads: &[&CudaBuffer],
    writes: &[&CudaBuffer],
) -> Result<()> {
    if let Some(launch) = over_rows(kernel, shape)? {
        backend.gpu.launch(launch, arguments, reads, writes)?;
    }
    Ok(())
}

/// The launch of a kernel that has a warp for each row of a head, if there are rows.
pub(crate) fn over_rows(kernel: &str, shape: StateShape) -> Result<Option<Launch<'_>>> {
    let rows = shape.batch * shape.rows * shape.heads;
    let grid = [narrow("rows times heads", rows.div_ceil(STATE_ROWS as usize))?, 1, 1];
    Ok((rows > 0).then_some(Launch { kernel, grid, threads: SMALL_THREADS, shared_bytes: 0 }))
}
