//! The meeting place of the ranks of one process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use crate::ballot::Ballot;
use crate::deadline::Deadline;
use crate::error::{Abort, AbortCause, Pending, TransportError};
use crate::misuse;
use crate::transport::{Completer, Progress, Rank, Tag, Vote};

/// Shared by all ranks of the group and by the watchdog.
#[derive(Debug)]
pub(crate) struct Hub {
    world: u32,
    stop_flag: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Wakes the watchdog when an earlier deadline was posted or the group has ended.
    #[cfg(not(target_family = "wasm"))]
    changed: std::sync::Condvar,
}

#[derive(Debug)]
struct State {
    sends: HashMap<Meeting, SendCall>,
    recvs: HashMap<Meeting, RecvCall>,
    agrees: HashMap<(Rank, u64), AgreeCall>,
    ballot: Ballot,
    ranks: Vec<RankState>,
    abort: Option<Abort>,
    /// When the watchdog, if it runs, wakes next.
    #[cfg(not(target_family = "wasm"))]
    watched_until: Option<std::time::Instant>,
}

/// Where a message is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Meeting {
    from: Rank,
    to: Rank,
    tag: Tag,
}

#[derive(Debug)]
struct SendCall {
    parts: Vec<Bytes>,
    total: u64,
    deadline: Deadline,
    completer: Completer<()>,
}

#[derive(Debug)]
struct RecvCall {
    part_bytes: Vec<usize>,
    total: u64,
    deadline: Deadline,
    completer: Completer<Vec<Bytes>>,
}

#[derive(Debug)]
struct AgreeCall {
    deadline: Deadline,
    completer: Completer<()>,
}

#[derive(Debug)]
struct RankState {
    phase: Phase,
    progress: Progress,
}

#[derive(Debug)]
enum Phase {
    Active,
    /// Closes as soon as its peers have what it sent.
    Leaving {
        deadline: Deadline,
        completer: Completer<()>,
    },
    Left,
    /// Its endpoint is gone.
    Gone,
}

impl Hub {
    pub(crate) fn new(world: u32) -> Self {
        let ranks =
            (0..world).map(|_| RankState { phase: Phase::Active, progress: Progress::default() }).collect();
        let state = State {
            sends: HashMap::new(),
            recvs: HashMap::new(),
            agrees: HashMap::new(),
            ballot: Ballot::new(world),
            ranks,
            abort: None,
            #[cfg(not(target_family = "wasm"))]
            watched_until: None,
        };
        let shared = Shared {
            state: Mutex::new(state),
            #[cfg(not(target_family = "wasm"))]
            changed: std::sync::Condvar::new(),
        };
        Self { world, stop_flag: Arc::new(AtomicBool::new(false)), shared: Arc::new(shared) }
    }

    pub(crate) fn world(&self) -> u32 {
        self.world
    }

    pub(crate) fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop_flag)
    }

    pub(crate) fn send(
        &self,
        me: Rank,
        to: Rank,
        tag: Tag,
        parts: Vec<Bytes>,
        patience: Duration,
        completer: Completer<()>,
    ) {
        let total = match misuse::check_message(me, self.world, to, tag, parts.iter().map(Bytes::len)) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.shared.lock();
        if let Err(error) = state.may_post(me) {
            return completer.complete(Err(error));
        }
        let meeting = Meeting { from: me, to, tag };
        if state.sends.contains_key(&meeting) {
            return completer.complete(Err(misuse::outstanding_already("send", to, tag)));
        }
        let call = SendCall { parts, total, deadline: Deadline::after(patience), completer };
        state.sends.insert(meeting, call);
        self.settle(state, meeting, to);
    }

    pub(crate) fn recv(
        &self,
        me: Rank,
        from: Rank,
        tag: Tag,
        part_bytes: &[usize],
        patience: Duration,
        completer: Completer<Vec<Bytes>>,
    ) {
        let total = match misuse::check_message(me, self.world, from, tag, part_bytes.iter().copied()) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.shared.lock();
        if let Err(error) = state.may_post(me) {
            return completer.complete(Err(error));
        }
        let meeting = Meeting { from, to: me, tag };
        if state.recvs.contains_key(&meeting) {
            return completer.complete(Err(misuse::outstanding_already("receive", from, tag)));
        }
        let part_bytes = part_bytes.to_vec();
        let call = RecvCall { part_bytes, total, deadline: Deadline::after(patience), completer };
        state.recvs.insert(meeting, call);
        self.settle(state, meeting, from);
    }

    /// Hands the message over if both sides are there; else sees to it that its deadline is watched.
    fn settle(&self, mut state: MutexGuard<'_, State>, meeting: Meeting, peer: Rank) {
        if state.sends.contains_key(&meeting) && state.recvs.contains_key(&meeting) {
            if let Err(abort) = state.hand_over(meeting) {
                self.abort_locked(&mut state, abort);
            }
            state.let_leavers_go();
            self.abort_if_somebody_waits_for_a_leaver(&mut state);
        } else if matches!(state.ranks[peer.0 as usize].phase, Phase::Left) {
            self.abort_if_somebody_waits_for_a_leaver(&mut state);
        } else {
            self.watch(&mut state);
        }
    }

    pub(crate) fn agree(&self, me: Rank, vote: Vote, patience: Duration, completer: Completer<()>) {
        let mut state = self.shared.lock();
        if let Err(error) = state.may_post(me) {
            return completer.complete(Err(error));
        }
        let (round, verdict) = match state.ballot.cast(me, vote) {
            Ok(counted) => counted,
            Err(text) => {
                return completer.complete(Err(TransportError::Misuse { text: format!("rank {me} {text}") }));
            }
        };
        state.agrees.insert((me, round), AgreeCall { deadline: Deadline::after(patience), completer });
        match verdict {
            Some(verdict) => {
                let result = verdict.map_err(TransportError::from);
                for rank in 0..self.world {
                    if let Some(call) = state.agrees.remove(&(Rank(rank), round)) {
                        call.completer.complete(result.clone());
                    }
                }
            }
            None => {
                self.abort_if_somebody_waits_for_a_leaver(&mut state);
                self.watch(&mut state);
            }
        }
    }

    pub(crate) fn abort(&self, abort: Abort) {
        let mut state = self.shared.lock();
        self.abort_locked(&mut state, abort);
    }

    pub(crate) fn report_progress(&self, me: Rank, progress: Progress) {
        self.shared.lock().ranks[me.0 as usize].progress = progress;
    }

    pub(crate) fn close(&self, me: Rank, patience: Duration, completer: Completer<()>) {
        let mut state = self.shared.lock();
        if let Err(error) = state.may_post(me) {
            return completer.complete(Err(error));
        }
        state.end_receives_of(me);
        state.ranks[me.0 as usize].phase = Phase::Leaving { deadline: Deadline::after(patience), completer };
        state.let_leavers_go();
        self.abort_if_somebody_waits_for_a_leaver(&mut state);
        self.watch(&mut state);
    }

    pub(crate) fn dropped(&self, me: Rank) {
        let mut state = self.shared.lock();
        // A rank that is leaving has said all it had to say: the hub finishes its goodbye.
        if matches!(state.ranks[me.0 as usize].phase, Phase::Active) {
            let progress = state.ranks[me.0 as usize].progress;
            let cause = AbortCause::Died("its endpoint was dropped without close".into());
            self.abort_locked(&mut state, Abort { culprit: me, cause, progress });
            state.ranks[me.0 as usize].phase = Phase::Gone;
        }
        #[cfg(not(target_family = "wasm"))]
        self.shared.changed.notify_all();
    }

    /// A rank that left cannot take part in anything any more; whoever still needs it would wait in vain.
    fn abort_if_somebody_waits_for_a_leaver(&self, state: &mut State) {
        if let Some(abort) = state.somebody_waits_for_a_leaver() {
            self.abort_locked(state, abort);
        }
    }

    fn abort_locked(&self, state: &mut State, abort: Abort) {
        if state.abort.is_some() {
            return;
        }
        self.stop_flag.store(true, Ordering::Release);
        tracing::debug!(%abort, "group aborted");
        state.abort = Some(abort);
        state.fail_everything();
    }

    #[cfg(not(target_family = "wasm"))]
    fn watch(&self, state: &mut State) {
        let Some(next) = state.next_deadline() else { return };
        match state.watched_until {
            Some(until) if until <= next => return,
            Some(_) => self.shared.changed.notify_all(),
            None => {
                let shared = Arc::clone(&self.shared);
                let thread = std::thread::Builder::new().name("kyklos-deadlines".into());
                if let Err(error) = thread.spawn(move || shared.watchdog()) {
                    tracing::warn!(%error, "no thread for deadlines: calls of this group may wait for ever");
                    return;
                }
            }
        }
        state.watched_until = Some(next);
    }

    #[cfg(target_family = "wasm")]
    fn watch(&self, _state: &mut State) {}
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // State is changed by code that does not panic between two related changes; a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends calls at their deadlines; returns when nothing is left that could pass one.
    #[cfg(not(target_family = "wasm"))]
    fn watchdog(&self) {
        let mut state = self.lock();
        loop {
            state.end_calls_past(std::time::Instant::now());
            let Some(next) = state.next_deadline() else {
                // The next call starts a new watchdog: an idle group costs no thread.
                state.watched_until = None;
                return;
            };
            state.watched_until = Some(next);
            let pause = next.saturating_duration_since(std::time::Instant::now());
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl State {
    fn may_post(&self, me: Rank) -> Result<(), TransportError> {
        match self.ranks[me.0 as usize].phase {
            Phase::Active => match &self.abort {
                Some(abort) => Err(TransportError::Aborted { abort: abort.clone(), pending: None }),
                None => Ok(()),
            },
            Phase::Leaving { .. } | Phase::Left | Phase::Gone => Err(TransportError::Closed),
        }
    }

    /// Completes both sides of a message. Fails with the abort that a mismatch calls for.
    fn hand_over(&mut self, meeting: Meeting) -> Result<(), Abort> {
        let (Some(send), Some(recv)) = (self.sends.remove(&meeting), self.recvs.remove(&meeting)) else {
            return Ok(());
        };
        let sent: Vec<usize> = send.parts.iter().map(Bytes::len).collect();
        if sent == recv.part_bytes {
            recv.completer.complete(Ok(send.parts));
            send.completer.complete(Ok(()));
            return Ok(());
        }
        let Meeting { from, to, tag } = meeting;
        let text = format!(
            "{tag}: rank {from} sends parts of {sent:?} bytes, rank {to} expects parts of {:?} bytes",
            recv.part_bytes
        );
        send.completer.complete(Err(TransportError::PeerMisbehaved { peer: to, text: text.clone() }));
        recv.completer.complete(Err(TransportError::PeerMisbehaved { peer: from, text: text.clone() }));
        let progress = self.ranks[from.0 as usize].progress;
        Err(Abort { culprit: from, cause: AbortCause::Failed(text), progress })
    }

    /// Lets ranks go whose messages have all been taken.
    fn let_leavers_go(&mut self) {
        for rank in 0..self.ranks.len() {
            let owes = self.sends.keys().any(|meeting| meeting.from.0 as usize == rank);
            let phase = &mut self.ranks[rank].phase;
            if !owes
                && let Phase::Leaving { .. } = phase
                && let Phase::Leaving { completer, .. } = std::mem::replace(phase, Phase::Left)
            {
                completer.complete(Ok(()));
            }
        }
    }

    fn somebody_waits_for_a_leaver(&self) -> Option<Abort> {
        let left = |rank: Rank| matches!(self.ranks[rank.0 as usize].phase, Phase::Left);
        let recv = self.recvs.keys().find(|meeting| left(meeting.from));
        let send = self.sends.keys().find(|meeting| left(meeting.to));
        let agree = self.agrees.keys().filter_map(|&(rank, round)| Some((rank, self.ballot.missing(round)?)));
        let agree = { agree }.find(|&(_, missing)| left(missing));
        let (culprit, text) = match (recv, send, agree) {
            (Some(Meeting { from, to, tag }), _, _) => {
                (*from, format!("left the group while rank {to} still expected {tag} from it"))
            }
            (_, Some(Meeting { from, to, tag }), _) => {
                (*to, format!("left the group while rank {from} still had {tag} for it"))
            }
            (_, _, Some((rank, missing))) => {
                (missing, format!("left the group while rank {rank} waited for its vote"))
            }
            (None, None, None) => return None,
        };
        let progress = self.ranks[culprit.0 as usize].progress;
        Some(Abort { culprit, cause: AbortCause::Failed(text), progress })
    }

    fn end_receives_of(&mut self, me: Rank) {
        for (_, call) in self.recvs.extract_if(|meeting, _| meeting.to == me) {
            call.completer.complete(Err(TransportError::Closed));
        }
        for (_, call) in self.agrees.extract_if(|(rank, _), _| *rank == me) {
            call.completer.complete(Err(TransportError::Closed));
        }
    }

    /// Ends every outstanding call with the abort.
    fn fail_everything(&mut self) {
        let Some(abort) = self.abort.clone() else { return };
        let error = |pending| TransportError::Aborted { abort: abort.clone(), pending: Some(pending) };
        for (meeting, call) in self.sends.drain() {
            call.completer.complete(Err(error(meeting.pending_send(call.total))));
        }
        for (meeting, call) in self.recvs.drain() {
            call.completer.complete(Err(error(meeting.pending_recv(call.total))));
        }
        for ((_, round), call) in self.agrees.drain() {
            call.completer.complete(Err(error(pending_agree(&self.ballot, round))));
        }
        for rank in &mut self.ranks {
            if let Phase::Leaving { .. } = rank.phase
                && let Phase::Leaving { completer, .. } = std::mem::replace(&mut rank.phase, Phase::Left)
            {
                completer.complete(Err(TransportError::Aborted { abort: abort.clone(), pending: None }));
            }
        }
    }
}

/// Deadlines, where there is a clock.
#[cfg(not(target_family = "wasm"))]
impl State {
    fn next_deadline(&self) -> Option<std::time::Instant> {
        let leaving = self.ranks.iter().filter_map(|rank| match &rank.phase {
            Phase::Leaving { deadline, .. } => Some(deadline.at()),
            _ => None,
        });
        (self.sends.values().map(|call| call.deadline.at()))
            .chain(self.recvs.values().map(|call| call.deadline.at()))
            .chain(self.agrees.values().map(|call| call.deadline.at()))
            .chain(leaving)
            .min()
    }

    fn end_calls_past(&mut self, now: std::time::Instant) {
        let late =
            |pending, deadline: Deadline| TransportError::Deadline { pending, waited: deadline.patience() };
        for (meeting, call) in self.sends.extract_if(|_, call| call.deadline.at() <= now) {
            call.completer.complete(Err(late(meeting.pending_send(call.total), call.deadline)));
        }
        for (meeting, call) in self.recvs.extract_if(|_, call| call.deadline.at() <= now) {
            call.completer.complete(Err(late(meeting.pending_recv(call.total), call.deadline)));
        }
        for ((_, round), call) in self.agrees.extract_if(|_, call| call.deadline.at() <= now) {
            call.completer.complete(Err(late(pending_agree(&self.ballot, round), call.deadline)));
        }
        for index in 0..self.ranks.len() {
            let phase = &mut self.ranks[index].phase;
            if !matches!(phase, Phase::Leaving { deadline, .. } if deadline.at() <= now) {
                continue;
            }
            if let Phase::Leaving { deadline, completer } = std::mem::replace(phase, Phase::Left) {
                let owed = self.sends.iter().find(|(meeting, _)| meeting.from.0 as usize == index);
                let pending = owed.map_or_else(
                    || pending_close(Rank(0)),
                    |(meeting, call)| Pending { operation: "close", ..meeting.pending_send(call.total) },
                );
                completer.complete(Err(late(pending, deadline)));
            }
        }
        self.let_leavers_go();
    }
}

impl Meeting {
    fn pending_send(self, total: u64) -> Pending {
        Pending { operation: "send", peer: self.to, tag: self.tag, bytes_done: 0, bytes_expected: total }
    }

    fn pending_recv(self, total: u64) -> Pending {
        Pending { operation: "receive", peer: self.from, tag: self.tag, bytes_done: 0, bytes_expected: total }
    }
}

fn pending_agree(ballot: &Ballot, round: u64) -> Pending {
    let peer = ballot.missing(round).unwrap_or(Rank(0));
    Pending { operation: "agree", peer, tag: Tag { op: round, message: 0 }, bytes_done: 0, bytes_expected: 0 }
}

#[cfg(not(target_family = "wasm"))]
fn pending_close(peer: Rank) -> Pending {
    Pending { operation: "close", peer, tag: Tag { op: 0, message: 0 }, bytes_done: 0, bytes_expected: 0 }
}
