//! The `kyklos` program from outside: its output, its files, its refusals, and the files and
//! processes after its end.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bench;
mod calls;
#[cfg(target_os = "linux")]
mod cuda;
mod devices;
#[cfg(target_os = "linux")]
mod exit_codes;
#[path = "../../../tests/free_address.rs"]
mod free_address;
mod groups;
mod help;
#[cfg(target_os = "linux")]
mod nccl;
mod observe;
#[cfg(target_os = "linux")]
mod refusals;
mod strategies;
mod support;
