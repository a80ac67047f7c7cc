//! The error type of this crate. Each variant says where the fault lies: in the request, a plan, a
//! device or the group.

use kyklos_plan::Remedy;
use kyklos_transport::TransportError;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
///
/// The texts use the names of this library. A program that shows them to its users adds its own
/// option for a [`Remedy`], and chooses its exit code by [`Self::is_request`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
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
    /// The device or its driver failed.
    #[error("{device}: {operation} failed: {native}")]
    Device {
        /// The device's name.
        device: String,
        /// The operation that failed, as a verb phrase.
        operation: String,
        /// The driver's own text.
        native: String,
    },
    /// The device cannot give so much memory. Found before anything is dispatched.
    #[error("{device}: {what} needs {asked_bytes} bytes, allowed are {allowed_bytes}")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// The purpose of the memory.
        what: String,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes that one allocation or binding may have.
        allowed_bytes: u64,
    },
    /// An operation failed on this rank or on another one, while this rank ran its plan.
    #[error("rank {rank}, step {step} ({doing}): {source}")]
    Group {
        /// The rank that reports the error.
        rank: u32,
        /// Index of the step of its plan.
        step: usize,
        /// That step in words.
        doing: String,
        /// The transport's error; it names the culprit and the bytes that had moved.
        source: TransportError,
    },
    /// The transport failed outside a plan's steps: forming the group, agreement, collecting the
    /// result.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The call's cancel flag was set.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// A wrong request: both sides of the mismatch, and a request that would be accepted.
    pub fn request(mismatch: impl Into<String>, remedy: impl Into<Remedy>) -> Self {
        Self::Request { mismatch: mismatch.into(), remedy: remedy.into() }
    }

    /// Whether this rank's own request is at fault. The same call fails again, on every rank alike,
    /// until the caller changes it.
    ///
    /// A refusal by the vote of another rank is [`TransportError::Refused`], which has its own
    /// reason.
    pub fn is_request(&self) -> bool {
        matches!(self, Self::Request { .. })
    }
}

impl From<kyklos_plan::Error> for Error {
    fn from(error: kyklos_plan::Error) -> Self {
        match error {
            kyklos_plan::Error::Request { mismatch, remedy } => Self::Request { mismatch, remedy },
            kyklos_plan::Error::Plan { rank, step, fault } => Self::Plan { rank, step, fault },
            kyklos_plan::Error::OutOfMemory { device, what, asked_bytes, allowed_bytes } => {
                Self::OutOfMemory { device, what, asked_bytes, allowed_bytes }
            }
        }
    }
}
