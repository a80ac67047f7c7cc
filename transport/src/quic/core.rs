//! The state of one rank: its outstanding calls, and what its peers have said.
//!
//! Calls come in from any thread, frames and streams from tasks of the tokio context; both change the state under
//! one lock that is never held across a wait.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use quinn::Connection;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::control::Coordinator;
use super::frames::FrameSender;
use super::identity::JobId;
use crate::error::{Abort, AbortCause, Pending, TransportError};
use crate::transport::{Completer, Progress, Rank, Tag};
use crate::wire::Frame;

/// Everything that the tasks of one rank share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) me: Rank,
    pub(crate) world: u32,
    pub(crate) job: JobId,
    pub(crate) epoch: u32,
    pub(crate) heartbeat: Duration,
    pub(crate) stop_flag: Arc<AtomicBool>,
    pub(crate) endpoint: quinn::Endpoint,
    /// Data connections, by rank; none to itself.
    pub(crate) links: Vec<Option<Link>>,
    /// Control connections: of rank 0 to every other rank, of another rank to rank 0.
    pub(crate) control: Vec<Option<Link>>,
    /// Of rank 0.
    pub(crate) coordinator: Option<Coordinator>,
    pub(crate) runtime: Handle,
    /// Wakes who waits for calls to end, or for a deadline that has become earlier.
    pub(crate) changed: Notify,
    /// Becomes true when the rank has gone and all its tasks must end.
    pub(crate) over: watch::Sender<bool>,
    progress_op: AtomicU64,
    progress_step: AtomicU64,
    state: Mutex<State>,
}

/// A connection to a rank and the way its frames go out.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    frames: Mutex<Option<FrameSender>>,
    /// Becomes true when every frame has reached the peer, or never will.
    pub(crate) flushed: watch::Receiver<bool>,
}

impl Link {
    pub(crate) fn new(connection: Connection, frames: FrameSender, flushed: watch::Receiver<bool>) -> Self {
        Self {
            connection,
            frames: Mutex::new(Some(frames)),
            flushed,
        }
    }

    /// Queues a frame. A link that is gone drops it: its watcher knows.
    pub(crate) fn say(&self, frame: Frame) {
        if let Some(frames) = &*self.frames.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = frames.send(frame);
        }
    }

    /// No frame follows: ends the stream once the peer has all of them.
    pub(crate) fn hang_up(&self) {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    pub(crate) abort: Option<Abort>,
    pub(crate) sends: HashMap<(Rank, Tag), SendCall>,
    pub(crate) recvs: HashMap<(Rank, Tag), RecvCall>,
    pub(crate) agrees: BTreeMap<u64, AgreeCall>,
    pub(crate) next_round: u64,
    pub(crate) peers: Vec<Peer>,
    /// The coordinator has seen this rank's leave.
    pub(crate) goodbye: bool,
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
    pub(crate) completer: Completer<()>,
    pub(crate) total: u64,
    pub(crate) moved: Arc<AtomicU64>,
    pub(crate) patience: Patience,
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
    /// While a stream is being read; dropped to stop the reading.
    pub(crate) reading: Option<oneshot::Sender<Infallible>>,
}

#[derive(Debug)]
pub(crate) struct AgreeCall {
    pub(crate) completer: Completer<()>,
    pub(crate) patience: Patience,
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
        let until = now
            .checked_add(asked)
            .unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600));
        Self { until, asked }
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
    pub(crate) early: HashMap<Tag, oneshot::Sender<()>>,
    /// Receives that have ended, of recent operations.
    pub(crate) ended: BTreeMap<Tag, Ended>,
    /// Latest operation of which a message was received or expected here.
    pub(crate) latest_op: u64,
    /// Messages under way to it that it has not asked for.
    pub(crate) unwanted: usize,
}

/// How a receive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Received,
    /// Its deadline passed, or this rank closed; what comes late is turned away.
    GivenUp,
}

/// Operations for which ended receives are remembered; what belongs to an older one is refused.
pub(crate) const REMEMBERED_OPS: u64 = 64;

impl Peer {
    /// Notes that the receive of `tag` ended, and forgets old ones.
    pub(crate) fn ended(&mut self, tag: Tag, ended: Ended) {
        self.ended.insert(tag, ended);
        let oldest = Tag {
            op: self.latest_op.saturating_sub(REMEMBERED_OPS),
            message: 0,
        };
        if self
            .ended
            .first_key_value()
            .is_some_and(|(&first, _)| first < oldest)
        {
            self.ended = self.ended.split_off(&oldest);
        }
    }
}

/// What a [`Core`] is made of.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) me: Rank,
    pub(crate) world: u32,
    pub(crate) job: JobId,
    pub(crate) epoch: u32,
    pub(crate) heartbeat: Duration,
    pub(crate) endpoint: quinn::Endpoint,
    pub(crate) links: Vec<Option<Link>>,
    pub(crate) control: Vec<Option<Link>>,
}

impl Core {
    /// Must be called in a tokio context.
    pub(crate) fn new(group: Group) -> Self {
        let Group {
            me,
            world,
            job,
            epoch,
            heartbeat,
            endpoint,
            links,
            control,
        } = group;
        let state = State {
            phase: Phase::Open,
            abort: None,
            sends: HashMap::new(),
            recvs: HashMap::new(),
            agrees: BTreeMap::new(),
            next_round: 0,
            peers: (0..world).map(|_| Peer::default()).collect(),
            goodbye: false,
        };
        Self {
            me,
            world,
            job,
            epoch,
            heartbeat,
            stop_flag: Arc::new(AtomicBool::new(false)),
            endpoint,
            links,
            control,
            coordinator: (me == COORDINATOR).then(|| Coordinator::new(world)),
            runtime: Handle::current(),
            changed: Notify::new(),
            over: watch::Sender::new(false),
            progress_op: AtomicU64::new(0),
            progress_step: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // State is changed by code that does not panic between two related changes; a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_coordinator(&self) -> bool {
        self.me == COORDINATOR
    }

    pub(crate) fn link(&self, rank: Rank) -> Option<&Link> {
        self.links.get(rank.0 as usize)?.as_ref()
    }

    pub(crate) fn control(&self, rank: Rank) -> Option<&Link> {
        self.control.get(rank.0 as usize)?.as_ref()
    }

    /// All connections of this rank.
    pub(crate) fn all_links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().chain(&self.control).filter_map(Option::as_ref)
    }

    pub(crate) fn progress(&self) -> Progress {
        let step = self.progress_step.load(Ordering::Relaxed);
        Progress {
            op: self.progress_op.load(Ordering::Relaxed),
            step: u32::try_from(step).unwrap_or(u32::MAX),
        }
    }

    pub(crate) fn report_progress(&self, progress: Progress) {
        // A heartbeat between the two stores may quote a step of the operation before: good enough for an error text.
        self.progress_op.store(progress.op, Ordering::Relaxed);
        self.progress_step
            .store(u64::from(progress.step), Ordering::Relaxed);
    }

    /// The group is aborted, as far as this rank is concerned: everything outstanding ends. The first one counts.
    pub(crate) fn aborted(&self, abort: Abort) {
        let mut state = self.lock();
        if state.abort.is_some() {
            return;
        }
        tracing::debug!(rank = %self.me, %abort, "group aborted");
        self.stop_flag.store(true, Ordering::Release);
        state.abort = Some(abort);
        state.fail_everything(self.me);
        drop(state);
        self.changed.notify_waiters();
    }

    /// `culprit` cannot go on; its last known progress is filled in by the coordinator.
    pub(crate) fn failed(&self, culprit: Rank, text: String) {
        let progress = if culprit == self.me {
            self.progress()
        } else {
            Progress::default()
        };
        self.ask_for_abort(Abort {
            culprit,
            cause: AbortCause::Failed(text),
            progress,
        });
    }

    /// Rank 0 decides; every other rank asks it to.
    pub(crate) fn ask_for_abort(&self, abort: Abort) {
        self.stop_flag.store(true, Ordering::Release);
        if self.is_coordinator() {
            self.decide(abort);
        } else if let Some(control) = self.control(COORDINATOR) {
            control.say(Frame::Abort { abort });
        }
    }

    /// Of the coordinator: makes an abort everyone's, unless there is one already.
    pub(crate) fn decide(&self, mut abort: Abort) {
        if self.lock().abort.is_some() {
            return;
        }
        if abort.progress == Progress::default()
            && let Some(coordinator) = &self.coordinator
        {
            abort.progress = coordinator.progress(abort.culprit);
        }
        self.aborted(abort);
        // Two ranks may have come here at once: what is said is what was kept.
        let Some(abort) = self.lock().abort.clone() else {
            return;
        };
        for member in self.control.iter().flatten() {
            member.say(Frame::Abort { abort: abort.clone() });
        }
    }

    /// A peer has broken the protocol: ends the receive that it concerns, tells the peer, and aborts the group.
    pub(crate) fn misbehaved(&self, peer: Rank, tag: Option<Tag>, text: String) {
        if let Some(tag) = tag {
            let call = self.lock().recvs.remove(&(peer, tag));
            if let Some(call) = call {
                call.completer.complete(Err(TransportError::PeerMisbehaved {
                    peer,
                    text: text.clone(),
                }));
            }
            if let Some(link) = self.link(peer) {
                link.say(Frame::Refuse {
                    tag,
                    text: text.clone(),
                });
            }
        }
        self.failed(peer, format!("broke the protocol: {text}"));
    }

    /// A rank has left in order. Whoever still needs it would wait in vain.
    pub(crate) fn peer_left(&self, peer: Rank) {
        let mut state = self.lock();
        state.peers[peer.0 as usize].left = true;
        let text = state.still_needs(peer, self.me);
        drop(state);
        if let Some(text) = text {
            self.failed(peer, text);
        }
    }

    /// Ends calls whose deadline has passed, until the rank has gone.
    pub(crate) async fn watch_deadlines(self: Arc<Self>) {
        let mut over = self.over.subscribe();
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let next = {
                let mut state = self.lock();
                let given_up = state.end_calls_past(Instant::now(), self.me);
                let next = state.next_deadline();
                drop(state);
                for (peer, tag) in given_up {
                    if let Some(link) = self.link(peer) {
                        let text = format!(
                            "rank {} gave up waiting for {tag}: its deadline has passed",
                            self.me
                        );
                        link.say(Frame::Refuse { tag, text });
                    }
                }
                next
            };
            let sleep = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => {}
                () = changed => {}
                _ = over.wait_for(|over| *over) => return,
            }
        }
    }
}

/// The rank whose word counts.
pub(crate) const COORDINATOR: Rank = Rank(0);

impl State {
    /// Whether a new call may start.
    pub(crate) fn may_post(&self) -> Result<(), TransportError> {
        match (self.phase, &self.abort) {
            (Phase::Open, None) => Ok(()),
            (Phase::Open, Some(abort)) => Err(TransportError::Aborted {
                abort: abort.clone(),
                pending: None,
            }),
            (Phase::Closing | Phase::Closed, _) => Err(TransportError::Closed),
        }
    }

    /// What this rank still needs of a rank that has left.
    pub(crate) fn still_needs(&self, peer: Rank, me: Rank) -> Option<String> {
        if let Some((_, tag)) = self.recvs.keys().find(|(from, _)| *from == peer) {
            return Some(format!(
                "left the group while rank {me} still expected {tag} from it"
            ));
        }
        let (_, tag) = self.sends.keys().find(|(to, _)| *to == peer)?;
        Some(format!("left the group while rank {me} still had {tag} for it"))
    }

    /// Removes a send and what hangs on it.
    pub(crate) fn take_send(&mut self, to: Rank, tag: Tag) -> Option<SendCall> {
        let call = self.sends.remove(&(to, tag))?;
        if call.unwanted {
            self.peers[to.0 as usize].unwanted -= 1;
        }
        Some(call)
    }

    pub(crate) fn fail_everything(&mut self, me: Rank) {
        let Some(abort) = self.abort.clone() else { return };
        let error = |pending| TransportError::Aborted {
            abort: abort.clone(),
            pending: Some(pending),
        };
        for ((to, tag), call) in self.sends.drain() {
            call.task.abort();
            let pending = call.pending(to, tag);
            call.completer.complete(Err(error(pending)));
        }
        for ((from, tag), call) in self.recvs.drain() {
            let pending = call.pending(from, tag);
            call.completer.complete(Err(error(pending)));
        }
        for (round, call) in std::mem::take(&mut self.agrees) {
            call.completer.complete(Err(error(pending_agree(me, round))));
        }
    }

    /// This rank closes: it waits for nothing any more.
    pub(crate) fn end_receives(&mut self) {
        for ((from, tag), call) in self.recvs.drain() {
            self.peers[from.0 as usize].ended(tag, Ended::GivenUp);
            call.completer.complete(Err(TransportError::Closed));
        }
        for (_, call) in std::mem::take(&mut self.agrees) {
            call.completer.complete(Err(TransportError::Closed));
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        (self.sends.values().map(|call| call.patience.until))
            .chain(self.recvs.values().map(|call| call.patience.until))
            .chain(self.agrees.values().map(|call| call.patience.until))
            .min()
    }

    /// Ends late calls, and returns the receives among them.
    fn end_calls_past(&mut self, now: Instant, me: Rank) -> Vec<(Rank, Tag)> {
        let late = |pending, patience: Patience| TransportError::Deadline {
            pending,
            waited: patience.asked,
        };
        for ((to, tag), call) in self.sends.extract_if(|_, call| call.patience.until <= now) {
            if call.unwanted {
                self.peers[to.0 as usize].unwanted -= 1;
            }
            call.task.abort();
            let pending = call.pending(to, tag);
            call.completer.complete(Err(late(pending, call.patience)));
        }
        let mut given_up = Vec::new();
        for ((from, tag), call) in self.recvs.extract_if(|_, call| call.patience.until <= now) {
            self.peers[from.0 as usize].ended(tag, Ended::GivenUp);
            given_up.push((from, tag));
            let pending = call.pending(from, tag);
            call.completer.complete(Err(late(pending, call.patience)));
        }
        let rounds: Vec<u64> = self
            .agrees
            .iter()
            .filter(|(_, call)| call.patience.until <= now)
            .map(|(&round, _)| round)
            .collect();
        for round in rounds {
            if let Some(call) = self.agrees.remove(&round) {
                call.completer
                    .complete(Err(late(pending_agree(me, round), call.patience)));
            }
        }
        given_up
    }
}

impl SendCall {
    pub(crate) fn pending(&self, peer: Rank, tag: Tag) -> Pending {
        let bytes_done = self.moved.load(Ordering::Relaxed);
        Pending {
            operation: "send",
            peer,
            tag,
            bytes_done,
            bytes_expected: self.total,
        }
    }
}

impl RecvCall {
    pub(crate) fn pending(&self, peer: Rank, tag: Tag) -> Pending {
        let bytes_done = self.moved.load(Ordering::Relaxed);
        Pending {
            operation: "receive",
            peer,
            tag,
            bytes_done,
            bytes_expected: self.total,
        }
    }
}

/// Only the coordinator knows who has not voted; others wait for its verdict.
fn pending_agree(_me: Rank, round: u64) -> Pending {
    let tag = Tag {
        op: round,
        message: 0,
    };
    Pending {
        operation: "agree",
        peer: COORDINATOR,
        tag,
        bytes_done: 0,
        bytes_expected: 0,
    }
}
