//! Refusals of placements, for callers of the library.

use std::ops::Range;

use kyklos::simulate::{PlanQuery, fewest_bytes};
use kyklos::{Error, Mesh, Placement, PlacementKind, Split, Strategy, TokenRuns, plan_placed, plan_rows};

use super::Entry;
use super::library::{entry, problem};

/// The placement of one rank with these tokens.
fn explicit(total: u32, replicated: Range<u32>, tokens: Range<u32>) -> Result<Placement, Error> {
    let lists = vec![TokenRuns::contiguous(tokens)];
    Ok(Placement::explicit(Mesh::new(1, 1).unwrap(), total, replicated, lists)?)
}

fn separate(queries: Split, keys: Split) -> Split {
    Split::Separate { queries: Box::new(queries), keys: Box::new(keys) }
}

/// Refusals of token lists, and of plans over placements that do not fit.
pub(super) fn refusals() -> Vec<Entry> {
    let one = Mesh::new(1, 1).unwrap();
    let two = Mesh::new(1, 2).unwrap();
    let whole_keys = explicit(8, 0..0, 0..8).unwrap();
    let rows = plan_rows(&problem(), TokenRuns::contiguous(2..4)).unwrap();
    let placed = |mesh, q: &Placement, kv: &Placement| {
        plan_placed(&problem(), mesh, q.clone(), kv.clone(), Strategy::Unified).unwrap_err()
    };
    let nobody = PlanQuery {
        ranks: 0,
        mesh: None,
        strategy: None,
        placement: None,
        split: Split::Even,
        gradients: false,
    };
    vec![
        entry(
            "Placement::new with Split::Work",
            Placement::new(PlacementKind::Zigzag, one, 8, &Split::Work(vec![1.0])).unwrap_err(),
            "The work of a token depends on the mask.",
        ),
        entry(
            "Placement::new with Split::Separate",
            Placement::new(PlacementKind::Zigzag, one, 8, &separate(Split::Even, Split::Even)).unwrap_err(),
            "A placement is of the queries or of the keys.",
        ),
        entry(
            "Placement::explicit with 2 lists for one rank",
            Placement::explicit(one, 8, 0..0, vec![TokenRuns::default(); 2]).unwrap_err(),
            "One list for each rank.",
        ),
        entry(
            "Placement::explicit, tokens 0..9 of 8 replicated",
            explicit(8, 0..9, 0..0).unwrap_err(),
            "Only tokens that exist can be on every rank.",
        ),
        entry(
            "Placement::explicit with token 8 of 8",
            explicit(8, 0..0, 0..9).unwrap_err(),
            "Tokens count from 0.",
        ),
        entry(
            "Placement::explicit with a replicated token in a list",
            explicit(8, 0..2, 1..8).unwrap_err(),
            "Replicated tokens have no owner.",
        ),
        entry(
            "Placement::explicit with two owners of token 3",
            Placement::explicit(two, 8, 0..0, [0..4, 3..8].map(TokenRuns::contiguous).to_vec()).unwrap_err(),
            "A token has one owner.",
        ),
        entry(
            "Placement::explicit without an owner of token 7",
            explicit(8, 0..0, 0..7).unwrap_err(),
            "A token has one owner.",
        ),
        entry(
            "Placement::on_mesh with 2 ranks for the list of one",
            whole_keys.on_mesh(two).unwrap_err(),
            "A rank keeps its list on another mesh, so there are as many ranks.",
        ),
        entry(
            "plan_placed with placements on another mesh",
            placed(two, &whole_keys, &whole_keys),
            "Both placements and the plans are on one mesh.",
        ),
        entry(
            "plan_placed with a placement of 7 queries of 8",
            placed(one, &explicit(7, 0..0, 0..7).unwrap(), &whole_keys),
            "The placements are of the problem's queries and keys.",
        ),
        entry(
            "plan_placed with keys that only the placement replicates",
            placed(one, &whole_keys, &explicit(8, 0..2, 2..8).unwrap()),
            "`AttentionProblem::with_replicated` and the placement of the keys name the same ones.",
        ),
        entry(
            "plan_placed with the queries of plan_rows",
            placed(one, &rows.q_placement, &whole_keys),
            "Every query has an owner.",
        ),
        entry(
            "simulate::fewest_bytes for 0 ranks",
            fewest_bytes(&problem(), &nobody).unwrap_err(),
            "A problem runs on at least one rank.",
        ),
    ]
}
