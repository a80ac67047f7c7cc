//! The suite that holds a backend to its contract, for backends in any crate.
//!
//! It checks every claim of [`kyklos::backend`] on a device: all cases of the f64 oracle in every
//! storage type, alone and on meshes of several ranks, non-finite values, running states, copies,
//! conversions, gradients, memory and cancellation. The tests of the backends `cpu`, `wgpu` and
//! `cuda` are this suite.
//!
//! # For your backend
//!
//! In `Cargo.toml`:
//!
//! ```toml
//! [dev-dependencies]
//! kyklos-backend-suite = "0.2"
//!
//! [[test]]
//! name = "backend"
//! harness = false
//! ```
//!
//! and all of `tests/backend.rs`, here with the CPU backend:
//!
//! ```no_run
//! use kyklos::backend::cpu::CpuBackend;
//! fn main() { kyklos_backend_suite::run("my backend", || Ok(CpuBackend::new())) }
//! ```
//!
//! Then `cargo test --release --test backend`. Without `--release` the oracle takes minutes. Words
//! after `--` choose claims: `cargo test --release --test backend -- "in f32"`. [`Suite`] has more:
//! several devices in one program, devices that are absent.
//!
//! # The start of a backend
//!
//! [`DoNothing`] is a backend that computes nothing; its source, `src/do_nothing.rs`, says at each
//! operation what a backend has to do there. Copy it, run the suite on it, and make the claims
//! true. It is here and not in `kyklos`, so that no program can choose it as a device.
//!
//! # In a browser
//!
//! There [`conformance::checks`] gives the claims as futures, and a page runs them.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

pub mod conformance;
mod do_nothing;
pub mod fixed_order;
mod gradients;
mod kept;
#[cfg(not(target_arch = "wasm32"))]
mod observed;
mod prepared;
mod rank_output;
#[cfg(not(target_arch = "wasm32"))]
pub mod resident;
mod running;
#[cfg(not(target_arch = "wasm32"))]
mod suite;

pub use self::do_nothing::DoNothing;
pub use self::gradients::GradientCase;
#[cfg(not(target_arch = "wasm32"))]
pub use self::observed::{Observed, Observer};
pub use self::prepared::{Prepared, Whole, chosen_cases, only_head_dim, oracle_dtype, problem_of};
pub use self::rank_output::RankOutput;
pub use self::running::{
    DEADLINE, attend_planned, dense_set, options, planned, proved, run_alone, run_rank, run_together,
};
#[cfg(not(target_arch = "wasm32"))]
pub use self::suite::{Suite, run};
