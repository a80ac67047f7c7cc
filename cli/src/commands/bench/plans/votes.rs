//! The time of a vote in one process, by the number of ranks.

use std::time::{Duration, Instant};

use kyklos_transport::{Group, Transport, Vote as Ballot, in_process_group};
use serde::Serialize;

use super::args::PlansArgs;
use crate::failure::{Failure, Result, note};

/// A vote of a group.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Vote {
    pub(super) ranks: u32,
    /// From the first ballot to the last notes; the median of [`ROUNDS`].
    pub(super) seconds: f64,
}

/// Votes of groups of all sizes up to `most_voters`.
pub(super) fn measure(args: &PlansArgs) -> Result<Vec<Vote>> {
    let mut votes = Vec::new();
    for ranks in args.ranks.iter().map(|ranks| ranks.get()).filter(|ranks| *ranks <= args.most_voters) {
        note(&format!("a vote of {ranks} ranks"));
        votes.push(vote(ranks)?);
    }
    Ok(votes)
}

fn vote(ranks: u32) -> Result<Vote> {
    let group = in_process_group(ranks);
    let all: Result<Vec<Duration>> = std::thread::scope(|scope| {
        let start = |rank: &Group| {
            let rank = rank.clone();
            // Each does nothing but wait.
            let builder = std::thread::Builder::new().stack_size(STACK);
            let thread = builder.spawn_scoped(scope, move || rounds(&*rank));
            thread.map_err(|error| {
                Failure::run(format!("cannot start a thread for each of {ranks} ranks: {error}"))
            })
        };
        let threads = group.iter().map(start).collect::<Result<Vec<_>>>()?;
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Failure::run("a rank panicked: this is a bug")))
            })
            .collect()
    });
    let slowest = all?.into_iter().max().unwrap_or_default();
    Ok(Vote { ranks, seconds: slowest.as_secs_f64() / f64::from(ROUNDS) })
}

/// The time of all votes but the first one, in which threads start.
fn rounds(rank: &dyn Transport) -> Result<Duration> {
    let mut started = Instant::now();
    for round in 0..=ROUNDS {
        let ballot = Ballot::Ready { plan_hash: [7; 32], note: vec![1; NOTE_BYTES].into() };
        pollster::block_on(rank.agree(ballot, DEADLINE))?;
        if round == 0 {
            started = Instant::now();
        }
    }
    Ok(started.elapsed())
}

const ROUNDS: u32 = 20;
/// As the facts of a call.
const NOTE_BYTES: usize = 128;
const STACK: usize = 256 << 10;
const DEADLINE: Duration = Duration::from_secs(120);
