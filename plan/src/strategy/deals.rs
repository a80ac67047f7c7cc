//! The placements that the dealers make for a problem: of its queries, and of its keys.

use std::ops::Range;

use super::balance;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::placement::{Deal, Placement, PlacementKind, Split, by_largest_remainder};
use crate::problem::AttentionProblem;
use crate::remedy::Remedy;

/// Deals the queries and the keys of `problem` to the ranks of `mesh`, for
/// [`plan_placed`](crate::plan_placed).
///
/// If there are as many queries as keys, and query 0 is at position 0, then a query and the key at
/// its position are one token of joint attention. Such a token has one owner: the rank that owns
/// its query owns its key, unless the key is replicated or the split gives a rank fewer queries
/// than keys.
///
/// # Errors
/// [`Error::Request`] when the split does not fit the mesh or the problem.
pub fn deal(
    problem: &AttentionProblem,
    mesh: Mesh,
    kind: PlacementKind,
    split: &Split,
) -> Result<(Placement, Placement)> {
    mesh.fits(problem)?;
    let (queries, keys) = (queries(problem), keys(problem));
    if let Split::Tokens(_) = split
        && problem.q_len != problem.kv_len
    {
        return Err(Error::request(
            format!("exact token counts for {} queries and {} keys", problem.q_len, problem.kv_len),
            Remedy::CountEachSideOrUseWeights,
        ));
    }
    if let Split::Separate { queries: of_queries, keys: of_keys } = split {
        counts_fit(of_queries, mesh, Side::Queries, problem.q_len)?;
        counts_fit(of_keys, mesh, Side::Keys, keys.without_replicated().total)?;
    }
    if problem.q_len == problem.kv_len
        && problem.q_offset == 0
        && !problem.replicated.is_empty()
        && let Some([own, more]) = counts_of_both(problem, &keys, mesh, kind, split)?
    {
        // The tokens with keys of their own are dealt once, for queries and keys.
        let kv = Placement::deal(&keys, kind, mesh, &Split::Tokens(own))?;
        let fronts = Placement::deal(&keys.only_replicated(), kind, mesh, &Split::Tokens(more))?;
        let shifted = fronts.ranks().iter().map(|tokens| tokens.around(&(0..problem.replicated.start)));
        let q = kv.clone().with_more(problem.q_len, shifted.collect());
        return Ok((q, kv));
    }
    let (of_queries, of_keys) = match split {
        Split::Separate { queries, keys } => (&**queries, &**keys),
        split => (split, split),
    };
    let q_split = match of_queries {
        Split::Work(weights) => {
            Split::Tokens(balance::tokens(problem, &queries, |token| token, mesh, kind, weights)?)
        }
        split => split.clone(),
    };
    let kv_split = match of_keys {
        // The owners of keys do not change the work of any rank, so they only follow the queries, if they
        // can.
        Split::Work(_) if same_tokens(problem, split) => q_split.clone(),
        Split::Work(weights) => Split::Weights(weights.clone()),
        // Replicated keys are not dealt; the others are, in the proportions of the queries.
        Split::Tokens(tokens) if !problem.replicated.is_empty() && !is_separate(split) => {
            if problem.q_len == 0 { Split::Even } else { Split::Weights(as_weights(tokens)) }
        }
        split => split.clone(),
    };
    Ok((Placement::deal(&queries, kind, mesh, &q_split)?, Placement::deal(&keys, kind, mesh, &kv_split)?))
}

/// The queries, as a placement deals them.
pub(super) fn queries(problem: &AttentionProblem) -> Deal {
    let boundaries = problem.mask.document_boundaries();
    let documents = boundaries.iter().map(|position| position.saturating_sub(problem.q_offset)).collect();
    let replicated = if problem.same_queries { 0..problem.q_len } else { 0..0 };
    Deal { total: problem.q_len, replicated, documents }
}

/// The keys.
fn keys(problem: &AttentionProblem) -> Deal {
    let documents = problem.mask.document_boundaries().to_vec();
    Deal { total: problem.kv_len, replicated: problem.replicated.clone(), documents }
}

fn is_separate(split: &Split) -> bool {
    matches!(split, Split::Separate { .. })
}

fn same_tokens(problem: &AttentionProblem, split: &Split) -> bool {
    problem.q_len == problem.kv_len && problem.replicated.is_empty() && !is_separate(split)
}

/// For joint attention with replicated keys: of each rank the number of tokens whose key it owns,
/// and the number of its other queries. None if the split gives a rank fewer queries than keys: it
/// wants other owners for both.
fn counts_of_both(
    problem: &AttentionProblem,
    keys: &Deal,
    mesh: Mesh,
    kind: PlacementKind,
    split: &Split,
) -> Result<Option<[Vec<u32>; 2]>> {
    let (own, replicated) = (keys.without_replicated(), keys.only_replicated());
    let (all_counts, own_counts) = match split {
        // Each part is level by itself, so both together are.
        Split::Work(weights) => {
            let Range { start, .. } = problem.replicated;
            let level = |deal: &Deal, query: &dyn Fn(u32) -> u32| {
                balance::tokens(problem, deal, query, mesh, kind, weights)
            };
            let behind = |token: u32| if token < start { token } else { token + replicated.total };
            return Ok(Some([level(&own, &behind)?, level(&replicated, &|token| token + start)?]));
        }
        Split::Separate { queries, keys } => {
            if [queries, keys].iter().any(|side| matches!(***side, Split::Work(_))) {
                return Ok(None);
            }
            (queries.counts(mesh, problem.q_len)?, keys.counts(mesh, own.total)?)
        }
        Split::Tokens(tokens) => {
            (split.counts(mesh, problem.q_len)?, by_largest_remainder(&as_weights(tokens), own.total)?)
        }
        Split::Even | Split::Weights(_) => {
            (split.counts(mesh, problem.q_len)?, split.counts(mesh, own.total)?)
        }
    };
    let missing: Vec<f64> =
        all_counts.iter().zip(&own_counts).map(|(all, own)| f64::from(*all) - f64::from(*own)).collect();
    if is_separate(split) && missing.iter().any(|count| *count < 0.0) {
        return Ok(None);
    }
    // Rounding may give a rank one token more of the smaller number than of the larger one. The others
    // share the rest.
    let missing: Vec<f64> = missing.into_iter().map(|count| count.max(0.0)).collect();
    Ok(Some([own_counts, by_largest_remainder(&missing, replicated.total)?]))
}

fn as_weights(counts: &[u32]) -> Vec<f64> {
    counts.iter().map(|count| f64::from(*count)).collect()
}

#[derive(Clone, Copy)]
enum Side {
    Queries,
    Keys,
}

/// Refuses exact counts of one side that do not fit its tokens, in the words of that side.
fn counts_fit(split: &Split, mesh: Mesh, side: Side, total: u32) -> Result<()> {
    let Split::Tokens(counts) = split else { return Ok(()) };
    let (one, all, remedy) = match side {
        Side::Queries => ("query", "queries", Remedy::CompleteQueryCounts { total }),
        Side::Keys => ("key", "keys to deal", Remedy::CompleteKeyCounts { total }),
    };
    if counts.len() != mesh.size() as usize {
        return Err(Error::request(
            format!("{} {one} counts for {} ranks", counts.len(), mesh.size()),
            format!("give one for each rank of the mesh {mesh}"),
        ));
    }
    let sum: u64 = counts.iter().map(|count| u64::from(*count)).sum();
    if sum == u64::from(total) {
        return Ok(());
    }
    Err(Error::request(format!("the {one} counts add up to {sum}, there are {total} {all}"), remedy))
}
