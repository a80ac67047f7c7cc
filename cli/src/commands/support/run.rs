//! Runs cells on groups and devices that are reused, and compares the results with a reference.

use std::collections::HashMap;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos::{RankOutput, RunOptions, Session, SessionOptions};
use kyklos_oracle::oracle::Row;
use kyklos_transport::{Abort, AbortCause, Progress, Rank};

use super::cell::{Accepted, CellState, Target};
use crate::devices::DeviceId;
use crate::failure::Result;
use crate::options::TransportName;
use crate::run::threads::on_threads;
use crate::run::{group, quiet};
use crate::verify::{Sample, WholeKv};

/// The reference of all cells of one row and dtype.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) sample: Sample,
    kv: WholeKv,
    expected: Vec<Row>,
    naive: Vec<Row>,
    /// The result of each device alone, or why it is wrong.
    alone: HashMap<DeviceId, Result<Vec<Row>, CellState>>,
}

impl Reference {
    pub(crate) fn new(accepted: &Accepted) -> Result<Self> {
        let sample = Sample::whole(&accepted.request)?;
        let kv = sample.whole_kv()?;
        let (expected, naive) = (sample.expected(&kv)?, sample.naive(&kv)?);
        Ok(Self { sample, kv, expected, naive, alone: HashMap::new() })
    }

    /// Compares the rows of a shared result with the oracle. The tolerance comes from the error of the device alone; if that
    /// error is larger than plain f32 arithmetic allows, every result of the device is wrong.
    pub(crate) fn judge(
        &mut self,
        rows: Vec<Row>,
        accepted: &Accepted,
        device: DeviceId,
        backend: &Device,
    ) -> CellState {
        // The owner of keys decides which keys share a scale on the wire: measured again for each world.
        if accepted.request.problem.wire.rounds() || !self.alone.contains_key(&device) {
            let alone = self.compute_alone(accepted, backend);
            self.alone.insert(device, alone);
        }
        match &self.alone[&device] {
            Err(state) => state.clone(),
            Ok(alone) => {
                let dense = [(format!("{device} alone"), alone.clone())];
                CellState::of(self.sample.hold(rows, &dense, &self.expected, &device.to_string()))
            }
        }
    }

    fn compute_alone(&self, accepted: &Accepted, backend: &Device) -> Result<Vec<Row>, CellState> {
        let bytes = self
            .sample
            .dense(backend, accepted.plans.world(), &self.kv, &options())
            .map_err(|failure| CellState::Failed(format!("the device alone: {}", failure.text)))?;
        let rows = self.sample.decode(self.sample.rows(), &bytes);
        let problem = &accepted.request.problem;
        // Keys that were rounded for the wire differ from the oracle's: that difference is what is measured.
        if !problem.wire.rounds() {
            let state =
                CellState::of(self.sample.hold_alone(&rows, &self.naive, &self.expected, "the device alone"));
            if state.is_bad() {
                return Err(state);
            }
        }
        Ok(rows)
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
        let backend = self.backend(target.device)?;
        let key = (target, accepted.plans.world().mesh.world());
        let mut group = match self.groups.remove(&key) {
            Some(group) => group,
            None => Group::new(target.transport, key.1, &backend)?,
        };
        let outputs = group.run(accepted)?;
        self.groups.insert(key, group);
        let mut rows = Vec::new();
        for (rank, output) in (0..).map(Rank).zip(outputs) {
            let tokens = accepted.plans.world().q_placement.of_rank(rank);
            let bytes = sample.extract(tokens, &output.o, &output.lse);
            rows.extend(sample.decode(&sample.rows_of(accepted.plans.world(), rank), &bytes));
        }
        Ok(rows)
    }
}

impl Group {
    fn new(transport: TransportName, world: u32, device: &Device) -> Result<Self> {
        let options = SessionOptions { deadline: DEADLINE, run: options(), ..SessionOptions::default() };
        let session = |transport| Session::with_options(transport, device.clone(), options.clone());
        Ok(Self(group(transport, world)?.into_iter().map(session).collect()))
    }

    /// Runs every rank on its own thread.
    fn run(&mut self, accepted: &Accepted) -> Result<Vec<RankOutput>> {
        on_threads(&mut self.0, |session| run_rank(session, accepted))
    }
}

/// One operation of one rank.
fn run_rank(session: &mut Session, Accepted { request, plans }: &Accepted) -> Result<RankOutput> {
    let (rank, world) = (session.rank(), plans.world());
    let (q_tokens, kv_tokens) = (world.q_placement.of_rank(rank), &world.kv_placement.held_by(rank));
    let tensors = request.source.all(&world.problem, q_tokens, kv_tokens).inspect_err(|failure| {
        // So that the others do not wait for this rank.
        let cause = AbortCause::Failed(failure.text.clone());
        session.transport().abort(Abort { culprit: rank, cause, progress: Progress::default() });
    })?;
    pollster::block_on(async {
        let mut inputs = session.load(plans, tensors).await?;
        Ok(session.run(plans, &mut inputs).await?)
    })
}

/// Memory that was never written holds NaN.
fn options() -> RunOptions {
    RunOptions { poison: true, ..quiet() }
}

/// Longest wait for one message; ranks compute for milliseconds.
const DEADLINE: Duration = Duration::from_secs(60);
