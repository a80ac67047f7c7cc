//! What could be run, and what each would take.

use super::candidate::Candidate;
use super::cluster::Cluster;
use super::large::predict;
use super::prediction::Prediction;
use crate::{AttentionProblem, Error, Mesh, PlacementKind, Result, Split, Strategy};

/// What is fixed, and what is the planner's.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Ranks in all.
    pub ranks: u32,
    /// Only this mesh.
    pub mesh: Option<Mesh>,
    /// Only this strategy.
    pub strategy: Option<Strategy>,
    /// Only this placement.
    pub placement: Option<PlacementKind>,
    /// Tokens of each rank.
    pub split: Split,
}

/// A candidate and what became of it.
#[derive(Clone, Debug)]
pub struct Priced {
    /// Which.
    pub candidate: Candidate,
    /// What it takes, or why it is refused.
    pub verdict: Verdict,
}

/// What became of a candidate.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// It fits and takes this.
    Fits(Prediction),
    /// It is refused.
    Refused(Error),
}

/// Every strategy on every mesh in every placement that differs: with one shard there is nothing to deal, without a mask
/// all tokens are alike, and a mesh that the problem does not fit is refused in any placement. A strategy that takes any
/// mesh is left out where the mesh has a name of its own, and one that sends the same messages as another.
///
/// # Errors
/// [`crate::Error::Request`] for more ranks than a mesh can have.
pub fn candidates(problem: &AttentionProblem, wanted: &Wanted) -> Result<Vec<Candidate>> {
    let alike = problem.mask.is_full() && problem.pairs.is_none();
    let meshes: Vec<Mesh> = match wanted.mesh {
        Some(mesh) => vec![mesh],
        None => (1..=wanted.ranks)
            .rev()
            .filter(|ulysses| wanted.ranks.is_multiple_of(*ulysses))
            .map(|ulysses| Mesh::new(ulysses, wanted.ranks / ulysses))
            .collect::<Result<_>>()?,
    };
    let mut found = Vec::new();
    for mesh in meshes {
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

/// Prices every candidate, the fastest first and those that are refused last; among equals the order of
/// [`candidates`].
///
/// # Errors
/// [`Error::Request`] where the cluster cannot be used at all, such as for fewer devices than ranks.
pub fn choose(problem: &AttentionProblem, wanted: &Wanted, cluster: &Cluster) -> Result<Vec<Priced>> {
    cluster.place(wanted.ranks)?;
    let mut priced: Vec<Priced> = candidates(problem, wanted)?
        .into_iter()
        .map(|candidate| {
            let verdict = predict(problem, candidate, &wanted.split, cluster)
                .and_then(|prediction| prediction.fits(cluster).map(|()| prediction));
            Priced { candidate, verdict: verdict.map_or_else(Verdict::Refused, Verdict::Fits) }
        })
        .collect();
    priced.sort_by_key(|priced| priced.prediction().map_or(u64::MAX, |prediction| prediction.wall_ns));
    Ok(priced)
}

impl Priced {
    /// What it takes, if it is not refused.
    pub fn prediction(&self) -> Option<&Prediction> {
        match &self.verdict {
            Verdict::Fits(prediction) => Some(prediction),
            Verdict::Refused(_) => None,
        }
    }
}
