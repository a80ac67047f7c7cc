//! The ways to run a problem, and the predicted time of each.

use super::candidate::Candidate;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::placement::{PlacementKind, Split};
use crate::problem::AttentionProblem;
use crate::simulate::cluster::Cluster;
use crate::simulate::large::{predict, predict_backward};
use crate::simulate::prediction::Prediction;
use crate::strategy_list::Strategy;

/// The fixed choices of the user; the planner chooses the rest.
#[derive(Clone, Debug)]
pub struct PlanQuery {
    /// Number of ranks.
    pub ranks: u32,
    /// Only this mesh.
    pub mesh: Option<Mesh>,
    /// Only this strategy.
    pub strategy: Option<Strategy>,
    /// Only this placement.
    pub placement: Option<PlacementKind>,
    /// Tokens of each rank.
    pub split: Split,
    /// Whether the gradients are computed too: then both passes count.
    pub gradients: bool,
}

/// A candidate with its prediction or its refusal.
#[derive(Clone, Debug)]
pub struct EstimatedPlan {
    /// The candidate.
    pub candidate: Candidate,
    /// Its prediction, or its refusal. With [`PlanQuery::gradients`] it is that of both passes, one
    /// after the other.
    pub verdict: Feasibility,
    /// Each pass of a candidate that fits, with [`PlanQuery::gradients`].
    pub passes: Option<Passes>,
}

/// The passes of a candidate.
#[derive(Clone, Debug)]
pub struct Passes {
    /// The prediction of the forward pass.
    pub forward: Prediction,
    /// The prediction of the backward pass.
    pub backward: Prediction,
    /// The strategy of the backward pass: see [`Candidate::of_backward`].
    pub backward_strategy: Strategy,
}

/// The prediction or the refusal of a candidate.
#[derive(Clone, Debug)]
pub enum Feasibility {
    /// It fits; this is its prediction.
    Fits(Prediction),
    /// It is refused for this reason.
    Refused(Error),
}

/// Every strategy on every mesh in every placement, without candidates that make the same plans as
/// another one: with one shard all placements are the same, without a mask all tokens are alike, a
/// mesh that the problem does not fit is refused in any placement, and some strategies equal
/// another one on some meshes.
///
/// # Errors
/// [`crate::Error::Request`] for more ranks than a mesh can have.
pub fn candidates(problem: &AttentionProblem, wanted: &PlanQuery) -> Result<Vec<Candidate>> {
    let alike = problem.mask.is_full() && problem.bias.is_none();
    let mut found = Vec::new();
    for mesh in meshes(wanted)? {
        let strategies: Vec<Strategy> = match wanted.strategy {
            Some(strategy) => vec![strategy],
            None => Strategy::ALL
                .into_iter()
                .filter(|strategy| strategy.accepts(mesh).is_ok())
                .filter(|strategy| (strategy.facts().is_distinct)(problem, mesh))
                .collect(),
        };
        let placements: Vec<PlacementKind> = match wanted.placement {
            Some(placement) => vec![placement],
            None if mesh.ring() == 1 || alike || mesh.fits(problem).is_err() => {
                vec![PlacementKind::Contiguous]
            }
            None => {
                let documents = !problem.mask.document_boundaries().is_empty();
                let is_distinct = |kind: &PlacementKind| documents || kind.facts().of_one_document.is_none();
                PlacementKind::ALL.into_iter().filter(is_distinct).collect()
            }
        };
        for strategy in strategies {
            found.extend(placements.iter().map(|placement| Candidate {
                strategy,
                mesh,
                placement: *placement,
            }));
        }
    }
    Ok(found)
}

/// The meshes to choose from, the largest Ulysses extent first.
pub(in crate::simulate) fn meshes(wanted: &PlanQuery) -> Result<Vec<Mesh>> {
    match wanted.mesh {
        Some(mesh) => Ok(vec![mesh]),
        None => (1..=wanted.ranks)
            .rev()
            .filter(|ulysses| wanted.ranks.is_multiple_of(*ulysses))
            .map(|ulysses| Mesh::new(ulysses, wanted.ranks / ulysses))
            .collect(),
    }
}

/// Prices every candidate: the fastest first, refused candidates last. Equal candidates keep the
/// order of [`candidates`]. With [`PlanQuery::gradients`] the time is that of both passes.
///
/// # Errors
/// [`Error::Request`] if the cluster cannot be used at all, for example because it has fewer
/// devices than ranks.
pub fn choose(
    problem: &AttentionProblem,
    wanted: &PlanQuery,
    cluster: &Cluster,
) -> Result<Vec<EstimatedPlan>> {
    cluster.place(wanted.ranks)?;
    let mut priced: Vec<EstimatedPlan> = candidates(problem, wanted)?
        .into_iter()
        .map(|candidate| {
            let (verdict, passes) = match price(problem, candidate, wanted, cluster) {
                Ok((prediction, passes)) => (Feasibility::Fits(prediction), passes),
                Err(refusal) => (Feasibility::Refused(refusal), None),
            };
            EstimatedPlan { candidate, verdict, passes }
        })
        .collect();
    priced.sort_by_key(|priced| priced.prediction().map_or(u64::MAX, |prediction| prediction.wall_ns));
    Ok(priced)
}

/// The prediction of what is wanted, and with gradients of each pass.
pub(in crate::simulate) fn price(
    problem: &AttentionProblem,
    candidate: Candidate,
    PlanQuery { split, gradients, .. }: &PlanQuery,
    cluster: &Cluster,
) -> Result<(Prediction, Option<Passes>)> {
    let fitting = |prediction: Prediction| prediction.fits(cluster).map(|()| prediction);
    let forward = predict(problem, candidate, split, cluster).and_then(fitting)?;
    if !gradients {
        return Ok((forward, None));
    }
    let of_backward = candidate.of_backward(problem);
    let backward = predict_backward(problem, of_backward, split, cluster).and_then(fitting)?;
    let both = forward.then(&backward);
    Ok((both, Some(Passes { forward, backward, backward_strategy: of_backward.strategy })))
}

impl EstimatedPlan {
    /// The prediction, if the candidate is not refused.
    pub fn prediction(&self) -> Option<&Prediction> {
        match &self.verdict {
            Feasibility::Fits(prediction) => Some(prediction),
            Feasibility::Refused(_) => None,
        }
    }
}
