//! The one error type of this crate, by whose fault it is.

use kyklos_transport::{Rank, TransportError};

/// Why something could not be done.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What was asked for cannot be done; found before data moves, the same on every rank.
    #[error("{mismatch}: {remedy}")]
    Request {
        /// Both sides of the mismatch.
        mismatch: String,
        /// What would be right.
        remedy: String,
    },
    /// A plan failed its proof. A bug in a strategy, or a plan that was tampered with.
    #[error("plan of rank {rank}{}: {fault}", .step.map(|step| format!(", step {step}")).unwrap_or_default())]
    Plan {
        /// Whose plan.
        rank: u32,
        /// Which step, if one is to blame.
        step: Option<usize>,
        /// What is wrong.
        fault: String,
    },
    /// The device, or its driver, failed. Keeps the native text.
    #[error("{device}: {operation} failed: {native}")]
    Device {
        /// The device's name.
        device: String,
        /// What was being done.
        operation: String,
        /// The driver's own words.
        native: String,
    },
    /// The device has no such memory to give; found before anything is dispatched.
    #[error("{device}: {what} needs {asked_bytes} bytes, allowed are {allowed_bytes}")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes that one allocation or binding may have.
        allowed_bytes: u64,
    },
    /// Ranks could not finish together.
    #[error("rank {rank}, step {step} ({doing}): {source}")]
    Group {
        /// The rank that tells.
        rank: u32,
        /// Step of its plan.
        step: usize,
        /// That step in words.
        doing: String,
        /// What the transport said: names the culprit and the bytes.
        source: TransportError,
    },
    /// Keys that queries of those who are left see are with nobody any more.
    #[error(
        "keys {keys} of rank {rank} are lost: the rank was lost before any other one had all of them, and queries of rank \
         {seen_by} see them: run again, or go on without them"
    )]
    KeysLost {
        /// Whose keys they were.
        rank: u32,
        /// Which.
        keys: crate::TokenRuns,
        /// A rank with queries that see them.
        seen_by: u32,
    },
    /// The transport failed outside a plan's steps (bootstrap, agreement, collecting the result).
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The call was given up because its cancel token rose.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// A wrong request: what does not fit, and what would.
    pub fn request(mismatch: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Request { mismatch: mismatch.into(), remedy: remedy.into() }
    }

    pub(crate) fn plan(rank: Rank, step: Option<usize>, fault: impl Into<String>) -> Self {
        Self::Plan { rank: rank.0, step, fault: fault.into() }
    }

    /// The program's exit code for this error: 2 when the request is wrong, 1 when the run failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Request { .. } => 2,
            Self::Transport(TransportError::Refused { reason, .. })
            | Self::Group { source: TransportError::Refused { reason, .. }, .. } => reason.code(),
            _ => 1,
        }
    }
}
