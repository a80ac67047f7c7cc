//! The state of a group in one process: its ranks, their outstanding calls, and the votes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;

use crate::ballot::Ballot;
use crate::calls::{self, Ended, SystemClock, Transfer};
#[cfg(not(target_family = "wasm"))]
use crate::error::Pending;
use crate::error::{Abort, AbortCause, TransportError};
use crate::membership::{Claim, next_group};
use crate::posted::Completer;
use crate::pulse::Pulse;
use crate::rank::{Rank, Tag, Taken};
use crate::recorder::{EventKind, Recorder};
use crate::transport::Group;

pub(super) type Deadline = calls::Deadline<SystemClock>;
pub(super) type Calls = calls::Calls<SystemClock, Outgoing, Incoming>;

#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) ballot: Ballot,
    pub(super) ranks: Vec<RankState>,
    pub(super) aborted: Option<Abort>,
    /// By rank, its rank in the first group.
    pub(super) members: Vec<Rank>,
    pub(super) epoch: u32,
    /// The ranks that have called `reform`.
    pub(super) reforming: BTreeMap<Rank, ReformCall>,
    pub(super) stop_flag: Arc<AtomicBool>,
    /// When the watchdog, if it runs, wakes next.
    #[cfg(not(target_family = "wasm"))]
    pub(super) watched_until: Option<std::time::Instant>,
}

/// A message that its receiver has not posted yet.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) parts: Vec<Bytes>,
    /// From its post to its end.
    pub(super) _span: tracing::Span,
}

/// A message that its sender has not posted yet.
#[derive(Debug)]
pub(super) struct Incoming {
    /// From its post to its end.
    pub(super) _span: tracing::Span,
}

// A message moves at once when both sides have posted it. So an outstanding call has moved no
// bytes.
impl Transfer for Outgoing {
    fn bytes_done(&self) -> u64 {
        0
    }

    fn give_up(&mut self) {}
}

impl Transfer for Incoming {
    fn bytes_done(&self) -> u64 {
        0
    }

    fn give_up(&mut self) {}
}

#[derive(Debug)]
pub(super) struct ReformCall {
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Group>,
}

#[derive(Debug)]
pub(super) struct RankState {
    pub(super) phase: Phase,
    pub(super) calls: Calls,
    pub(super) recorder: Arc<Recorder>,
    pub(super) pulse: Arc<Pulse>,
}

#[derive(Debug)]
pub(super) enum Phase {
    Active,
    /// Closes as soon as its peers have all messages that it sent.
    Leaving {
        deadline: Deadline,
        completer: Completer<()>,
    },
    Left,
    /// It has left for the next group.
    Reforming,
    /// Its endpoint is dropped.
    Gone,
}

impl GroupState {
    pub(super) fn rank(&self, rank: Rank) -> &RankState {
        &self.ranks[rank.0 as usize]
    }

    pub(super) fn rank_mut(&mut self, rank: Rank) -> &mut RankState {
        &mut self.ranks[rank.0 as usize]
    }

    pub(super) fn may_post(&self, me: Rank) -> Result<(), TransportError> {
        let rank = self.rank(me);
        match rank.phase {
            Phase::Active => rank.calls.check_not_aborted(),
            Phase::Leaving { .. } | Phase::Left | Phase::Reforming | Phase::Gone => {
                Err(TransportError::Closed)
            }
        }
    }

    /// Whether both sides of a message have posted it.
    pub(super) fn is_met(&self, from: Rank, to: Rank, tag: Tag) -> bool {
        self.rank(from).calls.sends.contains_key(&(to, tag))
            && self.rank(to).calls.receives.contains_key(&(from, tag))
    }

    /// Completes both sides of a message. Fails with an abort if the two sides do not match.
    pub(super) fn hand_over(&mut self, from: Rank, to: Rank, tag: Tag) -> Result<(), Abort> {
        let send = self.rank_mut(from).calls.take_send(to, tag, Ended::Done);
        let receive = self.rank_mut(to).calls.take_receive(from, tag, Ended::Done);
        let (Some(send), Some(receive)) = (send, receive) else { return Ok(()) };
        let sent: Vec<usize> = send.transfer.parts.iter().map(Bytes::len).collect();
        if sent == receive.part_bytes {
            self.note(from, EventKind::Sent, to, tag, send.total);
            self.note(to, EventKind::Received, from, tag, send.total);
            receive.completer.complete(Ok(send.transfer.parts));
            send.completer.complete(Ok(Taken { under_way: Duration::ZERO }));
            return Ok(());
        }
        let text = format!(
            "{tag}: rank {from} sends parts of {sent:?} bytes, rank {to} expects parts of {:?} bytes",
            receive.part_bytes
        );
        send.completer.complete(Err(TransportError::PeerMisbehaved { peer: to, text: text.clone() }));
        receive.completer.complete(Err(TransportError::PeerMisbehaved { peer: from, text: text.clone() }));
        let progress = self.rank(from).recorder.progress();
        Err(Abort { culprit: from, cause: AbortCause::Failed(text), progress })
    }

    /// Lets a closing rank leave when its peers have taken all its messages.
    pub(super) fn let_leavers_go(&mut self) {
        for rank in &mut self.ranks {
            if rank.calls.sends.is_empty()
                && let Phase::Leaving { .. } = rank.phase
                && let Phase::Leaving { completer, .. } = std::mem::replace(&mut rank.phase, Phase::Left)
            {
                completer.complete(Ok(()));
            }
        }
    }

    /// Aborts the group if a rank still needs a rank that has left: its call could end only at its
    /// deadline.
    pub(super) fn abort_if_a_leaver_is_needed(&mut self) {
        if let Some(abort) = self.needed_leaver() {
            self.abort(abort);
        }
    }

    /// Aborts the group for all ranks, unless it is already aborted.
    pub(super) fn abort(&mut self, abort: Abort) {
        if self.aborted.is_some() {
            return;
        }
        self.stop_flag.store(true, Ordering::Release);
        tracing::debug!(%abort, "group aborted");
        for rank in &self.ranks {
            rank.recorder.aborted(&abort);
        }
        for rank in &mut self.ranks {
            rank.calls.abort(&abort);
            if let Phase::Leaving { .. } = rank.phase
                && let Phase::Leaving { completer, .. } = std::mem::replace(&mut rank.phase, Phase::Left)
            {
                completer.complete(Err(TransportError::Aborted { abort: abort.clone(), pending: None }));
            }
        }
        self.aborted = Some(abort);
    }

    /// The abort that is due if a rank still needs a rank that has left. Checks messages before
    /// votes.
    fn needed_leaver(&self) -> Option<Abort> {
        let ranks = || (0..).map(Rank).zip(&self.ranks);
        let left = |(_, rank): &(Rank, &RankState)| matches!(rank.phase, Phase::Left);
        let leavers: Vec<Rank> = ranks().filter(left).map(|(rank, _)| rank).collect();
        // Asked with every vote: a group that nobody has left costs no more than a look at each rank.
        if leavers.is_empty() {
            return None;
        }
        let message = leavers.iter().find_map(|leaver| {
            let needs = |(me, rank): (Rank, &RankState)| rank.calls.still_needs(*leaver, me);
            Some((*leaver, ranks().find_map(needs)?))
        });
        let vote = || {
            ranks().find_map(|(me, rank)| {
                let absent =
                    |round: &u64| leavers.iter().find(|leaver| !self.ballot.has_voted(**leaver, *round));
                let leaver = rank.calls.agreements.keys().find_map(absent)?;
                Some((*leaver, format!("left the group while rank {me} waited for its vote")))
            })
        };
        let (culprit, text) = message.or_else(vote)?;
        let progress = self.rank(culprit).recorder.progress();
        Some(Abort { culprit, cause: AbortCause::Failed(text), progress })
    }

    /// In the calls of all ranks that wait in a round, records one rank whose vote is missing.
    pub(super) fn tell_missing(&mut self, round: u64) {
        let missing = self.ballot.missing(round).next().unwrap_or(Rank::COORDINATOR);
        for rank in &mut self.ranks {
            if let Some(call) = rank.calls.agreements.get_mut(&round) {
                call.missing = missing;
            }
        }
    }

    pub(super) fn note(&self, me: Rank, kind: EventKind, peer: Rank, tag: Tag, bytes: u64) {
        self.rank(me).recorder.note(kind, peer, tag, bytes);
    }

    /// Whether all ranks have called `reform`, except ranks that have left or are gone.
    pub(super) fn may_reform(&self) -> bool {
        let may_come = |rank: &RankState| matches!(rank.phase, Phase::Active);
        !self.reforming.is_empty() && !self.ranks.iter().any(may_come)
    }

    /// The next group of the ranks that have called `reform`, and their calls; or the reason why
    /// too few ranks have called.
    pub(super) fn take_next_group(&mut self) -> (Vec<ReformCall>, Result<Vec<Rank>, String>) {
        let calls = std::mem::take(&mut self.reforming);
        let claim = Claim { epoch: self.epoch, started: true, members: self.members.clone() };
        let came = calls.keys().map(|rank| (self.members[rank.0 as usize], vec![claim.clone()])).collect();
        (
            calls.into_values().collect(),
            next_group(&came, false, u32::try_from(self.members.len()).unwrap_or(u32::MAX)),
        )
    }
}

/// Deadlines, where there is a clock.
#[cfg(not(target_family = "wasm"))]
impl GroupState {
    pub(super) fn next_deadline(&self) -> Option<std::time::Instant> {
        let leaving = self.ranks.iter().filter_map(|rank| match &rank.phase {
            Phase::Leaving { deadline, .. } => Some(deadline.at()),
            _ => None,
        });
        let calls = self.ranks.iter().filter_map(|rank| rank.calls.next_deadline());
        calls.chain(self.reforming.values().map(|call| call.deadline.at())).chain(leaving).min()
    }

    /// Ends late calls. Afterwards the caller forms the next group if [`Self::reform_is_late`].
    pub(super) fn end_calls_past(&mut self, now: std::time::Instant) {
        for rank in &mut self.ranks {
            rank.calls.end_calls_past(now);
            if !matches!(rank.phase, Phase::Leaving { deadline, .. } if deadline.at() <= now) {
                continue;
            }
            if let Phase::Leaving { deadline, completer } = std::mem::replace(&mut rank.phase, Phase::Left) {
                let owed = rank.calls.sends.iter().next();
                let pending = owed.map_or_else(
                    || pending_close(Rank::COORDINATOR),
                    |(&(to, tag), call)| Pending { operation: "close", ..call.pending(to, tag) },
                );
                completer.complete(Err(TransportError::Deadline { pending, waited: deadline.asked() }));
            }
        }
        self.let_leavers_go();
        self.abort_if_a_leaver_is_needed();
    }

    /// Whether the deadline of a rank that waits for the next group has passed.
    pub(super) fn reform_is_late(&self, now: std::time::Instant) -> bool {
        self.reforming.values().any(|call| call.deadline.at() <= now)
    }
}

#[cfg(not(target_family = "wasm"))]
fn pending_close(peer: Rank) -> Pending {
    Pending { operation: "close", peer, tag: Tag { op: 0, message: 0 }, bytes_done: 0, bytes_expected: 0 }
}
