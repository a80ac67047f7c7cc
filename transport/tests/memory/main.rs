//! What others can make a rank hold, by the memory of the process: its tests take turns, and nothing else runs beside them.
#![cfg(all(feature = "quic", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[path = "../transport/common/mod.rs"]
mod common;
mod hostile;
mod members;
mod windows;
