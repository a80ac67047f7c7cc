//! The operations of the backend, each as launches of kernels on an open device.

mod arguments;
mod attend;
mod convert;
mod pieces;
mod repack;
mod state;

pub(crate) use attend::{attend, tile_shape};
pub(crate) use convert::convert;
pub(crate) use repack::repack;
pub(crate) use state::{finalize, merge, reset_state};
