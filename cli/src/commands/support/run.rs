//! Runs cells on groups and devices that are reused, and compares the results with a reference.

use std::collections::HashMap;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos::{RunOptions, Session, SessionOptions};
use kyklos_oracle::oracle::Row;
use kyklos_transport::{Abort, AbortCause, Progress, Rank};

use super::cell::{Accepted, CellState, Target};
use crate::devices::DeviceId;
use crate::failure::{Failure, Result};
use crate::options::TransportName;
use crate::run::call::{HostGradients, HostOutput, RankCall};
use crate::run::gather::gather;
use crate::run::threads::on_threads;
use crate::run::{group, quiet};
use crate::verify::{GradientVerdict, HeadReference, RightRows, Sample, WholeKv};

/// The reference of all cells of one row and dtype. Everything in it is computed when it is first needed.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) sample: Sample,
    rows: Option<(WholeKv, RightRows)>,
    /// The result of each device alone, or why it failed.
    alone: HashMap<DeviceId, Result<Vec<Row>, CellState>>,
    /// Of each KV head.
    heads: Vec<HeadReference>,
}

impl Reference {
    pub(crate) fn new(accepted: &Accepted) -> Result<Self> {
        let sample = Sample::whole(&accepted.request)?;
        Ok(Self { sample, rows: None, alone: HashMap::new(), heads: Vec::new() })
    }

    /// Compares the rows of a shared result with the oracle.
    pub(crate) fn judge(
        &mut self,
        rows: Vec<Row>,
        accepted: &Accepted,
        device: DeviceId,
        backend: &Device,
    ) -> Result<CellState> {
        let (sample, world) = (&self.sample, accepted.plans.world());
        // The owner of keys decides which keys share a scale on the wire: measured again for each world.
        let again = accepted.request.problem.wire.rounds();
        let (kv, right) = match self.rows.take().filter(|_| !again) {
            Some(rows) => rows,
            None => {
                let kv = sample.whole_kv()?;
                let right = sample.right_rows(&kv, world)?;
                (kv, right)
            }
        };
        if again || !self.alone.contains_key(&device) {
            let alone = sample.dense(backend, world, &kv, &options());
            let alone = alone
                .map(|bytes| sample.decode(sample.rows(), &bytes))
                .map_err(|failure| CellState::Failed(format!("the device alone: {}", failure.text)));
            self.alone.insert(device, alone);
        }
        let state = match &self.alone[&device] {
            Err(state) => state.clone(),
            Ok(alone) => {
                let dense = [(format!("{device} alone"), alone.clone())];
                CellState::of(sample.hold(rows, &dense, &right, &device.to_string()))
            }
        };
        self.rows = Some((kv, right));
        Ok(state)
    }

    /// Compares the gradients of all heads with the oracle. The first wrong head is the result, else the one that is nearest to
    /// its limit.
    pub(crate) fn judge_gradients(
        &mut self,
        gradients: &HostGradients,
        accepted: &Accepted,
    ) -> Result<CellState> {
        let kv_heads = accepted.request.problem.kv_heads;
        // As for the rows of a device alone.
        if accepted.request.problem.wire.rounds() || self.heads.is_empty() {
            let heads = 0..kv_heads;
            self.heads = heads
                .map(|kv_head| self.sample.head_reference(kv_head, accepted.plans.world()))
                .collect::<Result<_>>()?;
        }
        let mut nearest: Option<GradientVerdict> = None;
        for (kv_head, reference) in (0..kv_heads).zip(&self.heads) {
            let head = self.sample.head_of(kv_head, gradients);
            let verdict = self.sample.hold_head(kv_head, &head, &gradients.d_sinks_part, reference);
            if verdict.failure.is_some() {
                return Ok(CellState::of_gradients(verdict));
            }
            let near = |verdict: &GradientVerdict| verdict.max_abs_error / verdict.tolerance;
            if nearest.as_ref().is_none_or(|other| near(other) < near(&verdict)) {
                nearest = Some(verdict);
            }
        }
        nearest.map(CellState::of_gradients).ok_or_else(|| Failure::run("a problem without heads"))
    }
}

/// Opened devices and groups, created at first use. A group in which a rank failed is dropped.
#[derive(Debug, Default)]
pub(crate) struct Runner {
    backends: HashMap<DeviceId, Device>,
    groups: HashMap<(Target, u32), Group>,
}

/// The sessions of all ranks, on one device.
#[derive(Debug)]
struct Group(Vec<Session>);

impl Runner {
    pub(crate) fn backend(&mut self, device: DeviceId) -> Result<Device> {
        if let Some(backend) = self.backends.get(&device) {
            return Ok(backend.clone());
        }
        let backend = device.open()?;
        self.backends.insert(device, backend.clone());
        Ok(backend)
    }

    /// The rows of `sample` as the ranks of a world compute them.
    pub(crate) fn run(&mut self, accepted: &Accepted, target: Target, sample: &Sample) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (rank, Passes { output, .. }) in (0..).map(Rank).zip(self.passes(accepted, target)?) {
            let tokens = accepted.plans.world().q_placement.of_rank(rank);
            let bytes = sample.extract(tokens, &output.o, &output.lse);
            rows.extend(sample.decode(&sample.rows_of(accepted.plans.world(), rank), &bytes));
        }
        Ok(rows)
    }

    /// The gradients of all tokens and heads as the ranks of a world compute them.
    pub(crate) fn gradients(&mut self, accepted: &Accepted, target: Target) -> Result<HostGradients> {
        let passes = self.passes(accepted, target)?;
        let parts = passes.into_iter().filter_map(|passes| passes.gradients);
        Ok(gather(accepted.plans.world(), parts))
    }

    fn passes(&mut self, accepted: &Accepted, target: Target) -> Result<Vec<Passes>> {
        let backend = self.backend(target.device)?;
        let key = (target, accepted.plans.world().mesh.world());
        let mut group = match self.groups.remove(&key) {
            Some(group) => group,
            None => Group::new(target.transport, key.1, &backend)?,
        };
        let passes = group.run(accepted)?;
        self.groups.insert(key, group);
        Ok(passes)
    }
}

/// What a rank has computed.
struct Passes {
    output: HostOutput,
    /// Of a cell of the backward pass.
    gradients: Option<HostGradients>,
}

impl Group {
    fn new(transport: TransportName, world: u32, device: &Device) -> Result<Self> {
        let options = SessionOptions { deadline: DEADLINE, run: options(), ..SessionOptions::default() };
        let session = |transport| Session::with_options(transport, device.clone(), options.clone());
        Ok(Self(group(transport, world)?.into_iter().map(session).collect()))
    }

    /// Runs every rank on its own thread.
    fn run(&mut self, accepted: &Accepted) -> Result<Vec<Passes>> {
        on_threads(&mut self.0, |session| run_rank(session, accepted))
    }
}

/// The passes of one rank.
fn run_rank(session: &mut Session, Accepted { request, plans, backward }: &Accepted) -> Result<Passes> {
    let (rank, world) = (session.rank(), plans.world());
    let (q_tokens, kv_tokens) = (world.q_placement.of_rank(rank), &world.kv_placement.held_by(rank));
    let read = || {
        let tensors = request.source.all(&world.problem, q_tokens, kv_tokens)?;
        let gradient = backward.as_ref().map(|_| request.source.output_gradient(&world.problem, q_tokens));
        Ok((tensors, gradient.transpose()?))
    };
    let (tensors, gradient) = read().inspect_err(|failure: &Failure| {
        // So that the others do not wait for this rank.
        let cause = AbortCause::Failed(failure.text.clone());
        session.transport().abort(Abort { culprit: rank, cause, progress: Progress::default() });
    })?;
    pollster::block_on(async {
        let backward = backward.as_ref().zip(gradient.as_ref());
        let call = RankCall::open(session, plans, tensors, backward).await?;
        let output = call.attend(session).await?;
        let gradients = match call.backward(session, &output).await? {
            Some(gradients) => Some(HostGradients::of(gradients).await?),
            None => None,
        };
        Ok(Passes { output: HostOutput::of(output).await?, gradients })
    })
}

/// Memory that was never written holds NaN.
fn options() -> RunOptions {
    RunOptions { poison: true, ..quiet() }
}

/// Longest wait for one message; ranks compute for milliseconds.
const DEADLINE: Duration = Duration::from_secs(60);
