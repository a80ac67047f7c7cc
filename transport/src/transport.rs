//! The seam: what a transport promises to the executor.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_channel::oneshot;

use crate::error::{Abort, TransportError};
use crate::figures::ConnectionFigures;
use crate::pulse::Pulse;
use crate::recorder::{Outstanding, Recorder};
use crate::reform::{Reformed, Regroup};

/// Moves bytes between the ranks of one group. Object-safe; the implementations are in-process channels and QUIC.
///
/// Every method may be called from any thread. No method blocks.
pub trait Transport: Send + Sync + fmt::Debug {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks in the group.
    fn world(&self) -> u32;

    /// Starts sending `parts` to rank `to` as the message `tag`.
    ///
    /// Completes when the receiver has the message, and says how long it was under way. Empty messages (no bytes at all) must not be sent:
    /// they are neither sent nor counted, and both sides know that from their plans.
    fn post_send(&self, to: Rank, tag: Tag, parts: Vec<Bytes>, deadline: Duration) -> Posted<Taken>;

    /// Registers the receive of the message `tag` from rank `from`, whose parts have exactly `part_bytes` bytes.
    ///
    /// The parts arrive in memory aligned to at least 16 bytes unless the sender's own memory is handed over
    /// (in-process), in which case they have the sender's alignment.
    fn post_recv(&self, from: Rank, tag: Tag, part_bytes: &[usize], deadline: Duration)
    -> Posted<Vec<Bytes>>;

    /// Exchanges votes before an operation: every rank brings [`Vote::Ready`] with the hash of what it is about to
    /// run, or refuses. Completes with `Ok(())` on all ranks if all are ready and all hashes are equal, and with
    /// the same error on all ranks otherwise (the lowest refusing rank's text and exit code).
    ///
    /// Votes are counted in call order: the n-th `agree` of one rank meets the n-th of the others. It carries no
    /// tensor bytes, so it is also the barrier between two operations.
    fn agree(&self, vote: Vote, deadline: Duration) -> Posted<()>;

    /// Ends the operation on every rank: this rank has failed for `reason`. Idempotent; the first abort that the
    /// coordinator sees wins.
    fn abort(&self, abort: Abort);

    /// What this rank is doing now, so that an abort caused by this rank's death can say it. Cheap; called at every step.
    fn report_progress(&self, progress: Progress);

    /// Rises when the group has been aborted. Long computations look at it between two pieces.
    fn stop_flag(&self) -> Arc<AtomicBool>;

    /// Of this rank: to be held and beaten by whoever computes, so that a rank that is stuck in its own work is found.
    fn pulse(&self) -> Arc<Pulse>;

    /// Says goodbye: waits (up to `deadline`) until peers have everything they were sent, then closes. A peer that
    /// leaves without this has died, as far as the others are concerned.
    fn close(&self, deadline: Duration) -> Posted<()>;

    /// Leaves a group that has been aborted, and forms the next one with the others that do the same, by `deadline`.
    ///
    /// Ends with the same group and epoch on all its ranks, or with [`TransportError::Bootstrap`], which says who did not
    /// come or that the others have gone on without this rank. This transport is closed either way.
    fn reform(&self, who: Regroup, deadline: Duration) -> Posted<Reformed>;

    /// What this rank has done lately: for whoever wants to know why a group stands still, and how much it moves.
    fn recorder(&self) -> Arc<Recorder>;

    /// The calls that have not ended.
    fn outstanding(&self) -> Vec<Outstanding>;

    /// What joins this rank to the others, in one line for people; `None` within one process.
    fn network(&self) -> Option<String>;

    /// Figures of the connections over which messages go, by rank; `None` for this rank, and within one process.
    fn connections(&self) -> Vec<Option<ConnectionFigures>>;
}

/// Index of a rank in its group, `0..world`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank that counts votes and whose decision on an abort is final.
    pub const COORDINATOR: Self = Self(0);
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Names a message between two ranks. A (source, destination, tag) triple is used once in the life of a group;
/// a call that uses one again is refused, as far as its operation is one of the last 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// Which operation (attention call, output collection, …) of this group, counted from 0 on every rank alike.
    pub op: u64,
    /// Which message of that operation.
    pub message: u32,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {} message {}", self.op, self.message)
    }
}

/// What a sender knows of a message that its receiver has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// From when this rank knew that the receiver had posted its receive, but not before the send was posted, until it
    /// knew that the receiver had all of it. What the send took beyond that, it waited for its receiver to ask.
    ///
    /// A small message may leave before it is asked for; as nobody can take it then, it counts from the ask all the same.
    /// Zero within one process, where a message is handed over at the moment both sides have posted it.
    pub under_way: Duration,
}

/// A rank's word before an operation starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vote {
    /// This rank is about to run the plan with this hash.
    Ready {
        /// BLAKE3 of everything that makes the plans of all ranks.
        plan_hash: [u8; 32],
    },
    /// This rank cannot run it.
    Refuse {
        /// Process exit code that the refusal asks for.
        exit: u8,
        /// One line that says why, and what would be right.
        text: String,
    },
}

/// Where a rank is in its operation; carried by heartbeats and quoted in errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Operation number, as in [`Tag::op`].
    pub op: u64,
    /// Step of the rank's plan.
    pub step: u32,
}

/// Completion of a call: a future that any thread may wait for with any executor.
#[must_use = "the work goes on by itself, but its failure is seen only by whoever waits for this"]
#[derive(Debug)]
pub struct Posted<T> {
    receiver: oneshot::Receiver<Result<T, TransportError>>,
}

/// The side of a [`Posted`] that ends it.
#[derive(Debug)]
pub(crate) struct Completer<T> {
    sender: oneshot::Sender<Result<T, TransportError>>,
}

impl<T> Posted<T> {
    pub(crate) fn pair() -> (Completer<T>, Self) {
        let (sender, receiver) = oneshot::channel();
        (Completer { sender }, Self { receiver })
    }
}

impl<T> Completer<T> {
    /// Ends the completion. Nobody waiting for it any more is not an error.
    pub(crate) fn complete(self, value: Result<T, TransportError>) {
        let _ = self.sender.send(value);
    }
}

impl<T> Future for Posted<T> {
    type Output = Result<T, TransportError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver)
            .poll(context)
            .map(|result| result.unwrap_or_else(|_| Err(TransportError::Closed)))
    }
}
