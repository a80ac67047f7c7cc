//! The state that only rank 0 has: the votes, and the last report of every rank.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::stalls::{Report, Stall, Stalls};
use crate::ballot::Ballot;
use crate::rank::{Progress, Rank};

/// The state of the coordinator.
#[derive(Debug)]
pub(crate) struct Coordinator {
    state: Mutex<CoordinatorState>,
}

#[derive(Debug)]
pub(crate) struct CoordinatorState {
    pub(crate) ballot: Ballot,
    pub(crate) members: Vec<Member>,
    pub(crate) stalls: Stalls,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Member {
    pub(crate) progress: Progress,
    pub(crate) silence: Silence,
    pub(crate) left: bool,
}

impl Coordinator {
    pub(crate) fn new(size: u32, stuck_ticks: u32) -> Self {
        let members = vec![Member::default(); size as usize];
        let stalls = Stalls::new(size, stuck_ticks);
        Self { state: Mutex::new(CoordinatorState { ballot: Ballot::new(size), members, stalls }) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, CoordinatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lowest rank, other than this one, that has not left.
    pub(crate) fn lowest_present(&self) -> Option<Rank> {
        let state = self.lock();
        let mut ranks = (0..).map(Rank).zip(&state.members).skip(1);
        ranks.find(|(_, member)| !member.left).map(|(rank, _)| rank)
    }

    /// The last reported progress of a rank.
    pub(crate) fn progress(&self, rank: Rank) -> Progress {
        self.lock().members.get(rank.0 as usize).map(|member| member.progress).unwrap_or_default()
    }

    pub(crate) fn heard(&self, rank: Rank) {
        self.lock().members[rank.0 as usize].silence.reset();
    }

    /// Takes the report of a heartbeat, or of this rank itself.
    pub(crate) fn report(&self, rank: Rank, report: Report) {
        let mut state = self.lock();
        state.members[rank.0 as usize].progress = report.progress;
        state.stalls.report(rank, report);
    }

    /// Counts a tick for ranks that make no progress, and returns one that others wait for.
    pub(crate) fn stalled(&self) -> Option<Stall> {
        let mut state = self.lock();
        let round = state.ballot.open_rounds().next();
        let absent: Vec<Rank> = round.iter().flat_map(|&round| state.ballot.missing(round)).collect();
        let voters: Vec<Rank> = round.iter().flat_map(|&round| state.ballot.voted(round)).collect();
        state.stalls.tick(&absent, &voters)
    }

    pub(crate) fn left(&self, rank: Rank) -> bool {
        self.lock().members[rank.0 as usize].left
    }

    /// Notes that a rank has left, and returns whether it had left before.
    pub(crate) fn leaves(&self, rank: Rank) -> bool {
        std::mem::replace(&mut self.lock().members[rank.0 as usize].left, true)
    }

    /// The vote that is missing in an open round.
    pub(crate) fn missing_vote(&self, round: u64) -> Option<MissingVote> {
        self.lock().missing_vote(round)
    }

    /// For each rank that waits in the first open round: the vote that is missing.
    pub(crate) fn missing_in_first_round(&self) -> Vec<(Rank, MissingVote)> {
        self.lock().missing_in(1)
    }

    /// For each rank that waits in any open round: the vote that is missing.
    pub(crate) fn missing_in_any_round(&self) -> Vec<(Rank, MissingVote)> {
        self.lock().missing_in(usize::MAX)
    }

    /// Counts a tick of silence for every rank, and returns a rank that has been silent for as long
    /// as `path` says.
    pub(crate) fn tick(&self, path: impl Fn(Rank) -> PathSigns) -> Option<(Rank, DeadLink)> {
        let mut state = self.lock();
        let mut dead = None;
        for (rank, member) in (0..).map(Rank).zip(&mut state.members).skip(1) {
            if !member.left
                && let Some(link) = member.silence.tick(path(rank))
            {
                dead = dead.or(Some((rank, link)));
            }
        }
        dead
    }
}

/// The path to a rank at a tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathSigns {
    /// [`Link::signs_of_life`](super::link::Link::signs_of_life).
    pub(crate) signs_of_life: u64,
    /// [`Link::acknowledged`](super::link::Link::acknowledged).
    pub(crate) acknowledged: u64,
    /// Ticks of silence after which the rank counts as dead.
    pub(crate) dead_after: u32,
}

/// The direction of a link that carries nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeadLink {
    /// No packet of the peer arrives.
    FromPeer,
    /// Packets of the peer arrive, and acknowledge none of this rank, for so many ticks. The peer
    /// counts this rank as dead by now, and cannot be relied upon to have told it: what it says
    /// once is lost with one packet.
    ToPeer { ticks: u32 },
}

/// For how long a rank has been silent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Silence {
    ticks: u32,
    signs_of_life: u64,
    unacknowledged_ticks: u32,
    acknowledged: u64,
}

impl Silence {
    /// A frame has arrived.
    pub(crate) fn reset(&mut self) {
        self.ticks = 0;
    }

    /// Counts a tick, in which this rank has sent a heartbeat, unless the rank has shown that it
    /// lives. Returns whether it counts as dead.
    pub(crate) fn tick(&mut self, path: PathSigns) -> Option<DeadLink> {
        let PathSigns { signs_of_life, acknowledged, dead_after } = path;
        if std::mem::replace(&mut self.signs_of_life, signs_of_life) != signs_of_life {
            self.ticks = 0;
        }
        if std::mem::replace(&mut self.acknowledged, acknowledged) != acknowledged {
            self.unacknowledged_ticks = 0;
        }
        self.ticks += 1;
        self.unacknowledged_ticks += 1;
        // The peer notices first, and its own words are the better error.
        let unacknowledged_after = dead_after.saturating_add(dead_after / 4);
        if self.ticks >= dead_after {
            Some(DeadLink::FromPeer)
        } else if self.unacknowledged_ticks >= unacknowledged_after {
            Some(DeadLink::ToPeer { ticks: self.unacknowledged_ticks })
        } else {
            None
        }
    }
}

impl CoordinatorState {
    /// Names a rank that has left, if there is one; otherwise a rank that may still vote.
    fn missing_vote(&self, round: u64) -> Option<MissingVote> {
        let left = |rank: &Rank| self.members[rank.0 as usize].left;
        let gone = self.ballot.missing(round).find(left);
        let rank = gone.or_else(|| self.ballot.missing(round).next())?;
        Some(MissingVote { round, rank, left: gone.is_some() })
    }

    fn missing_in(&self, most_rounds: usize) -> Vec<(Rank, MissingVote)> {
        let rounds = self.ballot.open_rounds().take(most_rounds);
        let missing_vote = rounds.filter_map(|round| self.missing_vote(round));
        missing_vote.flat_map(|one| self.ballot.voted(one.round).map(move |voter| (voter, one))).collect()
    }
}

/// A vote that is missing in an open round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MissingVote {
    pub(crate) round: u64,
    /// The rank that has not voted.
    pub(crate) rank: Rank,
    /// The rank has left the group: it will not vote.
    pub(crate) left: bool,
}
