//! The state that the tasks and the calls of one rank share, and how a failure reaches every rank.
//!
//! Calls come in from any thread, frames and streams from tasks of the tokio context; both change
//! the state under one lock that is never held across a wait.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::coordinator::Coordinator;
use super::link::{Link, MAX_QUEUED_FRAMES};
use super::state::{Deadline, Phase, RankState};
use crate::error::{Abort, AbortCause, BootstrapKind, TransportError};
use crate::pulse::Pulse;
use crate::quic::forming::config::QuicConfig;
use crate::quic::forming::endpoint::RankEndpoint;
use crate::quic::trust::job::JobId;
use crate::rank::{Progress, Rank, Tag};
use crate::recorder::{EventKind, Recorder};
use crate::wire::Frame;

/// The state that the tasks of one rank share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) me: Rank,
    pub(crate) size: u32,
    pub(crate) job: JobId,
    pub(crate) epoch: u32,
    pub(crate) warn: fn(&str, BootstrapKind),
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) stop_flag: Arc<AtomicBool>,
    pub(crate) endpoint: Arc<RankEndpoint>,
    /// By rank of this group, its rank in the first one.
    pub(crate) members: Vec<Rank>,
    /// By rank of this group, the addresses at which it can be reached.
    pub(crate) table: Vec<Vec<SocketAddr>>,
    /// Data connections, by rank; none to itself.
    pub(crate) links: Vec<Option<Link>>,
    /// Control connections: of rank 0 to every other rank, of another rank to rank 0.
    pub(crate) control: Vec<Option<Link>>,
    /// Of rank 0.
    pub(crate) coordinator: Option<Coordinator>,
    pub(crate) runtime: Handle,
    /// Wakes the tasks that wait for the end of a call, and the watcher of deadlines if one has
    /// become earlier.
    pub(crate) changed: Notify,
    /// Becomes true when the rank has left the group and all its tasks must end.
    pub(crate) over: watch::Sender<bool>,
    pub(crate) recorder: Arc<Recorder>,
    state: Mutex<RankState>,
}

/// The inputs from which a [`Core`] is made.
#[derive(Debug)]
pub(crate) struct CoreParts {
    pub(crate) endpoint: Arc<RankEndpoint>,
    pub(crate) me: Rank,
    pub(crate) epoch: u32,
    pub(crate) members: Vec<Rank>,
    pub(crate) table: Vec<Vec<SocketAddr>>,
    pub(crate) links: Vec<Option<Link>>,
    pub(crate) control: Vec<Option<Link>>,
}

impl Core {
    /// Must be called in a tokio context.
    pub(crate) fn new(group: CoreParts) -> Self {
        let CoreParts { endpoint, me, epoch, members, table, links, control } = group;
        let QuicConfig { job, stuck_after, warn, .. } = endpoint.config;
        let heartbeat = endpoint.timing.heartbeat;
        let size = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let recorder = Arc::new(Recorder::new(me, size, format!("{job} epoch {epoch}")));
        let stuck_ticks = stuck_after.as_nanos().div_ceil(heartbeat.as_nanos().max(1));
        Self {
            me,
            size,
            job,
            epoch,
            warn,
            pulse: Arc::default(),
            stop_flag: Arc::new(AtomicBool::new(false)),
            endpoint,
            members,
            table,
            links,
            control,
            coordinator: (me == Rank::COORDINATOR)
                .then(|| Coordinator::new(size, u32::try_from(stuck_ticks).unwrap_or(u32::MAX))),
            runtime: Handle::current(),
            changed: Notify::new(),
            over: watch::Sender::new(false),
            state: Mutex::new(RankState::new(size, Arc::clone(&recorder))),
            recorder,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, RankState> {
        // State is changed by code that does not panic between two related changes; a poisoned lock is
        // usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_coordinator(&self) -> bool {
        self.me == Rank::COORDINATOR
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
        self.recorder.progress()
    }

    pub(crate) fn report_progress(&self, progress: Progress) {
        self.recorder.enter(progress);
    }

    /// A call was posted with this deadline. The watcher must hear of it only if it would sleep too
    /// long: most deadlines are later than that of a call before, and to wake another thread
    /// costs more than to post a small message.
    pub(crate) fn posted(&self, deadline: Deadline) {
        if self.lock().watched.is_none_or(|watched| deadline.at() < watched) {
            self.changed.notify_waiters();
        }
    }

    /// A call has ended. Only a rank that closes waits for that.
    pub(crate) fn call_ended(&self) {
        if self.lock().phase != Phase::Open {
            self.changed.notify_waiters();
        }
    }

    /// This rank takes the group as aborted: every outstanding call ends. The first abort counts.
    pub(crate) fn aborted(&self, abort: Abort) {
        let mut state = self.lock();
        if state.calls.aborted().is_some() {
            return;
        }
        tracing::debug!(rank = %self.me, %abort, "group aborted");
        self.stop_flag.store(true, Ordering::Release);
        self.recorder.aborted(&abort);
        state.calls.abort(&abort);
        drop(state);
        self.changed.notify_waiters();
    }

    /// The rank `culprit` has failed. The coordinator fills in its last known progress.
    pub(crate) fn failed(&self, culprit: Rank, text: String) {
        let progress = if culprit == self.me { self.progress() } else { Progress::default() };
        self.ask_for_abort(Abort { culprit, cause: AbortCause::Failed(text), progress });
    }

    /// Asks rank 0 for an abort; on rank 0, decides it. Of another rank, rank 0 adds who asks: it
    /// knows that, whatever that rank says.
    pub(crate) fn ask_for_abort(&self, abort: Abort) {
        self.stop_flag.store(true, Ordering::Release);
        if self.is_coordinator() {
            self.decide(abort.said_by(self.me));
        } else if let Some(control) = self.control(Rank::COORDINATOR) {
            control.say(Frame::Abort { abort });
        }
    }

    /// On the coordinator: aborts the group for all ranks, unless it is already aborted.
    pub(crate) fn decide(&self, mut abort: Abort) {
        if self.lock().calls.aborted().is_some() {
            return;
        }
        if abort.progress == Progress::default() {
            abort.progress = match &self.coordinator {
                Some(coordinator) if abort.culprit != self.me => coordinator.progress(abort.culprit),
                _ => self.progress(),
            };
        }
        self.aborted(abort);
        // Two ranks may report a failure at the same time. All ranks get the abort that was kept.
        let Some(abort) = self.lock().calls.aborted().cloned() else {
            return;
        };
        for member in self.control.iter().flatten() {
            member.say(Frame::Abort { abort: abort.clone() });
        }
    }

    /// A peer has broken the protocol: ends the receive that it concerns, tells the peer, and
    /// aborts the group.
    pub(crate) fn misbehaved(&self, peer: Rank, tag: Option<Tag>, text: String) {
        // One answer is enough: a peer that misbehaves again and again, and reads no answer, must not fill
        // queues.
        let is_known = self.lock().calls.aborted().is_some();
        if let Some(tag) = tag {
            self.recorder.note(EventKind::Refused, peer, tag, 0);
            let call = self.lock().calls.receives.remove(&(peer, tag));
            if let Some(call) = call {
                call.completer.complete(Err(TransportError::PeerMisbehaved { peer, text: text.clone() }));
            }
            if let Some(link) = self.link(peer).filter(|_| !is_known) {
                link.say(Frame::Refuse { tag, text: text.clone() });
            }
        }
        if !is_known {
            self.failed(peer, format!("broke the protocol: {text}"));
        }
    }

    /// Aborts the group if a peer reads no frames: frames for it must not queue without end.
    pub(crate) fn abort_unresponsive_peers(&self) {
        for links in [&self.links, &self.control] {
            let mut all = (0..).map(Rank).zip(links);
            let deaf = all.find(|(_, link)| link.as_ref().is_some_and(Link::is_unresponsive));
            if let Some((rank, _)) = deaf {
                self.misbehaved(
                    rank,
                    None,
                    format!("more than {MAX_QUEUED_FRAMES} frames wait for it, it reads none"),
                );
            }
        }
    }

    /// A rank has left in order. If this rank still needs it, the group is aborted.
    pub(crate) fn peer_left(&self, peer: Rank) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.peers[peer.0 as usize].left, true) {
            self.recorder.note(EventKind::PeerLeft, peer, Tag { op: 0, message: 0 }, 0);
        }
        let text = state.calls.still_needs(peer, self.me);
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
            let (withdrawn, next) = {
                let mut state = self.lock();
                // A deadline ends the call it belongs to; the other side has its own.
                let withdrawn = state.end_calls_past(Instant::now());
                state.watched = state.calls.next_deadline();
                (withdrawn, state.watched)
            };
            for (to, tag) in withdrawn {
                if let Some(link) = self.link(to) {
                    link.say(Frame::Withdraw { tag });
                }
            }
            let sleep = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = sleep => {}
                () = changed => {}
                _ = over.wait_for(|over| *over) => return,
            }
        }
    }
}
