//! The adapters of a machine: finding them, listing each physical GPU once, their kinds.

pub(super) mod adapter;
pub(super) mod class;
#[cfg(not(target_arch = "wasm32"))]
pub(super) mod hidden;
#[cfg(not(target_arch = "wasm32"))]
pub(super) mod instance;
#[cfg(not(target_arch = "wasm32"))]
pub(super) mod listing;
