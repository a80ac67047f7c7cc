//! The lines of a record: the common format of writer and reader.
//!
//! One JSON object a line. The first is of kind `rank`, the last of kind `end`: a record without
//! `end` is truncated. Times are nanoseconds on the rank's own clock, from the moment its transport
//! was made.

use serde::{Deserialize, Serialize};

/// A line of a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Line {
    /// The rank of the record.
    Rank(Box<RankLine>),
    /// What the rank knows about another rank.
    Peer(PeerLine),
    /// A call that is pending, or that was cancelled.
    Call(CallLine),
    /// The end of the group.
    Abort(AbortLine),
    /// One event.
    Event(EventLine),
    /// The last line.
    End,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankLine {
    pub(crate) format: u32,
    pub(crate) version: String,
    pub(crate) rank: u32,
    #[serde(rename = "world")]
    pub(crate) size: u32,
    pub(crate) job: String,
    pub(crate) plan_hash: String,
    pub(crate) strategy: String,
    pub(crate) mesh: String,
    pub(crate) pid: u32,
    pub(crate) started_unix_ms: u64,
    pub(crate) written_unix_ms: u64,
    pub(crate) now_ns: u64,
    /// `done`, `failed` or `asked`.
    pub(crate) why: String,
    pub(crate) error: Option<String>,
    pub(crate) at: StepAt,
    /// Number of older events that are no longer kept.
    pub(crate) forgotten: u64,
    /// The network between the ranks; none within one process.
    #[serde(default)]
    pub(crate) network: Option<String>,
    /// How the rank spent its time.
    #[serde(default)]
    pub(crate) spent: Spent,
    /// How messages go between devices, where the ranks have agreed on that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) messages: Option<MessagesLine>,
}

/// How messages go between devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MessagesLine {
    /// In words.
    pub(crate) ways: String,
    /// If the rank exchanges messages by NCCL.
    pub(crate) nccl: Option<NcclLine>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct NcclLine {
    pub(crate) version: String,
    /// The file of the library, where the system tells.
    pub(crate) library: Option<String>,
    /// Of the communicator.
    pub(crate) ranks: Vec<u32>,
    /// Exchanges that the rank has posted.
    pub(crate) posted: u64,
    /// Those of them that have ended well.
    pub(crate) ended: u64,
    /// Why the communicator was aborted, if it was.
    pub(crate) failure: Option<String>,
}

/// Time of all operations of a rank, up to its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spent {
    pub(crate) compute_ns: u64,
    /// Waiting for messages of others.
    pub(crate) receive_wait_ns: u64,
    /// Waiting until others ask for messages of this rank, while no expected message was missing.
    #[serde(default)]
    pub(crate) credit_blocked_ns: u64,
    /// Waiting until messages of this rank reach the others, while no expected message was missing.
    pub(crate) send_blocked_ns: u64,
    /// Packing, and copies between host and device.
    pub(crate) device_copy_ns: u64,
}

/// The position of a rank in its plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepAt {
    pub(crate) op: u64,
    pub(crate) step: u32,
    /// The text of the step.
    pub(crate) doing: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PeerLine {
    pub(crate) rank: u32,
    pub(crate) messages_sent: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) messages_received: u64,
    pub(crate) bytes_received: u64,
    /// Time of the last message from this peer.
    pub(crate) heard_ns: Option<u64>,
    /// Its position, from its last heartbeat.
    pub(crate) at: Option<StepAt>,
    /// Bytes of calls with this peer that are pending or were cancelled.
    pub(crate) bytes_done: u64,
    pub(crate) bytes_expected: u64,
    /// The connection to this peer; none within one process.
    #[serde(default)]
    pub(crate) connection: Option<ConnectionLine>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ConnectionLine {
    pub(crate) round_trip_ns: u64,
    pub(crate) packets_sent: u64,
    pub(crate) packets_lost: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CallLine {
    /// `send`, `receive` or `agree`.
    pub(crate) call: String,
    pub(crate) peer: u32,
    /// Of an `agree`, the number of the agreement.
    pub(crate) op: u64,
    pub(crate) message: u32,
    pub(crate) bytes_done: u64,
    pub(crate) bytes_expected: u64,
    pub(crate) waited_ns: u64,
    /// The call was cancelled.
    pub(crate) ended: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AbortLine {
    pub(crate) at_ns: u64,
    pub(crate) culprit: u32,
    /// The connection or the process is gone; else the rank failed with an error, its own or one
    /// that others reported.
    pub(crate) died: bool,
    pub(crate) text: String,
    pub(crate) at: StepAt,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventLine {
    pub(crate) at_ns: u64,
    pub(crate) event: String,
    pub(crate) peer: u32,
    pub(crate) op: u64,
    pub(crate) message: u32,
    pub(crate) step: u32,
    pub(crate) bytes: u64,
}

/// Version of the format.
pub(crate) const FORMAT: u32 = 1;
