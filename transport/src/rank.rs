//! Ranks, the names of their messages, and their votes and positions.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
pub use kyklos_rank::{MAX_RANKS, Rank};

/// Names a message between two ranks. A (source, destination, tag) triple is used once in the life
/// of a group; a call that uses one again is refused, as far as its operation is one of the last
/// 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// Which operation (attention call, output collection, …) of this group, counted from 0 on
    /// every rank alike.
    pub op: u64,
    /// Which message of that operation.
    pub message: u32,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {} message {}", self.op, self.message)
    }
}

/// Facts about a message that has been delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Time from the moment at which this rank knew that the receive was posted (or posted its
    /// send, if later) until it knew that the receiver had the whole message. The rest of the
    /// send's time was spent waiting for the receive.
    ///
    /// A small message may leave before its receive is posted; its time counts from the post of the
    /// receive as well, and is zero if it had begun to arrive before that post.
    /// Zero within one process, where a message is handed over at the moment both sides have posted
    /// it.
    pub under_way: Duration,
}

/// The vote of a rank before an operation starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vote {
    /// This rank is about to run the plan with this hash.
    Ready {
        /// BLAKE3 of everything that makes the plans of all ranks.
        plan_hash: [u8; 32],
        /// What the other ranks must know of this rank, at most [`MAX_NOTE_BYTES`]. All ranks get
        /// the notes of all ranks when the round ends.
        note: Bytes,
    },
    /// This rank cannot run it.
    Refuse {
        /// The kind of the refusal.
        reason: RefusalReason,
        /// One line with the reason, and with a request that would be right.
        text: String,
    },
}

impl Vote {
    /// Ready, with an empty note.
    pub const fn ready(plan_hash: [u8; 32]) -> Self {
        Self::Ready { plan_hash, note: Bytes::new() }
    }
}

/// Longest [note](Vote::Ready::note) of a vote, in bytes.
pub const MAX_NOTE_BYTES: usize = 1024;

/// The kind of a rank's refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The request is wrong and fails again: it does not fit itself, the ranks have different ones,
    /// or it names what this rank's machine does not have.
    WrongRequest,
    /// The rank has failed.
    Failed,
    /// Anything else that programs agree on; neither 1 nor 2.
    Other(u8),
}

impl RefusalReason {
    /// The reason with this number: 1 is [`Self::Failed`], 2 is [`Self::WrongRequest`].
    pub const fn from_code(code: u8) -> Self {
        match code {
            1 => Self::Failed,
            2 => Self::WrongRequest,
            other => Self::Other(other),
        }
    }

    /// The number of the reason, as it is on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Self::Failed => 1,
            Self::WrongRequest => 2,
            Self::Other(code) => code,
        }
    }
}

/// The position of a rank in its operation; carried by heartbeats and quoted in errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Operation number, as in [`Tag::op`].
    pub op: u64,
    /// Step of the rank's plan.
    pub step: u32,
}
