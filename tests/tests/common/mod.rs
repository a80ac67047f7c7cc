//! Shared by the programs of these suites, beside `kyklos_backend_suite`.

#![allow(dead_code, reason = "each program uses its part")]

pub mod devices;
mod threads;

#[allow(unused_imports, reason = "each program uses its part")]
pub use threads::{run_plans, run_set};
