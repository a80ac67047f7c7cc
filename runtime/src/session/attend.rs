//! Attention calls of a session: agreement, plan and run.

use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::{Abort, AbortCause, Progress, Rank, TransportError, Vote};

use super::Session;
use super::agreement::{Agreed, facts_of, note};
use super::choice::plans;
use super::shapes::Shapes;
use crate::backend::{Backend, Device, DeviceBuffer};
use crate::call::{Attention, BIAS, BiasRows, Options};
use crate::error::{Error, Result};
use crate::exec::{AbortOnDrop, DeviceOutput, Executor, Inputs, LoweredPlan};
use crate::meter::{RankReport, Span};
use crate::tensor::Tensor;
use kyklos_plan::Dtype;
use kyklos_plan::plan::{Direction, ProvedPlans};

/// The result of a call on one rank, on its device.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[batch, tokens, q_heads, dim]` of the rank's own queries, in the type of q.
    pub o: Tensor,
    /// Log-sum-exp of the logits (natural logarithm), f32 `[batch, tokens, q_heads, 1]`.
    pub lse: Tensor,
    /// The same to about 14 digits, for gradients: f32 `[batch, tokens, q_heads, 2]`, two numbers
    /// whose sum it is. `lse` is a view of the first ones: [`Tensor::copied`] makes it dense.
    /// Beyond 10⁷ these are the largest logit, however many others are as large.
    pub lse_pair: Tensor,
    /// Time in nanoseconds and traffic in bytes.
    pub report: RankReport,
    /// The rank's timelines; empty without [`RunOptions::trace`](crate::RunOptions::trace).
    pub spans: Vec<Span>,
}

/// One direction of calls.
pub(super) struct Pass {
    /// The hash under which calls vote.
    pub(super) hash: [u8; 32],
    pub(super) direction: Direction,
    /// The plans of a call.
    pub(super) plans: fn(&Options, &Agreed) -> Result<Arc<ProvedPlans>>,
}

/// Attention calls.
pub(super) const FORWARD: Pass = Pass { hash: CALLS, direction: Direction::Forward, plans };

/// The plan of a call that this session has made before.
pub(super) struct CachedCall {
    direction: Direction,
    options: Options,
    /// Of all ranks, as they travel.
    facts: Vec<Bytes>,
    lowered: Arc<LoweredPlan>,
    /// Of `lowered`, in host memory.
    bytes: usize,
}

/// Calls whose plans a session keeps; the one used longest ago is dropped first.
const CACHED_CALLS: usize = 32;
/// Most bytes of the plans that a session keeps, apart from those of the last call.
const CACHED_BYTES: usize = 64 << 20;

/// The hash under which attention calls vote.
pub(super) const CALLS: [u8; 32] = *b"attend: a kyklos call, release 2";

impl Session {
    /// Attention over the tokens of all ranks: `q`, `k` and `v` are this rank's, `[batch, tokens,
    /// heads, dim]`. Ranks may hold any numbers of tokens, zero included; they learn each
    /// other's with the vote. Blocks until the device has the output.
    ///
    /// # Errors
    /// [`Error::Request`](crate::Error::Request) when the ranks' calls do not fit together: the
    /// same on all ranks. Where the fault is in the tensors or options of one rank, that rank
    /// gets [`Error::Request`](crate::Error::Request) and the others
    /// [`TransportError::Refused`] with its text. In both cases the session stays usable. Other
    /// errors end the call on all ranks, and the group with it.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attend(&mut self, call: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Output> {
        pollster::block_on(self.attend_async(call, q, k, v))
    }

    /// [`Self::attend`] as a future. If it is dropped after its first poll and before its end, the
    /// group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub async fn attend_async(
        &mut self,
        call: &Attention,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Output> {
        let inputs = |session: &Self| session.inputs(call, q, k, v);
        let (lowered, mut inputs) = self.agree(&FORWARD, call, &Shapes::of([q, k, v]), 1, inputs).await?;
        self.run_call(&lowered, &mut inputs, q).await
    }

    /// Agrees with all ranks on `calls` calls with tensors like these; then all make the same
    /// plans. Before the vote, `prepare` does what may fail on this rank alone, so that the
    /// other ranks get its error.
    pub(super) async fn agree<T>(
        &mut self,
        pass: &Pass,
        call: &Attention,
        shapes: &Shapes,
        calls: u32,
        prepare: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<(Arc<LoweredPlan>, T)> {
        let device = self.device.most_state_bytes();
        let prepared = note(&mut self.last_facts, self.op, calls, call, (shapes, device), None)
            .and_then(|note| Ok((note, prepare(self)?)));
        let (note, prepared) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let notes = self.vote(Vote::Ready { plan_hash: pass.hash, note }).await?;
        let planned =
            facts_of(&notes).and_then(|facts| self.plan_of(pass.direction, &call.options, facts, pass.plans));
        Ok((self.counted_if_refused(planned)?, prepared))
    }

    /// The outcome of an agreement, the same on all ranks. A call that was refused counts as made,
    /// as one that runs.
    pub(super) fn counted_if_refused<T>(&mut self, agreed: Result<T>) -> Result<T> {
        self.op += u64::from(agreed.is_err());
        agreed
    }

    /// Runs a call on which the ranks agree; its queries are `q`.
    pub(super) async fn run_call(
        &mut self,
        lowered: &Arc<LoweredPlan>,
        inputs: &mut Inputs<DeviceBuffer>,
        q: &Tensor,
    ) -> Result<Output> {
        let op = self.op;
        self.op += 1;
        let executor = Executor::new(&self.device, &*self.collective, lowered, self.options.run.clone());
        let DeviceOutput { results, report, spans } = executor.run(op, inputs).await?;
        self.last_run = Some((lowered.clone(), report.compute_ns));
        let [batch, _, heads, dim] = q.shape();
        let tokens = lowered.plans().set().output_tokens(self.rank()).len();
        let tensor =
            |dim, dtype, buffer| Tensor::on_device([batch, tokens, heads, dim], dtype, &self.device, buffer);
        let mut results = results.into_iter();
        let (Some(o), Some(lse)) = (results.next(), results.next()) else {
            unreachable!("a forward plan has two results")
        };
        let lse_pair = tensor(2, Dtype::F32, lse);
        let lse = lse_pair.view([batch, tokens, heads, 1], [tokens * heads * 2, heads * 2, 2, 1], 0)?;
        Ok(Output { o: tensor(dim, q.dtype(), o), lse, lse_pair, report, spans })
    }

    /// The notes of all ranks, after a vote of which this is the vote of this rank.
    pub(super) async fn vote(&mut self, vote: Vote) -> Result<Vec<Bytes>> {
        let guard = AbortOnDrop::new(|abort| self.group.abort(abort), self.rank(), self.op);
        let agreed = self.group.agree(vote, self.options.deadline).await;
        guard.end();
        let agreed = agreed.map_err(|error| {
            self.end_vote(&error);
            error.into()
        });
        self.counted_if_refused(agreed)
    }

    /// Ends the group if a vote did not come to its end: other ranks may take it for passed, and
    /// would wait for this rank.
    pub(super) fn end_vote(&self, error: &TransportError) {
        if let TransportError::Deadline { pending, .. } = error {
            let cause = AbortCause::Failed(error.to_string());
            let progress = Progress { op: self.op, step: 0 };
            self.group.abort(Abort { culprit: pending.peer, cause, progress });
        }
    }

    /// Ends the call on all ranks, before its plan begins or after it ended: this rank failed.
    pub(super) fn end_call(&self, error: &Error) {
        let cause = AbortCause::Failed(error.to_string());
        let progress = Progress { op: self.op, step: 0 };
        self.group.abort(Abort { culprit: self.rank(), cause, progress });
    }

    fn inputs(&self, call: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Inputs<DeviceBuffer>> {
        let bias = self.bias_buffer(call)?;
        self.inputs_with(call, [q, k, v], bias)
    }

    /// This rank's part of the attention bias tensor of a call, on the device.
    pub(super) fn bias_buffer(&self, call: &Attention) -> Result<Option<DeviceBuffer>> {
        let on_device = |rows: &BiasRows| match rows {
            BiasRows::Bytes(rows) => self.device.upload(BIAS, rows.clone()),
            BiasRows::Tensor(rows) | BiasRows::Words(rows) => rows.buffer(BIAS, &self.device),
        };
        call.bias_rows.as_ref().map(on_device).transpose()
    }

    /// Refuses a forward pass for which the device has no kernels.
    pub(super) fn supports(&self, call: &Attention, dtype: Dtype, dim: usize) -> Result<()> {
        self.device.supports(dtype, dim)?;
        if call.options.execution.fixed_order {
            self.device.supports_fixed_order()?;
        }
        Ok(())
    }

    /// The inputs of a call whose bias tensor is on the device.
    pub(super) fn inputs_with(
        &self,
        call: &Attention,
        [q, k, v]: [&Tensor; 3],
        bias: Option<DeviceBuffer>,
    ) -> Result<Inputs<DeviceBuffer>> {
        let device: &Device = &self.device;
        self.supports(call, q.dtype(), q.shape()[3])?;
        let shared = call.options.bias.is_some_and(|tensor| tensor.shared_rows);
        let tensors = [q.buffer("q", device)?, k.buffer("k", device)?, v.buffer("v", device)?];
        Ok(Inputs::of(tensors, bias, shared))
    }

    /// The plan for these facts of all ranks, made at the first call and kept.
    pub(super) fn plan_of(
        &mut self,
        direction: Direction,
        options: &Options,
        facts: Vec<Bytes>,
        make: impl FnOnce(&Options, &Agreed) -> Result<Arc<ProvedPlans>>,
    ) -> Result<Arc<LoweredPlan>> {
        let known = |cached: &CachedCall| {
            cached.direction == direction && cached.facts == facts && cached.options == *options
        };
        if let Some(index) = self.cache.iter().position(known) {
            let cached = self.cache.remove(index);
            let lowered = cached.lowered.clone();
            self.cache.push(cached);
            return Ok(lowered);
        }
        let agreed = Agreed::new(options, &facts)?;
        let plans = make(options, &agreed)?;
        for (rank, most) in (0..).map(Rank).zip(&agreed.most_state_bytes) {
            LoweredPlan::check_states(plans.set(), rank, *most)?;
        }
        self.collective.supports(&plans)?;
        self.plans_made += 1;
        let lowered = Arc::new(LoweredPlan::new(plans, self.rank(), &self.device));
        let bytes = lowered.host_bytes();
        let full = |cache: &[CachedCall]| {
            cache.len() == CACHED_CALLS
                || cache.iter().map(|cached| cached.bytes).sum::<usize>() + bytes > CACHED_BYTES
        };
        while !self.cache.is_empty() && full(&self.cache) {
            self.cache.remove(0);
        }
        self.cache.push(CachedCall {
            direction,
            options: options.clone(),
            facts,
            lowered: lowered.clone(),
            bytes,
        });
        Ok(lowered)
    }
}
