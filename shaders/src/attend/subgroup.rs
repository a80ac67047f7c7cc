//! Numbers of `attend/subgroup.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use crate::variant::AttendKernel;

/// Keys in which the work list counts: a multiple of the keys of one iteration of the loop over
/// full runs.
pub(crate) const KV_COLS: u32 = 32;

/// Workgroup memory where a mask tensor is read.
pub(crate) const VISIBLE_BYTES: u32 = 4;

/// Independent sums in a logit, so that additions overlap. They depend on nothing but the head dim:
/// every loop of this kernel and of the backward kernels rounds the logit of a pair alike, so
/// weights fit the log-sum-exp.
pub(crate) const fn chains(head_dim: u32) -> u32 {
    if head_dim <= 128 { 2 } else { 4 }
}

/// Loads with which a subgroup reads the units of one row of one head.
pub(crate) const fn loads(units: u32, lanes: u32) -> u32 {
    units.div_ceil(lanes)
}

pub(crate) fn values(kernel: AttendKernel, lanes: u32, rows: u32) -> Value {
    context! {
        lanes,
        rows,
        loads => loads(kernel.storage.units(kernel.head_dim), lanes),
        chains => chains(kernel.head_dim),
        keys_at_once => if kernel.head_dim <= 256 { 2 } else { 1 },
    }
}
