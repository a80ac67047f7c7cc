//! Agreements: every rank votes, rank 0 counts and tells all of them how it ended.

use std::time::Duration;

use super::coordinator::Coordinator;
use super::core::{COORDINATOR, Core};
use super::state::{AgreeCall, Patience};
use crate::ballot::{Refusal, Verdict};
use crate::error::TransportError;
use crate::transport::{Completer, Rank, Vote};
use crate::wire::Frame;

impl Core {
    /// Of every rank: starts this rank's part in the next agreement.
    pub(crate) fn agree(&self, vote: Vote, patience: Duration, completer: Completer<()>) {
        let mut state = self.lock();
        if let Err(error) = state.may_post() {
            return completer.complete(Err(error));
        }
        let round = state.next_round;
        state.next_round += 1;
        state.agrees.insert(round, AgreeCall { completer, patience: Patience::of(patience) });
        drop(state);
        self.changed.notify_waiters();
        match (&self.coordinator, self.control(COORDINATOR)) {
            (Some(coordinator), _) => self.count_vote(coordinator, self.me, vote),
            (None, Some(control)) => control.say(Frame::Vote { vote }),
            (None, None) => {}
        }
    }

    pub(crate) fn agreed(&self, round: u64, verdict: Verdict) {
        let call = self.lock().agrees.remove(&round);
        if let Some(call) = call {
            call.completer.complete(verdict.map_err(TransportError::from));
        }
        self.changed.notify_waiters();
    }

    /// Of the coordinator: counts a vote, and tells the verdict if it was the last one of its round.
    pub(crate) fn count_vote(&self, coordinator: &Coordinator, rank: Rank, vote: Vote) {
        let mut state = coordinator.lock();
        let (round, verdict) = match state.ballot.cast(rank, vote) {
            Ok(counted) => counted,
            Err(text) => {
                drop(state);
                return self.failed(rank, text);
            }
        };
        let leaver = state.ballot.missing(round).filter(|missing| state.members[missing.0 as usize].left);
        drop(state);
        if let Some(verdict) = verdict {
            let refusal = verdict.clone().err().map(|Refusal { rank, exit, text }| (rank, exit, text));
            for member in self.control.iter().flatten() {
                member.say(Frame::Verdict { round, refusal: refusal.clone() });
            }
            self.agreed(round, verdict);
        } else if let Some(leaver) = leaver {
            self.failed(leaver, format!("left the group while rank {rank} waited for its vote"));
        }
    }

    /// Somebody may wait for the vote of a rank that has just left.
    pub(crate) fn check_open_rounds(&self, coordinator: &Coordinator, leaver: Rank) {
        let first_open = self.lock().agrees.keys().next().copied();
        let missing = first_open.and_then(|round| coordinator.lock().ballot.missing(round));
        if missing == Some(leaver) {
            self.failed(leaver, format!("left the group while rank {} waited for its vote", self.me));
        }
    }
}
