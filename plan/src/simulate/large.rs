//! Groups of thousands of ranks, from smaller ones.
//!
//! A ring of R shards has R² hops in all, so the plans of a large ring take too much memory. But
//! with shards of the same size every further hop costs as much as the one before it, so the times
//! and bytes of a rank grow linearly with R, and two small rings determine the line. That holds
//! where all hops cost the same: for full and causal masks, even splits, and hosts of one kind.

use super::cluster::Cluster;
use super::prediction::{LinkPrediction, Prediction, RankPrediction};
use super::walk::simulate;
use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::mesh::Mesh;
use crate::placement::{Placement, PlacementKind, Split};
use crate::plan::PlanSet;
use crate::problem::AttentionProblem;
use crate::simulate::choice::candidate::Candidate;
use crate::strategy::{EqualHops, plan as plan_forward, plan_backward, plan_placed};
use crate::strategy_list::Strategy;

/// Predicts `candidate` for `problem`: by a walk, or for a long ring by extrapolation from two
/// shorter rings.
///
/// # Errors
/// As [`simulate`] and [`plan_forward`].
pub fn predict(
    problem: &AttentionProblem,
    candidate: Candidate,
    split: &Split,
    cluster: &Cluster,
) -> Result<Prediction> {
    predict_pass(plan_forward, problem, candidate, split, cluster)
}

/// As [`predict`], of the backward pass: the gradients of q, k and v.
///
/// # Errors
/// As [`simulate`] and [`plan_backward`].
pub fn predict_backward(
    problem: &AttentionProblem,
    candidate: Candidate,
    split: &Split,
    cluster: &Cluster,
) -> Result<Prediction> {
    predict_pass(plan_backward, problem, candidate, split, cluster)
}

/// Makes the plans of one pass.
type Planner = fn(&AttentionProblem, Mesh, PlacementKind, &Split, Strategy) -> Result<PlanSet>;

fn predict_pass(
    plans: Planner,
    problem: &AttentionProblem,
    candidate: Candidate,
    split: &Split,
    cluster: &Cluster,
) -> Result<Prediction> {
    let walk = |problem: &AttentionProblem, mesh: Mesh| {
        let size = plans(problem, mesh, candidate.placement, split, candidate.strategy)?;
        simulate(&size, cluster)
    };
    let Candidate { strategy, mesh, .. } = candidate;
    strategy.accepts(mesh)?;
    mesh.fits(problem)?;
    let causal = problem.mask == Mask::causal() && candidate.placement.facts().equal_causal_hops;
    let alike = match strategy.facts().equal_hops {
        EqualHops::FullAndCausal => problem.mask.is_full() || causal,
        EqualHops::Full => problem.mask.is_full(),
        EqualHops::Never => false,
    };
    let even = *split == Split::Even && problem.q_len == problem.kv_len && problem.q_offset == 0;
    if hops(mesh, strategy) <= MOST_HOPS
        || mesh.ring() < 4 * SHORTEST
        || !alike
        || !even
        || problem.bias.is_some()
        || problem.fixed_order
        || !problem.replicated.is_empty()
    {
        few_enough(mesh, strategy)?;
        return walk(problem, mesh);
    }
    let short_ranks = if at_once(mesh, strategy) == 1 { SHORT_RANKS } else { SHORT_RANKS / 4 };
    let short_ranks = short_ranks / strategy.exchanges_of_hop();
    let short = (short_ranks / mesh.ulysses()).clamp(SHORTEST, mesh.ring() / 4);
    let shrunk = |ring: u32| -> Result<Prediction> {
        // Each rank gets as many tokens as the rank with the most tokens: a small difference would count
        // many times along the line.
        let tokens = problem.q_len.div_ceil(mesh.size()) * mesh.ulysses() * ring;
        let problem = problem.clone().with_keys(tokens)?.with_queries(tokens, 0)?;
        walk(&problem, Mesh::new(mesh.ulysses(), ring)?)
    };
    let (near, far) = (shrunk(short)?, shrunk(2 * short)?);
    Ok(Line { near: short, far: 2 * short, wanted: mesh.ring() }.extend(&near, far))
}

/// Predicts `strategy` on `mesh` for `problem` with these owners of queries and of keys, by a walk:
/// the hops of given token lists need not be equal.
///
/// # Errors
/// As [`simulate`] and [`plan_placed`].
pub fn predict_placed(
    problem: &AttentionProblem,
    mesh: Mesh,
    q_placement: Placement,
    kv_placement: Placement,
    strategy: Strategy,
    cluster: &Cluster,
) -> Result<Prediction> {
    few_enough(mesh, strategy)?;
    simulate(&plan_placed(problem, mesh, q_placement, kv_placement, strategy)?, cluster)
}

/// The hops and messages of the plans, in units of the time to walk one.
fn hops(mesh: Mesh, strategy: Strategy) -> u64 {
    let exchanges = mesh.ring() * strategy.exchanges_of_hop() + mesh.ulysses();
    u64::from(mesh.size()) * u64::from(exchanges) * at_once(mesh, strategy)
}

/// Refuses a walk that would take too long.
fn few_enough(mesh: Mesh, strategy: Strategy) -> Result<()> {
    if hops(mesh, strategy) <= MOST_WALKED {
        return Ok(());
    }
    Err(Error::request(
        format!("{strategy} on {mesh} has too many unequal hops to simulate"),
        "ask for fewer ranks, or for a strategy and placement whose hops all cost the same",
    ))
}

/// The factor on the time to walk a hop if all hops are in flight at once: each start and end
/// changes the speed of all hops on the same links.
fn at_once(mesh: Mesh, strategy: Strategy) -> u64 {
    if strategy.facts().posts_all_at_once { u64::from(mesh.ring()).div_ceil(8) } else { 1 }
}

/// A line through the predictions for two lengths of the ring.
struct Line {
    near: u32,
    far: u32,
    wanted: u32,
}

impl Line {
    fn extend(&self, near: &Prediction, far: Prediction) -> Prediction {
        // Rank i of the longer ring is paired with rank i of the shorter one, modulo its length.
        let of_near = |index: usize| &near.ranks[index % near.ranks.len()];
        let ranks = far.ranks.iter().enumerate().map(|(index, rank)| {
            let before = of_near(index);
            let at = |value: fn(&RankPrediction) -> u64| self.at(value(before), value(rank));
            RankPrediction {
                device: rank.device,
                finish_ns: at(|rank| rank.finish_ns),
                compute_ns: at(|rank| rank.compute_ns),
                wait_ns: at(|rank| rank.wait_ns),
                copy_ns: at(|rank| rank.copy_ns),
                bytes_sent: at(|rank| rank.bytes_sent),
                messages_sent: at(|rank| rank.messages_sent),
                peak_bytes: at(|rank| rank.peak_bytes),
                pairs: before.pairs + (rank.pairs - before.pairs) * self.steps(),
            }
        });
        let links =
            far.links.iter().map(|link| match near.links.iter().find(|before| before.name == link.name) {
                Some(before) => LinkPrediction {
                    name: link.name.clone(),
                    bytes: self.at(before.bytes, link.bytes),
                    busy_ns: self.at(before.busy_ns, link.busy_ns),
                },
                None => link.clone(),
            });
        Prediction {
            wall_ns: self.at(near.wall_ns, far.wall_ns),
            ranks: ranks.collect(),
            links: links.collect(),
            extrapolated: true,
        }
    }

    /// The distance of the wanted length from the shorter one; the unit is the step from the
    /// shorter to the longer.
    fn steps(&self) -> f64 {
        f64::from(self.wanted - self.near) / f64::from(self.far - self.near)
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times and bytes are far below 2^52, and a line that falls is cut off at 0"
    )]
    fn at(&self, near: u64, far: u64) -> u64 {
        (near as f64 + (far as f64 - near as f64) * self.steps()).max(0.0).round() as u64
    }
}

/// The most hops and all-to-all messages of plans that are walked directly; such a walk takes a
/// fraction of a second.
const MOST_HOPS: u64 = 1 << 14;
/// Hops beyond which a walk would take many seconds, for each of many candidates.
const MOST_WALKED: u64 = 1 << 18;
/// In a shorter ring no hop is like the others.
const SHORTEST: u32 = 4;
/// Ranks of the shorter of two plan sets if hops follow each other, unless `SHORTEST` makes its
/// ring longer.
const SHORT_RANKS: u32 = 64;
