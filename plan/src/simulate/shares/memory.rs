//! Shares that fit the memory of every rank.

use super::level::{LEAST_SHARE, Level, Shard, count, fastest_first, number};
use crate::error::{Error, Result};
use crate::placement::Split;
use crate::plan::{bytes, check};
use crate::problem::AttentionProblem;
use crate::simulate::capacity::Capacity;
use crate::simulate::choice::candidate::Candidate;
use crate::strategy::plan as plan_forward;

/// Takes work from shards whose plans do not fit their memory, and gives it to the others. Returns
/// which shards that are. The peak of a rank also grows with the shards of the others, whose keys
/// it receives: so the share that fits is found by halving.
pub(super) fn fit_memory(
    problem: &AttentionProblem,
    candidate: Candidate,
    capacities: &[Capacity],
    shards: &[Shard],
    level: &mut Level,
    pairs: f64,
) -> Result<Vec<bool>> {
    let mesh = candidate.mesh;
    let mut limits: Vec<Option<Limit>> = vec![None; shards.len()];
    let is_limited = |limits: &[Option<Limit>]| limits.iter().map(Option::is_some).collect();
    if capacities.iter().all(|capacity| capacity.memory_bytes.is_none()) {
        return Ok(is_limited(&limits));
    }
    for _ in 0..ROUNDS {
        let split = Split::Work(level.weights(mesh));
        let set = plan_forward(problem, mesh, candidate.placement, &split, candidate.strategy)?;
        let checks = check(&set)?;
        // Of each shard, how much of its memory the fullest rank needs.
        let mut needs = vec![0.0_f64; shards.len()];
        for (rank, (capacity, check)) in capacities.iter().zip(&checks).enumerate() {
            let need =
                capacity.memory_bytes.map_or(0.0, |memory| number(check.peak_bytes) / number(memory.max(1)));
            let shard = &mut needs[rank / mesh.ulysses() as usize];
            *shard = shard.max(need);
        }
        let least = pairs / count(shards.len()) * LEAST_SHARE;
        let mut is_settled = true;
        for ((need, limit), now) in needs.iter().zip(&mut limits).zip(&level.pairs) {
            match limit {
                None if *need <= 1.0 => continue,
                None => *limit = Some(Limit { fits: 0.0, over: *now, next: now * BELOW_THE_LIMIT / need }),
                Some(limit) => limit.narrow(*now, *need, least),
            }
            is_settled &= *need <= 1.0 && limit.is_none_or(|limit| limit.next == *now);
        }
        if is_settled {
            return Ok(is_limited(&limits));
        }
        let next = limits.iter().enumerate().filter_map(|(shard, limit)| Some((shard, (*limit)?.next)));
        let fixed: Vec<(usize, f64)> = next.collect();
        if fastest_first(shards, &fixed).is_empty() {
            break;
        }
        *level = Level::of(shards, pairs, &fixed);
    }
    let least = capacities.iter().filter_map(|capacity| capacity.memory_bytes).min().unwrap_or(0);
    Err(Error::request(
        format!(
            "the tensors do not fit the memory of the {} ranks, the least is {}",
            mesh.size(),
            bytes(least)
        ),
        "use more ranks, fewer tokens, heads or batch entries, or devices with more memory",
    ))
}

/// Pairs of a shard that its memory limits.
#[derive(Clone, Copy, Debug)]
struct Limit {
    /// The most that are known to fit.
    fits: f64,
    /// The fewest that are known not to fit.
    over: f64,
    /// To be tried next.
    next: f64,
}

impl Limit {
    /// The plan with `now` pairs needs this part of the memory.
    fn narrow(&mut self, now: f64, need: f64, least: f64) {
        match need <= 1.0 {
            true if need > NEAR_THE_LIMIT || now == 0.0 || self.over - now < least => return,
            true => self.fits = now,
            // It fitted before the others got more.
            false => (self.fits, self.over) = (self.fits.min(now / 2.0), now),
        }
        self.next = f64::midpoint(self.fits, self.over);
        if self.next < least {
            self.next = 0.0;
        }
    }
}

/// Peaks do not shrink quite as fast as shares.
const BELOW_THE_LIMIT: f64 = 0.97;
/// A plan that takes more of the memory than this is not made larger.
const NEAR_THE_LIMIT: f64 = 0.9;
/// Each round makes plans for all ranks. Halving finds a share to one percent in seven.
const ROUNDS: usize = 24;
