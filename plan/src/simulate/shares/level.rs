//! Pairs of the shards for which all of them end at the same time.

use crate::error::Result;
use crate::mesh::Mesh;
use crate::placement::Split;
use crate::problem::AttentionProblem;
use crate::simulate::capacity::Capacity;
use crate::simulate::choice::candidate::Candidate;
use crate::simulate::cluster::Cluster;
use crate::simulate::large::predict;
use crate::simulate::prediction::Prediction;

/// The ranks of one position of the ring, as one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shard {
    /// Pairs in a nanosecond.
    pub(super) speed: f64,
    step_ns: f64,
    /// Nanoseconds in which it waits for messages and copies, as far as a description tells.
    late_ns: f64,
}

impl Shard {
    /// Nanoseconds in which it does not attend, with so many attend steps.
    pub(super) fn idle_ns(&self, steps: f64) -> f64 {
        self.step_ns * steps + self.late_ns
    }
}

/// Each rank of a shard has the same number of heads, so the slowest counts.
pub(super) fn shards(mesh: Mesh, capacities: &[Capacity]) -> Vec<Shard> {
    let of = |ranks: &[Capacity]| {
        let slowest = ranks.iter().map(|rank| rank.pairs_per_s).min().unwrap_or(0);
        let step_ns = ranks.iter().map(|rank| rank.step_ns).max().unwrap_or(0);
        let speed = number(slowest) * f64::from(mesh.ulysses()) / 1e9;
        Shard { speed, step_ns: number(step_ns), late_ns: 0.0 }
    };
    capacities.chunks(mesh.ulysses() as usize).map(of).collect()
}

/// A division of the pairs among the shards.
#[derive(Clone, Debug)]
pub(super) struct Level {
    /// By shard.
    pub(super) pairs: Vec<f64>,
    pub(super) end_ns: f64,
}

impl Level {
    /// The earliest end. `fixed` are shards whose pairs are given, as memory allows.
    pub(super) fn of(shards: &[Shard], pairs: f64, fixed: &[(usize, f64)]) -> Self {
        let free = fastest_first(shards, fixed);
        let with = |most: usize| Self::with(shards, pairs, fixed, &free[..most]);
        let mut best = with(free.len().min(1));
        for most in 2..=free.len() {
            let level = with(most);
            if level.end_ns < best.end_ns {
                best = level;
            }
        }
        best
    }

    /// All `free` shards end at the same time, but those that would do hardly anything do nothing.
    fn with(shards: &[Shard], pairs: f64, fixed: &[(usize, f64)], free: &[usize]) -> Self {
        let mut free = free.to_vec();
        let rest = pairs - fixed.iter().map(|(_, pairs)| pairs).sum::<f64>();
        loop {
            let steps = count(free.len() + fixed.iter().filter(|(_, pairs)| *pairs > 0.0).count());
            let speed: f64 = free.iter().map(|shard| shards[*shard].speed).sum();
            let idle: f64 =
                free.iter().map(|shard| shards[*shard].speed * shards[*shard].idle_ns(steps)).sum();
            let end_ns = if free.is_empty() { 0.0 } else { (rest + idle) / speed };
            let share = |shard: usize| (end_ns - shards[shard].idle_ns(steps)) * shards[shard].speed;
            let least = rest / count(free.len().max(1)) * LEAST_SHARE;
            let idle = free
                .iter()
                .copied()
                .filter(|shard| share(*shard) < least)
                .min_by(|a, b| shards[*a].speed.total_cmp(&shards[*b].speed).then(b.cmp(a)));
            if let (Some(idle), true) = (idle, free.len() > 1) {
                free.retain(|shard| *shard != idle);
                continue;
            }
            let mut level = Self { pairs: vec![0.0; shards.len()], end_ns };
            for shard in &free {
                level.pairs[*shard] = share(*shard);
            }
            for (shard, pairs) in fixed {
                level.pairs[*shard] = *pairs;
                let shard = &shards[*shard];
                level.end_ns = level.end_ns.max(shard.idle_ns(steps) + pairs / shard.speed);
            }
            return level;
        }
    }

    /// Of each rank: the ranks of a shard share its work evenly.
    pub(super) fn weights(&self, mesh: Mesh) -> Vec<f64> {
        let of = |pairs: &f64| std::iter::repeat_n(*pairs, mesh.ulysses() as usize);
        self.pairs.iter().flat_map(of).collect()
    }
}

/// The shards with a speed that are not fixed.
pub(super) fn fastest_first(shards: &[Shard], fixed: &[(usize, f64)]) -> Vec<usize> {
    let is_fixed = |shard: &usize| fixed.iter().any(|(one, _)| one == shard);
    let mut free: Vec<usize> =
        (0..shards.len()).filter(|shard| shards[*shard].speed > 0.0 && !is_fixed(shard)).collect();
    // Stable: of equals the lower one first.
    free.sort_by(|a, b| shards[*b].speed.total_cmp(&shards[*a].speed));
    free
}

/// The number of shards, of the fastest, with which `cluster` predicts the earliest end. A shard
/// that waits for messages gets less work, and then waits for others: a few rounds bring both
/// together.
pub(super) fn earliest(
    problem: &AttentionProblem,
    candidate: Candidate,
    cluster: &Cluster,
    shards: &[Shard],
    pairs: f64,
) -> Result<Level> {
    let free = fastest_first(shards, &[]);
    let mut best: Option<(u64, Level)> = None;
    for most in 1..=free.len() {
        let mut shards = shards.to_vec();
        for _ in 0..ROUNDS {
            let level = Level::with(&shards, pairs, &[], &free[..most]);
            let split = Split::Work(level.weights(candidate.mesh));
            let Prediction { wall_ns, ranks, extrapolated, .. } =
                predict(problem, candidate, &split, cluster)?;
            if best.as_ref().is_none_or(|(least, _)| wall_ns < *least) {
                best = Some((wall_ns, level));
            }
            if extrapolated {
                break;
            }
            for (shard, ranks) in shards.iter_mut().zip(ranks.chunks(candidate.mesh.ulysses() as usize)) {
                let late_ns = ranks.iter().map(|rank| rank.wait_ns + rank.copy_ns).max().unwrap_or(0);
                shard.late_ns = f64::midpoint(shard.late_ns, number(late_ns));
            }
        }
    }
    Ok(best.map_or_else(|| Level::of(shards, pairs, &[]), |(_, level)| level))
}

#[expect(clippy::cast_precision_loss, reason = "shares are good to 53 bits")]
pub(super) fn number(n: u64) -> f64 {
    n as f64
}

#[expect(clippy::cast_precision_loss, reason = "shards are few")]
pub(super) fn count(n: usize) -> f64 {
    n as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; casts saturate")]
pub(super) fn whole(n: f64) -> u64 {
    n as u64
}

/// Predictions for each number of shards.
const ROUNDS: usize = 5;
/// A shard that would do less than this part of an even share does nothing: its messages cost more
/// than it helps.
pub(super) const LEAST_SHARE: f64 = 0.01;
