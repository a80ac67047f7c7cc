//! What others can make a rank hold, measured by the memory of this process: its tests take turns, and no other test
//! runs beside them.
#![cfg(all(feature = "quic", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[path = "../transport/common/mod.rs"]
mod common;
mod hostile;
mod members;
mod windows;
