//! Running cells: groups and devices that serve many of them, and what their results are held to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kyklos::backend::Backend;
use kyklos::collective::HostStaged;
use kyklos::local::Tensors;
use kyklos::{Executor, NoObserver, RankOutput, RunOptions, SystemClock, plan};
use kyklos_oracle::oracle::Row;
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Abort, AbortCause, Progress, Rank, Transport, in_process_group};

use super::cell::{Accepted, Place, State};
use crate::args::TransportName;
use crate::device::{AnyBackend, DeviceId};
use crate::failure::{Failure, Result};
use crate::verify::{Sample, WholeKv};

/// What all cells of one row and dtype are held to.
#[derive(Debug)]
pub(crate) struct Yardstick {
    pub(crate) sample: Sample,
    kv: WholeKv,
    expected: Vec<Row>,
    naive: Vec<Row>,
    /// What each device computed alone, or what is wrong with that.
    alone: HashMap<DeviceId, Result<Vec<Row>, State>>,
}

impl Yardstick {
    pub(crate) fn new(accepted: &Accepted) -> Result<Self> {
        let sample = Sample::whole(&accepted.request)?;
        let kv = sample.whole_kv()?;
        let (expected, naive) = (sample.expected(&kv)?, sample.naive(&kv)?);
        Ok(Self { sample, kv, expected, naive, alone: HashMap::new() })
    }

    /// Holds the rows of a shared result to the oracle, within what its device reaches alone; a device that alone is
    /// further off than plain f32 arithmetic allows makes everything wrong that is held to it.
    pub(crate) fn judge(
        &mut self,
        rows: Vec<Row>,
        accepted: &Accepted,
        device: DeviceId,
        backend: &AnyBackend,
    ) -> State {
        // Which keys share a scale on the wire, their owners say, so that is measured for each world anew.
        if accepted.request.problem.wire.rounds() || !self.alone.contains_key(&device) {
            let alone = self.compute_alone(accepted, backend);
            self.alone.insert(device, alone);
        }
        match &self.alone[&device] {
            Err(state) => state.clone(),
            Ok(alone) => {
                let dense = [(format!("{device} alone"), alone.clone())];
                State::of(self.sample.hold(rows, &dense, &self.expected, &device.to_string()))
            }
        }
    }

    fn compute_alone(&self, accepted: &Accepted, backend: &AnyBackend) -> Result<Vec<Row>, State> {
        let bytes = self
            .sample
            .dense(backend, &accepted.world, &self.kv, &options())
            .map_err(|failure| State::Failed(format!("the device alone: {}", failure.text)))?;
        let rows = self.sample.decode(self.sample.rows(), &bytes);
        let problem = &accepted.request.problem;
        // Keys that were rounded for the wire are no longer the oracle's: what that costs is what is measured.
        if !problem.wire.rounds() {
            let state =
                State::of(self.sample.hold_alone(&rows, &self.naive, &self.expected, "the device alone"));
            if state.is_bad() {
                return Err(state);
            }
        }
        Ok(rows)
    }
}

/// Devices and groups, made when they are needed first. A group in which a rank failed is given up.
#[derive(Debug, Default)]
pub(crate) struct Workshop {
    backends: HashMap<DeviceId, Arc<AnyBackend>>,
    groups: HashMap<(TransportName, u32), Group>,
}

#[derive(Debug)]
struct Group {
    transports: Vec<Arc<dyn Transport>>,
    /// Operations so far.
    op: u64,
}

impl Workshop {
    pub(crate) fn backend(&mut self, device: DeviceId) -> Result<Arc<AnyBackend>> {
        if let Some(backend) = self.backends.get(&device) {
            return Ok(backend.clone());
        }
        let backend = Arc::new(AnyBackend::open(device)?);
        self.backends.insert(device, backend.clone());
        Ok(backend)
    }

    /// The rows of `sample` as the ranks of a world compute them.
    pub(crate) fn run(&mut self, accepted: &Accepted, place: Place, sample: &Sample) -> Result<Vec<Row>> {
        let backend = self.backend(place.device)?;
        let key = (place.transport, accepted.world.mesh.world());
        let mut group = match self.groups.remove(&key) {
            Some(group) => group,
            None => Group::new(place.transport, key.1)?,
        };
        let outputs = group.run(accepted, &backend)?;
        self.groups.insert(key, group);
        let mut rows = Vec::new();
        for (rank, output) in (0..).map(Rank).zip(outputs) {
            let tokens = accepted.world.q_placement.of_rank(rank);
            let bytes = sample.extract(tokens, &output.o, &output.lse);
            rows.extend(sample.decode(&sample.rows_of(&accepted.world, rank), &bytes));
        }
        Ok(rows)
    }
}

impl Group {
    fn new(transport: TransportName, world: u32) -> Result<Self> {
        let transports = match transport {
            TransportName::InProcess => in_process_group(world),
            TransportName::Quic => quic_loopback_group(world)?,
        };
        Ok(Self { transports, op: 0 })
    }

    /// Every rank on a thread of its own, all on one device.
    fn run(&mut self, accepted: &Accepted, backend: &AnyBackend) -> Result<Vec<RankOutput>> {
        let identities: Vec<String> =
            (0..accepted.world.mesh.world()).map(|rank| format!("rank-{rank}")).collect();
        let (op, hash) = (self.op, plan::plan_hash(&accepted.world, &identities));
        self.op += 1;
        let results: Vec<Result<RankOutput>> = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .transports
                .iter()
                .map(|transport| {
                    scope.spawn(move || match backend {
                        AnyBackend::Cpu(backend) => run_rank(backend, transport, accepted, op, hash),
                        AnyBackend::Wgpu(backend) => run_rank(&**backend, transport, accepted, op, hash),
                        AnyBackend::Cuda(backend) => run_rank(&**backend, transport, accepted, op, hash),
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|_| Err(Failure::run("a rank panicked: this is a bug")))
                })
                .collect()
        });
        let blame =
            results.iter().filter_map(|result| result.as_ref().err()).min_by_key(|failure| failure.of_group);
        match blame {
            Some(failure) => Err(failure.clone()),
            None => results.into_iter().collect(),
        }
    }
}

fn run_rank<B: Backend>(
    backend: &B,
    transport: &Arc<dyn Transport>,
    accepted: &Accepted,
    op: u64,
    plan_hash: [u8; 32],
) -> Result<RankOutput> {
    let (rank, world) = (transport.rank(), &accepted.world);
    let collective = HostStaged::new(transport.clone(), DEADLINE);
    let peak_bytes = accepted.checks[rank.0 as usize].peak_bytes;
    let executor = Executor::new(backend, &collective, world, rank, plan_hash, peak_bytes, options());
    let (q_tokens, kv_tokens) = (world.q_placement.of_rank(rank), &world.kv_placement.held_by(rank));
    let loaded = accepted
        .request
        .source
        .all(&world.problem, q_tokens, kv_tokens)
        .and_then(|Tensors { q, k, v, bias: pairs }| Ok(executor.load(q, k, v, pairs)?));
    match loaded {
        Ok(mut inputs) => Ok(pollster::block_on(executor.run(op, &mut inputs))?),
        Err(failure) => {
            // The others need not wait for this rank.
            let cause = AbortCause::Failed(failure.text.clone());
            transport.abort(Abort { culprit: rank, cause, progress: Progress { op, step: 0 } });
            Err(failure)
        }
    }
}

/// Memory that nobody wrote holds NaN.
fn options() -> RunOptions {
    RunOptions {
        clock: Arc::new(SystemClock::new()),
        observer: Arc::new(NoObserver),
        trace: false,
        poison: true,
    }
}

/// For one message: ranks of one process that compute for milliseconds.
const DEADLINE: Duration = Duration::from_secs(60);
