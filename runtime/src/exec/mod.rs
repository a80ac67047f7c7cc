//! The executor: runs one rank's plan on any backend, through any collective.
//!
//! It knows steps, not strategies. While it waits for a device or for the network, it polls every
//! exchange that is under way.

mod ahead;
mod background;
mod backward;
mod buffers;
mod copies;
mod guard;
mod inputs;
mod range;
mod run;
mod submit;

use std::sync::Arc;

use kyklos_transport::{Abort, AbortCause, Progress, Rank, TransportError};

use crate::backend::{Backend, State, StateMut, StateShape};
use crate::clock::{Clock, SystemClock};
use crate::collective::{Collective, Memory};
use crate::error::{Error, Result};
use crate::meter::{Meter, RankReport, Span};
pub(crate) use guard::AbortOnDrop;
use guard::RunGuard;
pub use inputs::Inputs;
pub(crate) use inputs::refusal;
use kyklos_plan::plan::{Buffer, BufferId, Content, GradientStep, Plan, PlanSet, ProvedPlans, Step};
use kyklos_plan::{BlockWork, MaskClass, WireFormat};
use run::Run;

/// One rank, ready to run its plan any number of times.
///
/// Below sessions: the ranks have agreed on the plans and on the number of each operation before
/// they run it. [`Self::load`] brings the rank's tensors to the device, [`Self::run`] runs one
/// operation on them.
pub struct Executor<'a, B: Backend, C: ?Sized> {
    backend: &'a B,
    collective: &'a C,
    lowered: &'a LoweredPlan,
    set: &'a PlanSet,
    plan: &'a Plan,
    peak_bytes: u64,
    options: RunOptions,
}

/// Settings of a run that change no result: clock, observation, poisoning.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Clock of the reports and spans.
    pub clock: Arc<dyn Clock>,
    /// Called at every step.
    pub observer: Arc<dyn Observer>,
    /// Whether to record the timelines of the ranks, [`Output::spans`](crate::Output::spans).
    pub trace: bool,
    /// Whether to fill new memory with NaN, so that a read of memory that no step wrote shows in
    /// the output. For tests.
    pub poison: bool,
}

impl Default for RunOptions {
    /// Default options: the system's clock, no observer, no trace, and memory as the device gives
    /// it.
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock::new()),
            observer: Arc::new(NoObserver),
            trace: false,
            poison: false,
        }
    }
}

/// Observes ranks while they run. Called on the rank's thread; must not block.
pub trait Observer: std::fmt::Debug + Send + Sync {
    /// `rank` starts step `step` (counted from 0) of the `steps` steps of operation `op`. `doing`
    /// describes the step in words.
    fn step(&self, rank: Rank, op: u64, step: usize, steps: usize, doing: &dyn Fn() -> String);

    /// The counters of `rank` in operation `op` so far. Called after every step.
    fn counted(&self, _rank: Rank, _op: u64, _so_far: &RankReport) {}

    /// `rank` has done `share` of the attention of operation `op`, 0 to 1: never less than before,
    /// by the visible tiles of its steps. Called after every piece of work whose backend knows its
    /// share, and after every attend step.
    fn worked(&self, _rank: Rank, _op: u64, _share: f64) {}
}

/// An observer that does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn step(&self, _: Rank, _: u64, _: usize, _: usize, _: &dyn Fn() -> String) {}
}

/// The results of one operation on one rank, on its device.
#[derive(Debug)]
pub struct DeviceOutput<Buffer> {
    /// o and lse; or dq, dk, dv and, if the problem asks for it, dbias.
    pub results: Vec<Buffer>,
    /// Time in nanoseconds and traffic in bytes.
    pub report: RankReport,
    /// The rank's timelines; empty without [`RunOptions::trace`].
    pub spans: Vec<Span>,
}

/// The plan of one rank, lowered for a device: all that a call needs apart from its data.
#[derive(Debug)]
pub struct LoweredPlan {
    plans: Arc<ProvedPlans>,
    rank: Rank,
    /// For each attend step, its lowered masks and positions, layer by layer; for other steps
    /// nothing.
    works: Vec<Vec<BlockWork>>,
    /// For each of them, its share of the work of all; they add up to 1.
    shares: Vec<Vec<f64>>,
    /// Whether any rank sends keys or values as f16 that are f32.
    narrows: bool,
}

impl LoweredPlan {
    /// Lowers the mask of each attend step of `rank` to the tiles of `backend`.
    pub fn new<B: Backend>(plans: Arc<ProvedPlans>, rank: Rank, backend: &B) -> Self {
        let set = plans.set();
        let (plan, problem) = (set.plan(rank), &set.problem);
        let mut works: Vec<Vec<BlockWork>> = Vec::with_capacity(plan.steps.len());
        let mut shares: Vec<Vec<f64>> = Vec::with_capacity(plan.steps.len());
        let mut before: Option<usize> = None;
        for step in &plan.steps {
            let mut layers = Vec::new();
            let block = match step {
                Step::Attend { q, kv, state, .. } => {
                    Some((q, kv, backend.tile_shape(problem, state_shape(set, plan, *state))))
                }
                Step::AttendBackward(step) => {
                    let GradientStep { q, kv, dq, .. } = &**step;
                    Some((q, kv, backend.backward_tile_shape(problem, state_shape(set, plan, *dq))))
                }
                _ => None,
            };
            if let Some((q, kv, tile)) = block {
                layers = BlockWork::layers(problem, &plan.slice_tokens(q), &plan.slice_tokens(kv), tile);
                for (layer, other) in layers.iter_mut().zip(before.map_or(&[][..], |at| &works[at])) {
                    layer.share_rows(other);
                }
                before = Some(works.len());
            }
            let heads = block.map_or(0, |(q, ..)| q.heads.len());
            let cost = |work: &BlockWork| cost(work, problem.batch as usize, heads);
            shares.push(layers.iter().map(cost).collect());
            works.push(layers);
        }
        let all = shares.iter().flatten().sum::<f64>().max(1.0);
        shares.iter_mut().flatten().for_each(|share| *share /= all);
        let converts = |plan: &Plan| plan.steps.iter().any(|step| matches!(step, Step::Convert { .. }));
        let narrows = problem.wire == WireFormat::F16 && set.plans.iter().any(converts);
        Self { plans, rank, works, shares, narrows }
    }

    /// Refuses a plan of `rank` with a running state that its device does not read, by the
    /// [`Backend::most_state_bytes`] of that.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub fn check_states(set: &PlanSet, rank: Rank, most_state_bytes: Option<u64>) -> Result<()> {
        let Some(most) = most_state_bytes else { return Ok(()) };
        let plan = set.plan(rank);
        for (index, buffer) in plan.buffers.iter().enumerate() {
            if buffer.content != Content::State {
                continue;
            }
            let shape = state_shape(set, plan, BufferId(index));
            let needed = shape.ml_bytes().max(shape.lse_bytes()) as u64;
            if needed > most {
                let StateShape { batch, rows, heads, .. } = shape;
                return Err(Error::request(
                    format!(
                        "{batch} batch entries × {rows} query rows × {heads} heads on rank {rank}: their sums take \
                         {needed} bytes, and its device binds at most {most} at once"
                    ),
                    "use more ranks, fewer heads or batch entries in a call, or another device",
                ));
            }
        }
        Ok(())
    }

    /// Host memory of this and of the plans of all ranks, in bytes; arrays that steps share count
    /// for each of them.
    pub fn host_bytes(&self) -> usize {
        let class = |class: &MaskClass| {
            size_of_val(&class.rows[..]) + size_of_val(&class.starts[..]) + size_of_val(&class.runs[..])
        };
        let work = |work: &BlockWork| {
            size_of_val(&work.kv_positions[..]) + work.classes.iter().map(class).sum::<usize>()
        };
        let buffer = |buffer: &Buffer| {
            size_of::<Buffer>() + size_of_val(buffer.tokens.runs()) + size_of_val(buffer.met.runs())
        };
        let plan =
            |plan: &Plan| size_of_val(&plan.steps[..]) + plan.buffers.iter().map(buffer).sum::<usize>();
        self.works.iter().flatten().map(work).sum::<usize>()
            + self.shares.iter().map(|shares| size_of_val(&shares[..])).sum::<usize>()
            + self.plans.set().plans.iter().map(plan).sum::<usize>()
    }

    /// The plans of all ranks.
    pub fn plans(&self) -> &Arc<ProvedPlans> {
        &self.plans
    }
}

impl<'a, B: Backend, C: Collective<B> + ?Sized> Executor<'a, B, C> {
    /// An executor of `lowered`, which was lowered for `backend`.
    pub fn new(backend: &'a B, collective: &'a C, lowered: &'a LoweredPlan, options: RunOptions) -> Self {
        let set = lowered.plans.set();
        let plan = set.plan(lowered.rank);
        let peak_bytes = lowered.plans.peak_bytes(lowered.rank);
        Self { backend, collective, lowered, set, plan, peak_bytes, options }
    }

    /// Runs the plan as operation `op`. Each operation of a group has its own number, the same on
    /// all ranks. An error of this rank ends the operation on all ranks. If the future is
    /// dropped after its first poll and before its end, the group is aborted on all ranks; the
    /// inputs stay.
    ///
    /// # Errors
    /// Any; [`Error::Group`] when another rank is the cause. [`Error::Request`], here or on another
    /// rank ([`TransportError::Refused`]), for elements beyond the range of the wire format.
    ///
    /// # Panics
    /// For a plan of a backward pass with inputs of [`Self::load`], which have no gradient of the
    /// output.
    pub async fn run(&self, op: u64, inputs: &mut Inputs<B::Buffer>) -> Result<DeviceOutput<B::Buffer>> {
        let meter = Meter::new(self.options.clock.clone(), self.options.trace);
        let run = Run {
            executor: self,
            op,
            meter: &meter,
            memory: Memory::new(self.plan.buffers.len()),
            shared_bias: None,
            d_shared_bias: None,
            step: 0,
            worked: 0.0,
            unsettled: Vec::new(),
            overflow: None,
        };
        // The inputs are moved into the run's memory, and moved back after the run, also after an error or
        // a drop.
        let mut guard = RunGuard::new(run, inputs);
        let result = guard.run().execute().await;
        let mut run = guard.end();

        if let Err(error) = &result {
            self.end_for_all(op, run.step, error);
        }
        let (results, pieces) = result?;
        self.agree_on_range(op, run.overflow.take()).await?;
        let tokens = self.plan.buffer(self.plan.q).tokens.len() as u64;
        let report = RankReport { tokens, peak_bytes: self.peak_bytes, pieces, ..meter.report() };
        Ok(DeviceOutput { results, report, spans: meter.spans() })
    }

    /// Ends the operation on every rank, unless another rank's failure has ended it here.
    fn end_for_all(&self, op: u64, step: usize, error: &Error) {
        let me = Rank(self.plan.rank);
        let culprit = match error {
            Error::Group { source, .. } | Error::Transport(source) => match source {
                // When a peer misbehaves, the transport aborts the group by itself, and names the peer.
                TransportError::Aborted { .. }
                | TransportError::Refused { .. }
                | TransportError::PeerMisbehaved { .. }
                | TransportError::Closed => return,
                // No rank is known to have died, but every rank would wait for this peer next.
                TransportError::Deadline { pending, .. } => pending.peer,
                TransportError::LateExchange { peers, .. } => peers.first().copied().unwrap_or(me),
                _ => me,
            },
            _ => me,
        };
        let progress = Progress { op, step: u32::try_from(step).unwrap_or(u32::MAX) };
        self.collective.abort(Abort { culprit, cause: AbortCause::Failed(error.to_string()), progress });
    }

    /// Bytes of each tensor of a buffer.
    fn tensor_bytes(&self, id: BufferId) -> Vec<usize> {
        let (buffer, problem) = (self.plan.buffer(id), &self.set.problem);
        let batch = buffer.content.batch(problem) as usize;
        let (rows, heads) = (buffer.rows(), buffer.head_count() as usize);
        buffer.content.tensors(problem).map(|tensor| batch * tensor.bytes(rows, heads)).collect()
    }
}

/// (query, key) pairs of the tiles of a block, of all batch entries and `heads` heads.
#[expect(clippy::cast_precision_loss, reason = "what a block costs, about")]
fn cost(work: &BlockWork, batch: usize, heads: usize) -> f64 {
    let tile = u64::from(work.tile.q_rows) * u64::from(work.tile.kv_cols);
    (work.tiles(batch) * tile) as f64 * heads as f64
}

/// Extents of a running state of a plan.
fn state_shape(set: &PlanSet, plan: &Plan, state: BufferId) -> StateShape {
    let (buffer, problem) = (plan.buffer(state), &set.problem);
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

impl<B: Backend, C: ?Sized> std::fmt::Debug for Executor<'_, B, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("rank", &self.plan.rank).finish_non_exhaustive()
    }
}
