//! Token counts that give every rank its share of the *work*: of visible (query, key) pairs, not of
//! tokens.

use crate::error::Result;
use crate::mesh::Mesh;
use crate::placement::{Deal, Placement, PlacementKind, ShardShape, Split};
use crate::problem::AttentionProblem;
use crate::tokens::TokenRuns;

/// Counts for every rank of `mesh`, so that the pairs of each shard are in proportion to the
/// weights of its ranks. Inside a shard every rank has all of the shard's queries for its share of
/// the heads, so inside a shard tokens are split by weight.
///
/// `deal` has the queries that are dealt, and `query` is the number of each of them in the problem.
pub(super) fn tokens(
    problem: &AttentionProblem,
    deal: &Deal,
    query: impl Fn(u32) -> u32,
    mesh: Mesh,
    kind: PlacementKind,
    weights: &[f64],
) -> Result<Vec<u32>> {
    // Refuses weights from which no shares can be computed.
    let by_tokens = Placement::new(kind, mesh, deal.total, &Split::Weights(weights.to_vec()))?;
    let work = Work::new(problem, (0..deal.total).map(query));
    if work.all() == 0.0 {
        return Ok(counts(&by_tokens));
    }
    let shards: Vec<f64> = weights.chunks(mesh.ulysses() as usize).map(|shard| shard.iter().sum()).collect();
    let one_document = problem.mask.document_boundaries().is_empty();
    let kind = if one_document { kind.facts().of_one_document.unwrap_or(kind) } else { kind };
    let sizes = match kind.facts().shape {
        shape @ (ShardShape::OneRun | ShardShape::TwoRuns) => cut(&work, shape, deal.total, &shards),
        ShardShape::ManyRuns => by_trial(&work, deal, kind, mesh, &shards)?,
    };
    let mut all = Vec::with_capacity(weights.len());
    for (size, weights) in sizes.into_iter().zip(weights.chunks(mesh.ulysses() as usize)) {
        if size == 0 {
            all.extend(weights.iter().map(|_| 0));
            continue;
        }
        let shard = Mesh::new(mesh.ulysses(), 1)?;
        let split = Split::Weights(weights.to_vec());
        all.extend(counts(&Placement::new(PlacementKind::Contiguous, shard, size, &split)?));
    }
    Ok(all)
}

/// Sizes of shards of one run or two. The tokens of the first few shards together grow from the
/// front on, or from both ends on, and their work grows with them.
fn cut(work: &Work, shape: ShardShape, total: u32, shards: &[f64]) -> Vec<u32> {
    let of_first = |tokens: u32| match shape {
        ShardShape::TwoRuns => {
            work.before[tokens.div_ceil(2) as usize] + work.all() - work.before[(total - tokens / 2) as usize]
        }
        _ => work.before[tokens as usize],
    };
    let all: f64 = shards.iter().sum();
    let (mut weight, mut start) = (0.0, 0);
    let last = shards.iter().rposition(|shard| *shard > 0.0);
    let end_of = |(place, shard): (usize, &f64)| {
        weight += shard;
        let end = if *shard == 0.0 {
            start
        } else if Some(place) == last {
            // Includes the tokens without work.
            total
        } else {
            let target = work.all() * weight / all;
            let (mut low, mut high) = (start, total);
            while low < high {
                let middle = low + (high - low) / 2;
                if of_first(middle) < target { low = middle + 1 } else { high = middle }
            }
            // The nearer of two neighbours.
            let before = low.saturating_sub(1).max(start);
            if target - of_first(before) < of_first(low) - target { before } else { low }
        };
        end - std::mem::replace(&mut start, end)
    };
    shards.iter().enumerate().map(end_of).collect()
}

/// Sizes of shards of many runs, found by trial: the tokens of a shard depend on the sizes of all
/// others.
fn by_trial(work: &Work, deal: &Deal, kind: PlacementKind, mesh: Mesh, shards: &[f64]) -> Result<Vec<u32>> {
    let ring = Mesh::new(1, mesh.ring())?;
    let all: f64 = shards.iter().sum();
    let mut density = shards.to_vec();
    let mut best = (f64::INFINITY, Vec::new());
    for _ in 0..ROUNDS {
        let placement = Placement::deal(deal, kind, ring, &Split::Weights(density.clone()))?;
        let shares: Vec<f64> = placement.ranks().iter().map(|tokens| work.of(tokens) / work.all()).collect();
        let late = |(share, weight): (&f64, &f64)| if *weight > 0.0 { share * all / weight } else { 0.0 };
        let slowest = shares.iter().zip(shards).map(late).fold(0.0, f64::max);
        if slowest < best.0 {
            best = (slowest, counts(&placement));
        }
        if slowest < GOOD_ENOUGH {
            break;
        }
        // Half of the correction on a logarithmic scale, so that the sizes do not oscillate.
        for ((density, share), weight) in density.iter_mut().zip(shares).zip(shards) {
            if *weight > 0.0 {
                *density *= (weight / all / share.max(TINY)).sqrt().clamp(0.5, 2.0);
            }
        }
    }
    Ok(best.1)
}

fn counts(placement: &Placement) -> Vec<u32> {
    let count = |tokens: &TokenRuns| tokens.runs().iter().map(|run| run.count).sum();
    placement.ranks().iter().map(count).collect()
}

/// Visible (query, key) pairs of ranges of dealt queries.
struct Work {
    /// Entry `i`: visible pairs of all queries before the dealt query `i`.
    before: Vec<f64>,
}

impl Work {
    fn new(problem: &AttentionProblem, queries: impl Iterator<Item = u32>) -> Self {
        let mut before = vec![0.0];
        let mut sum = 0_u64;
        for token in queries {
            let position = problem.q_position(token);
            let keys = |class| problem.mask.visible(class, position, problem.kv_len).keys();
            sum += (0..problem.mask.batch_classes()).map(keys).sum::<u64>();
            #[expect(clippy::cast_precision_loss, reason = "shares are good to 53 bits")]
            before.push(sum as f64);
        }
        Self { before }
    }

    fn all(&self) -> f64 {
        self.before.last().copied().unwrap_or(0.0)
    }

    fn of(&self, tokens: &TokenRuns) -> f64 {
        let one = |token: u32| self.before[token as usize + 1] - self.before[token as usize];
        let of_run = |run: &crate::tokens::Run| match run.stride {
            1 => self.before[(run.start + run.count) as usize] - self.before[run.start as usize],
            stride => (0..run.count).map(|i| one(run.start + i * stride)).sum(),
        };
        tokens.runs().iter().map(of_run).sum()
    }
}

/// Enough for every mask that was tried; most masks need a few.
const ROUNDS: usize = 60;
/// The slowest shard has at most half a percent more than its share.
const GOOD_ENOUGH: f64 = 1.005;
/// Avoids a division by the zero share of a shard without work.
const TINY: f64 = 1e-9;

#[cfg(test)]
mod tests {
    use super::super::deals::queries;
    use super::*;
    use crate::dtype::Dtype;

    fn of_all(
        problem: &AttentionProblem,
        mesh: Mesh,
        kind: PlacementKind,
        weights: &[f64],
    ) -> Result<Vec<u32>> {
        tokens(problem, &queries(problem), |token| token, mesh, kind, weights)
    }

    /// The work of the slowest shard, divided by its share.
    fn slowest(mask: &str, mesh: (u32, u32), kind: PlacementKind, weights: &[f64]) -> f64 {
        let problem = AttentionProblem::new([2, 6000, 4, 4, 8], Dtype::F32, mask.parse().unwrap()).unwrap();
        let mesh = Mesh::new(mesh.0, mesh.1).unwrap();
        let split = Split::Tokens(of_all(&problem, mesh, kind, weights).unwrap());
        let placement = Placement::deal(&queries(&problem), kind, mesh, &split).unwrap();
        // Pair by pair, without prefix sums.
        let work = |r: u32| -> f64 {
            let keys = |token: u32| (0..2).map(|b| problem.mask.visible(b, token, 6000).keys()).sum::<u64>();
            placement.of_shard(r).iter().map(|token| keys(token) as f64).sum()
        };
        let all: f64 = (0..mesh.ring()).map(work).sum();
        let of_shard =
            |r: u32| -> f64 { weights.chunks(mesh.ulysses() as usize).nth(r as usize).unwrap().iter().sum() };
        let total: f64 = weights.iter().sum();
        (0..mesh.ring()).map(|r| work(r) / all * total / of_shard(r)).fold(0.0, f64::max)
    }

    #[test]
    fn work_is_level_under_every_kind_of_mask() {
        let documents = "causal+documents:0,200,4000,4100,5000,6000";
        for kind in PlacementKind::ALL {
            for mask in [
                "causal",
                "full",
                "window:300,0",
                documents,
                "valid:1000,6000",
                "slices:0..6000x0..100,0..900x0..6000",
                "causal+documents:0,200,4000,6000//causal+documents:0,2500,6000",
            ] {
                for (mesh, weights) in
                    [((1, 4), &[1.0; 4][..]), ((1, 3), &[3.0, 1.0, 0.5]), ((2, 2), &[2.0, 1.0, 1.0, 1.0])]
                {
                    let late = slowest(mask, mesh, kind, weights);
                    assert!(late < 1.02, "{mask} {kind} {mesh:?} {weights:?}: {late}");
                }
            }
        }
    }

    #[test]
    fn a_rank_without_weight_gets_nothing_and_no_work_is_shared_by_tokens() {
        let make =
            |mask: &str| AttentionProblem::new([1, 100, 1, 1, 8], Dtype::F32, mask.parse().unwrap()).unwrap();
        let mesh = Mesh::new(1, 3).unwrap();
        let counts = of_all(&make("causal"), mesh, PlacementKind::Contiguous, &[1.0, 0.0, 1.0]).unwrap();
        assert_eq!((counts[1], counts.iter().sum::<u32>()), (0, 100));
        assert!((60..80).contains(&counts[0]), "{counts:?}: the first 71 % have half of the pairs");
        let nothing = of_all(&make("valid:0"), mesh, PlacementKind::Contiguous, &[2.0, 1.0, 1.0]).unwrap();
        assert_eq!(nothing, [50, 25, 25]);
        assert!(of_all(&make("full"), mesh, PlacementKind::Contiguous, &[0.0; 3]).is_err());
    }
}
