//! Control frames: everything that ranks send to each other except payload.

use std::fmt;
use std::net::SocketAddr;

use super::candidates::Candidates;
use super::notes::Notes;
use crate::error::Abort;
use crate::membership::Claim;
use crate::rank::{Progress, Rank, RefusalReason, Tag, Vote};

/// A control frame.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Frame {
    /// First frame of the side that dialled.
    Hello {
        /// Protocol version that the sender speaks.
        protocol: u16,
        /// The purpose of the connection.
        purpose: Purpose,
        /// 128-bit number of the job.
        job: [u8; 16],
        /// Counts re-formations of the group within one job.
        epoch: u32,
        /// The rank that dials.
        rank: Rank,
        /// Number of ranks in the sender's configuration.
        size: u32,
    },
    /// The dialled side takes the connection.
    Welcome {
        /// Protocol version that the sender speaks.
        protocol: u16,
        /// The addresses of its lanes except the first, at most [`super::MOST_LANES`] - 1.
        lane_ports: Vec<u16>,
        /// Microseconds between two of its heartbeats.
        heartbeat_us: u32,
        /// Whether its times are those of links between data centres.
        wan: bool,
    },
    /// The dialled side refuses, and closes.
    Reject {
        /// Machine-readable reason.
        code: RejectCode,
        /// Reason for people.
        text: String,
    },
    /// The addresses at which the sender says it can be reached. It follows `Hello` on each
    /// connection that leads to a table.
    Advertise {
        /// In the order in which to try them, at most [`super::MOST_ADVERTISED`].
        addresses: Vec<SocketAddr>,
    },
    /// Where the next ranks of the group can be reached. A table of all ranks is one or more of
    /// these frames.
    AddressTable {
        /// By rank, after the ranks of the frame before: its addresses in the order in which to try
        /// them.
        candidates: Candidates,
    },
    /// The lower ranks to which the sender still has no data connection, though it dials them for a
    /// while. Replaces what it said before.
    Unreached {
        /// In order.
        peers: Vec<Rank>,
    },
    /// The sender has a connection to every other rank.
    Meshed,
    /// Every rank is meshed: the group exists.
    Start,
    /// From a rank that wants to form the next group: the groups to which it may belong.
    Join {
        /// None of a rank that was started anew.
        claims: Vec<Claim>,
        /// Milliseconds for which the sender would still wait for missing ranks.
        patience_ms: u32,
    },
    /// The members of the next group: from its lowest rank to the others. Their address table
    /// follows.
    Members {
        /// The next group's.
        epoch: u32,
        /// By rank of the next group, its rank in the first one.
        members: Vec<Rank>,
    },
    /// First frame of a side that dialled with a token: it asks for an identity.
    Apply {
        /// Which rank it wants to be; `None` takes any.
        rank: Option<Rank>,
        /// For the signature of its key: PKCS #10 in DER, at most [`super::MAX_DER_BYTES`].
        request: Vec<u8>,
        /// Proof that it knows the secret, for this connection and this request.
        proof: [u8; 32],
    },
    /// The answer to that.
    Grant {
        /// Which rank it is.
        rank: Rank,
        /// Number of ranks.
        size: u32,
        /// X.509 in DER, at most [`super::MAX_DER_BYTES`].
        certificate: Vec<u8>,
    },
    /// A rank's vote in its next round.
    Vote {
        /// The vote.
        vote: Vote,
    },
    /// The notes of the next ranks in a round that ended well. Such frames come before its verdict
    /// if a note is not empty.
    Notes {
        /// Rounds are counted from 0.
        round: u64,
        /// Those of the ranks after the ranks of the frame before, from rank 0 on.
        notes: Notes,
    },
    /// How a round of votes ended.
    Verdict {
        /// Rounds are counted from 0.
        round: u64,
        /// The refusal, if the round did not end well: the lowest refusing rank, its reason, its
        /// text.
        refusal: Option<(Rank, RefusalReason, String)>,
    },
    /// Whose vote a round lacks, for a rank that has voted in it.
    Missing {
        /// Rounds are counted from 0.
        round: u64,
        /// One rank that has not voted.
        rank: Rank,
        /// That rank has left, so the round can never end.
        left: bool,
    },
    /// The sender is alive; its progress.
    Ping {
        /// Position of the sender in its operation.
        progress: Progress,
        /// Number of beats of the sender's pulse.
        beats: u64,
        /// The sender computes, so it must make progress whatever others do.
        works: bool,
        /// If the sender does not compute: the ranks with which it has outstanding calls.
        waits_for: Vec<Rank>,
    },
    /// The coordinator is alive.
    Pong,
    /// The group is aborted; from a rank to the coordinator it is a request.
    Abort {
        /// Which rank failed, and why.
        abort: Abort,
    },
    /// The sender has lost its connection to a rank.
    LinkLost {
        /// The other side.
        peer: Rank,
        /// The error of the connection.
        text: String,
    },
    /// The sender needs nothing more and leaves the group.
    Leave,
    /// Answer to a leave.
    Goodbye,
    /// The sender has posted the receive of this message: it may be sent.
    Want {
        /// Which message, from the receiver of this frame.
        tag: Tag,
    },
    /// The sender has received this message, and its checksum fits.
    Done {
        /// Which message, from the receiver of this frame.
        tag: Tag,
    },
    /// The sender has given up this message. The message may have left before the receiver
    /// requested it.
    Withdraw {
        /// Which message, to the receiver of this frame.
        tag: Tag,
    },
    /// The sender cannot take this message.
    Refuse {
        /// Which message, from the receiver of this frame.
        tag: Tag,
        /// Why.
        text: String,
    },
    /// The sender offers shared memory for messages, in both directions. The first frame from a
    /// lower rank to a higher one, on their data connection.
    ShareMemory {
        /// Where to get it.
        offer: MemoryOffer,
    },
    /// The answer of a rank that gets no shared memory from the sender of an offer.
    NoSharedMemory {
        /// Why.
        text: String,
    },
}

/// Where two ranks on one host meet, and how they know each other there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MemoryOffer {
    /// Number in the name of the Unix socket at which the sender listens.
    pub socket: [u8; 16],
    /// Shown there by the rank that connects.
    pub secret_of_guest: [u8; 32],
    /// Shown there by the sender of the offer.
    pub secret_of_host: [u8; 32],
}

impl fmt::Debug for MemoryOffer {
    /// Without the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryOffer").finish_non_exhaustive()
    }
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Control frames between a rank and the coordinator.
    Control,
    /// Messages between two ranks, and control frames about these messages.
    Data,
    /// To form the next group of the survivors; the lower rank is dialled.
    Reform,
    /// To form the next group with restarted ranks.
    Rejoin,
    /// Chunks of messages between two ranks, beside the data connection.
    Lane,
}

/// Why a connection was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectCode {
    /// Another protocol version.
    Version,
    /// Another job or epoch.
    Job,
    /// The rank it names is not the rank of its certificate, or not in the group.
    Rank,
    /// Its configuration has another number of ranks.
    Size,
    /// This rank is here already.
    Duplicate,
    /// Another frame was expected.
    Protocol,
    /// The rank cannot form a group now: try later.
    Busy,
    /// The group has continued without this rank.
    Gone,
    /// Its token is wrong, used up or expired.
    Token,
}
