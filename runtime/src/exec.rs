//! The executor: runs one rank's plan on any backend, through any collective.
//!
//! It knows steps, not strategies. While it waits for anything, device or network, it keeps every outstanding
//! exchange moving.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use kyklos_transport::{Abort, AbortCause, Progress, Rank, Tag, TransportError, Vote};

use crate::backend::{Attend, Backend, Control, Extent, Layout, Operand, Pairs, State, StateMut, StateShape};
use crate::collective::{Arrivals, Collective, ExchangeError, Incoming, Memory, Outgoing, Piece};
use crate::meter::{Lane, Meter, RankReport, Span};
use crate::plan::{BufferId, Content, Plan, Recv, Slice, Step, Tensor, World, describe};
use crate::{BlockWork, Clock, Error, Result};

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
        let lower = |step: &Step| match step {
            Step::Attend { q, kv, state, .. } => {
                let tile = backend.tile_shape(problem, state_shape(world, plan, *state));
                BlockWork::layers(problem, &plan.slice_tokens(q), &plan.slice_tokens(kv), tile)
            }
            _ => Vec::new(),
        };
        let works = plan.steps.iter().map(lower).collect();
        Self { backend, collective, world, plan, plan_hash, peak_bytes, works, options }
    }

    /// Brings the rank's own tensors, `[batch, tokens, heads, dim]` in the problem's dtype, to its device, and its rows
    /// of the problem's pair tensor if there is one, as [`PairTensor`](crate::PairTensor) says.
    ///
    /// # Errors
    /// [`Error::Request`] when a tensor has not the size of the rank's tokens, [`Error::OutOfMemory`],
    /// [`Error::Device`].
    pub fn load(&self, q: Bytes, k: Bytes, v: Bytes, pairs: Option<Bytes>) -> Result<Inputs<B::Buffer>> {
        let [own_q, own_kv, own_pairs] = [Some(self.plan.q), Some(self.plan.kv), self.plan.pairs]
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
            pairs: match pairs.filter(|_| self.plan.pairs.is_some()) {
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
        if let Err(error) = self.collective.agree(Vote::Ready { plan_hash: self.plan_hash }).await {
            let error = Error::from(error);
            self.end_for_all(op, 0, &error);
            return Err(error);
        }
        let meter = Meter::new(self.options.clock.clone(), self.options.trace);
        let mut run =
            Run { executor: self, op, meter: &meter, memory: Memory::new(self.plan.buffers.len()), step: 0 };
        // The inputs are lent to the run's memory and come back whatever happens.
        run.memory.put(self.plan.q, inputs.q.take().into_iter().collect());
        run.memory.put(self.plan.kv, inputs.k.take().into_iter().chain(inputs.v.take()).collect());
        if let Some(id) = self.plan.pairs {
            run.memory.put(id, inputs.pairs.take().into_iter().collect());
        }
        let result = run.execute().await;
        if let Some(id) = self.plan.pairs {
            inputs.pairs = run.memory.take(id).and_then(|mut pairs| pairs.pop());
        }
        inputs.q = run.memory.take(self.plan.q).and_then(|mut q| q.pop());
        let mut kv = run.memory.take(self.plan.kv).unwrap_or_default();
        (inputs.v, inputs.k) = (kv.pop(), kv.pop());

        if let Err(error) = &result {
            self.end_for_all(op, run.step, error);
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
        let rows = batch * buffer.tokens.len() * buffer.head_count() as usize;
        buffer.content.tensors(problem).into_iter().map(|tensor| rows * tensor.row_bytes).collect()
    }
}

/// One run of one rank.
struct Run<'r, 'a, B: Backend, C> {
    executor: &'r Executor<'a, B, C>,
    op: u64,
    meter: &'r Meter,
    memory: Memory<B::Buffer>,
    step: usize,
}

/// An exchange that has been posted and not been waited for.
struct InFlight<'r, Buffer> {
    id: u32,
    recvs: &'r [Recv],
    arrivals: Arrivals<'r, Buffer>,
    ended: Option<Result<Vec<Vec<Buffer>>, ExchangeError>>,
}

impl<'r, B: Backend, C: Collective<B>> Run<'r, '_, B, C> {
    async fn execute(&mut self) -> Result<(Bytes, Bytes, u64)> {
        let Executor { backend, collective, plan, works, options, .. } = self.executor;
        let control = Control::new(collective.stop_flag());
        let mut in_flight: Vec<InFlight<'r, B::Buffer>> = Vec::new();
        for (index, step) in plan.steps.iter().enumerate() {
            self.step = index;
            let words = || describe(self.executor.world, plan, step);
            options.observer.step(Rank(plan.rank), self.op, index, plan.steps.len(), &words);
            collective
                .report_progress(Progress { op: self.op, step: u32::try_from(index).unwrap_or(u32::MAX) });
            let started = self.meter.start();
            match step {
                Step::Repack { from, into } => {
                    self.repack(from, into)?;
                    self.meter.end(started, Lane::Copy, words);
                }
                Step::Exchange { id, sends, recvs } => {
                    let sends: Vec<Outgoing> = sends
                        .iter()
                        .map(|send| Outgoing {
                            to: Rank(send.to),
                            pieces: send.parts.iter().flat_map(|part| self.pieces(part)).collect(),
                        })
                        .collect();
                    let expects: Vec<Incoming> = recvs
                        .iter()
                        .map(|recv| Incoming {
                            from: Rank(recv.from),
                            piece_bytes: recv
                                .parts
                                .iter()
                                .flat_map(|part| self.tensor_bytes(*part))
                                .collect(),
                        })
                        .collect();
                    let tag = Tag { op: self.op, message: *id };
                    let arrivals = collective.post_exchange(
                        backend,
                        self.meter,
                        tag,
                        &mut self.memory,
                        &sends,
                        &expects,
                    );
                    in_flight.push(InFlight { id: *id, recvs, arrivals, ended: None });
                }
                Step::Wait { id } => {
                    self.wait_for(*id, &mut in_flight).await?;
                    self.meter.end_wait(started, *id, words);
                }
                Step::Attend { q, kv, state, pairs } => {
                    let mut tensors = self.state(*state)?;
                    let mut attended = Ok(());
                    for work in &works[index] {
                        let attend =
                            self.attend([q, kv], pairs.as_ref(), work, *state, &mut tensors, &control);
                        attended = drive(&mut in_flight, attend).await;
                        if attended.is_err() {
                            break;
                        }
                    }
                    self.memory.put(*state, tensors);
                    if let Err(Error::Cancelled) = attended {
                        return Err(self.why_stopped(&mut in_flight).await);
                    }
                    attended?;
                    drive(&mut in_flight, backend.wait()).await?;
                    self.meter.end(started, Lane::Compute, words);
                }
                Step::Convert { from, into } => {
                    self.convert(from, *into)?;
                    self.meter.end(started, Lane::Copy, words);
                }
                Step::Merge { from, into } => {
                    let (from_tensors, mut into_tensors) = (self.state(*from)?, self.state(*into)?);
                    let shape = self.shape(*into);
                    let merged = backend
                        .merge(&mut state_mut(&mut into_tensors, shape), &state_ref(&from_tensors, shape));
                    self.memory.put(*from, from_tensors);
                    self.memory.put(*into, into_tensors);
                    merged?;
                    self.meter.end(started, Lane::Compute, words);
                }
                Step::Finalize { state, into } => {
                    let tensors = self.state(*state)?;
                    let mut output = self.allocate(*into)?;
                    let (o, lse) = output.split_at_mut(1);
                    let shape = self.shape(*state);
                    let dtype = self.executor.world.problem.dtype;
                    let sinks = self.sinks(*state);
                    backend.finalize(&state_ref(&tensors, shape), sinks, dtype, &mut o[0], &mut lse[0])?;
                    self.memory.put(*state, tensors);
                    self.memory.put(*into, output);
                    drive(&mut in_flight, backend.wait()).await?;
                    self.meter.end(started, Lane::Compute, words);
                }
                Step::Free { buffer } => drop(self.memory.take(*buffer)),
            }
            options.observer.counted(Rank(plan.rank), self.op, &self.meter.report());
        }
        let started = self.meter.start();
        // A rank without tokens writes nothing into its output, and has one all the same.
        let mut output = match self.memory.take(plan.output) {
            Some(output) => output,
            None => self.allocate(plan.output)?,
        };
        let sizes = self.tensor_bytes(plan.output);
        let o = backend.download(&mut output[0], 0..sizes[0]).await?;
        let lse = backend.download(&mut output[1], 0..sizes[1]).await?;
        self.meter.end(started, Lane::Copy, || "download the output".to_owned());
        Ok((o, lse, control.pieces_done()))
    }

    /// The sinks of a state's heads; none where the problem has none.
    fn sinks(&self, state: BufferId) -> &'r [f32] {
        let heads = &self.executor.plan.buffer(state).heads;
        self.executor.world.problem.sinks.get(heads.start as usize..heads.end as usize).unwrap_or_default()
    }

    async fn attend(
        &self,
        [q, kv]: [&Slice; 2],
        pairs: Option<&Slice>,
        work: &BlockWork,
        state: BufferId,
        tensors: &mut [B::Buffer],
        control: &Control,
    ) -> Result<()> {
        let (plan, problem) = (self.executor.plan, &self.executor.world.problem);
        let element = |slice| {
            let layout = self.layout(slice, problem.head_dim as usize);
            move |buffer| Operand { buffer, layout }
        };
        let kv_first = plan.slice_heads(kv).start;
        let kv_head_of: Vec<u32> =
            plan.slice_heads(q).map(|head| head / problem.group() - kv_first).collect();
        let args = Attend {
            dtype: problem.dtype,
            scale: problem.scale,
            softcap: problem.softcap,
            q: element(q)(self.memory.view(q.buffer, 0)),
            k: element(kv)(self.memory.view(kv.buffer, 0)),
            v: element(kv)(self.memory.view(kv.buffer, 1)),
            kv_head_of: &kv_head_of,
            work,
            pairs: pairs.zip(problem.pairs).map(|(slice, tensor)| {
                let layout = self.layout(slice, tensor.row_elements(problem.dtype, problem.kv_len));
                let shared = |stride, shared| if shared { 0 } else { stride };
                Pairs {
                    kind: tensor.kind,
                    buffer: self.memory.view(slice.buffer, 0),
                    layout: Layout {
                        batch_stride: shared(layout.batch_stride, tensor.batch == 1),
                        head_stride: shared(layout.head_stride, tensor.heads == 1),
                        ..layout
                    },
                }
            }),
            state: state_mut(tensors, self.shape(state)),
        };
        self.executor.backend.attend(args, control).await
    }

    fn repack(&mut self, from: &Slice, into: &Slice) -> Result<()> {
        let problem = &self.executor.world.problem;
        if !self.memory.is_alive(into.buffer) {
            let fresh = self.allocate(into.buffer)?;
            self.memory.put(into.buffer, fresh);
        }
        let mut target = self.memory.take(into.buffer).expect("it is alive now");
        for (index, tensor) in self.content(from.buffer).tensors(problem).into_iter().enumerate() {
            let extent = Extent {
                batch: self.content(from.buffer).batch(problem) as usize,
                rows: from.tokens.len(),
                heads: (from.heads.end - from.heads.start) as usize,
                row_bytes: tensor.row_bytes,
            };
            let source = (self.memory.view(from.buffer, index), self.layout(from, tensor.row_bytes));
            let target = (&mut target[index], self.layout(into, tensor.row_bytes));
            self.executor.backend.repack(source, target, extent)?;
        }
        self.memory.put(into.buffer, target);
        Ok(())
    }

    fn convert(&mut self, from: &Slice, into: BufferId) -> Result<()> {
        let problem = &self.executor.world.problem;
        let dtype = |content| if content == Content::WireKeyValue { problem.wire } else { problem.dtype };
        let (source, target) = (dtype(self.content(from.buffer)), dtype(self.content(into)));
        let mut fresh = self.allocate(into)?;
        for (piece, target_tensor) in self.pieces(from).into_iter().zip(&mut fresh) {
            let view = self.memory.view(piece.buffer, piece.tensor);
            let (first, count) = (piece.bytes.start / source.bytes(), piece.bytes.len() / source.bytes());
            self.executor.backend.convert((view, first, source), (target_tensor, target), count)?;
        }
        self.memory.put(into, fresh);
        Ok(())
    }

    async fn wait_for(&mut self, id: u32, in_flight: &mut Vec<InFlight<'r, B::Buffer>>) -> Result<()> {
        let index = in_flight.iter().position(|exchange| exchange.id == id);
        let index = index.expect("a checked plan waits only for what it has posted");
        let mut mine = in_flight.swap_remove(index);
        let ended = match mine.ended.take() {
            Some(ended) => ended,
            None => drive(in_flight, mine.arrivals.as_mut()).await,
        };
        let arrived = ended.map_err(|error| self.explain(error))?;
        for (recv, tensors) in mine.recvs.iter().zip(arrived) {
            let mut tensors = tensors.into_iter();
            for part in &recv.parts {
                let count = self.tensor_bytes(*part).len();
                self.memory.put(*part, tensors.by_ref().take(count).collect());
            }
        }
        Ok(())
    }

    /// The group's failure, after a computation was given up because of it.
    async fn why_stopped(&self, in_flight: &mut Vec<InFlight<'r, B::Buffer>>) -> Error {
        // What was outstanding knows most: peer and bytes.
        for exchange in in_flight {
            let ended = match exchange.ended.take() {
                Some(ended) => ended,
                None => exchange.arrivals.as_mut().await,
            };
            if let Err(error) = ended {
                return self.explain(error);
            }
        }
        // Nothing was outstanding: any call tells.
        match self.executor.collective.agree(Vote::Ready { plan_hash: self.executor.plan_hash }).await {
            Err(error) => self.explain(ExchangeError::Transport(error)),
            Ok(()) => Error::Cancelled,
        }
    }

    fn explain(&self, error: ExchangeError) -> Error {
        match error {
            ExchangeError::Own(error) => error,
            ExchangeError::Transport(source) => self.group_error(source),
        }
    }

    fn group_error(&self, source: TransportError) -> Error {
        let plan = self.executor.plan;
        let doing = describe(self.executor.world, plan, &plan.steps[self.step]);
        let doing = doing.split_whitespace().collect::<Vec<_>>().join(" ");
        Error::Group { rank: plan.rank, step: self.step, doing, source }
    }

    /// Takes a state's tensors out of memory; one that is not there yet has seen nothing.
    fn state(&mut self, id: BufferId) -> Result<Vec<B::Buffer>> {
        if let Some(tensors) = self.memory.take(id) {
            return Ok(tensors);
        }
        let mut tensors = self.allocate(id)?;
        self.executor.backend.reset_state(&mut state_mut(&mut tensors, self.shape(id)))?;
        Ok(tensors)
    }

    fn allocate(&self, id: BufferId) -> Result<Vec<B::Buffer>> {
        let name = &self.executor.plan.buffer(id).name;
        let backend = self.executor.backend;
        self.tensor_bytes(id)
            .into_iter()
            .map(|bytes| {
                if self.executor.options.poison {
                    backend.upload(name, Bytes::from(vec![0xFF; bytes]))
                } else {
                    backend.alloc(name, bytes)
                }
            })
            .collect()
    }

    /// The extents of the running state that a buffer holds.
    fn shape(&self, state: BufferId) -> StateShape {
        state_shape(self.executor.world, self.executor.plan, state)
    }

    fn content(&self, buffer: BufferId) -> Content {
        self.executor.plan.buffer(buffer).content
    }

    fn tensor_bytes(&self, id: BufferId) -> Vec<usize> {
        self.executor.tensor_bytes(id)
    }

    /// The memory of a slice that is one piece in each tensor.
    fn pieces(&self, slice: &Slice) -> Vec<Piece> {
        let (plan, problem) = (self.executor.plan, &self.executor.world.problem);
        let heads = plan.buffer(slice.buffer).head_count() as usize;
        let whole = slice.tokens == (0..plan.buffer(slice.buffer).tokens.len());
        let tensors = plan.buffer(slice.buffer).content.tensors(problem).into_iter().enumerate();
        let pieces = tensors.map(|(tensor, Tensor { row_bytes })| {
            let token = heads * row_bytes;
            let batch = if whole { self.content(slice.buffer).batch(problem) as usize } else { 1 };
            let end = slice.tokens.start + slice.tokens.len() * batch;
            Piece { buffer: slice.buffer, tensor, bytes: slice.tokens.start * token..end * token }
        });
        pieces.collect()
    }

    /// Where a slice lies in its tensors, in units of which a head of a token has `row`.
    fn layout(&self, slice: &Slice, row: usize) -> Layout {
        let buffer = self.executor.plan.buffer(slice.buffer);
        let row_stride = buffer.head_count() as usize * row;
        Layout {
            offset: slice.tokens.start * row_stride + slice.heads.start as usize * row,
            batch_stride: buffer.tokens.len() * row_stride,
            row_stride,
            head_stride: row,
        }
    }
}

/// Runs `future` and, meanwhile, keeps every exchange in flight moving.
async fn drive<T, Buffer>(in_flight: &mut [InFlight<'_, Buffer>], future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        for exchange in in_flight.iter_mut().filter(|exchange| exchange.ended.is_none()) {
            if let Poll::Ready(ended) = exchange.arrivals.as_mut().poll(context) {
                exchange.ended = Some(ended);
            }
        }
        future.as_mut().poll(context)
    })
    .await
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
