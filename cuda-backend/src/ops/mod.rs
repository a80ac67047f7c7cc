//! The operations of the backend, as launches of kernels.

pub(crate) mod attend;
pub(crate) mod convert;
pub(crate) mod pieces;
pub(crate) mod state;
