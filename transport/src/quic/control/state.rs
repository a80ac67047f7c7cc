//! What one rank remembers: its outstanding calls, and what its peers have said of messages.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::error::{Abort, Pending, TransportError};
use crate::history::{Ended, History};
use crate::posted::Completer;
use crate::quic::payload::assembly::Assembly;
use crate::rank::{Rank, Tag, Taken};
use crate::recorder::{Outstanding, Recorder};

/// Changed under the core's lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    pub(crate) abort: Option<Abort>,
    // In order, so that what is done to all of them is done in the same order every time.
    pub(crate) sends: BTreeMap<(Rank, Tag), SendCall>,
    pub(crate) recvs: BTreeMap<(Rank, Tag), RecvCall>,
    pub(crate) agrees: BTreeMap<u64, AgreeCall>,
    pub(crate) next_round: u64,
    pub(crate) peers: Vec<Peer>,
    /// The coordinator has seen this rank's leave.
    pub(crate) goodbye: bool,
    /// Hears of calls that end early.
    pub(crate) recorder: Arc<Recorder>,
}

/// Where a rank is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    Closing,
    /// Its connections are closed, or about to be.
    Closed,
}

#[derive(Debug)]
pub(crate) struct SendCall {
    pub(crate) completer: Completer<Taken>,
    pub(crate) total: u64,
    pub(crate) moved: Arc<AtomicU64>,
    pub(crate) patience: Patience,
    /// Since when the receiver has wanted the message, but not before it was posted here.
    pub(crate) asked: Option<Instant>,
    /// Told when the receiver wants the message.
    pub(crate) wanted: Option<oneshot::Sender<()>>,
    /// Counts against the messages that may be under way unwanted.
    pub(crate) unwanted: bool,
    pub(crate) task: AbortHandle,
}

#[derive(Debug)]
pub(crate) struct RecvCall {
    pub(crate) completer: Completer<Vec<Bytes>>,
    pub(crate) part_bytes: Vec<usize>,
    pub(crate) total: u64,
    pub(crate) moved: Arc<AtomicU64>,
    pub(crate) patience: Patience,
    /// From its first stream on.
    pub(crate) reading: Option<Reading>,
    /// From its post to its end.
    pub(crate) span: tracing::Span,
}

/// A message of which something has come.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) assembly: Assembly,
    /// Dropped to stop those who read.
    pub(crate) going_on: watch::Sender<()>,
}

#[derive(Debug)]
pub(crate) struct AgreeCall {
    pub(crate) completer: Completer<()>,
    pub(crate) patience: Patience,
    /// Whose vote is missing, as the coordinator last said; the coordinator itself until it has.
    pub(crate) missing: Rank,
}

/// When a call must end, and what its caller asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) until: Instant,
    pub(crate) asked: Duration,
}

impl Patience {
    pub(crate) fn of(asked: Duration) -> Self {
        let now = Instant::now();
        let until = now.checked_add(asked).unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600));
        Self { until, asked }
    }

    /// How long the caller has waited.
    pub(crate) fn waited(self) -> Duration {
        self.asked.saturating_sub(self.until.saturating_duration_since(Instant::now()))
    }
}

/// What is known of the messages between this rank and another one.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    /// It said goodbye.
    pub(crate) left: bool,
    /// Messages it wants that have not been posted here.
    pub(crate) wants: HashSet<Tag>,
    /// Messages from it that came before their receive was posted.
    pub(crate) early: BTreeMap<Tag, oneshot::Sender<()>>,
    /// Messages that it took back before they came.
    pub(crate) withdrawn: HashSet<Tag>,
    /// Receives from it that have ended.
    pub(crate) received: History,
    /// Sends to it that have ended.
    pub(crate) sent: History,
    /// Messages under way to it that it has not asked for.
    pub(crate) unwanted: usize,
}

impl Peer {
    fn send_ended(&mut self, tag: Tag, call: &SendCall, ended: Ended) {
        if call.unwanted {
            self.unwanted -= 1;
        }
        self.sent.end(tag, ended);
    }
}

impl State {
    pub(crate) fn new(world: u32, recorder: Arc<Recorder>) -> Self {
        Self {
            phase: Phase::Open,
            abort: None,
            sends: BTreeMap::new(),
            recvs: BTreeMap::new(),
            agrees: BTreeMap::new(),
            next_round: 0,
            peers: (0..world).map(|_| Peer::default()).collect(),
            goodbye: false,
            recorder,
        }
    }

    /// Whether a new call may start.
    pub(crate) fn may_post(&self) -> Result<(), TransportError> {
        match (self.phase, &self.abort) {
            (Phase::Open, None) => Ok(()),
            (Phase::Open, Some(abort)) => {
                Err(TransportError::Aborted { abort: abort.clone(), pending: None })
            }
            (Phase::Closing | Phase::Closed, _) => Err(TransportError::Closed),
        }
    }

    /// What this rank still needs of a rank that has left.
    pub(crate) fn still_needs(&self, peer: Rank, me: Rank) -> Option<String> {
        if let Some((_, tag)) = self.recvs.keys().find(|(from, _)| *from == peer) {
            return Some(format!("left the group while rank {me} still expected {tag} from it"));
        }
        let (_, tag) = self.sends.keys().find(|(to, _)| *to == peer)?;
        Some(format!("left the group while rank {me} still had {tag} for it"))
    }

    /// Removes a send that has ended, and what hangs on it.
    pub(crate) fn take_send(&mut self, to: Rank, tag: Tag, ended: Ended) -> Option<SendCall> {
        let call = self.sends.remove(&(to, tag))?;
        self.peers[to.0 as usize].send_ended(tag, &call, ended);
        Some(call)
    }

    /// The calls that have not ended.
    pub(crate) fn outstanding(&self) -> Vec<Outstanding> {
        let outstanding = |pending, patience: Patience| Outstanding { pending, waited: patience.waited() };
        let sends = self.sends.iter().map(|(&(to, tag), call)| (call.pending(to, tag), call.patience));
        let recvs = self.recvs.iter().map(|(&(from, tag), call)| (call.pending(from, tag), call.patience));
        let agrees = self.agrees.iter().map(|(&round, call)| (call.pending(round), call.patience));
        sends.chain(recvs).chain(agrees).map(|(pending, patience)| outstanding(pending, patience)).collect()
    }

    /// The ranks with which messages are outstanding, lowest first.
    pub(crate) fn waits_for(&self) -> Vec<Rank> {
        let peers: BTreeSet<Rank> =
            self.sends.keys().chain(self.recvs.keys()).map(|&(peer, _)| peer).collect();
        peers.into_iter().collect()
    }

    pub(crate) fn fail_everything(&mut self) {
        let Some(abort) = self.abort.clone() else { return };
        let error = |pending| TransportError::Aborted { abort: abort.clone(), pending: Some(pending) };
        for ((to, tag), call) in std::mem::take(&mut self.sends) {
            call.task.abort();
            let pending = call.pending(to, tag);
            self.recorder.ended_early(pending, call.patience.waited());
            call.completer.complete(Err(error(pending)));
        }
        for ((from, tag), call) in std::mem::take(&mut self.recvs) {
            // It may be on its way: its sender has been asked for it, and does not know of the abort yet.
            self.peers[from.0 as usize].received.end(tag, Ended::GivenUp);
            let pending = call.pending(from, tag);
            self.recorder.ended_early(pending, call.patience.waited());
            call.completer.complete(Err(error(pending)));
        }
        for (round, call) in std::mem::take(&mut self.agrees) {
            let pending = call.pending(round);
            self.recorder.ended_early(pending, call.patience.waited());
            call.completer.complete(Err(error(pending)));
        }
    }

    /// This rank closes: it waits for nothing any more.
    pub(crate) fn end_receives(&mut self) {
        for ((from, tag), call) in std::mem::take(&mut self.recvs) {
            self.peers[from.0 as usize].received.end(tag, Ended::GivenUp);
            call.completer.complete(Err(TransportError::Closed));
        }
        for (_, call) in std::mem::take(&mut self.agrees) {
            call.completer.complete(Err(TransportError::Closed));
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        (self.sends.values().map(|call| call.patience.until))
            .chain(self.recvs.values().map(|call| call.patience.until))
            .chain(self.agrees.values().map(|call| call.patience.until))
            .min()
    }

    /// Ends late calls. Returns messages that may be under way unwanted: their receivers must not keep them.
    pub(crate) fn end_calls_past(&mut self, now: Instant) -> Vec<(Rank, Tag)> {
        let mut unwanted = Vec::new();
        let late = |pending, patience: Patience| TransportError::Deadline { pending, waited: patience.asked };
        for ((to, tag), call) in take_late(&mut self.sends, |call| call.patience.until <= now) {
            self.peers[to.0 as usize].send_ended(tag, &call, Ended::GivenUp);
            if call.unwanted {
                unwanted.push((to, tag));
            }
            call.task.abort();
            let pending = call.pending(to, tag);
            self.recorder.ended_early(pending, call.patience.waited());
            call.completer.complete(Err(late(pending, call.patience)));
        }
        for ((from, tag), call) in take_late(&mut self.recvs, |call| call.patience.until <= now) {
            self.peers[from.0 as usize].received.end(tag, Ended::GivenUp);
            let pending = call.pending(from, tag);
            self.recorder.ended_early(pending, call.patience.waited());
            call.completer.complete(Err(late(pending, call.patience)));
        }
        for (round, call) in take_late(&mut self.agrees, |call| call.patience.until <= now) {
            let pending = call.pending(round);
            self.recorder.ended_early(pending, call.patience.waited());
            call.completer.complete(Err(late(pending, call.patience)));
        }
        unwanted
    }
}

/// Removes the calls that are late.
fn take_late<K: Copy + Ord, C>(calls: &mut BTreeMap<K, C>, is_late: impl Fn(&C) -> bool) -> Vec<(K, C)> {
    let late: Vec<K> = calls.iter().filter(|(_, call)| is_late(call)).map(|(&key, _)| key).collect();
    late.into_iter().filter_map(|key| calls.remove_entry(&key)).collect()
}

impl SendCall {
    pub(crate) fn pending(&self, peer: Rank, tag: Tag) -> Pending {
        let bytes_done = self.moved.load(Ordering::Relaxed);
        Pending { operation: "send", peer, tag, bytes_done, bytes_expected: self.total }
    }
}

impl RecvCall {
    pub(crate) fn pending(&self, peer: Rank, tag: Tag) -> Pending {
        let bytes_done = self.moved.load(Ordering::Relaxed);
        Pending { operation: "receive", peer, tag, bytes_done, bytes_expected: self.total }
    }
}

impl AgreeCall {
    fn pending(&self, round: u64) -> Pending {
        let tag = Tag { op: round, message: 0 };
        Pending { operation: "agree", peer: self.missing, tag, bytes_done: 0, bytes_expected: 0 }
    }
}
