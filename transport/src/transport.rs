//! The contract of a transport.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;

use crate::error::Abort;
use crate::figures::ConnectionFigures;
use crate::posted::Posted;
use crate::pulse::Pulse;
use crate::rank::{Progress, Rank, Tag, Taken, Vote};
use crate::recorder::{Outstanding, Recorder};

/// Moves bytes between the ranks of one group. Object-safe; the implementations are in-process
/// channels and QUIC.
///
/// Every method may be called from any thread. No method blocks.
pub trait Transport: Send + Sync + fmt::Debug {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks in the group.
    fn size(&self) -> u32;

    /// Starts sending `parts` to rank `to` as the message `tag`.
    ///
    /// Completes when the receiver has the message, and returns how long the message was in flight.
    /// Empty messages (no bytes at all) must not be sent: they are neither sent nor counted,
    /// and both sides know that from their plans.
    fn post_send(&self, to: Rank, tag: Tag, parts: Vec<Bytes>, deadline: Duration) -> Posted<Taken>;

    /// Registers the receive of the message `tag` from rank `from`, whose parts have exactly
    /// `part_bytes` bytes.
    ///
    /// The parts arrive in memory aligned to at least 16 bytes unless the sender's own memory is
    /// handed over (in-process), in which case they have the sender's alignment.
    fn post_recv(&self, from: Rank, tag: Tag, part_bytes: &[usize], deadline: Duration)
    -> Posted<Vec<Bytes>>;

    /// Exchanges votes before an operation: every rank brings [`Vote::Ready`] with the hash of what
    /// it is about to run and a note, or refuses. If all ranks are ready and all hashes are
    /// equal, it completes on all ranks with the notes of all ranks, by rank, this rank's
    /// included. Otherwise it completes with the same error on all ranks (the lowest refusing
    /// rank's reason and text).
    ///
    /// A note that is longer than [`crate::MAX_NOTE_BYTES`] is [`crate::TransportError::Misuse`]:
    /// no vote is cast, and the group is as before.
    ///
    /// Votes are counted in call order: the n-th `agree` of one rank meets the n-th of the others.
    /// It carries no tensor bytes, so it is also the barrier between two operations.
    ///
    /// ```
    /// use std::time::Duration;
    /// use kyklos_transport::{Transport, Vote, in_process_group};
    ///
    /// let (group, second) = (in_process_group(2), Duration::from_secs(1));
    /// let vote = |tokens: &'static str| Vote::Ready { plan_hash: [7; 32], note: tokens.into() };
    /// let votes = [group[0].agree(vote("40 tokens"), second), group[1].agree(vote("24 tokens"), second)];
    /// for notes in votes {
    ///     assert_eq!(pollster::block_on(notes)?, ["40 tokens", "24 tokens"]);
    /// }
    /// # Ok::<(), kyklos_transport::TransportError>(())
    /// ```
    fn agree(&self, vote: Vote, deadline: Duration) -> Posted<Vec<Bytes>>;

    /// Ends the operation on every rank: this rank has failed for `reason`. Idempotent; the first
    /// abort that the coordinator sees wins. If `culprit` is another rank, the text of the cause
    /// says on all ranks who asked for it.
    fn abort(&self, abort: Abort);

    /// Records what this rank is doing now, so that an abort caused by this rank's death can name
    /// it. Cheap; called at every step.
    fn report_progress(&self, progress: Progress);

    /// Rises when the group has been aborted. Long computations look at it between two pieces.
    fn stop_flag(&self) -> Arc<AtomicBool>;

    /// The pulse of this rank. Code that computes holds work of it and beats, so that a rank that
    /// is stuck in its work is found.
    fn pulse(&self) -> Arc<Pulse>;

    /// Leaves the group in order: waits (up to `deadline`) until the peers have all messages that
    /// were sent to them, then closes. For the other ranks, a peer that leaves without this has
    /// died.
    fn close(&self, deadline: Duration) -> Posted<()>;

    /// Leaves a group that has been aborted, and forms the next one with the others that do the
    /// same, by `deadline`.
    ///
    /// Ends with the same group and epoch on all its ranks, or with
    /// [`crate::TransportError::Bootstrap`]. The error names the missing ranks, or reports that
    /// the other ranks have continued without this rank. This transport is closed either way.
    fn reform(&self, who: Regroup, deadline: Duration) -> Posted<Group>;

    /// The recorder of this rank: its last events and its counters.
    fn recorder(&self) -> Arc<Recorder>;

    /// The calls that have not ended.
    fn outstanding(&self) -> Vec<Outstanding>;

    /// The network path of this rank in one line for people; `None` within one process.
    fn network(&self) -> Option<String>;

    /// Figures of the connections over which messages go, by rank; `None` for this rank, and within
    /// one process.
    fn connections(&self) -> Vec<Option<ConnectionFigures>>;
}

/// Which ranks are to be in the next group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regroup {
    /// The survivors of the last group.
    Survivors,
    /// All ranks of the first group, restarted ranks among them; after `within`, the ranks that are
    /// present.
    Everyone {
        /// How long to wait for missing ranks.
        within: Duration,
    },
}

/// A group of ranks, on one of them: what all functions that form one return. It has the methods of
/// [`Transport`]. When the last clone is dropped without [`Transport::close`], the rank has died.
///
/// ```
/// use kyklos_transport::in_process_group;
///
/// let group = in_process_group(2).remove(1);
/// assert_eq!((group.rank().0, group.size()), (1, 2));
/// ```
#[derive(Clone, Debug)]
pub struct Group {
    /// This rank's end of it, with the number that it has there.
    pub transport: Arc<dyn Transport>,
    /// By rank of this group, its rank in the first one.
    pub members: Vec<Rank>,
    /// Grows each time the group forms again; unique among the groups of a job.
    pub epoch: u32,
}

impl Deref for Group {
    type Target = dyn Transport;

    fn deref(&self) -> &Self::Target {
        &*self.transport
    }
}

/// The first group of these ranks.
impl From<Arc<dyn Transport>> for Group {
    fn from(transport: Arc<dyn Transport>) -> Self {
        let members = (0..transport.size()).map(Rank).collect();
        Self { transport, members, epoch: 0 }
    }
}

impl From<Group> for Arc<dyn Transport> {
    fn from(group: Group) -> Self {
        group.transport
    }
}
