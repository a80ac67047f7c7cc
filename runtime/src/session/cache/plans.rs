//! The record of a cache after a call, and the plans of the call.

use std::ops::Range;
use std::sync::Arc;

use super::{Holdings, KvCache, too_many};
use crate::call::{Attention, Execution, Options};
use crate::error::{Error, Result};
use crate::session::agreement::Agreed;
use crate::session::choice::plans;
use kyklos_plan::plan::ProvedPlans;
use kyklos_plan::{Deal, Mesh, Placement, PlacementKind, Split, TokenRuns, WireFormat};

/// The effect of a call on the record of a cache.
pub(super) struct Appended {
    /// The new tokens of each rank, numbered from 0.
    pub(super) own: Vec<TokenRuns>,
    pub(super) holdings: Holdings,
}

impl KvCache {
    /// Refuses options that do not go with this cache.
    pub(super) fn takes(&self, options: &Options) -> Result<()> {
        let Execution { owners, placement, replicated, mesh, .. } = &options.execution;
        let refuse = |mismatch: String, remedy: &str| Err(Error::request(mismatch, remedy));
        if !self.missing().is_empty() {
            return refuse(
                format!("a call on a cache that lost the keys of the tokens {}", self.missing()),
                "restore them (Session::restore), or truncate the cache before them",
            );
        }
        if options.execution.plans.is_some() {
            return refuse(
                "given plans in a call with a cache".to_owned(),
                "leave them out: a session plans the calls of a cache",
            );
        }
        if options.q_offset != 0 || owners.is_some() || !replicated.is_empty() {
            return refuse(
                "q_offset, owners or replicated keys in a call with a cache".to_owned(),
                "leave them out: the cache knows the positions and the owners of all tokens",
            );
        }
        if *placement != PlacementKind::Contiguous && mesh.is_none()
            || *placement == PlacementKind::PerDocument
        {
            return refuse(
                format!("new tokens placed {placement} in a call with a cache"),
                "use placement contiguous, or zigzag or striped together with a mesh",
            );
        }
        let Some(keys) = self.options.window else { return Ok(()) };
        match options.mask.as_window() {
            Some([Some(left), Some(0)]) if left < keys => Ok(()),
            _ => refuse(
                format!("mask {} on a cache with a window of {keys} keys", options.mask),
                "use Mask::window(Some(left), Some(0)) with left below the number of keys",
            ),
        }
    }

    /// The record without the tokens that no query of the next call sees.
    pub(super) fn kept_for(&self, holdings: &Holdings) -> Holdings {
        let mut kept = holdings.clone();
        if let Some(keys) = self.options.window {
            kept.drop_before(holdings.len().saturating_sub(keys - 1).saturating_sub(self.options.rollback));
        }
        kept
    }

    /// The record after a call. The same on all ranks.
    pub(super) fn appended(&self, call: &Attention, agreed: &Agreed) -> Result<Appended> {
        let Execution { same_queries, placement, mesh, .. } = &call.options.execution;
        let mut holdings = self.kept_for(&self.holdings);
        let counts = &agreed.kv_counts;
        let total: u64 = match same_queries {
            true => u64::from(counts[0]),
            false => counts.iter().map(|count| u64::from(*count)).sum(),
        };
        if u64::from(self.len()) + total > u64::from(u32::MAX / 2) {
            return Err(too_many());
        }
        let own = if *same_queries {
            if let Some(rank) = counts.iter().position(|count| *count != counts[0]) {
                return Err(Error::request(
                    format!("rank {rank} appends {} tokens, rank 0 {}", counts[rank], counts[0]),
                    "pass the same tokens on all ranks, or call without same_queries",
                ));
            }
            holdings.share_out(counts[0], self.options.block).ok_or_else(|| full(&holdings, counts[0]))?
        } else {
            for (rank, count) in holdings.ranks().zip(counts) {
                if *count > holdings.room(rank) {
                    return Err(full(&holdings, *count));
                }
            }
            let mesh = mesh_of(*mesh, counts.len())?;
            dealt(*placement, mesh, counts)?.ranks().to_vec()
        };
        holdings.append(&own);
        Ok(Appended { own, holdings })
    }

    /// The plans of a call after which the record is `holdings`.
    pub(super) fn plans(
        &self,
        options: &Options,
        agreed: &Agreed,
        holdings: &Holdings,
    ) -> Result<Arc<ProvedPlans>> {
        let Execution { same_queries, placement, mesh, .. } = &options.execution;
        let (live, q_len) = (holdings.live(), agreed.extents.q_len);
        let (keys, kv_len) = holdings.keys();
        let tokens = live.end - live.start;
        let Some(q_offset) = tokens.checked_sub(q_len) else {
            return Err(Error::request(
                format!("{q_len} queries over a cache of {tokens} tokens"),
                "append the keys of the queries too",
            ));
        };
        // Then a key's number is not its position.
        if live.start > 0 || kv_len > tokens {
            let sees = options.mask.as_window().filter(|[_, right]| *right == Some(0));
            let Some([left, _]) = sees else {
                return Err(Error::request(
                    format!("mask {} on a cache that has dropped or truncated tokens", options.mask),
                    "use a causal mask, or a window without keys to the right of the query",
                ));
            };
            let needs = (live.end - q_len).saturating_sub(left.unwrap_or(u32::MAX));
            if needs < live.start {
                return Err(Error::request(
                    format!(
                        "queries that see keys from position {needs} on; the cache has them from {}",
                        live.start
                    ),
                    "use a larger window for the cache, or fewer queries than new tokens",
                ));
            }
            // Rows that hold nothing would travel, and share scales with keys.
            if options.execution.wire == WireFormat::Int8 {
                return Err(Error::request(
                    "int8 on the wire, for a cache that has dropped or truncated tokens",
                    "send f16, or the tensors as they are",
                ));
            }
            if options.bias.is_some() {
                return Err(Error::request(
                    "an attention bias tensor on a cache that has dropped or truncated tokens",
                    "use a cache without a window, or a mask instead of the tensor",
                ));
            }
        }
        let mesh = mesh_of(*mesh, keys.len())?;
        let queries = match same_queries {
            true => Placement::everywhere(mesh, q_len),
            false => dealt(*placement, mesh, &agreed.q_counts)?,
        };
        let rows = agreed.cache_rows.as_ref().map_or(&[][..], |rows| rows);
        let spare: Option<Vec<u32>> =
            holdings.ranks().zip(rows).map(|(rank, rows)| rows.checked_sub(holdings.used(rank))).collect();
        let Some(spare) = spare.filter(|spare| spare.len() == keys.len()) else {
            return Err(Error::request(
                "a rank whose keys have no rows for its tokens",
                "use the same release on all ranks",
            ));
        };
        let counts = keys.iter().map(len).collect();
        let keys = Placement::explicit(mesh, kv_len, 0..0, keys)?.with_spare(spare)?;
        let mut options = Options { q_offset, ..options.clone() };
        options.execution.owners = Some((queries, keys));
        let mut agreed = Agreed { kv_counts: counts, ..agreed.clone() };
        agreed.extents.kv_len = kv_len;
        plans(&options, &agreed)
    }
}

/// The parts of this rank's new keys that it keeps, as ranges of their tokens.
pub(super) fn sources(call: &Attention, own: &[TokenRuns], rank: kyklos_transport::Rank) -> Vec<Range<u32>> {
    let own = &own[rank.0 as usize];
    match call.options.execution.same_queries {
        true => ranges(own),
        false => std::iter::once(0..len(own)).filter(|tokens| !tokens.is_empty()).collect(),
    }
}

pub(super) fn ranges(tokens: &TokenRuns) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for token in tokens.iter() {
        match ranges.last_mut() {
            Some(last) if last.end == token => last.end += 1,
            _ => ranges.push(token..token + 1),
        }
    }
    ranges
}

/// The owners of tokens of which each rank passes `counts`.
fn dealt(kind: PlacementKind, mesh: Mesh, counts: &[u32]) -> Result<Placement> {
    let total = counts.iter().sum();
    Ok(Placement::deal(&Deal { total, ..Deal::default() }, kind, mesh, &Split::Tokens(counts.to_vec()))?)
}

fn mesh_of(mesh: Option<Mesh>, ranks: usize) -> Result<Mesh> {
    let ring = u32::try_from(ranks).unwrap_or(u32::MAX);
    Ok(mesh.map_or_else(|| Mesh::new(1, ring), Ok)?)
}

pub(super) fn len(tokens: &TokenRuns) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

pub(super) fn full(holdings: &Holdings, count: u32) -> Error {
    let rooms: Vec<String> = holdings.ranks().map(|rank| holdings.room(rank).to_string()).collect();
    Error::request(
        format!("{count} more tokens for a cache whose ranks have room for {}", rooms.join(", ")),
        "allow more bytes (CacheOptions::max_bytes), truncate the cache, or use a window",
    )
}
