//! The second detector: a rank that is alive but makes no progress while others wait for it.
//!
//! Only a rank that works can be stuck. A rank that waits is not at fault, however long it waits,
//! and neither is one whose caller does something between two operations: the callers' own
//! deadlines end that. Time is counted in heartbeats of the rank itself that arrived and reported
//! nothing new: a host that was suspended as a whole has not been stuck.

use crate::rank::{Progress, Rank};

/// The report of a rank in every heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) progress: Progress,
    pub(crate) beats: u64,
    pub(crate) works: bool,
    /// The ranks with which it has calls that have not ended, if it does not work.
    pub(crate) waits_for: Vec<Rank>,
}

/// The last report of each rank, and for how many ticks it has made no progress while others waited
/// for it.
#[derive(Debug)]
pub(crate) struct Stalls {
    ranks: Vec<Watched>,
    slow_ticks: u32,
    stuck_ticks: u32,
}

#[derive(Clone, Debug, Default)]
struct Watched {
    report: Report,
    /// A report has arrived since the last tick.
    fresh: bool,
    /// That report shows progress.
    moved: bool,
    still_ticks: u32,
}

/// A rank that makes no progress while others wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    pub(crate) rank: Rank,
    pub(crate) progress: Progress,
    pub(crate) ticks: u32,
    /// The ranks that wait for it, lowest first.
    pub(crate) waiting: Vec<Rank>,
    /// Long enough to abort the group; otherwise only a warning is due.
    pub(crate) stuck: bool,
}

impl Stalls {
    pub(crate) fn new(size: u32, stuck_ticks: u32) -> Self {
        let slow_ticks = (stuck_ticks / SLOW_PART).max(1);
        Self { ranks: vec![Watched::default(); size as usize], slow_ticks, stuck_ticks: stuck_ticks.max(2) }
    }

    /// A heartbeat of `rank` has arrived.
    pub(crate) fn report(&mut self, rank: Rank, report: Report) {
        let watched = &mut self.ranks[rank.0 as usize];
        let now = (report.progress, report.beats);
        watched.moved |= now != (watched.report.progress, watched.report.beats);
        watched.fresh = true;
        watched.report = report;
    }

    /// Counts a tick for every rank. `absent` are the ranks for whose vote `voters` wait.
    pub(crate) fn tick(&mut self, absent: &[Rank], voters: &[Rank]) -> Option<Stall> {
        let mut worst: Option<Stall> = None;
        for index in 0..self.ranks.len() {
            let rank = Rank(u32::try_from(index).unwrap_or(u32::MAX));
            let waiting = if self.ranks[index].report.works {
                self.waiting_for(rank, absent, voters)
            } else {
                Vec::new()
            };
            let watched = &mut self.ranks[index];
            let (fresh, moved) = (std::mem::take(&mut watched.fresh), std::mem::take(&mut watched.moved));
            if waiting.is_empty() || moved {
                watched.still_ticks = 0;
            } else if fresh {
                watched.still_ticks += 1;
                let (ticks, stuck) = (watched.still_ticks, watched.still_ticks >= self.stuck_ticks);
                if (stuck || ticks == self.slow_ticks)
                    && worst.as_ref().is_none_or(|worst| worst.ticks < ticks)
                {
                    worst = Some(Stall { rank, progress: watched.report.progress, ticks, waiting, stuck });
                }
            }
        }
        worst
    }

    fn waiting_for(&self, rank: Rank, absent: &[Rank], voters: &[Rank]) -> Vec<Rank> {
        let others = (0..).map(Rank).zip(&self.ranks).filter(|&(other, _)| other != rank);
        let voted = |other: &Rank| absent.contains(&rank) && voters.contains(other);
        let waits = |other: Rank, it: &Watched| {
            !it.report.works && (it.report.waits_for.contains(&rank) || voted(&other))
        };
        others.filter(|&(other, it)| waits(other, it)).map(|(other, _)| other).collect()
    }
}

/// A warning is due after this part of the time after which a rank counts as stuck.
const SLOW_PART: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn works(beats: u64) -> Report {
        Report { progress: Progress { op: 3, step: 2 }, beats, works: true, waits_for: Vec::new() }
    }

    fn waits(for_rank: u32) -> Report {
        Report { waits_for: vec![Rank(for_rank)], ..Report::default() }
    }

    /// Runs ticks with these reports. Returns each reported stall and its tick.
    fn play(stuck_ticks: u32, ticks: u32, report: impl Fn(u32, u32) -> Option<Report>) -> Vec<(u32, Stall)> {
        let mut stalls = Stalls::new(3, stuck_ticks);
        let mut said = Vec::new();
        for tick in 0..ticks {
            for rank in 0..3 {
                if let Some(report) = report(tick, rank) {
                    stalls.report(Rank(rank), report);
                }
            }
            said.extend(stalls.tick(&[], &[]).map(|stall| (tick, stall)));
        }
        said
    }

    #[test]
    fn a_rank_that_stands_still_while_others_wait_is_spoken_of_and_then_stuck() {
        let said = play(8, 9, |_, rank| Some(if rank == 1 { works(5) } else { waits((rank + 1) % 3) }));
        // Rank 2 waits for rank 0, which waits for rank 1: only rank 1 is to blame.
        let stall = |ticks, stuck| Stall {
            rank: Rank(1),
            progress: Progress { op: 3, step: 2 },
            ticks,
            waiting: vec![Rank(0)],
            stuck,
        };
        assert_eq!(said, [(2, stall(2, false)), (8, stall(8, true))]);
    }

    #[test]
    fn who_beats_or_waits_or_is_needed_by_nobody_is_never_stuck() {
        let slow = |tick, rank| Some(if rank == 1 { works(u64::from(tick)) } else { waits(1) });
        assert_eq!(play(8, 100, slow), []);
        assert_eq!(play(8, 100, |_, rank| Some(waits((rank + 1) % 3))), []);
        assert_eq!(play(8, 100, |_, _| Some(works(5))), []);
    }

    #[test]
    fn a_rank_that_is_not_heard_is_not_counted() {
        // Only every third heartbeat arrives: its host, or the network, stands still in between.
        let rare = |tick, rank| match rank {
            1 => (tick % 3 == 0).then(|| works(5)),
            _ => Some(waits(1)),
        };
        assert_eq!(play(8, 20, rare).iter().filter(|(_, stall)| stall.stuck).count(), 0);
    }

    #[test]
    fn a_vote_that_is_missing_is_waited_for() {
        let mut stalls = Stalls::new(2, 4);
        let mut last = None;
        for _ in 0..10 {
            stalls.report(Rank(0), Report::default());
            stalls.report(Rank(1), works(5));
            last = stalls.tick(&[Rank(1)], &[Rank(0)]).or(last);
        }
        let last = last.unwrap();
        assert!(last.stuck && last.waiting == [Rank(0)], "{last:?}");
    }
}
