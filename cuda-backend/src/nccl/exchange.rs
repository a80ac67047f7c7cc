//! An exchange on its way from a rank to the thread of its communicator, and what the two share.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use kyklos::Error;
use kyklos_transport::{EventKind, Pending, Progress, Rank, Recorder, Tag, TransportError};

use super::communicator::Part;
use crate::device::CudaBuffer;

/// Why the messages of a rank do not move.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The device of this rank, or NCCL on it.
    Own(Error),
    /// An exchange was not done in time.
    Late(TransportError),
    /// The group has been aborted.
    Group,
}

/// Ends when something has happened or has failed.
pub(super) type Outcome = oneshot::Receiver<Result<(), Failure>>;
pub(super) type Promise = oneshot::Sender<Result<(), Failure>>;

/// Bytes of a buffer that go to a peer or come from it.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) peer: Rank,
    /// The peer's number in the communicator.
    pub(super) number: u32,
    pub(super) buffer: CudaBuffer,
    pub(super) bytes: Range<usize>,
}

impl Transfer {
    pub(super) fn part(&self) -> Part {
        let Self { number, buffer, bytes, .. } = self;
        Part { address: buffer.address() + bytes.start as u64, bytes: bytes.len(), peer: *number }
    }
}

/// An exchange that was posted.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) tag: Tag,
    pub(super) sends: Vec<Transfer>,
    pub(super) recvs: Vec<Transfer>,
    pub(super) posted: Instant,
    /// `None` once it is in the stream.
    pub(super) submitted: Option<Promise>,
    pub(super) moved: Promise,
}

/// What a rank and the thread of its communicator share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    queue: Mutex<Queue>,
    pub(super) changed: Condvar,
    /// Exchanges that were posted, and those of them whose messages have moved.
    pub(super) posted: AtomicU64,
    pub(super) ended: AtomicU64,
    /// The progress of the rank.
    op: AtomicU64,
    step: AtomicU32,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Posted, and not taken by the thread.
    pub(super) exchanges: VecDeque<Exchange>,
    /// Whether the rank has left.
    pub(super) closed: bool,
    /// Why no exchange can be posted any more.
    pub(super) failure: Option<Failure>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes which step the rank has reached, for the abort by which other ranks learn of a failure
    /// here.
    pub(super) fn report_progress(&self, progress: Progress) {
        self.op.store(progress.op, Ordering::Relaxed);
        self.step.store(progress.step, Ordering::Relaxed);
    }

    pub(super) fn progress(&self) -> Progress {
        Progress { op: self.op.load(Ordering::Relaxed), step: self.step.load(Ordering::Relaxed) }
    }
}

/// The messages of transfers: the peer of each, and its bytes. Transfers of one message are next to
/// each other.
fn messages(transfers: &[Transfer]) -> impl Iterator<Item = (Rank, u64)> {
    let pieces = transfers.chunk_by(|one, other| one.peer == other.peer);
    pieces.map(|pieces| (pieces[0].peer, pieces.iter().map(|piece| piece.bytes.len() as u64).sum()))
}

impl Exchange {
    /// The buffers that it reads, and those that it writes.
    pub(super) fn buffers(&self) -> [Vec<&CudaBuffer>; 2] {
        [&self.sends, &self.recvs].map(|all| all.iter().map(|transfer| &transfer.buffer).collect())
    }

    /// Ends it with a failure, and returns its buffers. The rank may no longer wait for it.
    pub(super) fn fail(self, failure: &Failure) -> impl Iterator<Item = Transfer> {
        for promise in self.submitted.into_iter().chain([self.moved]) {
            let _ = promise.send(Err(failure.clone()));
        }
        self.sends.into_iter().chain(self.recvs)
    }

    /// The ranks on the other side of its messages, in order.
    pub(super) fn peers(&self) -> Vec<Rank> {
        let peers: BTreeSet<Rank> =
            self.sends.iter().chain(&self.recvs).map(|transfer| transfer.peer).collect();
        peers.into_iter().collect()
    }

    /// That it is not done after `waited`. NCCL tells of all its messages together, so the error
    /// names all their ranks.
    pub(super) fn late(&self, waited: Duration) -> Failure {
        let peers = self.peers();
        if peers.len() > 1 {
            return Failure::Late(TransportError::LateExchange { tag: self.tag, peers, waited });
        }
        let (operation, message) = match (messages(&self.recvs).next(), messages(&self.sends).next()) {
            (Some(received), _) => ("receive", Some(received)),
            (None, sent) => ("send", sent),
        };
        let (peer, bytes_expected) = message.unwrap_or((Rank::COORDINATOR, 0));
        let pending = Pending { operation, peer, tag: self.tag, bytes_done: 0, bytes_expected };
        Failure::Late(TransportError::Deadline { pending, waited })
    }

    /// Notes an event of each message: of a kind for those that this rank sends, and of another for
    /// those that it receives.
    pub(super) fn note(&self, recorder: &Recorder, [sent, received]: [EventKind; 2]) {
        for (kind, transfers) in [(received, &self.recvs), (sent, &self.sends)] {
            messages(transfers).for_each(|(peer, bytes)| recorder.note(kind, peer, self.tag, bytes));
        }
    }
}
