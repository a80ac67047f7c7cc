//! The choice without a description of devices and links: the fewest bytes.

use super::candidate::Candidate;
use super::candidates::{Wanted, meshes};
use crate::strategy::{bytes_sent, dealt};
use crate::{AttentionProblem, Error, PlacementKind, Result, Strategy};

/// The candidate that sends the fewest bytes, among equals the one with the larger Ulysses extent. The strategy is the
/// default one of its mesh and the placement [`PlacementKind::for_problem`], unless `wanted` names others.
///
/// Only in a fixed order a problem may refuse that placement and take another one: then the first that fits is chosen.
///
/// # Errors
/// [`Error::Request`] if every candidate is refused: the refusal of the last mesh, a ring, in contiguous placement.
pub fn fewest_bytes(problem: &AttentionProblem, wanted: &Wanted) -> Result<Candidate> {
    let mut best: Option<(u64, Candidate)> = None;
    let mut refusal = None;
    let meshes = meshes(wanted)?;
    for mesh in &meshes {
        let strategy = wanted.strategy.unwrap_or_else(|| Strategy::of_mesh(*mesh));
        let placements = match wanted.placement {
            Some(placement) => vec![placement],
            None if mesh.ring() == 1 => vec![PlacementKind::Contiguous],
            None => in_order(problem),
        };
        for placement in placements {
            let candidate = Candidate { strategy, mesh: *mesh, placement };
            match dealt(problem, *mesh, placement, &wanted.split, strategy) {
                Ok((q, kv)) => {
                    // The only mesh needs no price.
                    let bytes = if meshes.len() == 1 { 0 } else { bytes_sent(problem, &q, &kv, strategy) };
                    if best.is_none_or(|(least, _)| bytes < least) {
                        best = Some((bytes, candidate));
                    }
                    break;
                }
                Err(error) => {
                    // Contiguous placement takes most requests, so its refusal says most.
                    if refusal.as_ref().is_none_or(|(of, _)| of != mesh)
                        || placement == PlacementKind::Contiguous
                    {
                        refusal = Some((*mesh, error));
                    }
                }
            }
        }
    }
    let refused = || match refusal {
        Some((_, error)) => error,
        None => Error::request("there is no plan to choose from", "name at least one rank"),
    };
    best.map(|(_, candidate)| candidate).ok_or_else(refused)
}

/// The placements to try, the best one first.
fn in_order(problem: &AttentionProblem) -> Vec<PlacementKind> {
    let best = PlacementKind::for_problem(problem);
    let others = PlacementKind::ALL.into_iter().filter(|kind| problem.fixed_order && *kind != best);
    [best].into_iter().chain(others).collect()
}

impl PlacementKind {
    /// Zigzag where later queries have clearly more work than earlier ones, as under a causal mask; else contiguous,
    /// which keeps neighbouring tokens on one rank.
    pub fn for_problem(problem: &AttentionProblem) -> Self {
        let work = |half: u64| -> u64 {
            (0..SAMPLES)
                .map(|i| (2 * i + 1 + half * 2 * SAMPLES) * u64::from(problem.q_len) / (4 * SAMPLES))
                .filter_map(|token| u32::try_from(token).ok())
                .filter(|token| *token < problem.q_len)
                .map(|token| problem.mask.visible(0, problem.q_position(token), problem.kv_len).keys())
                .sum()
        };
        let (front, back) = (work(0), work(1));
        if back * 4 > front * 5 { Self::Zigzag } else { Self::Contiguous }
    }
}

/// Queries of each half of the sequence whose work is counted.
const SAMPLES: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Mask, Mesh, Split};

    fn placement_of(mask: &str) -> PlacementKind {
        let problem = AttentionProblem::new([1, 4096, 8, 2, 64], Dtype::F32, mask.parse().unwrap()).unwrap();
        PlacementKind::for_problem(&problem)
    }

    #[test]
    fn zigzag_is_for_masks_whose_work_grows_along_the_sequence() {
        assert_eq!(placement_of("causal"), PlacementKind::Zigzag);
        assert_eq!(placement_of("causal+window:3000,-1"), PlacementKind::Zigzag);
        assert_eq!(placement_of("full"), PlacementKind::Contiguous);
        assert_eq!(placement_of("window:64,0"), PlacementKind::Contiguous);
        assert_eq!(placement_of("window:0,-1"), PlacementKind::Contiguous);
        let empty = AttentionProblem::new([1, 0, 1, 1, 8], Dtype::F32, Mask::causal()).unwrap();
        assert_eq!(PlacementKind::for_problem(&empty), PlacementKind::Contiguous);
    }

    #[test]
    fn a_fixed_order_takes_the_placement_that_has_whole_tiles() {
        let chosen = |seq, ranks, mesh: Option<(u32, u32)>, split: Split| {
            let problem = AttentionProblem::new([1, seq, 2, 2, 16], Dtype::F32, Mask::causal()).unwrap();
            let wanted = Wanted {
                ranks,
                mesh: mesh.map(|(ulysses, ring)| Mesh::new(ulysses, ring).unwrap()),
                strategy: None,
                placement: None,
                split,
            };
            fewest_bytes(&problem.with_fixed_order(true).unwrap(), &wanted)
        };
        // 768 tokens are three tiles: zigzag halves of 128 tokens are not, and there are fewer heads than ranks.
        for mesh in [None, Some((1, 3))] {
            let candidate = chosen(768, 3, mesh, Split::Even).unwrap();
            assert_eq!(candidate.to_string(), "ring 1x3 contiguous");
        }
        let tokens = Split::Tokens(vec![256, 0, 256, 18]);
        assert_eq!(chosen(530, 4, None, tokens).unwrap().to_string(), "ring 1x4 contiguous");
        assert_eq!(chosen(2048, 2, Some((1, 2)), Split::Even).unwrap().to_string(), "ring 1x2 zigzag");
        // Nothing fits: the refusal says what would.
        let refusal = chosen(700, 3, None, Split::Even).unwrap_err().to_string();
        assert!(refusal.ends_with("use token counts 256, 256, 188"), "{refusal}");
    }
}
