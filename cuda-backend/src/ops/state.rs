//! Running states: reset, merge, finalize. A reset is submitted together with the next kernel,
//! because nothing else reads its result; or not at all, if that kernel computes the first block of
//! the state: it can write the state without reading it.

use bytemuck::Pod;
use kyklos::backend::{State, StateMut, StateShape};
use kyklos::{Dtype, Result};

use super::arguments::{row_launch_config, state_arguments};
use crate::device::{CudaBuffer, Deferred, OpenDevice};
use crate::kernels::{StateArguments, finalize_kernel};

pub(crate) fn reset_state(
    device: &OpenDevice,
    a: &CudaBuffer,
    ml: &CudaBuffer,
    shape: StateShape,
) -> Result<()> {
    let arguments = StateArguments { a: a.address(), ml: ml.address(), ..state_arguments(shape)? };
    let launch = row_launch_config(RESET, shape)?;
    launch.map_or(Ok(()), |launch| device.launch_deferred(launch, &arguments, &[], &[a, ml]))
}

/// The reset of a state, if it is not submitted yet.
pub(crate) fn deferred_reset(
    device: &OpenDevice,
    state: &StateMut<'_, CudaBuffer>,
) -> Result<Option<Deferred>> {
    let (a, ml) = (state.a.address(), state.ml.address());
    Ok(device.deferred(RESET, &StateArguments { a, ml, ..state_arguments(state.shape)? }))
}

const RESET: &str = "reset_state";

pub(crate) fn merge(
    device: &OpenDevice,
    a: &CudaBuffer,
    ml: &CudaBuffer,
    from: &State<'_, CudaBuffer>,
) -> Result<()> {
    let arguments = StateArguments {
        a: a.address(),
        ml: ml.address(),
        from_a: from.a.address(),
        from_ml: from.ml.address(),
        ..state_arguments(from.shape)?
    };
    launch_rows(device, "merge_states", from.shape, &arguments, &[from.a, from.ml], &[a, ml])
}

pub(crate) fn finalize(
    device: &OpenDevice,
    from: &State<'_, CudaBuffer>,
    sinks: &[f32],
    dtype: Dtype,
    o: &CudaBuffer,
    lse: &CudaBuffer,
) -> Result<()> {
    let sinks = upload_sinks(device, sinks)?;
    let arguments = StateArguments {
        a: from.a.address(),
        ml: from.ml.address(),
        sinks: sinks.as_ref().map_or(0, CudaBuffer::address),
        o: o.address(),
        lse: lse.address(),
        ..state_arguments(from.shape)?
    };
    let mut reads = vec![from.a, from.ml];
    reads.extend(&sinks);
    launch_rows(device, finalize_kernel(dtype), from.shape, &arguments, &reads, &[o, lse])
}

/// The sinks on the device, if there are any.
pub(super) fn upload_sinks(device: &OpenDevice, sinks: &[f32]) -> Result<Option<CudaBuffer>> {
    (!sinks.is_empty()).then(|| device.upload("sinks", bytemuck::cast_slice(sinks))).transpose()
}

/// Launches a kernel with one warp for each row of a head.
fn launch_rows(
    device: &OpenDevice,
    kernel: &str,
    shape: StateShape,
    arguments: &impl Pod,
    reads: &[&CudaBuffer],
    writes: &[&CudaBuffer],
) -> Result<()> {
    if let Some(launch) = row_launch_config(kernel, shape)? {
        device.launch(launch, arguments, reads, writes)?;
    }
    Ok(())
}
