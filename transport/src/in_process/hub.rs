//! The shared hub of the ranks of one process.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::state::{Calls, Deadline, GroupState, Incoming, Outgoing, Phase, RankState, ReformCall};
use crate::ballot::{Ballot, note_bytes};
use crate::calls::{AgreeCall, ReceiveCall, SendCall, check_message, check_vote};
use crate::error::{Abort, AbortCause, TransportError};
use crate::posted::Completer;
use crate::pulse::Pulse;
use crate::rank::{Progress, Rank, Tag, Taken, Vote};
use crate::recorder::{EventKind, Outstanding, Recorder};
use crate::spans;
use crate::transport::{Group, Regroup};

/// Shared by all ranks of the group and by the watchdog.
#[derive(Debug)]
pub(crate) struct Hub {
    size: u32,
    stop_flag: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<GroupState>,
    /// Wakes the watchdog when an earlier deadline was posted or the group has ended.
    #[cfg(not(target_family = "wasm"))]
    changed: std::sync::Condvar,
}

impl Hub {
    /// A hub for these ranks of the first group.
    pub(crate) fn new(members: Vec<Rank>, epoch: u32) -> Self {
        let size = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let ranks = (0..size).map(|rank| {
            let recorder = Arc::new(Recorder::new(Rank(rank), size, IN_PROCESS.to_owned()));
            let calls = Calls::new(Arc::clone(&recorder));
            RankState { phase: Phase::Active, calls, recorder, pulse: Arc::default() }
        });
        let stop_flag = Arc::new(AtomicBool::new(false));
        let state = GroupState {
            stop_flag: Arc::clone(&stop_flag),
            ballot: Ballot::new(size),
            ranks: ranks.collect(),
            aborted: None,
            members,
            epoch,
            reforming: BTreeMap::new(),
            #[cfg(not(target_family = "wasm"))]
            watched_until: None,
        };
        let shared = Shared {
            state: Mutex::new(state),
            #[cfg(not(target_family = "wasm"))]
            changed: std::sync::Condvar::new(),
        };
        Self { size, stop_flag, shared: Arc::new(shared) }
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
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
        completer: Completer<Taken>,
    ) {
        let total = match check_message(me, self.size, to, tag, parts.iter().map(Bytes::len)) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.shared.lock();
        if let Err(error) = state.may_post(me) {
            return completer.complete(Err(error));
        }
        if let Err(error) = state.rank_mut(me).calls.begin_send(to, tag) {
            return completer.complete(Err(error));
        }
        state.note(me, EventKind::SendPosted, to, tag, total);
        let transfer = Outgoing { parts, _span: spans::send(me, to, tag, total) };
        let call = SendCall { completer, total, deadline: Deadline::after(patience), transfer };
        state.rank_mut(me).calls.sends.insert((to, tag), call);
        self.settle(state, (me, to, tag), to);
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
        let total = match check_message(me, self.size, from, tag, part_bytes.iter().copied()) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.shared.lock();
        if let Err(error) = state.may_post(me) {
            return completer.complete(Err(error));
        }
        if let Err(error) = state.rank_mut(me).calls.begin_receive(from, tag) {
            return completer.complete(Err(error));
        }
        state.note(me, EventKind::ReceivePosted, from, tag, total);
        state.note(from, EventKind::Asked, me, tag, 0);
        let transfer = Incoming { _span: spans::receive(me, from, tag, total) };
        let (part_bytes, deadline) = (part_bytes.to_vec(), Deadline::after(patience));
        let call = ReceiveCall { completer, part_bytes, total, deadline, transfer };
        state.rank_mut(me).calls.receives.insert((from, tag), call);
        self.settle(state, (from, me, tag), from);
    }

    /// Hands the message over if both sides have posted it; otherwise makes sure that its deadline
    /// is watched.
    fn settle(&self, mut state: MutexGuard<'_, GroupState>, (from, to, tag): (Rank, Rank, Tag), peer: Rank) {
        if state.is_met(from, to, tag) {
            if let Err(abort) = state.hand_over(from, to, tag) {
                state.abort(abort);
            }
            state.let_leavers_go();
            state.abort_if_a_leaver_is_needed();
        } else if matches!(state.rank(peer).phase, Phase::Left) {
            state.abort_if_a_leaver_is_needed();
        } else {
            self.watch(&mut state);
        }
    }

    pub(crate) fn agree(&self, me: Rank, vote: Vote, patience: Duration, completer: Completer<Vec<Bytes>>) {
        let bytes = match check_vote(me, &vote) {
            Ok(bytes) => bytes,
            Err(error) => return completer.complete(Err(error)),
        };
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
        state.note(me, EventKind::Voted, me, Tag { op: round, message: 0 }, bytes);
        let call = AgreeCall { completer, deadline: Deadline::after(patience), missing: Rank::COORDINATOR };
        state.rank_mut(me).calls.agreements.insert(round, call);
        match verdict {
            Some(verdict) => {
                let bytes = note_bytes(&verdict);
                let result = verdict.map_err(TransportError::from);
                for rank in 0..self.size {
                    if let Some(call) = state.rank_mut(Rank(rank)).calls.agreements.remove(&round) {
                        state.note(Rank(rank), EventKind::Agreed, me, Tag { op: round, message: 0 }, bytes);
                        call.completer.complete(result.clone());
                    }
                }
            }
            None => {
                state.tell_missing(round);
                state.abort_if_a_leaver_is_needed();
                self.watch(&mut state);
            }
        }
    }

    pub(crate) fn abort(&self, abort: Abort) {
        self.shared.lock().abort(abort);
    }

    pub(crate) fn report_progress(&self, me: Rank, progress: Progress) {
        self.shared.lock().rank(me).recorder.enter(progress);
    }

    pub(crate) fn recorder(&self, me: Rank) -> Arc<Recorder> {
        Arc::clone(&self.shared.lock().rank(me).recorder)
    }

    pub(crate) fn pulse(&self, me: Rank) -> Arc<Pulse> {
        Arc::clone(&self.shared.lock().rank(me).pulse)
    }

    pub(crate) fn outstanding(&self, me: Rank) -> Vec<Outstanding> {
        self.shared.lock().rank(me).calls.outstanding()
    }

    pub(crate) fn close(&self, me: Rank, patience: Duration, completer: Completer<()>) {
        let mut state = self.shared.lock();
        if let Err(error) = state.may_post(me) {
            return completer.complete(Err(error));
        }
        state.rank_mut(me).calls.end_receives();
        state.rank_mut(me).phase = Phase::Leaving { deadline: Deadline::after(patience), completer };
        state.let_leavers_go();
        state.abort_if_a_leaver_is_needed();
        self.watch(&mut state);
    }

    /// Adds this rank to the next group, which forms when all remaining ranks have arrived, or when
    /// the first deadline ends.
    pub(crate) fn reform(&self, me: Rank, who: Regroup, patience: Duration, completer: Completer<Group>) {
        let misuse = |text: &str| Err(TransportError::Misuse { text: text.into() });
        let mut state = self.shared.lock();
        if !matches!(state.rank(me).phase, Phase::Active) {
            return completer.complete(Err(TransportError::Closed));
        }
        if who != Regroup::Survivors {
            let text =
                "a rank of a process cannot be started anew without the process: form the group of survivors";
            return completer.complete(misuse(text));
        }
        if state.aborted.is_none() {
            return completer.complete(misuse(
                "only a group that has been aborted can be formed again: call abort first",
            ));
        }
        state.rank_mut(me).phase = Phase::Reforming;
        state.reforming.insert(me, ReformCall { deadline: Deadline::after(patience), completer });
        if state.may_reform() {
            reform(&mut state);
        }
        self.watch(&mut state);
    }

    pub(crate) fn dropped(&self, me: Rank) {
        let mut state = self.shared.lock();
        // A leaving rank sends nothing more. The hub finishes its goodbye.
        if matches!(state.rank(me).phase, Phase::Active) {
            let progress = state.rank(me).recorder.progress();
            let cause = AbortCause::Died("its endpoint was dropped without close".into());
            state.abort(Abort { culprit: me, cause, progress });
            state.rank_mut(me).phase = Phase::Gone;
            if state.may_reform() {
                reform(&mut state);
            }
        }
        #[cfg(not(target_family = "wasm"))]
        self.shared.changed.notify_all();
    }

    #[cfg(not(target_family = "wasm"))]
    fn watch(&self, state: &mut GroupState) {
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
    fn watch(&self, _state: &mut GroupState) {}
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, GroupState> {
        // State is changed by code that does not panic between two related changes; a poisoned lock is
        // usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends calls at their deadlines. Returns when no call with a deadline remains.
    #[cfg(not(target_family = "wasm"))]
    fn watchdog(&self) {
        let mut state = self.lock();
        loop {
            let now = std::time::Instant::now();
            state.end_calls_past(now);
            if state.reform_is_late(now) {
                reform(&mut state);
            }
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

/// Forms the next group of the ranks that have called `reform`, if there are enough of them.
fn reform(state: &mut GroupState) {
    let epoch = state.epoch + 1;
    let (calls, next) = state.take_next_group();
    let next = next.map(|members| (super::ends_of(&Arc::new(Hub::new(members.clone(), epoch))), members));
    for (place, call) in calls.into_iter().enumerate() {
        call.completer.complete(match &next {
            Ok((ends, members)) => {
                Ok(Group { transport: Arc::clone(&ends[place]), members: members.clone(), epoch })
            }
            Err(text) => Err(TransportError::bootstrap(text)),
        });
    }
}

/// The name in dumps for a group without its own name.
const IN_PROCESS: &str = "in-process";
