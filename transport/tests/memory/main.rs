//! Tests how much memory other hosts can make a rank hold. They measure the memory of this process,
//! so they run one at a time, and no other test runs beside them.
#![cfg(all(feature = "quic", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[path = "../transport/common/mod.rs"]
mod common;
mod flood;
mod hostile;
mod members;
mod reports;
mod votes;
mod windows;

/// Counts what is allocated. The system shows less exactly what is held: freed memory stays
/// resident, and is used again.
#[global_allocator]
static ALLOCATOR: cap::Cap<std::alloc::System> = cap::Cap::new(std::alloc::System, usize::MAX);
