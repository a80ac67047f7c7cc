//! The flight recorder: the last events of a rank, kept at all times, to find out later why the
//! rank makes no progress.
//!
//! A ring of fixed size and counters for each peer. An event is a few numbers under a lock that is
//! held for the copy of one event, or of the whole ring while it is read: no allocation, no
//! formatting, no input or output. Nothing that a peer sends decides how much is kept.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Abort, Pending};
use crate::rank::{Progress, Rank, Tag};

/// The last events of one rank, and counters for each peer. Every [`crate::Transport`] keeps one.
#[derive(Debug)]
pub struct Recorder {
    rank: Rank,
    job: String,
    start: Moment,
    op: AtomicU64,
    step: AtomicU32,
    ring: Mutex<Ring>,
    peers: Box<[PeerCounters]>,
    last: Mutex<Last>,
}

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds since the transport was made; 0 where there is no clock (wasm).
    pub at_ns: u64,
    /// Kind of the event.
    pub kind: EventKind,
    /// The other side; this rank itself where there is none.
    pub peer: Rank,
    /// The message. For votes, `op` is the number of the agreement.
    pub tag: Tag,
    /// The plan step of this rank at that time.
    pub step: u32,
    /// Bytes of the message, or those of it that had moved when it ended early. For votes: of this
    /// rank's note, and of the notes of all ranks when they agreed.
    pub bytes: u64,
}

/// Kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A send was posted.
    SendPosted,
    /// A receive was posted.
    ReceivePosted,
    /// The peer requested a message of this rank.
    Asked,
    /// The first bytes of a posted message have arrived.
    FirstByte,
    /// The peer has the message.
    Sent,
    /// The message is here.
    Received,
    /// A call ended early: its deadline has passed, or the group was aborted.
    EndedEarly,
    /// The peer took its message back.
    Withdrawn,
    /// One of both sides refused the message.
    Refused,
    /// This rank entered a step of its plan.
    Step,
    /// This rank voted.
    Voted,
    /// An agreement ended.
    Agreed,
    /// The group was aborted, as far as this rank is concerned; the peer is the culprit.
    Aborted,
    /// The connection to the peer ended without a goodbye.
    LinkLost,
    /// The peer said goodbye.
    PeerLeft,
    /// The peer makes no progress while others wait for it; noted by rank 0.
    Slow,
}

/// The contents of a recorder at one moment.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The moment, as [`Event::at_ns`].
    pub now_ns: u64,
    /// Where this rank is.
    pub progress: Progress,
    /// The latest events, oldest first.
    pub events: Vec<Event>,
    /// Earlier events that are no longer kept.
    pub forgotten: u64,
    /// By rank.
    pub peers: Vec<PeerRecord>,
    /// The abort that ended the group, and its time.
    pub abort: Option<(u64, Abort)>,
    /// Calls that ended early.
    pub ended_early: Vec<Outstanding>,
}

/// Counters of one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerRecord {
    /// Messages that the peer has confirmed.
    pub messages_sent: u64,
    /// Their payload.
    pub bytes_sent: u64,
    /// Messages received from the peer.
    pub messages_received: u64,
    /// Their payload.
    pub bytes_received: u64,
    /// When this rank last received anything from the peer, as [`Event::at_ns`].
    pub heard_ns: Option<u64>,
    /// The position in the peer's last heartbeat, and when that heartbeat arrived. Heartbeats go to
    /// rank 0.
    pub progress: Option<Progress>,
}

/// A call that has not ended, or did not end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outstanding {
    /// The call, and its progress.
    pub pending: Pending,
    /// How long its caller has waited.
    pub waited: Duration,
}

#[derive(Debug)]
struct Ring {
    events: Vec<Event>,
    /// Where the next event goes once the ring is full.
    next: usize,
    written: u64,
}

#[derive(Debug, Default)]
struct PeerCounters {
    messages_sent: AtomicU64,
    bytes_sent: AtomicU64,
    messages_received: AtomicU64,
    bytes_received: AtomicU64,
    /// One more than the time: 0 is never.
    heard_ns: AtomicU64,
    /// One more than the operation: 0 is unknown.
    op: AtomicU64,
    step: AtomicU32,
}

/// Data that is written once or rarely.
#[derive(Debug, Default)]
struct Last {
    abort: Option<(u64, Abort)>,
    ended_early: Vec<Outstanding>,
}

impl Recorder {
    /// An empty recorder of `rank` in a group of `size`; `job` names the group in dumps.
    pub fn new(rank: Rank, size: u32, job: String) -> Self {
        Self {
            rank,
            job,
            start: Moment::now(),
            op: AtomicU64::new(0),
            step: AtomicU32::new(0),
            ring: Mutex::new(Ring { events: Vec::with_capacity(EVENTS), next: 0, written: 0 }),
            peers: (0..size).map(|_| PeerCounters::default()).collect(),
            last: Mutex::default(),
        }
    }

    /// The name of the group.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// Notes an event. Counts the message if it is one that has arrived.
    pub fn note(&self, kind: EventKind, peer: Rank, tag: Tag, bytes: u64) {
        self.count(kind, peer, 1, bytes);
        let step = self.step.load(Ordering::Relaxed);
        // The time is taken under the lock, so that events stand in the order of their times.
        let mut ring = lock(&self.ring);
        let event = Event { at_ns: self.start.elapsed_ns(), kind, peer, tag, step, bytes };
        ring.push(event);
    }

    /// Counts `bytes` bytes more of a message that was noted as [`EventKind::Sent`] or
    /// [`EventKind::Received`], and did not pass through the transport itself.
    pub fn note_more_bytes(&self, kind: EventKind, peer: Rank, bytes: u64) {
        self.count(kind, peer, 0, bytes);
    }

    fn count(&self, kind: EventKind, peer: Rank, messages: u64, bytes: u64) {
        let Some(counters) = self.peers.get(peer.0 as usize) else { return };
        let [of_messages, of_bytes] = match kind {
            EventKind::Sent => [&counters.messages_sent, &counters.bytes_sent],
            EventKind::Received => [&counters.messages_received, &counters.bytes_received],
            _ => return,
        };
        of_messages.fetch_add(messages, Ordering::Relaxed);
        of_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// This rank enters a step.
    pub(crate) fn enter(&self, progress: Progress) {
        self.op.store(progress.op, Ordering::Relaxed);
        self.step.store(progress.step, Ordering::Relaxed);
        self.note(EventKind::Step, self.rank, Tag { op: progress.op, message: 0 }, 0);
    }

    /// Where this rank is.
    pub(crate) fn progress(&self) -> Progress {
        // Between the two stores this may be a step of the operation before: good enough for an error text.
        Progress { op: self.op.load(Ordering::Relaxed), step: self.step.load(Ordering::Relaxed) }
    }

    /// A frame or bytes from a peer have arrived. This is no event: heartbeats would push out all
    /// other events.
    #[cfg(feature = "quic")]
    pub(crate) fn heard(&self, peer: Rank, progress: Option<Progress>) {
        let Some(counters) = self.peers.get(peer.0 as usize) else { return };
        counters.heard_ns.store(self.start.elapsed_ns().saturating_add(1), Ordering::Relaxed);
        if let Some(progress) = progress {
            counters.step.store(progress.step, Ordering::Relaxed);
            counters.op.store(progress.op.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// The group has been aborted. The first one counts.
    pub(crate) fn aborted(&self, abort: &Abort) {
        let tag = Tag { op: abort.progress.op, message: 0 };
        self.note(EventKind::Aborted, abort.culprit, tag, 0);
        lock(&self.last).abort.get_or_insert_with(|| (self.start.elapsed_ns(), abort.clone()));
    }

    /// A call has ended without its value.
    pub(crate) fn ended_early(&self, pending: Pending, waited: Duration) {
        self.note(EventKind::EndedEarly, pending.peer, pending.tag, pending.bytes_done);
        let calls = &mut lock(&self.last).ended_early;
        if calls.len() < ENDED_EARLY {
            calls.push(Outstanding { pending, waited });
        }
    }

    /// Copies everything that is recorded.
    pub fn look(&self) -> Recorded {
        let (events, forgotten) = lock(&self.ring).in_order();
        let last = lock(&self.last);
        Recorded {
            now_ns: self.start.elapsed_ns(),
            progress: self.progress(),
            events,
            forgotten,
            peers: self.peers(),
            abort: last.abort.clone(),
            ended_early: last.ended_early.clone(),
        }
    }

    /// Where this rank is, without its events.
    pub fn now(&self) -> (u64, Progress) {
        (self.start.elapsed_ns(), self.progress())
    }

    /// The counters of the peers, by rank.
    pub fn peers(&self) -> Vec<PeerRecord> {
        self.peers.iter().map(PeerCounters::record).collect()
    }

    /// Whether the group has been aborted.
    pub fn is_aborted(&self) -> bool {
        lock(&self.last).abort.is_some()
    }
}

impl EventKind {
    /// Its name in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Self::SendPosted => "send-posted",
            Self::ReceivePosted => "receive-posted",
            Self::Asked => "asked",
            Self::FirstByte => "first-byte",
            Self::Sent => "sent",
            Self::Received => "received",
            Self::EndedEarly => "ended-early",
            Self::Withdrawn => "withdrawn",
            Self::Refused => "refused",
            Self::Step => "step",
            Self::Voted => "voted",
            Self::Agreed => "agreed",
            Self::Aborted => "aborted",
            Self::LinkLost => "link-lost",
            Self::PeerLeft => "peer-left",
            Self::Slow => "slow",
        }
    }
}

impl Ring {
    fn push(&mut self, event: Event) {
        self.written += 1;
        if self.events.len() < EVENTS {
            self.events.push(event);
        } else {
            self.events[self.next] = event;
            self.next = (self.next + 1) % EVENTS;
        }
    }

    fn in_order(&self) -> (Vec<Event>, u64) {
        let (newer, older) = self.events.split_at(self.next);
        let events = [older, newer].concat();
        (events, self.written - self.events.len() as u64)
    }
}

impl PeerCounters {
    fn record(&self) -> PeerRecord {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PeerRecord {
            messages_sent: load(&self.messages_sent),
            bytes_sent: load(&self.bytes_sent),
            messages_received: load(&self.messages_received),
            bytes_received: load(&self.bytes_received),
            heard_ns: load(&self.heard_ns).checked_sub(1),
            progress: load(&self.op)
                .checked_sub(1)
                .map(|op| Progress { op, step: self.step.load(Ordering::Relaxed) }),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics between two related changes of a record: a poisoned lock is usable.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A point in time, where there is a clock.
#[derive(Clone, Copy, Debug)]
struct Moment {
    #[cfg(not(target_family = "wasm"))]
    at: std::time::Instant,
}

impl Moment {
    fn now() -> Self {
        Self {
            #[cfg(not(target_family = "wasm"))]
            at: std::time::Instant::now(),
        }
    }

    fn elapsed_ns(self) -> u64 {
        #[cfg(not(target_family = "wasm"))]
        return u64::try_from(self.at.elapsed().as_nanos()).unwrap_or(u64::MAX);
        #[cfg(target_family = "wasm")]
        return 0;
    }
}

/// Events that are kept: 48 bytes each.
const EVENTS: usize = 2048;

/// Calls that ended early and are kept; a plan has fewer outstanding at a time.
const ENDED_EARLY: usize = 1024;

#[cfg(test)]
mod tests;
