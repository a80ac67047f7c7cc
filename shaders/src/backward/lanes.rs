//! Numbers and names of `backward/lanes.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use super::variant::BackwardKernel;
use crate::attend::subgroup;
use crate::variant::{AttendVariant, Tile};

/// The tiles of the forward kernel.
pub(crate) const fn list_tile(lanes: u32, head_dim: u32) -> Tile {
    Tile { q_rows: lanes * forward_rows(lanes, head_dim), kv_cols: subgroup::KV_COLS }
}

const fn forward_rows(lanes: u32, head_dim: u32) -> u32 {
    match AttendVariant::subgroup_broadcast(lanes, head_dim) {
        AttendVariant::SubgroupBroadcast { rows_per_lane, .. } => rows_per_lane,
        _ => 1,
    }
}

/// Fixed rows of a lane; they divide those of the list's tile.
pub(crate) const fn rows_per_lane(kernel: &BackwardKernel, lanes: u32) -> u32 {
    if kernel.sums.rows_are_fixed() {
        forward_rows(lanes, kernel.head_dim)
    } else if kernel.head_dim <= 64 {
        2
    } else {
        1
    }
}

pub(crate) fn values(kernel: BackwardKernel, lanes: u32) -> Value {
    let sum = |name, factor| context! { name, factor };
    let sums = if kernel.sums.of_bias() {
        Vec::new()
    } else if kernel.sums.rows_are_fixed() {
        vec![sum("dq", " * params.scale")]
    } else {
        vec![sum("dk", " * params.unscale"), sum("dv", "")]
    };
    context! {
        lanes,
        rows => rows_per_lane(&kernel, lanes),
        loads => subgroup::loads(kernel.storage.units(kernel.head_dim), lanes),
        chains => subgroup::chains(kernel.head_dim),
        sums,
    }
}
