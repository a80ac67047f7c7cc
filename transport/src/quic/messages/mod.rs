//! Messages between two ranks: requests for them, sending and receiving, over QUIC and through
//! shared memory.

pub(crate) mod receiving;
pub(crate) mod requests;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(crate) mod same_host;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
#[path = "same_host_elsewhere.rs"]
pub(crate) mod same_host;
pub(crate) mod sending;
