//! One attention call: its options, its inputs and what it writes.

mod agreement;
mod attend;
pub(crate) mod bias_gradients;
mod files;
pub(crate) mod gradients;
mod hostile_files;
mod requests;
mod shares;
