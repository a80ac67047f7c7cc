//! Why a request or a plan is refused.

use kyklos_rank::Rank;

pub use crate::remedy::Remedy;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why there is no plan.
///
/// ```
/// use kyklos_plan::{Error, Mask};
///
/// assert!(matches!("window:x".parse::<Mask>(), Err(Error::Request { .. })));
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The request cannot be satisfied. Found before any data moves, and the same on every rank.
    #[error("{mismatch}: {remedy}")]
    Request {
        /// Both sides of the mismatch.
        mismatch: String,
        /// A request that would be accepted.
        remedy: Remedy,
    },
    /// A plan failed its proof: a bug in a strategy, or a plan that was tampered with.
    #[error("plan of rank {rank}{}: {fault}", .step.map(|step| format!(", step {step}")).unwrap_or_default())]
    Plan {
        /// The rank whose plan it is.
        rank: u32,
        /// Index of the faulty step, if it is one step.
        step: Option<usize>,
        /// The fault.
        fault: String,
    },
    /// A device has too little memory for what its ranks hold at once.
    #[error("{device}: {what} needs {asked_bytes} bytes, allowed are {allowed_bytes}")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// The purpose of the memory.
        what: String,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes that it has.
        allowed_bytes: u64,
    },
}

impl Error {
    /// A wrong request: both sides of the mismatch, and a request that would be accepted.
    pub fn request(mismatch: impl Into<String>, remedy: impl Into<Remedy>) -> Self {
        Self::Request { mismatch: mismatch.into(), remedy: remedy.into() }
    }

    /// A plan of `rank` that failed its proof, in this step if it is one step.
    pub fn plan(rank: Rank, step: Option<usize>, fault: impl Into<String>) -> Self {
        Self::Plan { rank: rank.0, step, fault: fault.into() }
    }

    /// Whether the request is at fault: the same one is refused again, on every rank alike.
    pub fn is_request(&self) -> bool {
        matches!(self, Self::Request { .. })
    }
}
