//! Runs cells on groups and devices that are reused, and compares the results with a reference.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::{RunOptions, Session, SessionOptions};
use kyklos_oracle::oracle::Row;
use kyklos_transport::Rank;

use super::cell::{Accepted, CellState, Target};
use crate::devices::DeviceId;
use crate::failure::Result;
use crate::run::call::RankCall;
use crate::run::gather::gather;
use crate::run::threads::on_threads;
use crate::run::{group, quiet};
use crate::tensors::GivenGradient;
use crate::tensors::results::{HostGradients, HostOutput};
use crate::verify::{GradientVerdict, HeadReference, RightRows, Sample, WholeKv};

/// The reference of all cells of one row and dtype. Everything in it is computed when it is first
/// needed.
#[derive(Debug)]
pub(super) struct Reference {
    pub(super) sample: Sample,
    rows: Option<(WholeKv, RightRows)>,
    /// The result of each device alone, by its name.
    alone: HashMap<DeviceId, [(String, Vec<Row>); 1]>,
    /// Of each KV head.
    heads: Vec<HeadReference>,
}

impl Reference {
    pub(super) fn new(accepted: &Accepted) -> Result<Self> {
        let sample = Sample::of_rows(&accepted.request.problem, &accepted.request.source, usize::MAX)?;
        Ok(Self { sample, rows: None, alone: HashMap::new(), heads: Vec::new() })
    }

    /// Compares the rows of a shared result with the oracle.
    pub(super) fn judge(
        &mut self,
        rows: Vec<Row>,
        accepted: &Accepted,
        device: DeviceId,
        backend: &Device,
    ) -> Result<CellState> {
        let (sample, set) = (&self.sample, accepted.plans.set());
        let (kv, right) = match &mut self.rows {
            Some(rows) => rows,
            rows => {
                let kv = sample.whole_kv()?;
                let right = sample.right_rows(&kv, set)?;
                rows.insert((kv, right))
            }
        };
        let alone = match self.alone.entry(device) {
            Entry::Occupied(alone) => alone.into_mut(),
            Entry::Vacant(place) => {
                let alone = sample.dense(backend, set, kv, &options())?;
                place.insert([(format!("{device} alone"), sample.decode(sample.rows(), &alone))])
            }
        };
        let held = sample.hold(rows, alone, right, &device.to_string());
        Ok(CellState::of(held.max_abs_error, held.tolerance, held.failure))
    }

    /// Compares the gradients of all heads with the oracle.
    pub(super) fn judge_gradients(
        &mut self,
        gradients: &HostGradients,
        accepted: &Accepted,
    ) -> Result<CellState> {
        let kv_heads = 0..accepted.request.problem.kv_heads;
        if self.heads.is_empty() {
            let of = |kv_head| self.sample.head_reference(kv_head, accepted.plans.set());
            self.heads = kv_heads.clone().map(of).collect::<Result<_>>()?;
        }
        let mut all = GradientVerdict::NONE;
        for (kv_head, reference) in kv_heads.zip(&self.heads) {
            let head = self.sample.head_of(kv_head, gradients);
            all.join(self.sample.hold_head(kv_head, &head, &gradients.d_sinks_part, reference));
        }
        Ok(CellState::of(all.max_abs_error, all.tolerance, all.failure))
    }
}

/// Opened devices and groups, created at first use. A group in which a rank failed is dropped.
#[derive(Debug, Default)]
pub(super) struct Runner {
    backends: HashMap<DeviceId, Device>,
    /// The sessions of all ranks, by their number.
    groups: HashMap<(Target, u32), Vec<Session>>,
}

impl Runner {
    pub(super) fn backend(&mut self, device: DeviceId) -> Result<Device> {
        if let Some(backend) = self.backends.get(&device) {
            return Ok(backend.clone());
        }
        let backend = device.open()?;
        self.backends.insert(device, backend.clone());
        Ok(backend)
    }

    /// The rows of `sample` as the ranks of a plan set compute them.
    pub(super) fn run(&mut self, accepted: &Accepted, target: Target, sample: &Sample) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (rank, Passes { output, .. }) in (0..).map(Rank).zip(self.passes(accepted, target)?) {
            let tokens = accepted.plans.set().q_placement.of_rank(rank);
            let bytes = sample.extract(tokens, &output.o, &output.lse);
            rows.extend(sample.decode(&sample.rows_of(accepted.plans.set(), rank), &bytes));
        }
        Ok(rows)
    }

    /// The gradients of all tokens and heads as the ranks of a plan set compute them.
    pub(super) fn gradients(&mut self, accepted: &Accepted, target: Target) -> Result<HostGradients> {
        let passes = self.passes(accepted, target)?;
        let parts = passes.into_iter().filter_map(|passes| passes.gradients);
        Ok(gather(accepted.plans.set(), parts))
    }

    /// Runs every rank on its own thread.
    fn passes(&mut self, accepted: &Accepted, target: Target) -> Result<Vec<Passes>> {
        let ranks = accepted.plans.set().mesh.size();
        let inputs = (0..ranks).map(|rank| inputs(accepted, Rank(rank))).collect::<Result<Vec<_>>>()?;
        let device = self.backend(target.device)?;
        let mut sessions = match self.groups.remove(&(target, ranks)) {
            Some(sessions) => sessions,
            None => {
                let options =
                    SessionOptions { deadline: DEADLINE, run: options(), ..SessionOptions::default() };
                let session = |transport| Session::with_options(transport, device.clone(), options.clone());
                group(target.transport, ranks)?.into_iter().map(session).collect()
            }
        };
        let passes = on_threads(sessions.iter_mut().zip(inputs), |(session, inputs)| {
            pollster::block_on(passes_of_rank(session, accepted, inputs))
        })?;
        self.groups.insert((target, ranks), sessions);
        Ok(passes)
    }
}

/// The tensors of a rank, and the gradient of its output in a cell of the backward pass.
type Inputs = (Tensors, Option<GivenGradient>);

/// What a rank has computed.
struct Passes {
    output: HostOutput,
    /// Of a cell of the backward pass.
    gradients: Option<HostGradients>,
}

fn inputs(Accepted { request, plans, backward }: &Accepted, rank: Rank) -> Result<Inputs> {
    let size = plans.set();
    let (q_tokens, kv_tokens) = (size.q_placement.of_rank(rank), &size.kv_placement.held_by(rank));
    let tensors = request.source.all(&size.problem, q_tokens, kv_tokens)?;
    let gradient = backward.as_ref().map(|_| request.source.output_gradient(&size.problem, q_tokens));
    Ok((tensors, gradient.transpose()?))
}

async fn passes_of_rank(
    session: &mut Session,
    Accepted { plans, backward, .. }: &Accepted,
    (tensors, gradient): Inputs,
) -> Result<Passes> {
    let backward = backward.as_ref().zip(gradient.as_ref());
    let call = RankCall::open(session, plans, tensors, backward).await?;
    let output = call.attend(session).await?;
    let gradients = match call.backward(session, &output).await? {
        Some(gradients) => Some(HostGradients::of(gradients).await?),
        None => None,
    };
    Ok(Passes { output: HostOutput::of(output).await?, gradients })
}

/// Memory that was never written holds NaN.
fn options() -> RunOptions {
    RunOptions { poison: true, ..quiet() }
}

/// Longest wait for one message; ranks compute for milliseconds.
const DEADLINE: Duration = Duration::from_secs(60);
