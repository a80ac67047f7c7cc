//! The suite that holds a backend to its contract: each claim is checked against the f64 oracle.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

pub mod conformance;
#[cfg(not(target_arch = "wasm32"))]
mod counting;
pub mod fixed_order;
mod prepared;
#[cfg(not(target_arch = "wasm32"))]
pub mod resident;

pub use self::prepared::{
    DEADLINE, ONLY_HEAD_DIM, Prepared, Whole, chosen_cases, options, oracle_dtype, problem_of, proved,
    run_rank,
};
