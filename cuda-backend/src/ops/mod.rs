//! The operations of the backend, each as launches of kernels on an open device.

mod arguments;
mod attend;
mod backward;
mod choose;
mod convert;
mod lists;
mod pieces;
mod repack;
mod state;
mod sums;

pub(crate) use attend::{attend, attend_and_finalize};
pub(crate) use backward::{attend_backward, supports_backward};
pub(crate) use choose::tile_shape;
pub(crate) use convert::convert;
pub(crate) use repack::{accumulate, repack};
pub(crate) use state::{finalize, merge, reset_state};
pub(crate) use sums::{clear, row_stats};
