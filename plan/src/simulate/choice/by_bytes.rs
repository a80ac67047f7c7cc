//! The choice without a description of devices and links: the fewest bytes.

use super::candidate::Candidate;
use super::candidates::{PlanQuery, meshes};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::placement::{Placement, PlacementKind};
use crate::problem::AttentionProblem;
use crate::strategy::{bytes_sent, dealt, plan_backward_placed};
use crate::strategy_list::Strategy;

/// The candidate that sends the fewest bytes, among equals the one with the larger Ulysses extent.
/// The strategy is the default one of its mesh and the placement [`PlacementKind::for_problem`],
/// unless `wanted` names others. With [`PlanQuery::gradients`] the bytes are those of both passes.
///
/// Only in a fixed order a problem may refuse that placement and take another one: then the first
/// that fits is chosen.
///
/// # Errors
/// [`Error::Request`] if every candidate is refused: the refusal of the last mesh, a ring, in
/// contiguous placement.
pub fn fewest_bytes(problem: &AttentionProblem, wanted: &PlanQuery) -> Result<Candidate> {
    let mut best: Option<(u64, Candidate)> = None;
    let mut refusal = Error::request("there is no plan to choose from", "name at least one rank");
    let meshes = meshes(wanted)?;
    for mesh in &meshes {
        let priced = first_fit(problem, *mesh, wanted).and_then(|(candidate, q, kv)| {
            // The only mesh needs no price.
            let only = meshes.len() == 1;
            let bytes = if only { 0 } else { bytes_of_passes(problem, candidate, wanted, (q, kv))? };
            Ok((bytes, candidate))
        });
        match priced {
            Ok((bytes, candidate)) => {
                if best.is_none_or(|(least, _)| bytes < least) {
                    best = Some((bytes, candidate));
                }
            }
            Err(error) => refusal = error,
        }
    }
    best.map(|(_, candidate)| candidate).ok_or(refusal)
}

/// Bytes of the passes that are wanted.
fn bytes_of_passes(
    problem: &AttentionProblem,
    candidate: Candidate,
    wanted: &PlanQuery,
    (q, kv): (Placement, Placement),
) -> Result<u64> {
    let forward = bytes_sent(problem, &q, &kv, candidate.strategy);
    if !wanted.gradients {
        return Ok(forward);
    }
    let Candidate { strategy, mesh, .. } = candidate.of_backward(problem);
    let backward = plan_backward_placed(problem, mesh, q, kv, strategy)?;
    Ok(forward + backward.plans.iter().map(|plan| plan.volume(problem).0).sum::<u64>())
}

/// The first placement that fits on `mesh`, and the owners of queries and keys; or the refusal.
fn first_fit(
    problem: &AttentionProblem,
    mesh: Mesh,
    wanted: &PlanQuery,
) -> Result<(Candidate, Placement, Placement)> {
    let strategy = wanted.strategy.unwrap_or_else(|| Strategy::of_mesh(mesh));
    let placements = match wanted.placement {
        Some(placement) => vec![placement],
        None if mesh.ring() == 1 => vec![PlacementKind::Contiguous],
        None => in_order(problem),
    };
    let mut refusal = None;
    for placement in placements {
        match dealt(problem, mesh, placement, &wanted.split, strategy) {
            Ok((q, kv)) => return Ok((Candidate { strategy, mesh, placement }, q, kv)),
            // Contiguous placement takes most requests, so its refusal says most.
            Err(error) if refusal.is_none() || placement == PlacementKind::Contiguous => {
                refusal = Some(error)
            }
            Err(_) => {}
        }
    }
    Err(refusal.expect("at least one placement is tried"))
}

/// The placements to try, the best one first.
fn in_order(problem: &AttentionProblem) -> Vec<PlacementKind> {
    let best = PlacementKind::for_problem(problem);
    let others = PlacementKind::ALL.into_iter().filter(|kind| problem.fixed_order && *kind != best);
    [best].into_iter().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::mask::Mask;
    use crate::placement::Split;

    #[test]
    fn a_fixed_order_takes_the_placement_that_has_whole_tiles() {
        let chosen = |seq, ranks, mesh: Option<(u32, u32)>, split: Split| {
            let problem = AttentionProblem::new([1, seq, 2, 2, 16], Dtype::F32, Mask::causal()).unwrap();
            let wanted = PlanQuery {
                ranks,
                mesh: mesh.map(|(ulysses, ring)| Mesh::new(ulysses, ring).unwrap()),
                strategy: None,
                placement: None,
                split,
                gradients: false,
            };
            fewest_bytes(&problem.with_fixed_order(true).unwrap(), &wanted)
        };
        // 768 tokens are three tiles: zigzag halves of 128 tokens are not, and there are fewer heads than
        // ranks.
        for mesh in [None, Some((1, 3))] {
            let candidate = chosen(768, 3, mesh, Split::Even).unwrap();
            assert_eq!(candidate.to_string(), "ring 1x3 contiguous");
        }
        let tokens = || Split::Tokens(vec![256, 0, 256, 18]);
        assert_eq!(chosen(530, 4, None, tokens()).unwrap().to_string(), "unified 2x2 contiguous");
        assert_eq!(chosen(530, 4, Some((1, 4)), tokens()).unwrap().to_string(), "ring 1x4 contiguous");
        assert_eq!(chosen(2048, 2, Some((1, 2)), Split::Even).unwrap().to_string(), "ring 1x2 zigzag");
        // Nothing fits: the refusal says what would.
        let refusal = chosen(900, 3, None, Split::Even).unwrap_err().to_string();
        assert!(refusal.ends_with("use token counts 256, 256, 388"), "{refusal}");
    }
}
