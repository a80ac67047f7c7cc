//! Memory of a device and of the host for copies: allocation, reuse, memory of callers, release.

pub(super) mod allocation;
pub(super) mod caller_memory;
pub(super) mod download;
pub(super) mod memory_pool;
pub(super) mod reclaimer;
pub(super) mod staging;
