//! The `kyklos` program from outside: its output, its files, its refusals, and the files and processes after its end.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod agreement;
mod attend;
mod bench;
mod bias_gradients;
mod certs;
mod clusters;
#[cfg(target_os = "linux")]
mod cuda;
mod delivery;
mod devices;
mod doctor;
mod files;
mod forming;
#[path = "../../../tests/free_address.rs"]
mod free_address;
mod gradients;
mod hostile_files;
mod launch;
mod metrics;
#[cfg(target_os = "linux")]
mod nccl;
mod on_loss;
#[cfg(target_os = "linux")]
mod refusals;
mod report;
mod requests;
mod shares;
mod strategies;
mod support;
mod tab;
mod tokens;
mod watch;
