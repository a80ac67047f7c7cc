//! Agreements: every rank votes, rank 0 counts the votes and sends the verdict to all ranks.

use std::time::Duration;

use bytes::Bytes;

use super::coordinator::{Coordinator, MissingVote};
use super::core::Core;
use super::state::Deadline;
use crate::ballot::{Refusal, Verdict, note_bytes};
use crate::calls::{AgreeCall, check_vote};
use crate::error::TransportError;
use crate::posted::Completer;
use crate::rank::{Rank, Tag, Vote};
use crate::recorder::EventKind;
use crate::wire::{Frame, Notes};

impl Core {
    /// On every rank: starts this rank's part in the next agreement.
    pub(crate) fn agree(&self, vote: Vote, patience: Duration, completer: Completer<Vec<Bytes>>) {
        let bytes = match check_vote(self.me, &vote) {
            Ok(bytes) => bytes,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.lock();
        if let Err(error) = state.may_post() {
            return completer.complete(Err(error));
        }
        let round = state.next_round;
        state.next_round += 1;
        self.recorder.note(EventKind::Voted, self.me, Tag { op: round, message: 0 }, bytes);
        let deadline = Deadline::after(patience);
        state.calls.agreements.insert(round, AgreeCall { completer, deadline, missing: Rank::COORDINATOR });
        drop(state);
        self.posted(deadline);
        match (&self.coordinator, self.control(Rank::COORDINATOR)) {
            (Some(coordinator), _) => self.count_vote(coordinator, self.me, vote),
            (None, Some(control)) => control.say(Frame::Vote { vote }),
            (None, None) => {}
        }
    }

    pub(crate) fn agreed(&self, round: u64, verdict: Verdict) {
        let call = self.lock().calls.agreements.remove(&round);
        if let Some(call) = call {
            let tag = Tag { op: round, message: 0 };
            self.recorder.note(EventKind::Agreed, Rank::COORDINATOR, tag, note_bytes(&verdict));
            call.completer.complete(verdict.map_err(TransportError::from));
        }
        self.call_ended();
    }

    /// On the coordinator: counts a vote, and sends the verdict if it was the last one of its
    /// round.
    pub(crate) fn count_vote(&self, coordinator: &Coordinator, rank: Rank, vote: Vote) {
        let counted = coordinator.lock().ballot.cast(rank, vote);
        match counted {
            Err(text) => self.failed(rank, text),
            Ok((round, Some(verdict))) => {
                let frames = verdict_frames(round, &verdict);
                for member in self.control.iter().flatten() {
                    member.say_encoded(frames.clone());
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
    /// Only the voter knows whether it still waits, so the voter ends a wait for a rank that has
    /// left.
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

/// The frames that tell a rank how a round ended, encoded once for all ranks. They stay together on
/// the way.
fn verdict_frames(round: u64, verdict: &Verdict) -> Bytes {
    let mut frames = Vec::new();
    let refusal = match verdict {
        Ok(notes) => {
            let notes = Notes::split(notes).into_iter();
            frames.extend(notes.map(|notes| Frame::Notes { round, notes }.encode()));
            None
        }
        Err(Refusal { rank, reason, text }) => Some((*rank, *reason, text.clone())),
    };
    frames.push(Frame::Verdict { round, refusal }.encode());
    // An allocation of exactly this size: a peer that does not read makes many of them wait.
    frames.concat().into()
}
