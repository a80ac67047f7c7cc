//! Calls with a cache: the new keys and values are appended, and the queries attend to all that is held.

use std::ops::Range;

use bytes::Bytes;
use kyklos_transport::{Rank, Vote};

use super::{Holdings, KvCache, NewKeys};
use crate::backend::{Backend, DeviceBuffer};
use crate::call::{Attention, Execution, Options};
use crate::plan::ProvedPlans;
use crate::session::Session;
use crate::session::agreement::{Agreed, CacheFacts, facts_of, note};
use crate::session::attend::{CALLS, Output};
use crate::session::choice::plans;
use crate::{Deal, Error, Inputs, Mesh, Placement, PlacementKind, Result, Split, Tensor, TokenRuns};

/// The hash under which ranks vote on keys that replace missing ones.
const RESTORED: [u8; 32] = *b"kyklos: restored keys, release 1";

impl Session {
    /// Appends the new tokens' `k` and `v` to `cache`, and attends from `q` to all keys of the cache, the new ones included.
    /// The queries are the last tokens: query i of n is at position `cache.len() − n + i`, after the append. Without
    /// queries it only appends, without keys it only attends.
    ///
    /// With [`Execution::same_queries`], all ranks pass the same q, k and v, as in decoding: the cache keeps each key
    /// on one rank ([`CacheOptions::block`](super::CacheOptions::block), [`CacheOptions::share`](super::CacheOptions::share)),
    /// and every rank gets the whole output. Without it, each rank passes tokens of its own, as for a prompt that is split:
    /// their keys stay on this rank, and it gets the rows of its queries. They are numbered in rank order, or by
    /// the [`Execution::placement`] of the call. The calls of one cache may be of both sorts.
    ///
    /// # Errors
    /// As [`Self::attend`]. [`Error::Request`] on all ranks when the cache has no room, the ranks' records differ, or
    /// the mask does not fit the window of the cache. After an error the cache has the tokens that it had before.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attend_cached(
        &mut self,
        call: &Attention,
        cache: &mut KvCache,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Output> {
        pollster::block_on(self.attend_cached_async(call, cache, q, k, v))
    }

    /// [`Self::attend_cached`] as a future.
    ///
    /// # Errors
    /// As [`Self::attend_cached`].
    pub async fn attend_cached_async(
        &mut self,
        call: &Attention,
        cache: &mut KvCache,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Output> {
        let (note, prepared) = match self.prepare(call, cache, [q, k, v]) {
            Ok(prepared) => prepared,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let notes = self.vote(Vote::Ready { plan_hash: CALLS, note }).await?;
        let facts = facts_of(&notes)?;
        let agreed = Agreed::new(&call.options, &facts)?;
        let Appended { own, holdings } = cache.appended(call, &agreed)?;
        let make = |options: &Options, agreed: &Agreed| cache.plans(options, agreed, &holdings);
        let lowered = self.plan_of(&call.options, facts, make)?;
        let rows = cache.kept_for(&cache.holdings).next_rows(cache.rank, len(&own[cache.rank.0 as usize]));
        let written = cache.write(&prepared.new, &sources(call, &own, cache.rank), &rows);
        written.inspect_err(|error| self.end_call(error))?;
        let keys = cache.tensors.take().ok_or_else(super::dropped)?;
        let shared = call.options.bias.is_some_and(|tensor| tensor.shared_rows);
        let [k, v] = keys;
        let mut loan = Loan { inputs: Inputs::of([prepared.q, k, v], prepared.bias, shared), cache };
        let output = self.run_call(&lowered, &mut loan.inputs, q).await?;
        loan.cache.holdings = holdings;
        Ok(output)
    }

    /// Appends the keys and values of the tokens that are [`missing`](KvCache::missing), in this order. All ranks pass the
    /// same ones; the cache keeps each on one rank. Blocks.
    ///
    /// # Errors
    /// As [`Self::attend_cached`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn restore(&mut self, cache: &mut KvCache, k: &Tensor, v: &Tensor) -> Result<()> {
        pollster::block_on(self.restore_async(cache, k, v))
    }

    /// [`Self::restore`] as a future.
    ///
    /// # Errors
    /// As [`Self::restore`].
    pub async fn restore_async(&mut self, cache: &mut KvCache, k: &Tensor, v: &Tensor) -> Result<()> {
        let mut holdings = cache.holdings.clone();
        let prepared = self.fits(cache).and_then(|()| cache.upload([k, v])).and_then(|new| {
            let missing = len(cache.missing());
            if new.count != missing {
                return Err(Error::request(
                    format!("{} keys for {missing} missing tokens", new.count),
                    "give one key for each position of KvCache::missing",
                ));
            }
            let own =
                holdings.share_out(missing, cache.options.block).ok_or_else(|| full(&holdings, missing))?;
            let tokens = &own[cache.rank.0 as usize];
            let rows = holdings.next_rows(cache.rank, len(tokens));
            cache.grow(rows.last().map_or(0, |rows| rows.end))?;
            Ok((new, own, rows))
        });
        let (new, own, rows) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let note = Bytes::copy_from_slice(&cache.holdings.digest().to_le_bytes());
        let notes = self.vote(Vote::Ready { plan_hash: RESTORED, note }).await?;
        self.op += 1;
        if let Some(rank) = notes.iter().position(|note| *note != notes[0]) {
            return Err(Error::request(
                format!("rank {rank} restores a cache with another record of its tokens than rank 0"),
                "restore the same cache on all ranks",
            ));
        }
        let written = cache.write(&new, &ranges(&own[cache.rank.0 as usize]), &rows);
        written.inspect_err(|error| self.end_call(error))?;
        holdings.restore(&own);
        cache.holdings = holdings;
        Ok(())
    }

    /// Refuses a cache of another group or device.
    fn fits(&self, cache: &KvCache) -> Result<()> {
        let ranks = cache.holdings.ranks().count();
        if ranks != self.transport.world() as usize || cache.rank != self.rank() {
            return Err(Error::request(
                format!(
                    "a cache of rank {} of {ranks}, on rank {} of {}",
                    cache.rank,
                    self.rank(),
                    self.transport.world()
                ),
                "use a cache that a session of this group made, or KvCache::after_loss",
            ));
        }
        if !cache.device.is_same(&self.device) {
            return Err(Error::request(
                format!(
                    "a cache on {}, for a session on {}",
                    cache.device.info().name,
                    self.device.info().name
                ),
                "use the cache with a session on the same Device, or a clone of it",
            ));
        }
        Ok(())
    }

    /// What this rank does before the vote: everything that can fail on this rank alone.
    fn prepare(
        &mut self,
        call: &Attention,
        cache: &mut KvCache,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<(Bytes, Prepared)> {
        self.fits(cache)?;
        cache.takes(&call.options)?;
        let new = cache.upload([k, v])?;
        let mut kept = cache.kept_for(&cache.holdings);
        let count = match call.options.execution.same_queries {
            true => {
                let own = kept.share_out(new.count, cache.options.block);
                len(&own.ok_or_else(|| full(&kept, new.count))?[cache.rank.0 as usize])
            }
            false if new.count > kept.room(cache.rank) => return Err(full(&kept, new.count)),
            false => new.count,
        };
        let rows = kept.next_rows(cache.rank, count);
        cache.grow(kept.used(cache.rank).max(rows.last().map_or(0, |rows| rows.end)))?;
        let facts = CacheFacts { digest: cache.holdings.digest(), rows: cache.rows };
        let note = note(&mut self.last_facts, self.op, 1, call, [q, k, v], Some(facts))?;
        self.device.supports(q.dtype(), q.shape()[3])?;
        let q = q.buffer("q", &self.device)?;
        Ok((note, Prepared { q, new, bias: self.bias_buffer(call)? }))
    }
}

/// What a rank has ready before the vote.
struct Prepared {
    q: DeviceBuffer,
    new: NewKeys,
    bias: Option<DeviceBuffer>,
}

/// The effect of a call on the record of a cache.
struct Appended {
    /// The new tokens of each rank, numbered from 0.
    own: Vec<TokenRuns>,
    holdings: Holdings,
}

/// The keys of a cache during a call. They go back to the cache however the call ends.
struct Loan<'a> {
    cache: &'a mut KvCache,
    inputs: Inputs<DeviceBuffer>,
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.cache.tensors = self.inputs.take_keys();
    }
}

impl KvCache {
    /// Refuses options that do not go with this cache.
    fn takes(&self, options: &Options) -> Result<()> {
        let Execution { owners, placement, replicated, mesh, .. } = &options.execution;
        let refuse = |mismatch: String, remedy: &str| Err(Error::request(mismatch, remedy));
        if !self.missing().is_empty() {
            return refuse(
                format!("a call on a cache that lost the keys of the tokens {}", self.missing()),
                "restore them (Session::restore), or truncate the cache before them",
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
    fn kept_for(&self, holdings: &Holdings) -> Holdings {
        let mut kept = holdings.clone();
        if let Some(keys) = self.options.window {
            kept.drop_before(holdings.len().saturating_sub(keys - 1).saturating_sub(self.options.rollback));
        }
        kept
    }

    /// The record after a call. The same on all ranks.
    fn appended(&self, call: &Attention, agreed: &Agreed) -> Result<Appended> {
        let Execution { same_queries, placement, mesh, .. } = &call.options.execution;
        let mut holdings = self.kept_for(&self.holdings);
        let counts = &agreed.kv_counts;
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
    fn plans(&self, options: &Options, agreed: &Agreed, holdings: &Holdings) -> Result<ProvedPlans> {
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
fn sources(call: &Attention, own: &[TokenRuns], rank: Rank) -> Vec<Range<u32>> {
    let own = &own[rank.0 as usize];
    match call.options.execution.same_queries {
        true => ranges(own),
        false => std::iter::once(0..len(own)).filter(|tokens| !tokens.is_empty()).collect(),
    }
}

fn ranges(tokens: &TokenRuns) -> Vec<Range<u32>> {
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
    Placement::deal(&Deal { total, ..Deal::default() }, kind, mesh, &Split::Tokens(counts.to_vec()))
}

fn mesh_of(mesh: Option<Mesh>, ranks: usize) -> Result<Mesh> {
    let ring = u32::try_from(ranks).unwrap_or(u32::MAX);
    mesh.map_or_else(|| Mesh::new(1, ring), Ok)
}

fn len(tokens: &TokenRuns) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

fn full(holdings: &Holdings, count: u32) -> Error {
    let rooms: Vec<String> = holdings.ranks().map(|rank| holdings.room(rank).to_string()).collect();
    Error::request(
        format!("{count} more tokens for a cache whose ranks have room for {}", rooms.join(", ")),
        "allow more bytes (CacheOptions::max_bytes), truncate the cache, or use a window",
    )
}
