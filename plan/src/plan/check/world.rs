//! The proof of all plans of a world.

use kyklos_rank::Rank;

use super::proof::RankProof;
use super::together::{messages_meet, no_rank_waits_for_ever};
use crate::error::{Error, Result};
use crate::parallel::for_each_rank;
use crate::placement::explicit::covers_once;
use crate::plan::World;
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

/// Proves the plans of `world`.
///
/// # Errors
/// [`Error::Plan`] that names the rank, the step and the fault.
pub fn check(world: &World) -> Result<Vec<RankCheck>> {
    let ranks = world.mesh.world() as usize;
    let lists = [world.plans.len(), world.q_placement.ranks().len(), world.kv_placement.ranks().len()];
    if lists != [ranks; 3] {
        let fault =
            format!("{ranks} ranks have {} plans and {} and {} token lists", lists[0], lists[1], lists[2]);
        return Err(Error::plan(Rank(0), None, fault));
    }
    owners(world)?;
    let checks: Result<_> =
        for_each_rank(world.mesh.world(), |rank| check_rank(world, Rank(rank))).into_iter().collect();
    let checks = checks?;
    messages_meet(world)?;
    no_rank_waits_for_ever(world)?;
    Ok(checks)
}

/// Proves the plan of one rank by itself.
fn check_rank(world: &World, rank: Rank) -> Result<RankCheck> {
    let plan = world.plan(rank);
    if plan.rank != rank.0 {
        return Err(Error::plan(rank, None, format!("the plan is of rank {}", plan.rank)));
    }
    let peak_bytes = RankProof::new(world, plan).run()?;
    let (bytes_sent, messages_sent) = plan.volume(&world.problem);
    Ok(RankCheck { peak_bytes, bytes_sent, messages_sent })
}

/// Checks that every token has exactly one owner, except replicated tokens and left-out queries, which have none.
fn owners(world: &World) -> Result<()> {
    let none = TokenRuns::default();
    for (what, placement, total, left_out) in [
        ("query", &world.q_placement, world.problem.q_len, &world.left_out),
        ("key", &world.kv_placement, world.problem.kv_len, &none),
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
