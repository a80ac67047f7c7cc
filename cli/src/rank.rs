//! One rank, from its own tokens to everyone's result. The same for ranks of one process and for a rank that is one.

mod collect;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kyklos::local::{RankTask, Tensors};
use kyklos::plan::{RankCheck, World};
use kyklos::{Error, Finished, RankOutput, RunOptions, Span, Survivors};
use kyklos_transport::{Abort, AbortCause, Progress, Rank, Transport, TransportError, Vote};

use crate::device::{AnyBackend, AnyLasting, DeviceId};
use crate::failure::{Failure, Result, note};
use crate::on_loss::Losses;
use crate::output::{OutputFile, OutputTarget};
use crate::progress::Watch;
use crate::record::Flight;
use crate::report::Summary;
use crate::request::Request;
use crate::trace::{Trace, Track};
use crate::verify::Sample;
pub(crate) use collect::Lines;

/// Everything that all ranks agree on.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) world: Arc<World>,
    /// Where this finishes what more ranks began: their world.
    pub(crate) begun: Option<Arc<World>>,
    pub(crate) checks: Vec<RankCheck>,
    pub(crate) plan_hash: [u8; 32],
    pub(crate) repeat: u64,
    pub(crate) deadline: Duration,
    pub(crate) sample: Option<Sample>,
    pub(crate) output: Option<OutputTarget>,
    /// Where the timelines go, by rank or of all ranks together.
    pub(crate) trace: Option<PathBuf>,
    /// Where records go.
    pub(crate) record: Option<PathBuf>,
    pub(crate) options: RunOptions,
    pub(crate) watch: Arc<Watch>,
    /// What is done outlives the group.
    pub(crate) lasting: bool,
    /// By rank, its number in the first group.
    pub(crate) members: Vec<Rank>,
}

/// What a rank leaves behind.
#[derive(Debug)]
pub(crate) struct RankDone {
    /// Timelines to write: its own, or on rank 0 those of all.
    pub(crate) trace: Option<Trace>,
    /// On rank 0.
    pub(crate) summary: Option<Summary>,
    /// Why the result is not to be used, though it was computed.
    pub(crate) rejected: Option<Failure>,
    /// What the result lacks, which is right otherwise.
    pub(crate) lacks: Option<Failure>,
}

/// What a rank has before it meets the others.
struct Ready {
    backend: AnyBackend,
    tensors: Tensors,
    file: Option<OutputFile>,
}

/// What a rank has computed.
struct Computed {
    output: RankOutput,
    spans: Vec<Span>,
    wall_ns: u64,
}

/// Runs a rank, tells the others if it fails, and leaves the group.
pub(crate) fn run(job: &Job, transport: &Arc<dyn Transport>, device: Result<DeviceId>) -> Result<RankDone> {
    let result = work(job, transport, device, None);
    leave(job, transport, &result);
    result
}

/// Runs a rank, and tells the others if it fails. With `losses` it is finished with those who are left, in their group.
pub(crate) fn work(
    job: &Job,
    transport: &Arc<dyn Transport>,
    device: Result<DeviceId>,
    losses: Option<&mut Losses<'_>>,
) -> Result<RankDone> {
    let flight = Flight::list(job, transport);
    let ready = device
        .and_then(|device| job.prepare(transport.rank(), device))
        .map_err(|failure| refuse(&**transport, job.named(transport.rank(), failure)));
    let Ready { backend, tensors, file } = match ready {
        Ok(ready) => ready,
        Err(failure) => {
            let result = Err(failure);
            flight.ended(&result);
            return result;
        }
    };
    let mut lasting = backend.lasting(job.task(transport, tensors));
    let result = job
        .compute(transport.rank(), &mut lasting)
        .and_then(|computed| job.deliver(transport, &backend, computed, file));
    flight.ended(&result);
    match (result, losses) {
        (Err(failure), Some(losses)) => match losses.survivors(&failure) {
            Some(survivors) => finish(job, &survivors?, &backend, &mut lasting, losses),
            None => Err(failure),
        },
        (result, _) => result,
    }
}

/// Finishes, with those who are left, what a group began that has lost ranks.
fn finish(
    job: &Job,
    survivors: &Survivors,
    backend: &AnyBackend,
    lasting: &mut AnyLasting<'_>,
    losses: &mut Losses<'_>,
) -> Result<RankDone> {
    let transport = &survivors.transport;
    let Finished { world, checks, plan_hash, output } = lasting.finish(survivors).map_err(|error| {
        if matches!(error, Error::KeysLost { .. } | Error::Request { .. }) {
            losses.refuse();
        }
        error
    })?;
    let job = job.finishing(world, checks, plan_hash, losses.members());
    let flight = Flight::list(&job, transport);
    let computed =
        Computed { wall_ns: job.watch.since_start_ns(transport.rank()), spans: output.spans.clone(), output };
    let lacks = job.lacks();
    let result = job
        .open_output(transport.rank())
        .map_err(|failure| job.give_up(&**transport, failure))
        .and_then(|file| job.deliver(transport, backend, computed, file))
        .map(|done| RankDone { lacks: Some(lacks), ..done });
    flight.ended(&result);
    result
}

/// Leaves the group after that.
pub(crate) fn leave(job: &Job, transport: &Arc<dyn Transport>, result: &Result<RankDone>) {
    let well = result.as_ref().is_ok_and(|done| done.rejected.is_none());
    let left = pollster::block_on(transport.close(if well { job.deadline } else { LEAVE }));
    // The work is done: who leaves rudely afterwards takes nothing away.
    if let (true, Err(error)) = (well, left) {
        note(&format!("warning: rank {}: {error}", transport.rank()));
    }
}

/// Refuses the operation on all ranks. Returns what became everyone's error.
pub(crate) fn refuse(transport: &dyn Transport, failure: Failure) -> Failure {
    let vote = Vote::Refuse { exit: failure.exit, text: failure.text.clone() };
    match pollster::block_on(transport.agree(vote, REFUSE)) {
        Err(refused @ TransportError::Refused { .. }) => refused.into(),
        // Whatever became of the others, this rank knows its own reason.
        _ => failure,
    }
}

impl Job {
    fn prepare(&self, rank: Rank, device: DeviceId) -> Result<Ready> {
        let Request { problem, source, .. } = &self.request;
        let (q_tokens, kv_tokens) =
            (self.world.q_placement.of_rank(rank), &self.world.kv_placement.held_by(rank));
        Ok(Ready {
            backend: AnyBackend::open(device)?,
            tensors: source.all(problem, q_tokens, kv_tokens)?,
            file: self.open_output(rank)?,
        })
    }

    /// What this rank has to write, if anything.
    fn open_output(&self, rank: Rank) -> Result<Option<OutputFile>> {
        match &self.output {
            Some(target) => target.open(&self.world, rank, self.members[rank.0 as usize]),
            None => Ok(None),
        }
    }

    /// The job of those who finish this one in `world`.
    fn finishing(&self, world: World, checks: Vec<RankCheck>, plan_hash: [u8; 32], members: &[Rank]) -> Self {
        Self {
            request: Request { mesh: world.mesh, predicted_s: None, ..self.request.clone() },
            begun: Some(Arc::clone(&self.world)),
            checks,
            plan_hash,
            repeat: self.repeat,
            deadline: self.deadline,
            sample: self.sample.as_ref().map(|sample| sample.owned_in(&world)),
            world: Arc::new(world),
            output: self.output.clone(),
            trace: self.trace.clone(),
            record: self.record.clone(),
            options: self.options.clone(),
            watch: Arc::clone(&self.watch),
            lasting: false,
            members: members.to_vec(),
        }
    }

    /// The world in which keys began to travel.
    fn begun(&self) -> &World {
        self.begun.as_ref().unwrap_or(&self.world)
    }

    /// What the result lacks when ranks were lost.
    fn lacks(&self) -> Failure {
        let queries = &self.world.lost.queries;
        Failure {
            exit: EXIT_LACKS,
            ..Failure::run(format!(
                "queries {queries} have no answer, their ranks were lost; the other {} are answered over all keys",
                self.world.problem.q_len as usize - queries.len()
            ))
        }
    }

    /// A wrong request is wrong everywhere; what failed, failed on this rank.
    fn named(&self, rank: Rank, failure: Failure) -> Failure {
        if failure.exit == 2 || self.world.mesh.world() == 1 {
            return failure;
        }
        Failure { text: format!("rank {rank}: {}", failure.text), ..failure }
    }

    fn task<'a>(&'a self, transport: &Arc<dyn Transport>, tensors: Tensors) -> RankTask<'a> {
        let Tensors { q, k, v, bias: pairs } = tensors;
        RankTask {
            world: &self.world,
            transport: transport.clone(),
            plan_hash: self.plan_hash,
            peak_bytes: self.checks[transport.rank().0 as usize].peak_bytes,
            q,
            k,
            v,
            bias: pairs,
            repeat: self.repeat,
            deadline: self.deadline,
            options: self.options.clone(),
        }
    }

    fn compute(&self, rank: Rank, lasting: &mut AnyLasting<'_>) -> Result<Computed> {
        let mut spans = Vec::new();
        let (mut last, mut walls_ns) = (None, Vec::new());
        lasting.run(self.lasting, |op, mut output| {
            walls_ns.push(self.watch.since_start_ns(rank));
            self.watch.done(rank, op);
            spans.append(&mut output.spans);
            last = Some(output);
        })?;
        let output = last.ok_or_else(|| Failure::run("no run took place"))?;
        // The median over the repetitions: the first one pays for memory and shaders, the last one is any other.
        walls_ns.sort_unstable();
        Ok(Computed { output, spans, wall_ns: walls_ns[walls_ns.len() / 2] })
    }

    /// Timelines, reports and output go where they belong.
    fn deliver(
        &self,
        transport: &Arc<dyn Transport>,
        backend: &AnyBackend,
        computed: Computed,
        file: Option<OutputFile>,
    ) -> Result<RankDone> {
        let rank = transport.rank();
        let Computed { output, spans, wall_ns } = computed;
        let lines = Lines { transport: &**transport, op: self.repeat, deadline: self.deadline };
        let trace = match &self.trace {
            Some(path) => {
                let track = Track { rank, device: backend.info().name.clone(), spans };
                let told = track.tell(path, &lines, &*self.options.clock);
                told.map_err(|failure| self.give_up(&**transport, failure))?
            }
            None => None,
        };
        let (summary, rejected) = self
            .collect(transport, backend, &output, wall_ns, file)
            .map_err(|failure| self.give_up(&**transport, failure))?;
        Ok(RankDone { trace, summary, rejected, lacks: None })
    }

    /// Ends the group after a failure that only this rank knows of.
    fn give_up(&self, transport: &dyn Transport, failure: Failure) -> Failure {
        transport.abort(Abort {
            culprit: transport.rank(),
            cause: AbortCause::Failed(failure.text.clone()),
            progress: Progress { op: self.repeat, step: 0 },
        });
        failure
    }
}

/// Exit code of a result that is right and lacks the answers of ranks that were lost.
pub(crate) const EXIT_LACKS: u8 = 3;
/// How long a refusal waits for the others' votes: as long as they may take to get there.
const REFUSE: Duration = Duration::from_secs(600);
/// How long a rank that failed waits for the others to hear of it.
const LEAVE: Duration = Duration::from_secs(3);
