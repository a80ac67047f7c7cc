//! Which kernel a call of attention gets, before its keys are known and for its work list.

use kyklos::backend::{Attend, StateShape};
use kyklos::{AttentionProblem, Error, Result, TileShape};

use super::arguments::to_u32;
use crate::device::{CudaBuffer, OpenDevice};
use crate::kernels::{AttendKernel, CallShape, HeadPack, KernelChoice, PACKED_ROWS};

/// The tile shape for calls of `problem` on states of this shape. `None` for a head dim without a
/// kernel.
pub(crate) fn tile_shape(problem: &AttentionProblem, shape: StateShape, wgmma: bool) -> Option<TileShape> {
    // Which query heads the state has is not known here. At most all that share a KV head are in a
    // pack.
    let pack = (problem.q_heads / problem.kv_heads).min(PACKED_ROWS);
    let call = CallShape {
        dtype: problem.dtype,
        dim: problem.head_dim,
        // The call itself refuses a number of rows that is too large.
        rows: u32::try_from(shape.rows).unwrap_or(u32::MAX),
        pack: pack.min(u32::try_from(shape.heads).unwrap_or(u32::MAX)).max(1),
        bias: problem.bias.is_some(),
        full: problem.mask.is_full(),
        fixed_order: problem.fixed_order,
    };
    KernelChoice::candidates(&call, wgmma).first().map(|(_, kernel)| kernel.tile)
}

/// The kernel whose tile shape the work list of a call has.
pub(super) fn choose_kernel(
    device: &OpenDevice,
    args: &Attend<'_, CudaBuffer>,
    packs: &[HeadPack],
) -> Result<(KernelChoice, AttendKernel)> {
    let shape = args.state.shape;
    let call = CallShape {
        dtype: args.dtype,
        dim: to_u32("the head dim", shape.dim)?,
        rows: to_u32("the number of rows", shape.rows)?,
        pack: packs.iter().map(|pack| pack.count).max().unwrap_or(1),
        bias: args.bias.is_some(),
        // The work list has been made for one of the kernels.
        full: false,
        fixed_order: args.fixed_order,
    };
    let candidates = KernelChoice::candidates(&call, device.wgmma);
    if candidates.is_empty() || !call.dim.is_multiple_of(8) {
        return Err(Error::request(
            format!("head dim {} is not supported", call.dim),
            "use a multiple of 8 up to 256",
        ));
    }
    let tile = args.work.tile;
    let tiles: Vec<_> = candidates.iter().map(|(_, kernel)| kernel.tile).collect();
    candidates.into_iter().find(|(choice, kernel)| choice.accepts(&call, kernel, tile)).ok_or_else(|| {
        Error::request(
            format!("the work list is in tiles of {tile:?}, kernels for this call have {tiles:?}"),
            "lower the mask with this backend's tile_shape for the shape of the state",
        )
    })
}
