//! The state of one rank: its outstanding calls, and what its peers have reported about messages.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::calls::{self, Clock, Ended, Transfer};
use crate::error::TransportError;
use crate::quic::payload::assembly::Assembly;
use crate::rank::{Rank, Tag};
use crate::recorder::Recorder;

pub(crate) type Deadline = calls::Deadline<TokioClock>;
pub(crate) type Calls = calls::Calls<TokioClock, Outgoing, Incoming>;
pub(crate) type SendCall = calls::SendCall<TokioClock, Outgoing>;
pub(crate) type ReceiveCall = calls::ReceiveCall<TokioClock, Incoming>;

/// Changed under the core's lock.
#[derive(Debug)]
pub(crate) struct RankState {
    pub(crate) phase: Phase,
    pub(crate) calls: Calls,
    /// The deadline until which its watcher sleeps. It may be that of a call that has ended. `None`
    /// is for ever.
    pub(crate) watched: Option<Instant>,
    /// Round of votes in which this rank votes next.
    pub(crate) next_round: u64,
    pub(crate) peers: Vec<Peer>,
    /// The coordinator has seen this rank's leave.
    pub(crate) goodbye: bool,
}

/// Whether a rank takes part in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    Closing,
    /// Its connections are closed, or about to be.
    Closed,
}

/// The clock of the tokio runtime, which tests can pause.
#[derive(Debug)]
pub(crate) struct TokioClock;

impl Clock for TokioClock {
    type Instant = Instant;

    fn now() -> Instant {
        Instant::now()
    }

    fn later(time: Instant, by: Duration) -> Option<Instant> {
        time.checked_add(by)
    }

    fn until(time: Instant) -> Duration {
        time.saturating_duration_since(Instant::now())
    }
}

/// A message that is being sent.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// Payload bytes handed to QUIC.
    pub(crate) moved: Arc<AtomicU64>,
    /// When the receiver requested the message, but not earlier than its post on this rank.
    pub(crate) asked: Option<Instant>,
    /// Signalled when the receiver requests the message.
    pub(crate) wanted: Option<oneshot::Sender<()>>,
    /// Counts against the limit of unrequested messages in flight.
    pub(crate) unwanted: bool,
    pub(crate) task: AbortHandle,
}

/// A message that is being received.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// Payload bytes read.
    pub(crate) moved: Arc<AtomicU64>,
    /// From its first stream on.
    pub(crate) reading: Option<Reading>,
    /// From its post to its end.
    pub(crate) span: tracing::Span,
}

/// A message of which some bytes have arrived.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) assembly: Assembly,
    /// Of every chunk but the last.
    pub(crate) chunk_bytes: u64,
    /// Dropped to stop the tasks that read its chunks.
    pub(crate) going_on: watch::Sender<()>,
}

impl Transfer for Outgoing {
    fn bytes_done(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    fn give_up(&mut self) {
        self.task.abort();
    }
}

impl Transfer for Incoming {
    fn bytes_done(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    fn give_up(&mut self) {
        self.reading = None;
    }
}

/// The known state of the messages between this rank and another one, except messages that are
/// posted here.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    /// It has left the group in order.
    pub(crate) left: bool,
    /// Messages that it has requested and that are not posted here yet.
    pub(crate) wants: HashSet<Tag>,
    /// Messages from it that arrived before their receive was posted.
    pub(crate) early: BTreeMap<Tag, oneshot::Sender<()>>,
    /// Messages that it withdrew before they arrived.
    pub(crate) withdrawn: HashSet<Tag>,
    /// Messages in flight to it that it has not requested.
    pub(crate) unwanted: usize,
}

impl RankState {
    pub(crate) fn new(size: u32, recorder: Arc<Recorder>) -> Self {
        Self {
            phase: Phase::Open,
            calls: Calls::new(recorder),
            watched: None,
            next_round: 0,
            peers: (0..size).map(|_| Peer::default()).collect(),
            goodbye: false,
        }
    }

    pub(crate) fn peer(&mut self, rank: Rank) -> &mut Peer {
        &mut self.peers[rank.0 as usize]
    }

    /// Whether a new call may start.
    pub(crate) fn may_post(&self) -> Result<(), TransportError> {
        match self.phase {
            Phase::Open => self.calls.check_not_aborted(),
            Phase::Closing | Phase::Closed => Err(TransportError::Closed),
        }
    }

    /// Removes a send that has ended; the caller completes it.
    pub(crate) fn take_send(&mut self, to: Rank, tag: Tag, ended: Ended) -> Option<SendCall> {
        let call = self.calls.take_send(to, tag, ended)?;
        if call.transfer.unwanted {
            self.peer(to).unwanted -= 1;
        }
        Some(call)
    }

    /// Ends late calls. Returns unrequested messages that may be in flight: their receivers must
    /// not keep them.
    pub(crate) fn end_calls_past(&mut self, now: Instant) -> Vec<(Rank, Tag)> {
        let ended = self.calls.end_calls_past(now).into_iter();
        let unwanted: Vec<_> =
            ended.filter(|(.., transfer)| transfer.unwanted).map(|(to, tag, _)| (to, tag)).collect();
        for (to, _) in &unwanted {
            self.peer(*to).unwanted -= 1;
        }
        unwanted
    }
}
