//! The reference of Kyklos: the right result, the tolerance, and the inputs of the tests.
//!
//! # Contract
//!
//! - [`oracle`] is attention in f64, written straight from its definition. It shares no code and no algorithm with
//!   the product and must stay that way: no tiles, no running state, no merge, no dependency on `kyklos`.
//! - [`tolerance`] is the only place where a tolerance is computed. A suite that needs a number takes a
//!   [`tolerance::Limit`]; a literal `1e-5` in a test is a bug.
//! - [`wire`] is what keys and values become on the wire, as written here as the oracle is.
//! - [`inputs`] makes the same tensors for every number of ranks, and lists the awkward problems all suites run.
//!
//! Nothing here blocks, starts a thread or does I/O. Constructors refuse what is malformed with an
//! [`oracle::OracleError`]; an index outside a tensor is a bug of the caller and panics.
#![forbid(unsafe_code)]

pub mod inputs;
pub mod oracle;
pub mod tolerance;
pub mod wire;

#[cfg(test)]
mod seeded_faults;
