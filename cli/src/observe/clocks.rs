//! Clocks of ranks, compared with that of rank 0.
//!
//! Every process has its own clock. Rank 0 asks each rank for its time, several times. The fastest
//! answer gives the offset of that clock, within half of the round-trip time.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use bytes::Bytes;
use kyklos::Clock;
use kyklos_transport::Rank;

use crate::failure::Result;
use crate::messages::{Messages, numbers};

/// How far a rank's clock is ahead of rank 0's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub(crate) ns: i64,
    /// The most by which `ns` can be wrong.
    pub(crate) within_ns: u64,
}

impl Ahead {
    /// Measures the offsets of all ranks; returns that of this rank. All ranks call it together.
    pub(crate) fn measure(messages: &Messages<'_>, clock: &dyn Clock) -> Result<Self> {
        if messages.transport.rank().0 != 0 {
            return follow(messages, clock);
        }
        for rank in (1..messages.transport.size()).map(Rank) {
            lead(messages, clock, rank)?;
        }
        Ok(Self { ns: 0, within_ns: 0 })
    }

    /// A time of this rank's clock on the clock of rank 0.
    pub(crate) fn on_rank_0(self, ns: u64) -> i64 {
        i64::try_from(ns).unwrap_or(i64::MAX).saturating_sub(self.ns)
    }
}

/// The part of rank 0: measures the offset of a rank's clock, and sends it to the rank.
fn lead(messages: &Messages<'_>, clock: &dyn Clock, rank: Rank) -> Result<()> {
    let mut best = Ahead { ns: 0, within_ns: u64::MAX };
    for round in 0..ROUNDS {
        let asked_ns = clock.now_ns();
        let asking = messages.post(rank, PING + 2 * round, Bytes::from_static(&[0; 8]));
        let [theirs_ns, process] = numbers(&messages.recv(rank, PING + 2 * round + 1, 16)?);
        let answered_ns = clock.now_ns();
        pollster::block_on(asking)?;
        if process == *PROCESS {
            // Ranks of one process share a clock.
            best = Ahead { ns: 0, within_ns: 0 };
            continue;
        }
        let within_ns = (answered_ns - asked_ns).div_ceil(2);
        if within_ns < best.within_ns {
            let middle = asked_ns + (answered_ns - asked_ns) / 2;
            best = Ahead { ns: theirs_ns.wrapping_sub(middle).cast_signed(), within_ns };
        }
    }
    let told = [best.ns.cast_unsigned(), best.within_ns].map(u64::to_le_bytes).concat();
    messages.send(rank, AHEAD, told.into())
}

/// The part of another rank: answers, and receives the offset of its clock.
fn follow(messages: &Messages<'_>, clock: &dyn Clock) -> Result<Ahead> {
    for round in 0..ROUNDS {
        messages.recv(Rank(0), PING + 2 * round, 8)?;
        let answer = [clock.now_ns(), *PROCESS].map(u64::to_le_bytes).concat();
        messages.send(Rank(0), PING + 2 * round + 1, answer.into())?;
    }
    let [ns, within_ns] = numbers(&messages.recv(Rank(0), AHEAD, 16)?);
    Ok(Ahead { ns: ns.cast_signed(), within_ns })
}

/// Identifies the process; process ids are not unique over hosts.
static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));
/// Number of questions; the first ones are slower.
const ROUNDS: u32 = 8;
/// Message numbers that `job/results/collect.rs` and `trace.rs` do not use.
const AHEAD: u32 = 10;
const PING: u32 = 16;
