//! Suites over plans, strategies and groups of ranks, as one program, so that it is linked once. What every backend must do is
//! in `tests/backends.rs`, the CUDA backend on its fake driver in `tests/cuda/`.

#![expect(unreachable_pub, reason = "`common` is shared by several programs")]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[cfg(unix)]
mod accidents;
#[path = "../common/mod.rs"]
mod common;
mod fixed_order;
mod plan_properties;
mod random_worlds;
mod simulator;
mod spans;
mod strategies;
mod survivors;
mod wire;
