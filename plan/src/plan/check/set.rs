//! The proof of a plan set.

use kyklos_rank::Rank;

use super::proof::RankProof;
use super::together::{messages_meet, no_rank_waits_for_ever};
use crate::error::{Error, Result};
use crate::parallel::for_each_rank;
use crate::placement::explicit::covers_once;
use crate::plan::PlanSet;
use crate::tokens::TokenRuns;

/// Figures of one rank that the proof finds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RankCheck {
    /// Most bytes of buffers alive at once, the rank's input and output among them.
    pub peak_bytes: u64,
    /// Plan payload sent, in bytes.
    pub bytes_sent: u64,
    /// Messages sent.
    pub messages_sent: u64,
}

/// Proves the plans of `set`.
///
/// # Errors
/// [`Error::Plan`] that names the rank, the step and the fault.
pub fn check(set: &PlanSet) -> Result<Vec<RankCheck>> {
    let ranks = set.mesh.size() as usize;
    let lists = [set.plans.len(), set.q_placement.ranks().len(), set.kv_placement.ranks().len()];
    if lists != [ranks; 3] {
        let fault =
            format!("{ranks} ranks have {} plans and {} and {} token lists", lists[0], lists[1], lists[2]);
        return Err(Error::plan(Rank(0), None, fault));
    }
    owners(set)?;
    let checks: Result<_> =
        for_each_rank(set.mesh.size(), |rank| check_rank(set, Rank(rank))).into_iter().collect();
    let checks = checks?;
    messages_meet(set)?;
    no_rank_waits_for_ever(set)?;
    Ok(checks)
}

/// Proves the plan of one rank by itself.
fn check_rank(set: &PlanSet, rank: Rank) -> Result<RankCheck> {
    let plan = set.plan(rank);
    if plan.rank != rank.0 {
        return Err(Error::plan(rank, None, format!("the plan is of rank {}", plan.rank)));
    }
    let peak_bytes = RankProof::new(set, plan).run()?;
    let (bytes_sent, messages_sent) = plan.volume(&set.problem);
    Ok(RankCheck { peak_bytes, bytes_sent, messages_sent })
}

/// Checks that every token has exactly one owner, except replicated tokens and left-out queries,
/// which have none.
fn owners(set: &PlanSet) -> Result<()> {
    let none = TokenRuns::default();
    for (what, placement, total, left_out) in [
        ("query", &set.q_placement, set.problem.q_len, &set.left_out),
        ("key", &set.kv_placement, set.problem.kv_len, &none),
    ] {
        let shared = match placement.replicated().runs() {
            [] => Some(0..0),
            [run] if run.stride == 1 => Some(run.start..run.start + run.count),
            _ => None,
        };
        if left_out.is_empty() && shared.is_some_and(|shared| covers_once(total, &shared, placement.ranks()))
        {
            continue;
        }
        let mut owner: Vec<Option<u32>> = vec![None; total as usize];
        let is_in =
            |tokens: &TokenRuns, token: u32| tokens.runs().iter().any(|run| run.meets(token, token + 1));
        let replicated = |token: u32| is_in(placement.replicated(), token);
        let mut is_left_out = vec![false; total as usize];
        for token in left_out.iter() {
            match is_left_out.get_mut(token as usize) {
                Some(is_left_out) => *is_left_out = true,
                None => {
                    let fault = format!("{what} {token} is left out and does not exist, there are {total}");
                    return Err(Error::plan(Rank(0), None, fault));
                }
            }
        }
        for (rank, tokens) in (0u32..).zip(placement.ranks()) {
            for token in tokens.iter() {
                let fault = match owner.get_mut(token as usize) {
                    Some(None) if replicated(token) => format!("{what} {token} is also on every rank"),
                    Some(None) if is_left_out[token as usize] => format!("{what} {token} is also left out"),
                    Some(owner @ None) => {
                        *owner = Some(rank);
                        continue;
                    }
                    Some(Some(other)) => format!("{what} {token} is also rank {other}'s"),
                    None => format!("{what} {token} does not exist, there are {total}"),
                };
                return Err(Error::plan(Rank(rank), None, fault));
            }
        }
        if let Some((token, _)) = (0..)
            .zip(&owner)
            .zip(&is_left_out)
            .map(|((token, owner), lost)| (token, owner.is_some() || *lost))
            .find(|(token, fine)| !fine && !replicated(*token))
        {
            return Err(Error::plan(Rank(0), None, format!("{what} {token} has no owner")));
        }
    }
    Ok(())
}
