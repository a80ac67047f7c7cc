//! What the hub remembers of its ranks and their outstanding calls.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;

use super::hub::Hub;
use crate::ballot::Ballot;
use crate::deadline::Deadline;
use crate::error::{Abort, AbortCause, Pending, TransportError};
use crate::history::{Ended, History};
use crate::membership::{Claim, next_group};
use crate::posted::Completer;
use crate::pulse::Pulse;
use crate::rank::{Rank, Tag, Taken};
use crate::recorder::{EventKind, Outstanding, Recorder};
use crate::transport::Reformed;

#[derive(Debug)]
pub(super) struct State {
    pub(super) sends: HashMap<Meeting, SendCall>,
    pub(super) recvs: HashMap<Meeting, RecvCall>,
    pub(super) histories: HashMap<(Rank, Rank), Histories>,
    pub(super) agrees: HashMap<(Rank, u64), AgreeCall>,
    pub(super) ballot: Ballot,
    pub(super) ranks: Vec<RankState>,
    pub(super) aborted: Option<Abort>,
    /// By rank, its rank in the first group.
    pub(super) members: Vec<Rank>,
    pub(super) epoch: u32,
    /// Who has come to form the next group.
    pub(super) comers: BTreeMap<Rank, ReformCall>,
    pub(super) stop_flag: Arc<AtomicBool>,
    /// When the watchdog, if it runs, wakes next.
    #[cfg(not(target_family = "wasm"))]
    pub(super) watched_until: Option<std::time::Instant>,
}

/// Where a message is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Meeting {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) tag: Tag,
}

#[derive(Debug)]
pub(super) struct SendCall {
    pub(super) parts: Vec<Bytes>,
    pub(super) total: u64,
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Taken>,
    /// From its post to its end.
    pub(super) _span: tracing::Span,
}

#[derive(Debug)]
pub(super) struct RecvCall {
    pub(super) part_bytes: Vec<usize>,
    pub(super) total: u64,
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Vec<Bytes>>,
    /// As above.
    pub(super) _span: tracing::Span,
}

#[derive(Debug)]
pub(super) struct AgreeCall {
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<()>,
}

#[derive(Debug)]
pub(super) struct ReformCall {
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Reformed>,
}

/// Calls between a sender and a receiver that have ended.
#[derive(Debug, Default)]
pub(super) struct Histories {
    pub(super) sent: History,
    pub(super) received: History,
}

#[derive(Debug)]
pub(super) struct RankState {
    pub(super) phase: Phase,
    pub(super) recorder: Arc<Recorder>,
    pub(super) pulse: Arc<Pulse>,
}

#[derive(Debug)]
pub(super) enum Phase {
    Active,
    /// Closes as soon as its peers have what it sent.
    Leaving {
        deadline: Deadline,
        completer: Completer<()>,
    },
    Left,
    /// It has left for the next group.
    Reforming,
    /// Its endpoint is gone.
    Gone,
}

impl State {
    pub(super) fn may_post(&self, me: Rank) -> Result<(), TransportError> {
        match self.ranks[me.0 as usize].phase {
            Phase::Active => match &self.aborted {
                Some(abort) => Err(TransportError::Aborted { abort: abort.clone(), pending: None }),
                None => Ok(()),
            },
            Phase::Leaving { .. } | Phase::Left | Phase::Reforming | Phase::Gone => {
                Err(TransportError::Closed)
            }
        }
    }

    /// Completes both sides of a message. Fails with the abort that a mismatch calls for.
    pub(super) fn hand_over(&mut self, meeting: Meeting) -> Result<(), Abort> {
        let (Some(send), Some(recv)) = (self.sends.remove(&meeting), self.recvs.remove(&meeting)) else {
            return Ok(());
        };
        let histories = self.histories.entry((meeting.from, meeting.to)).or_default();
        histories.sent.end(meeting.tag, Ended::Done);
        histories.received.end(meeting.tag, Ended::Done);
        let sent: Vec<usize> = send.parts.iter().map(Bytes::len).collect();
        if sent == recv.part_bytes {
            self.note(meeting.from, EventKind::Sent, meeting.to, meeting.tag, send.total);
            self.note(meeting.to, EventKind::Received, meeting.from, meeting.tag, send.total);
            recv.completer.complete(Ok(send.parts));
            send.completer.complete(Ok(Taken { under_way: Duration::ZERO }));
            return Ok(());
        }
        let Meeting { from, to, tag } = meeting;
        let text = format!(
            "{tag}: rank {from} sends parts of {sent:?} bytes, rank {to} expects parts of {:?} bytes",
            recv.part_bytes
        );
        send.completer.complete(Err(TransportError::PeerMisbehaved { peer: to, text: text.clone() }));
        recv.completer.complete(Err(TransportError::PeerMisbehaved { peer: from, text: text.clone() }));
        let progress = self.ranks[from.0 as usize].recorder.progress();
        Err(Abort { culprit: from, cause: AbortCause::Failed(text), progress })
    }

    /// Lets ranks go whose messages have all been taken.
    pub(super) fn let_leavers_go(&mut self) {
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

    /// A rank that left cannot take part in anything any more; whoever still needs it would wait in vain.
    pub(super) fn abort_if_somebody_waits_for_a_leaver(&mut self) {
        if let Some(abort) = self.somebody_waits_for_a_leaver() {
            self.abort(abort);
        }
    }

    /// Makes an abort everyone's, unless there is one already.
    pub(super) fn abort(&mut self, abort: Abort) {
        if self.aborted.is_some() {
            return;
        }
        self.stop_flag.store(true, Ordering::Release);
        tracing::debug!(%abort, "group aborted");
        for rank in &self.ranks {
            rank.recorder.aborted(&abort);
        }
        self.aborted = Some(abort);
        self.fail_everything();
    }

    fn somebody_waits_for_a_leaver(&self) -> Option<Abort> {
        let left = |rank: Rank| matches!(self.ranks[rank.0 as usize].phase, Phase::Left);
        let recv = self.recvs.keys().find(|meeting| left(meeting.from));
        let send = self.sends.keys().find(|meeting| left(meeting.to));
        let gone = |round| self.ballot.missing(round).find(|&missing| left(missing));
        let agree = self.agrees.keys().find_map(|&(rank, round)| Some((rank, gone(round)?)));
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
        let progress = self.ranks[culprit.0 as usize].recorder.progress();
        Some(Abort { culprit, cause: AbortCause::Failed(text), progress })
    }

    pub(super) fn note(&self, me: Rank, kind: EventKind, peer: Rank, tag: Tag, bytes: u64) {
        self.ranks[me.0 as usize].recorder.note(kind, peer, tag, bytes);
    }

    /// The calls of a rank that have not ended.
    pub(super) fn outstanding(&self, me: Rank) -> Vec<Outstanding> {
        let sends = self.sends.iter().filter(|(meeting, _)| meeting.from == me);
        let recvs = self.recvs.iter().filter(|(meeting, _)| meeting.to == me);
        let agrees = self.agrees.iter().filter(|((rank, _), _)| *rank == me);
        (sends.map(|(meeting, call)| meeting.send(call.total, call.deadline)))
            .chain(recvs.map(|(meeting, call)| meeting.recv(call.total, call.deadline)))
            .chain(agrees.map(|((_, round), call)| Outstanding {
                pending: pending_agree(&self.ballot, *round),
                waited: call.deadline.waited(),
            }))
            .collect()
    }

    pub(super) fn end_receives_of(&mut self, me: Rank) {
        for (_, call) in self.recvs.extract_if(|meeting, _| meeting.to == me) {
            call.completer.complete(Err(TransportError::Closed));
        }
        for (_, call) in self.agrees.extract_if(|(rank, _), _| *rank == me) {
            call.completer.complete(Err(TransportError::Closed));
        }
    }

    /// Forms the next group once everybody has come who has not left, or is gone.
    pub(super) fn reform_if_all_are_here(&mut self) {
        let may_come = |rank: &RankState| matches!(rank.phase, Phase::Active);
        if !self.comers.is_empty() && !self.ranks.iter().any(may_come) {
            self.reform();
        }
    }

    /// Forms the next group of those who have come, if they are enough.
    fn reform(&mut self) {
        let comers = std::mem::take(&mut self.comers);
        let of_first = |rank: &Rank| self.members[rank.0 as usize];
        let claim = Claim { epoch: self.epoch, started: true, members: self.members.clone() };
        let came = comers.keys().map(|rank| (of_first(rank), vec![claim.clone()])).collect();
        let next = next_group(&came, false).map(|members| {
            let epoch = self.epoch + 1;
            (super::ends_of(&Arc::new(Hub::new(members.clone(), epoch))), members, epoch)
        });
        for (place, call) in comers.into_values().enumerate() {
            call.completer.complete(match &next {
                Ok((ends, members, epoch)) => {
                    let transport = Arc::clone(&ends[place]);
                    Ok(Reformed { transport, members: members.clone(), epoch: *epoch })
                }
                Err(text) => Err(TransportError::Bootstrap { text: text.clone() }),
            });
        }
    }

    /// Ends every outstanding call with the abort.
    fn fail_everything(&mut self) {
        let Some(abort) = self.aborted.clone() else { return };
        let error = |pending| TransportError::Aborted { abort: abort.clone(), pending: Some(pending) };
        let early = |me: Rank, Outstanding { pending, waited }: Outstanding| {
            self.ranks[me.0 as usize].recorder.ended_early(pending, waited);
            pending
        };
        for (meeting, call) in self.sends.drain() {
            let pending = early(meeting.from, meeting.send(call.total, call.deadline));
            call.completer.complete(Err(error(pending)));
        }
        for (meeting, call) in self.recvs.drain() {
            let pending = early(meeting.to, meeting.recv(call.total, call.deadline));
            call.completer.complete(Err(error(pending)));
        }
        for ((rank, round), call) in self.agrees.drain() {
            let pending = pending_agree(&self.ballot, round);
            early(rank, Outstanding { pending, waited: call.deadline.waited() });
            call.completer.complete(Err(error(pending)));
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
    pub(super) fn next_deadline(&self) -> Option<std::time::Instant> {
        let leaving = self.ranks.iter().filter_map(|rank| match &rank.phase {
            Phase::Leaving { deadline, .. } => Some(deadline.at()),
            _ => None,
        });
        (self.sends.values().map(|call| call.deadline.at()))
            .chain(self.recvs.values().map(|call| call.deadline.at()))
            .chain(self.agrees.values().map(|call| call.deadline.at()))
            .chain(self.comers.values().map(|call| call.deadline.at()))
            .chain(leaving)
            .min()
    }

    pub(super) fn end_calls_past(&mut self, now: std::time::Instant) {
        let late =
            |pending, deadline: Deadline| TransportError::Deadline { pending, waited: deadline.patience() };
        for (meeting, call) in self.sends.extract_if(|_, call| call.deadline.at() <= now) {
            let histories = self.histories.entry((meeting.from, meeting.to)).or_default();
            histories.sent.end(meeting.tag, Ended::GivenUp);
            let Outstanding { pending, waited } = meeting.send(call.total, call.deadline);
            self.ranks[meeting.from.0 as usize].recorder.ended_early(pending, waited);
            call.completer.complete(Err(late(pending, call.deadline)));
        }
        for (meeting, call) in self.recvs.extract_if(|_, call| call.deadline.at() <= now) {
            let histories = self.histories.entry((meeting.from, meeting.to)).or_default();
            histories.received.end(meeting.tag, Ended::GivenUp);
            let Outstanding { pending, waited } = meeting.recv(call.total, call.deadline);
            self.ranks[meeting.to.0 as usize].recorder.ended_early(pending, waited);
            call.completer.complete(Err(late(pending, call.deadline)));
        }
        for ((rank, round), call) in self.agrees.extract_if(|_, call| call.deadline.at() <= now) {
            let pending = pending_agree(&self.ballot, round);
            self.ranks[rank.0 as usize].recorder.ended_early(pending, call.deadline.waited());
            call.completer.complete(Err(late(pending, call.deadline)));
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
        self.abort_if_somebody_waits_for_a_leaver();
        if self.comers.values().any(|call| call.deadline.at() <= now) {
            self.reform();
        }
    }
}

impl Meeting {
    fn send(self, total: u64, deadline: Deadline) -> Outstanding {
        Outstanding { pending: self.pending_send(total), waited: deadline.waited() }
    }

    fn recv(self, total: u64, deadline: Deadline) -> Outstanding {
        Outstanding { pending: self.pending_recv(total), waited: deadline.waited() }
    }

    pub(super) fn pending_send(self, total: u64) -> Pending {
        Pending { operation: "send", peer: self.to, tag: self.tag, bytes_done: 0, bytes_expected: total }
    }

    fn pending_recv(self, total: u64) -> Pending {
        Pending { operation: "receive", peer: self.from, tag: self.tag, bytes_done: 0, bytes_expected: total }
    }
}

fn pending_agree(ballot: &Ballot, round: u64) -> Pending {
    let peer = ballot.missing(round).next().unwrap_or(Rank(0));
    Pending { operation: "agree", peer, tag: Tag { op: round, message: 0 }, bytes_done: 0, bytes_expected: 0 }
}

#[cfg(not(target_family = "wasm"))]
fn pending_close(peer: Rank) -> Pending {
    Pending { operation: "close", peer, tag: Tag { op: 0, message: 0 }, bytes_done: 0, bytes_expected: 0 }
}
