//! Agreements: every rank votes, rank 0 counts the votes and sends the verdict to all ranks.

use std::time::Duration;

use super::coordinator::{Coordinator, MissingVote};
use super::core::Core;
use super::state::Deadline;
use crate::ballot::{Refusal, Verdict};
use crate::calls::AgreeCall;
use crate::error::TransportError;
use crate::posted::Completer;
use crate::rank::{Rank, Tag, Vote};
use crate::recorder::EventKind;
use crate::wire::Frame;

impl Core {
    /// On every rank: starts this rank's part in the next agreement.
    pub(crate) fn agree(&self, vote: Vote, patience: Duration, completer: Completer<()>) {
        let mut state = self.lock();
        if let Err(error) = state.may_post() {
            return completer.complete(Err(error));
        }
        let round = state.next_round;
        state.next_round += 1;
        self.recorder.note(EventKind::Voted, self.me, Tag { op: round, message: 0 }, 0);
        let deadline = Deadline::after(patience);
        state.calls.agreements.insert(round, AgreeCall { completer, deadline, missing: Rank::COORDINATOR });
        drop(state);
        self.changed.notify_waiters();
        match (&self.coordinator, self.control(Rank::COORDINATOR)) {
            (Some(coordinator), _) => self.count_vote(coordinator, self.me, vote),
            (None, Some(control)) => control.say(Frame::Vote { vote }),
            (None, None) => {}
        }
    }

    pub(crate) fn agreed(&self, round: u64, verdict: Verdict) {
        let call = self.lock().calls.agreements.remove(&round);
        if let Some(call) = call {
            self.recorder.note(EventKind::Agreed, Rank::COORDINATOR, Tag { op: round, message: 0 }, 0);
            call.completer.complete(verdict.map_err(TransportError::from));
        }
        self.changed.notify_waiters();
    }

    /// On the coordinator: counts a vote, and sends the verdict if it was the last one of its round.
    pub(crate) fn count_vote(&self, coordinator: &Coordinator, rank: Rank, vote: Vote) {
        let counted = coordinator.lock().ballot.cast(rank, vote);
        match counted {
            Err(text) => self.failed(rank, text),
            Ok((round, Some(verdict))) => {
                let refusal =
                    verdict.clone().err().map(|Refusal { rank, reason, text }| (rank, reason, text));
                for member in self.control.iter().flatten() {
                    member.say(Frame::Verdict { round, refusal: refusal.clone() });
                }
                self.agreed(round, verdict);
            }
            // The other ranks learn it with the next heartbeat.
            Ok((round, None)) => {
                self.send_missing(coordinator.missing_vote(round).map(|missing_vote| (rank, missing_vote)))
            }
        }
    }

    /// On the coordinator: a rank has left, and another one may wait for its vote.
    pub(crate) fn check_open_rounds(&self, coordinator: &Coordinator) {
        self.send_missing(coordinator.missing_in_any_round());
    }

    /// On the coordinator: tells waiting ranks which vote is missing.
    pub(crate) fn send_missing(&self, missing_vote: impl IntoIterator<Item = (Rank, MissingVote)>) {
        for (voter, missing_vote) in missing_vote {
            if voter == self.me {
                self.note_missing(missing_vote);
            } else if let Some(control) = self.control(voter) {
                let MissingVote { round, rank, left } = missing_vote;
                control.say(Frame::Missing { round, rank, left });
            }
        }
    }

    /// On every rank: the coordinator has named a missing vote of a round.
    ///
    /// Only the voter knows whether it still waits, so the voter ends a wait for a rank that has left.
    pub(crate) fn note_missing(&self, MissingVote { round, rank, left }: MissingVote) {
        let waits = {
            let mut state = self.lock();
            let call = state.calls.agreements.get_mut(&round);
            call.map(|call| call.missing = rank).is_some()
        };
        if waits && left {
            self.failed(rank, format!("left the group while rank {} waited for its vote", self.me));
        }
    }
}
