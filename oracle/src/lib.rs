//! The reference of Kyklos: the right result, the tolerance, and the inputs of the tests.
//!
//! # Contract
//!
//! - [`oracle`] is attention in f64, written directly from its definition. It shares no code and no
//!   algorithm with the product, and this must not change: no tiles, no running state, no merge, no
//!   dependency on `kyklos`.
//! - [`tolerance`] is the only place where a tolerance is computed. A suite that needs a number
//!   takes a [`tolerance::Limit`]; a literal `1e-5` in a test is a bug.
//! - [`wire`] computes the rounded keys and values of the wire formats. Like the oracle, it shares
//!   no code with the product.
//! - [`inputs`] makes the same tensors for every number of ranks, and lists the difficult problems
//!   of all suites.
//!
//! This crate does not block, starts no thread and does no I/O. Constructors refuse malformed
//! arguments with an [`oracle::OracleError`]. An index outside a tensor is a bug of the caller and
//! panics.
#![forbid(unsafe_code)]

pub mod inputs;
pub mod oracle;
pub mod tolerance;
pub mod wire;

#[cfg(test)]
mod seeded_bias_gradient_faults;
#[cfg(test)]
mod seeded_faults;
#[cfg(test)]
mod seeded_gradient_faults;
