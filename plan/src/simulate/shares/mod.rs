//! How many tokens each rank gets where devices differ: as many that all ranks end at the same
//! time.
//!
//! The time of a rank is `steps · step_ns + pairs / speed`: it has `pairs` visible (query, key)
//! pairs of all its heads, and one attend step for each shard that has tokens. For a set of shards
//! of the speeds `v` the common end is `T = (pairs + Σ v·steps·step_ns) / Σ v`. Every number of
//! shards is tried, the fastest shards first, and the earliest end counts. Links enter only where a
//! [`Cluster`] describes them. All ranks compute the same shares from the same capacities.

mod level;
mod memory;

use self::level::{Level, count, earliest, shards, whole};
use self::memory::fit_memory;
use super::capacity::Capacity;
use super::cluster::Cluster;
use super::work::WorkCounter;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::placement::Split;
use crate::plan::PlanSet;
use crate::problem::AttentionProblem;
use crate::simulate::choice::candidate::Candidate;
use crate::tokens::TokenRuns;
use kyklos_rank::Rank;

/// The shares of all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    /// For [`plan_forward`](crate::plan_forward).
    pub split: Split,
    /// Ranks without tokens: with them the call would end later.
    pub left_out: Vec<Rank>,
    /// Ranks that would get more tokens if they had more memory.
    pub limited: Vec<Rank>,
    /// Nanoseconds until the last rank has computed, without messages.
    pub compute_ns: u64,
}

impl Shares {
    /// The shares of `problem` on the mesh of `candidate` for ranks of these capacities. Visible
    /// pairs are level over the shards of the mesh. Inside a shard ranks divide the heads
    /// evenly, so that the slowest of them counts for all. With a `cluster`, the shards that
    /// take part are those with the earliest predicted end, messages included.
    ///
    /// ```
    /// use kyklos_plan::simulate::{Candidate, Capacity, Shares};
    /// use kyklos_plan::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Strategy};
    ///
    /// let problem = AttentionProblem::new([1, 9000, 8, 2, 64], Dtype::F32, Mask::full())?;
    /// let ring = Candidate { strategy: Strategy::Ring, mesh: Mesh::new(1, 2)?, placement: PlacementKind::Contiguous };
    /// let device = |gigapairs: u64| Capacity { pairs_per_s: gigapairs * 1_000_000_000, step_ns: 0, memory_bytes: None };
    /// let shares = Shares::level(&problem, ring, &[device(2), device(1)], None)?;
    /// let set = kyklos_plan::plan_forward(&problem, ring.mesh, ring.placement, &shares.split, ring.strategy)?;
    /// assert_eq!(set.q_placement.ranks()[0].to_string(), "0..6000");
    /// # Ok::<(), kyklos_plan::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Request`] if there is not one capacity for each rank of the mesh, if no rank has
    /// any speed, if the memory of all ranks is too small, or for a problem that `candidate`
    /// does not fit.
    pub fn level(
        problem: &AttentionProblem,
        candidate: Candidate,
        capacities: &[Capacity],
        cluster: Option<&Cluster>,
    ) -> Result<Self> {
        let mesh = candidate.mesh;
        if capacities.len() != mesh.size() as usize {
            return Err(Error::request(
                format!("{} capacities for the {} ranks of mesh {mesh}", capacities.len(), mesh.size()),
                "give one for each rank",
            ));
        }
        let shards = shards(mesh, capacities);
        if shards.iter().all(|shard| shard.speed == 0.0) {
            return Err(Error::request(
                format!("{} ranks, and none of them has a device that attends", mesh.size()),
                "let at least one rank compute; of the ranks of a shard, all",
            ));
        }
        let pairs = all_pairs(problem);
        if pairs == 0.0 {
            return Ok(Self { split: Split::Even, left_out: Vec::new(), limited: Vec::new(), compute_ns: 0 });
        }
        let mut level = Level::of(&shards, pairs, &[]);
        if let Some(cluster) = cluster {
            level = earliest(problem, candidate, cluster, &shards, pairs)?;
        }
        let limited = fit_memory(problem, candidate, capacities, &shards, &mut level, pairs)?;
        let weights = level.weights(mesh);
        let of_shard = |wanted: fn(&Level, usize) -> bool| {
            let shard = |rank: &u32| (rank / mesh.ulysses()) as usize;
            (0..mesh.size()).filter(|rank| wanted(&level, shard(rank))).map(Rank).collect::<Vec<_>>()
        };
        let left_out = of_shard(|level, shard| level.pairs[shard] == 0.0);
        let limited = (0..mesh.size()).filter(|rank| limited[(rank / mesh.ulysses()) as usize]).map(Rank);
        Ok(Self {
            split: Split::Work(weights),
            left_out,
            limited: limited.collect(),
            compute_ns: whole(level.end_ns),
        })
    }

    /// Nanoseconds until the last of ranks with these capacities has computed its part of these
    /// shares.
    ///
    /// # Errors
    /// As [`Self::level`].
    pub fn compute_ns(&self, problem: &AttentionProblem, mesh: Mesh, capacities: &[Capacity]) -> Result<u64> {
        let even;
        let weights = match &self.split {
            Split::Work(weights) => weights,
            _ => {
                even = vec![1.0; mesh.size() as usize];
                &even
            }
        };
        if [weights.len(), capacities.len()] != [mesh.size() as usize; 2] {
            return Err(Error::request(
                format!(
                    "shares of {} ranks and {} capacities for mesh {mesh}",
                    weights.len(),
                    capacities.len()
                ),
                "give both for each rank",
            ));
        }
        let each: Vec<f64> =
            weights.chunks(mesh.ulysses() as usize).map(|shard| shard.iter().sum()).collect();
        let (all, pairs): (f64, f64) = (each.iter().sum(), all_pairs(problem));
        let active = count(each.iter().filter(|weight| **weight > 0.0).count());
        let ends =
            shards(mesh, capacities).into_iter().zip(&each).map(|(shard, weight)| match *weight > 0.0 {
                true => shard.idle_ns(active) + pairs * weight / all / shard.speed,
                false => 0.0,
            });
        Ok(whole(ends.fold(0.0, f64::max)))
    }
}

/// The work of `rank` in its plan: visible pairs of all its heads, and attend steps.
pub fn work_of(set: &PlanSet, rank: Rank) -> (u64, u64) {
    let (pairs, steps) = WorkCounter::default().count_plan(set, set.plan(rank));
    (whole(pairs), steps)
}

/// Visible pairs of all heads and batch entries.
fn all_pairs(problem: &AttentionProblem) -> f64 {
    visible_pairs(problem, 0..problem.q_len) * f64::from(problem.q_heads)
}

/// Visible (query, key) pairs of the queries `rows` in one head: in all batch entries.
///
/// ```
/// use kyklos_plan::simulate::visible_pairs;
/// use kyklos_plan::{AttentionProblem, Dtype, Mask};
///
/// let problem = AttentionProblem::new([2, 10, 4, 4, 32], Dtype::F32, Mask::causal())?;
/// assert_eq!(visible_pairs(&problem, 0..10), 2.0 * 55.0);
/// # Ok::<(), kyklos_plan::Error>(())
/// ```
pub fn visible_pairs(problem: &AttentionProblem, rows: std::ops::Range<u32>) -> f64 {
    let (q, kv) = (TokenRuns::contiguous(rows), TokenRuns::contiguous(0..problem.kv_len));
    WorkCounter::default().count(problem, &q, &kv).pairs
}

#[cfg(test)]
mod tests;
