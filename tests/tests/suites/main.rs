//! Suites over plans, strategies and groups of ranks, as one program, so that it is linked once.
//! The suite for all backends is `tests/backends.rs`, the CUDA backend on its fake driver
//! `tests/cuda/`.

#![expect(unreachable_pub, reason = "`common` is shared by several programs")]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[path = "../../amount.rs"]
mod amount;
mod cache;
#[path = "../common/mod.rs"]
mod common;
mod dealt_sides;
mod entry_masks;
mod fixed_order;
mod gradients;
mod open_placement;
mod plan_properties;
mod random_sets;
mod same_queries;
mod session;
mod shared_memory;
mod shared_rows;
mod simulator;
mod spans;
mod strategies;
mod wire;

use amount::amount;
use proptest::test_runner::{Config, RngSeed};

/// The configuration of a property: the sample has a fixed seed, the full run a random one.
fn cases(sample: u32, all: u32) -> Config {
    let rng_seed = amount(RngSeed::Fixed(7), RngSeed::Random);
    Config { cases: amount(sample, all), failure_persistence: None, rng_seed, ..Config::default() }
}
