//! The executor: runs one rank's plan on any backend, through any collective.
//!
//! It knows steps, not strategies. While it waits for anything, device or network, it keeps every outstanding
//! exchange moving.

mod kept;
mod places;
mod run;

use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::{Abort, AbortCause, Progress, Rank, TransportError, Vote};

use crate::backend::{Backend, State, StateMut, StateShape};
use crate::collective::{Collective, Memory};
use crate::meter::{Meter, RankReport, Span};
use crate::plan::{BufferId, Content, Plan, Reached, Step, World, describe};
use crate::{BlockWork, Clock, Error, Result};
use run::Run;

/// One rank, ready to run its plan any number of times.
pub struct Executor<'a, B: Backend, C> {
    backend: &'a B,
    collective: &'a C,
    world: &'a World,
    plan: &'a Plan,
    plan_hash: [u8; 32],
    peak_bytes: u64,
    /// For each attend step, its lowered masks and positions, layer by layer; for other steps nothing.
    works: Vec<Vec<BlockWork>>,
    options: RunOptions,
    keeps: bool,
}

/// How to run, for whoever looks on.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Told about every step.
    pub observer: Arc<dyn Observer>,
    /// Keep spans for a trace.
    pub trace: bool,
    /// Fill fresh memory with NaN first, so that nobody can read what nobody wrote.
    pub poison: bool,
}

/// Looks on while ranks run. Called on the rank's thread; must not block.
pub trait Observer: std::fmt::Debug + Send + Sync {
    /// `rank` starts step `step` of `steps`; `doing` puts it in words.
    fn step(&self, rank: Rank, op: u64, step: usize, steps: usize, doing: &dyn Fn() -> String);

    /// `rank` has spent and sent this much in run `op` so far; told after every step.
    fn counted(&self, _rank: Rank, _op: u64, _so_far: &RankReport) {}
}

/// Looks away.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn step(&self, _: Rank, _: u64, _: usize, _: usize, _: &dyn Fn() -> String) {}
}

/// A rank's own queries, keys and values on its device.
#[derive(Debug)]
pub struct Inputs<Buffer> {
    q: Option<Buffer>,
    k: Option<Buffer>,
    v: Option<Buffer>,
    pairs: Option<Buffer>,
}

/// What a run left on the device: where another plan goes on after a loss ([`crate::repair`]).
#[derive(Debug)]
pub struct Remains<Buffer> {
    reached: Reached,
    memory: Memory<Buffer>,
}

impl<Buffer> Default for Remains<Buffer> {
    fn default() -> Self {
        Self { reached: Reached::default(), memory: Memory::default() }
    }
}

impl<Buffer> Remains<Buffer> {
    /// How far the rank came.
    pub fn reached(&self) -> &Reached {
        &self.reached
    }
}

/// What a rank gets out of one run.
#[derive(Clone, Debug)]
pub struct RankOutput {
    /// `[batch, tokens, heads, dim]` of the rank's own tokens, in the problem's dtype.
    pub o: Bytes,
    /// f32 `[batch, tokens, heads]` of the same tokens.
    pub lse: Bytes,
    /// Time and traffic.
    pub report: RankReport,
    /// The rank's timeline, if it was asked for.
    pub spans: Vec<Span>,
}

impl<'a, B: Backend, C: Collective<B>> Executor<'a, B, C> {
    /// Prepares `rank`'s part of `world`, whose proof found `peak_bytes` for it.
    pub fn new(
        backend: &'a B,
        collective: &'a C,
        world: &'a World,
        rank: Rank,
        plan_hash: [u8; 32],
        peak_bytes: u64,
        options: RunOptions,
    ) -> Self {
        let (plan, problem) = (world.plan(rank), &world.problem);
        let mut works: Vec<Vec<BlockWork>> = Vec::with_capacity(plan.steps.len());
        let mut before: Option<usize> = None;
        for step in &plan.steps {
            let mut layers = Vec::new();
            if let Step::Attend { q, kv, state, .. } = step {
                let tile = backend.tile_shape(problem, state_shape(world, plan, *state));
                layers = BlockWork::layers(problem, &plan.slice_tokens(q), &plan.slice_tokens(kv), tile);
                for (layer, other) in layers.iter_mut().zip(before.map_or(&[][..], |at| &works[at])) {
                    layer.share_rows(other);
                }
                before = Some(works.len());
            }
            works.push(layers);
        }
        Self { backend, collective, world, plan, plan_hash, peak_bytes, works, options, keeps: false }
    }

    /// Keeps what a run that is cut off has done, for [`Self::run_from`]. Costs a copy of the running state while a block is
    /// attended to, of `batch · tokens · heads · (4 · dim + 8)` bytes.
    #[must_use]
    pub fn keeping(mut self) -> Self {
        let states = self.plan.buffers.iter().filter(|buffer| buffer.content == Content::State);
        self.peak_bytes += states.map(|state| state.bytes(&self.world.problem)).max().unwrap_or(0);
        self.keeps = true;
        self
    }

    /// Brings the rank's own tensors, `[batch, tokens, heads, dim]` in the problem's dtype, to its device, and its rows
    /// of the problem's pair tensor if there is one, as [`BiasTensor`](crate::BiasTensor) says.
    ///
    /// # Errors
    /// [`Error::Request`] when a tensor has not the size of the rank's tokens, [`Error::OutOfMemory`],
    /// [`Error::Device`].
    pub fn load(&self, q: Bytes, k: Bytes, v: Bytes, pairs: Option<Bytes>) -> Result<Inputs<B::Buffer>> {
        let [own_q, own_kv, own_pairs] = [Some(self.plan.q), Some(self.plan.kv), self.plan.bias]
            .map(|id| id.map_or_else(Vec::new, |id| self.tensor_bytes(id)));
        let wanted = [own_q, own_kv, own_pairs].concat();
        let none = Bytes::new();
        let given = [("q", &q), ("k", &k), ("v", &v), ("the pair tensor", pairs.as_ref().unwrap_or(&none))];
        for (index, (name, tensor)) in given.into_iter().enumerate() {
            let wanted = wanted.get(index).copied().unwrap_or(0);
            if tensor.len() != wanted {
                let (rank, given) = (self.plan.rank, tensor.len());
                return Err(Error::request(
                    format!("{name} of rank {rank} has {given} bytes, its tokens need {wanted}"),
                    "give each rank the tensors of its own tokens, in the problem's dtype",
                ));
            }
        }
        let upload = |name, data| self.backend.upload(name, data).map(Some);
        Ok(Inputs {
            q: upload("q", q)?,
            k: upload("k", k)?,
            v: upload("v", v)?,
            pairs: match pairs.filter(|_| self.plan.bias.is_some()) {
                Some(pairs) => upload("pairs", pairs)?,
                None => None,
            },
        })
    }

    /// Agrees with all ranks that they are about to run the same plan, runs it as operation `op`, and brings the
    /// output to the host. An error of this rank ends the operation on all of them.
    ///
    /// # Errors
    /// Any; [`Error::Group`] when another rank is the cause.
    pub async fn run(&self, op: u64, inputs: &mut Inputs<B::Buffer>) -> Result<RankOutput> {
        self.run_from(op, inputs, &mut Remains::default()).await
    }

    /// As [`Self::run`], beginning with what the plan keeps of `remains`. Puts there what this run leaves in turn, unless
    /// it never begins; of an executor that is not [`Self::keeping`] that is nothing.
    ///
    /// # Errors
    /// As [`Self::run`]; [`Error::Plan`] when something is not there that the plan keeps.
    pub async fn run_from(
        &self,
        op: u64,
        inputs: &mut Inputs<B::Buffer>,
        remains: &mut Remains<B::Buffer>,
    ) -> Result<RankOutput> {
        if let Err(error) = self.collective.agree(Vote::Ready { plan_hash: self.plan_hash }).await {
            let error = Error::from(error);
            self.end_for_all(op, 0, &error);
            return Err(error);
        }
        let meter = Meter::new(self.options.clock.clone(), self.options.trace);
        let mut run = Run {
            executor: self,
            op,
            meter: &meter,
            memory: Memory::new(self.plan.buffers.len()),
            step: 0,
            arrived: Vec::new(),
        };
        // Whatever else was left ends here.
        let Remains { memory: mut old, .. } = std::mem::take(remains);
        for kept in &self.plan.kept {
            match old.take(kept.was) {
                Some(tensors) => run.memory.put(kept.buffer, tensors),
                None => {
                    let fault = format!("keeps buffer {} of the run before, which is not there", kept.was.0);
                    let error = Error::plan(Rank(self.plan.rank), None, fault);
                    self.end_for_all(op, 0, &error);
                    return Err(error);
                }
            }
        }
        drop(old);
        // The inputs are lent to the run's memory and come back whatever happens.
        run.memory.put(self.plan.q, inputs.q.take().into_iter().collect());
        run.memory.put(self.plan.kv, inputs.k.take().into_iter().chain(inputs.v.take()).collect());
        if let Some(id) = self.plan.bias {
            run.memory.put(id, inputs.pairs.take().into_iter().collect());
        }
        let result = run.execute().await;
        if let Some(id) = self.plan.bias {
            inputs.pairs = run.memory.take(id).and_then(|mut pairs| pairs.pop());
        }
        inputs.q = run.memory.take(self.plan.q).and_then(|mut q| q.pop());
        let mut kv = run.memory.take(self.plan.kv).unwrap_or_default();
        (inputs.v, inputs.k) = (kv.pop(), kv.pop());

        if let Err(error) = &result {
            self.end_for_all(op, run.step, error);
        }
        // After an error of its own device a rank has nothing that could be trusted.
        let of_group = |error: &Error| matches!(error, Error::Group { .. } | Error::Cancelled);
        if self.keeps && result.as_ref().err().is_none_or(of_group) {
            let reached = Reached { op, steps: run.step, arrived: std::mem::take(&mut run.arrived) };
            *remains = Remains { reached, memory: std::mem::take(&mut run.memory) };
        }
        let (o, lse, pieces) = result?;
        let tokens = self.plan.buffer(self.plan.q).tokens.len() as u64;
        let report = RankReport { tokens, peak_bytes: self.peak_bytes, pieces, ..meter.report() };
        Ok(RankOutput { o, lse, report, spans: meter.spans() })
    }

    /// Ends the operation on every rank, unless it is another rank's failure that has ended it here.
    fn end_for_all(&self, op: u64, step: usize, error: &Error) {
        let me = Rank(self.plan.rank);
        let culprit = match error {
            Error::Group { source, .. } | Error::Transport(source) => match source {
                // A transport ends the group by itself when a peer misbehaves: it knows who did.
                TransportError::Aborted { .. }
                | TransportError::Refused { .. }
                | TransportError::PeerMisbehaved { .. }
                | TransportError::Closed => return,
                // Nobody is known to have died, but everybody would wait for that rank next.
                TransportError::Deadline { pending, .. } => pending.peer,
                _ => me,
            },
            _ => me,
        };
        let progress = Progress { op, step: u32::try_from(step).unwrap_or(u32::MAX) };
        self.collective.abort(Abort { culprit, cause: AbortCause::Failed(error.to_string()), progress });
    }

    /// Bytes of each tensor of a buffer.
    fn tensor_bytes(&self, id: BufferId) -> Vec<usize> {
        let (buffer, problem) = (self.plan.buffer(id), &self.world.problem);
        let batch = buffer.content.batch(problem) as usize;
        let (tokens, heads) = (buffer.tokens.len(), buffer.head_count() as usize);
        buffer.content.tensors(problem).map(|tensor| batch * tensor.bytes(tokens, heads)).collect()
    }
}

impl World {
    /// A step of a rank's plan in words, if there is such a step.
    pub fn step_in_words(&self, rank: Rank, step: u32) -> Option<String> {
        let plan = self.plans.get(rank.0 as usize)?;
        plan.steps.get(step as usize).map(|step| describe(self, plan, step))
    }
}

/// Extents of a running state of a plan.
fn state_shape(world: &World, plan: &Plan, state: BufferId) -> StateShape {
    let (buffer, problem) = (plan.buffer(state), &world.problem);
    StateShape {
        batch: problem.batch as usize,
        rows: buffer.tokens.len(),
        heads: buffer.head_count() as usize,
        dim: problem.head_dim as usize,
    }
}

fn state_mut<Buffer>(tensors: &mut [Buffer], shape: StateShape) -> StateMut<'_, Buffer> {
    let (a, ml) = tensors.split_at_mut(1);
    StateMut { a: &mut a[0], ml: &mut ml[0], shape }
}

fn state_ref<Buffer>(tensors: &[Buffer], shape: StateShape) -> State<'_, Buffer> {
    State { a: &tensors[0], ml: &tensors[1], shape }
}

impl<B: Backend, C> std::fmt::Debug for Executor<'_, B, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("rank", &self.plan.rank).finish_non_exhaustive()
    }
}
