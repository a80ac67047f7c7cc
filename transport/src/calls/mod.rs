//! The calls of one rank that have not ended: the same table, with the same rules, for every
//! transport.
//!
//! A call ends with its value, at its deadline, with the abort of its group, or when its rank
//! closes. A transport adds what it needs to move a message ([`Transfer`]) and the clock by which
//! deadlines pass ([`Clock`]).

#[cfg_attr(
    target_family = "wasm",
    expect(dead_code, reason = "deadlines are not watched where there are no threads")
)]
mod deadline;
mod history;
mod misuse;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

pub(crate) use self::deadline::{Clock, Deadline, SystemClock};
pub(crate) use self::history::Ended;
use self::history::History;
use self::misuse::outstanding_already;
pub(crate) use self::misuse::{check_message, check_vote};
use crate::error::{Abort, Pending, TransportError};
use crate::posted::Completer;
use crate::rank::{Rank, Tag, Taken};
use crate::recorder::{Outstanding, Recorder};

/// The calls of one rank, by peer and message; agreements by round.
#[derive(Debug)]
pub(crate) struct Calls<C: Clock, S, R> {
    abort: Option<Abort>,
    // Ordered maps, so that a change of all calls happens in the same order every time.
    pub(crate) sends: BTreeMap<(Rank, Tag), SendCall<C, S>>,
    pub(crate) receives: BTreeMap<(Rank, Tag), ReceiveCall<C, R>>,
    pub(crate) agreements: BTreeMap<u64, AgreeCall<C>>,
    /// By peer, the messages to it and from it whose calls have ended.
    histories: BTreeMap<Rank, Histories>,
    /// Notes calls that end early.
    recorder: Arc<Recorder>,
}

/// What a transport keeps of a message while its call is outstanding.
pub(crate) trait Transfer: fmt::Debug {
    /// Payload bytes that have moved so far.
    fn bytes_done(&self) -> u64;

    /// The call ends early: nothing of the message may move any more.
    fn give_up(&mut self);
}

#[derive(Debug)]
pub(crate) struct SendCall<C: Clock, S> {
    pub(crate) completer: Completer<Taken>,
    /// Bytes of all parts.
    pub(crate) total: u64,
    pub(crate) deadline: Deadline<C>,
    pub(crate) transfer: S,
}

#[derive(Debug)]
pub(crate) struct ReceiveCall<C: Clock, R> {
    pub(crate) completer: Completer<Vec<Bytes>>,
    pub(crate) part_bytes: Vec<usize>,
    /// Bytes of all parts.
    pub(crate) total: u64,
    pub(crate) deadline: Deadline<C>,
    pub(crate) transfer: R,
}

#[derive(Debug)]
pub(crate) struct AgreeCall<C: Clock> {
    pub(crate) completer: Completer<Vec<Bytes>>,
    pub(crate) deadline: Deadline<C>,
    /// A rank whose vote is missing, if one is known; otherwise the coordinator.
    pub(crate) missing: Rank,
}

#[derive(Debug, Default)]
struct Histories {
    sent: History,
    received: History,
}

impl<C: Clock, S: Transfer, R: Transfer> Calls<C, S, R> {
    pub(crate) fn new(recorder: Arc<Recorder>) -> Self {
        Self {
            abort: None,
            sends: BTreeMap::new(),
            receives: BTreeMap::new(),
            agreements: BTreeMap::new(),
            histories: BTreeMap::new(),
            recorder,
        }
    }

    /// Whether the group still accepts a new call.
    pub(crate) fn check_not_aborted(&self) -> Result<(), TransportError> {
        match &self.abort {
            None => Ok(()),
            Some(abort) => Err(TransportError::Aborted { abort: abort.clone(), pending: None }),
        }
    }

    /// Whether the send of `tag` to `to` may be posted. If so, the caller must insert the call
    /// next.
    pub(crate) fn begin_send(&mut self, to: Rank, tag: Tag) -> Result<(), TransportError> {
        if self.sends.contains_key(&(to, tag)) {
            return Err(outstanding_already("send", to, tag));
        }
        self.histories.entry(to).or_default().sent.post("send", to, tag)
    }

    /// The same of a receive.
    pub(crate) fn begin_receive(&mut self, from: Rank, tag: Tag) -> Result<(), TransportError> {
        if self.receives.contains_key(&(from, tag)) {
            return Err(outstanding_already("receive", from, tag));
        }
        self.histories.entry(from).or_default().received.post("receive", from, tag)
    }

    /// Removes a send that has ended; the caller completes it.
    pub(crate) fn take_send(&mut self, to: Rank, tag: Tag, ended: Ended) -> Option<SendCall<C, S>> {
        let call = self.sends.remove(&(to, tag))?;
        self.histories.entry(to).or_default().sent.end(tag, ended);
        Some(call)
    }

    /// Removes a receive that has ended; the caller completes it.
    pub(crate) fn take_receive(&mut self, from: Rank, tag: Tag, ended: Ended) -> Option<ReceiveCall<C, R>> {
        let call = self.receives.remove(&(from, tag))?;
        self.histories.entry(from).or_default().received.end(tag, ended);
        Some(call)
    }

    /// Describes what this rank, `me`, still needs from a peer that has left the group, as a text
    /// for the abort.
    pub(crate) fn still_needs(&self, peer: Rank, me: Rank) -> Option<String> {
        if let Some((_, tag)) = self.receives.keys().find(|(from, _)| *from == peer) {
            return Some(format!("left the group while rank {me} still expected {tag} from it"));
        }
        let (_, tag) = self.sends.keys().find(|(to, _)| *to == peer)?;
        Some(format!("left the group while rank {me} still had {tag} for it"))
    }

    /// The calls that have not ended.
    pub(crate) fn outstanding(&self) -> Vec<Outstanding> {
        let sends = self.sends.iter().map(|(&(to, tag), call)| (call.pending(to, tag), call.deadline));
        let receives = self.receives.iter();
        let receives = receives.map(|(&(from, tag), call)| (call.pending(from, tag), call.deadline));
        let agreements = self.agreements.iter();
        let agreements = agreements.map(|(&round, call)| (call.pending(round), call.deadline));
        let all = sends.chain(receives).chain(agreements);
        all.map(|(pending, deadline)| Outstanding { pending, waited: deadline.waited() }).collect()
    }

    /// Ends every call with the abort of the group, and every later one. Only the first abort
    /// counts.
    pub(crate) fn abort(&mut self, abort: &Abort) {
        if self.abort.is_some() {
            return;
        }
        self.abort = Some(abort.clone());
        let error = |pending| TransportError::Aborted { abort: abort.clone(), pending: Some(pending) };
        for ((to, tag), mut call) in std::mem::take(&mut self.sends) {
            call.transfer.give_up();
            let pending = call.pending(to, tag);
            self.recorder.ended_early(pending, call.deadline.waited());
            call.completer.complete(Err(error(pending)));
        }
        for ((from, tag), mut call) in std::mem::take(&mut self.receives) {
            // The message may be in flight: its sender has received the request, and does not know of the
            // abort yet.
            self.histories.entry(from).or_default().received.end(tag, Ended::GivenUp);
            call.transfer.give_up();
            let pending = call.pending(from, tag);
            self.recorder.ended_early(pending, call.deadline.waited());
            call.completer.complete(Err(error(pending)));
        }
        for (round, call) in std::mem::take(&mut self.agreements) {
            let pending = call.pending(round);
            self.recorder.ended_early(pending, call.deadline.waited());
            call.completer.complete(Err(error(pending)));
        }
    }

    /// This rank closes: it no longer waits for any message or vote. Its sends continue.
    pub(crate) fn end_receives(&mut self) {
        for ((from, tag), mut call) in std::mem::take(&mut self.receives) {
            self.histories.entry(from).or_default().received.end(tag, Ended::GivenUp);
            call.transfer.give_up();
            call.completer.complete(Err(TransportError::Closed));
        }
        for (_, call) in std::mem::take(&mut self.agreements) {
            call.completer.complete(Err(TransportError::Closed));
        }
    }
}

/// Deadlines, where there is a clock.
#[cfg(not(target_family = "wasm"))]
impl<C: Clock, S: Transfer, R: Transfer> Calls<C, S, R> {
    /// The next deadline of the outstanding calls.
    pub(crate) fn next_deadline(&self) -> Option<C::Instant> {
        (self.sends.values().map(|call| call.deadline.at()))
            .chain(self.receives.values().map(|call| call.deadline.at()))
            .chain(self.agreements.values().map(|call| call.deadline.at()))
            .min()
    }

    /// Ends the calls whose deadline is not after `now`. Returns the sends among them.
    pub(crate) fn end_calls_past(&mut self, now: C::Instant) -> Vec<(Rank, Tag, S)> {
        let mut sends = Vec::new();
        let late =
            |pending, deadline: Deadline<C>| TransportError::Deadline { pending, waited: deadline.asked() };
        for ((to, tag), mut call) in take_late(&mut self.sends, |call| call.deadline.at() <= now) {
            self.histories.entry(to).or_default().sent.end(tag, Ended::GivenUp);
            call.transfer.give_up();
            let pending = call.pending(to, tag);
            self.recorder.ended_early(pending, call.deadline.waited());
            call.completer.complete(Err(late(pending, call.deadline)));
            sends.push((to, tag, call.transfer));
        }
        for ((from, tag), mut call) in take_late(&mut self.receives, |call| call.deadline.at() <= now) {
            self.histories.entry(from).or_default().received.end(tag, Ended::GivenUp);
            call.transfer.give_up();
            let pending = call.pending(from, tag);
            self.recorder.ended_early(pending, call.deadline.waited());
            call.completer.complete(Err(late(pending, call.deadline)));
        }
        for (round, call) in take_late(&mut self.agreements, |call| call.deadline.at() <= now) {
            let pending = call.pending(round);
            self.recorder.ended_early(pending, call.deadline.waited());
            call.completer.complete(Err(late(pending, call.deadline)));
        }
        sends
    }
}

/// Lookups for a transport whose messages arrive asynchronously.
#[cfg(feature = "quic")]
impl<C: Clock, S: Transfer, R: Transfer> Calls<C, S, R> {
    /// The abort of the group, if it has been aborted.
    pub(crate) fn aborted(&self) -> Option<&Abort> {
        self.abort.as_ref()
    }

    /// How the send of `tag` ended, if it did and is remembered.
    pub(crate) fn send_ended(&self, to: Rank, tag: Tag) -> Option<Ended> {
        self.histories.get(&to)?.sent.of(tag)
    }

    /// How the receive of `tag` ended, if it did and is remembered.
    pub(crate) fn receive_ended(&self, from: Rank, tag: Tag) -> Option<Ended> {
        self.histories.get(&from)?.received.of(tag)
    }

    /// The current operation, if `tag` belongs to an operation so old that the end of its receive
    /// would be forgotten.
    pub(crate) fn receive_is_past(&self, from: Rank, tag: Tag) -> Option<u64> {
        self.histories.get(&from)?.received.is_past(tag)
    }

    /// The ranks with which messages are outstanding, lowest first.
    pub(crate) fn waits_for(&self) -> Vec<Rank> {
        let keys = self.sends.keys().chain(self.receives.keys());
        let peers: std::collections::BTreeSet<Rank> = keys.map(|&(peer, _)| peer).collect();
        peers.into_iter().collect()
    }

    /// This rank is gone: no bytes of its messages may move any more.
    pub(crate) fn end_sends(&mut self) {
        for (_, mut call) in std::mem::take(&mut self.sends) {
            call.transfer.give_up();
            call.completer.complete(Err(TransportError::Closed));
        }
    }
}

/// Removes the calls that are late.
#[cfg(not(target_family = "wasm"))]
fn take_late<K: Copy + Ord, V>(calls: &mut BTreeMap<K, V>, is_late: impl Fn(&V) -> bool) -> Vec<(K, V)> {
    let late: Vec<K> = calls.iter().filter(|(_, call)| is_late(call)).map(|(&key, _)| key).collect();
    late.into_iter().filter_map(|key| calls.remove_entry(&key)).collect()
}

impl<C: Clock, S: Transfer> SendCall<C, S> {
    pub(crate) fn pending(&self, peer: Rank, tag: Tag) -> Pending {
        let bytes_done = self.transfer.bytes_done();
        Pending { operation: "send", peer, tag, bytes_done, bytes_expected: self.total }
    }
}

impl<C: Clock, R: Transfer> ReceiveCall<C, R> {
    fn pending(&self, peer: Rank, tag: Tag) -> Pending {
        let bytes_done = self.transfer.bytes_done();
        Pending { operation: "receive", peer, tag, bytes_done, bytes_expected: self.total }
    }
}

impl<C: Clock> AgreeCall<C> {
    fn pending(&self, round: u64) -> Pending {
        let tag = Tag { op: round, message: 0 };
        Pending { operation: "agree", peer: self.missing, tag, bytes_done: 0, bytes_expected: 0 }
    }
}
