//! Calls with a cache: the new keys and values are appended, and the queries attend to all that is
//! held.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::Vote;

use super::plans::{Appended, full, len, sources};
use super::{Holdings, KvCache, NewKeys};
use crate::backend::{Backend, DeviceBuffer};
use crate::call::{Attention, Options};
use crate::error::{Error, Result};
use crate::exec::{Inputs, LoweredPlan};
use crate::session::Session;
use crate::session::agreement::{Agreed, CacheFacts, facts_of, note};
use crate::session::attend::{CALLS, Output};
use crate::session::shapes::Shapes;
use crate::tensor::Tensor;
use kyklos_plan::plan::Direction;

impl Session {
    /// Appends the new tokens' `k` and `v` to `cache`, and attends from `q` to all keys of the
    /// cache, the new ones included. The queries are the last tokens: query i of n is at
    /// position `cache.len() − n + i`, after the append. Without queries it only appends,
    /// without keys it only attends.
    ///
    /// With [`Execution::same_queries`](crate::Execution::same_queries), all ranks pass the same q,
    /// k and v, as in decoding: the cache keeps each key on one rank
    /// ([`CacheOptions::block`](super::CacheOptions::block),
    /// [`CacheOptions::share`](super::CacheOptions::share)), and every rank gets the whole
    /// output. Without it, each rank passes tokens of its own, as for a prompt that is split:
    /// their keys stay on this rank, and it gets the rows of its queries. They are numbered in rank
    /// order, or by the [`Execution::placement`](crate::Execution::placement) of the call. The
    /// calls of one cache may be of both sorts.
    ///
    /// After tokens were dropped behind a window or truncated, rows may hold nothing until other
    /// tokens fill them. Then the call takes a causal or window mask only, no bias tensor, and
    /// no int8 on the wire.
    ///
    /// # Errors
    /// As [`Self::attend`]. [`Error::Request`] on all ranks when the cache has no room, the ranks'
    /// records differ, or the mask does not fit the window of the cache; where one rank alone
    /// has no room for its tokens, the others get
    /// [`TransportError::Refused`](kyklos_transport::TransportError::Refused). In these cases the
    /// cache has the tokens that it had before. After an error of the group, a rank that had
    /// ended its call has the new ones: the survivors truncate to the fewest.
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
        let upload = |session: &Self, cache: &KvCache| {
            let (q, new) = (q.buffer("q", &session.device)?, cache.upload([k, v])?);
            Ok((q, new, session.bias_buffer(call)?))
        };
        let caches = std::slice::from_mut(cache);
        let (step, (q_buffer, new, bias)) = self.agree_cached(call, caches, [q, k, v], upload).await?;
        let inputs = (q_buffer, new, bias);
        self.run_cached(call, &step, cache, inputs, q).await
    }

    /// Agrees with all ranks on one call on each of `caches`, with tensors like these; they have
    /// the same record and the same number of rows. Before the vote this rank does what may
    /// fail on it alone: it makes room, and calls `prepare` with the first cache.
    pub(super) async fn agree_cached<T>(
        &mut self,
        call: &Attention,
        caches: &mut [KvCache],
        tensors: [&Tensor; 3],
        prepare: impl FnOnce(&Self, &KvCache) -> Result<T>,
    ) -> Result<(CachedStep, T)> {
        let prepared = self
            .note_of_caches(call, caches, tensors)
            .and_then(|note| Ok((note, prepare(self, &caches[0])?)));
        let (note, prepared) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let notes = self.vote(Vote::Ready { plan_hash: CALLS, note }).await?;
        let step = self.cached_step(call, &caches[0], &notes);
        Ok((self.counted_if_refused(step)?, prepared))
    }

    /// What the ranks have agreed on.
    fn cached_step(&mut self, call: &Attention, cache: &KvCache, notes: &[Bytes]) -> Result<CachedStep> {
        let facts = facts_of(notes)?;
        let agreed = Agreed::new(&call.options, &facts)?;
        let Appended { own, holdings } = cache.appended(call, &agreed)?;
        let make = |options: &Options, agreed: &Agreed| {
            // A cache has no backward pass.
            let options = Options { execution: options.execution.clone().inference(true), ..options.clone() };
            cache.plans(&options, agreed, &holdings)
        };
        let lowered = self.plan_of(Direction::Forward, &call.options, facts, make)?;
        let tokens = sources(call, &own, cache.rank);
        let rows = cache.kept_for(&cache.holdings).next_rows(cache.rank, len(&own[cache.rank.0 as usize]));
        Ok(CachedStep { lowered, holdings, tokens, rows })
    }

    /// Runs a call on which the ranks agree; its queries are `q`.
    pub(super) async fn run_cached(
        &mut self,
        call: &Attention,
        step: &CachedStep,
        cache: &mut KvCache,
        (q_buffer, new, bias): CallTensors,
        q: &Tensor,
    ) -> Result<Output> {
        let written = cache.write(&new, &step.tokens, &step.rows);
        written.inspect_err(|error| self.end_call(error))?;
        let [k, v] = cache.tensors.take().ok_or_else(super::dropped)?;
        let shared = call.options.bias.is_some_and(|tensor| tensor.shared_rows);
        let mut loan = Loan { inputs: Inputs::of([q_buffer, k, v], bias, shared), cache };
        let output = self.run_call(&step.lowered, &mut loan.inputs, q).await?;
        loan.cache.holdings = step.holdings.clone();
        Ok(output)
    }

    /// Refuses a cache of another group or device.
    pub(super) fn fits(&self, cache: &KvCache) -> Result<()> {
        let ranks = cache.holdings.ranks().count();
        if ranks != self.group.size() as usize || cache.rank != self.rank() {
            return Err(Error::request(
                format!(
                    "a cache of rank {} of {ranks}, on rank {} of {}",
                    cache.rank,
                    self.rank(),
                    self.group.size()
                ),
                "use a cache that a session of this group made, or KvCache::after_loss",
            ));
        }
        if !cache.device.is_same(&self.device) {
            return Err(Error::request(
                format!(
                    "a cache on {}, for a session on {}, which is another device or was opened apart",
                    cache.device.info().name,
                    self.device.info().name
                ),
                "use the cache with a session on the same Device, or a clone of it",
            ));
        }
        Ok(())
    }

    /// Makes room on this rank, and describes the calls for the vote.
    fn note_of_caches(
        &mut self,
        call: &Attention,
        caches: &mut [KvCache],
        [q, k, v]: [&Tensor; 3],
    ) -> Result<Bytes> {
        let count = u32::try_from(caches.len()).unwrap_or(u32::MAX);
        let mut first: Option<CacheFacts> = None;
        let mut made = Vec::new();
        for cache in caches {
            self.fits(cache)?;
            cache.takes(&call.options)?;
            let new = cache.count([k, v])?;
            let mut kept = cache.kept_for(&cache.holdings);
            let own = match call.options.execution.same_queries {
                true => {
                    let own = kept.share_out(new, cache.options.block);
                    len(&own.ok_or_else(|| full(&kept, new))?[cache.rank.0 as usize])
                }
                false if new > kept.room(cache.rank) => return Err(full(&kept, new)),
                false => new,
            };
            let rows = kept.next_rows(cache.rank, own);
            cache.grow(kept.used(cache.rank).max(rows.last().map_or(0, |rows| rows.end)))?;
            // Without what the call drops: a call that failed may have dropped it on some ranks.
            cache.holdings = cache.kept_for(&cache.holdings);
            made.push(cache.made);
            let facts = CacheFacts { digest: cache.digest(), rows: cache.rows };
            if facts != *first.get_or_insert(facts) {
                return Err(Error::request(
                    "caches with unlike tokens or unlike room, for calls after one vote",
                    "make the same calls on all of these caches",
                ));
            }
        }
        let Some(facts) = first else {
            return Err(Error::request("calls on no cache", "give a cache for each call"));
        };
        self.supports(call, q.dtype(), q.shape()[3])?;
        let rank = (&Shapes::of([q, k, v]), self.device.most_state_bytes());
        note(&mut self.last_facts, self.op, count, call, rank, Some((facts, &made)))
    }
}

/// A call on which the ranks agree: what all caches of the vote have in common.
#[derive(Debug)]
pub(super) struct CachedStep {
    lowered: Arc<LoweredPlan>,
    /// The record after the call.
    holdings: Holdings,
    /// The parts of the new keys that this rank keeps, as ranges of their tokens, and the rows that
    /// they get.
    tokens: Vec<Range<u32>>,
    rows: Vec<Range<u32>>,
}

/// q, the new keys and the bias tensor of a call on the device.
pub(super) type CallTensors = (DeviceBuffer, NewKeys, Option<DeviceBuffer>);

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
