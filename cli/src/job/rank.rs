//! One rank, from its own tokens to everyone's result. The same for ranks of one process and for a rank that is one.

use std::sync::Arc;
use std::time::Duration;

use kyklos::local::Tensors;
use kyklos::{Error, RankOutput, Span, Survivors};
use kyklos_transport::{Abort, AbortCause, Progress, Rank, Transport};

use crate::devices::{AnyBackend, AnyResumable, DeviceId};
use crate::failure::{Failure, Result, note};
use crate::job::call::Job;
use crate::job::on_loss::Recovery;
use crate::job::refusal::refuse;
use crate::job::report::Summary;
use crate::messages::Messages;
use crate::observe::trace::{Trace, Track};
use crate::request::Request;
use crate::tensors::output::OutputFile;

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

/// Runs a rank, and tells the others if it fails. With `recovery` it is finished with those who are left, in their group.
pub(crate) fn work(
    job: &Job,
    transport: &Arc<dyn Transport>,
    device: Result<DeviceId>,
    recovery: Option<&mut Recovery<'_>>,
) -> Result<RankDone> {
    let flight = job.list(transport);
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
    let mut resumable = backend.resumable(job.agreed.plans.task(Arc::clone(transport), tensors, &job.runs));
    let result = job
        .compute(transport.rank(), &mut resumable)
        .and_then(|computed| job.deliver(transport, &backend, computed, file));
    flight.ended(&result);
    match (result, recovery) {
        (Err(failure), Some(recovery)) => match recovery.survivors(&failure) {
            Some(survivors) => finish(job, &survivors?, &backend, &mut resumable, recovery),
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
    resumable: &mut AnyResumable<'_>,
    recovery: &mut Recovery<'_>,
) -> Result<RankDone> {
    let transport = &survivors.transport;
    let finished = resumable.finish(survivors).map_err(|error| {
        if matches!(error, Error::KeysLost { .. } | Error::Request { .. }) {
            recovery.refuse();
        }
        error
    })?;
    let (job, output) = job.completion(finished, recovery.members());
    let flight = job.list(transport);
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
    let left = pollster::block_on(transport.close(if well { job.runs.deadline } else { LEAVE }));
    // The work is done: who leaves rudely afterwards takes nothing away.
    if let (true, Err(error)) = (well, left) {
        note(&format!("warning: rank {}: {error}", transport.rank()));
    }
}

impl Job {
    fn prepare(&self, rank: Rank, device: DeviceId) -> Result<Ready> {
        let Request { problem, source, .. } = &self.agreed.request;
        let (q_tokens, kv_tokens) =
            (self.world().q_placement.of_rank(rank), &self.world().kv_placement.held_by(rank));
        Ok(Ready {
            backend: device.open()?,
            tensors: source.all(problem, q_tokens, kv_tokens)?,
            file: self.open_output(rank)?,
        })
    }

    /// What this rank has to write, if anything.
    fn open_output(&self, rank: Rank) -> Result<Option<OutputFile>> {
        match &self.outputs.result {
            Some(target) => target.open(self.world(), rank, self.agreed.members[rank.0 as usize]),
            None => Ok(None),
        }
    }

    /// What the result lacks when ranks were lost.
    fn lacks(&self) -> Failure {
        let queries = &self.world().lost.queries;
        Failure {
            exit: EXIT_LACKS,
            ..Failure::run(format!(
                "queries {queries} have no answer, their ranks were lost; the other {} are answered over all keys",
                self.world().problem.q_len as usize - queries.len()
            ))
        }
    }

    fn compute(&self, rank: Rank, resumable: &mut AnyResumable<'_>) -> Result<Computed> {
        let mut spans = Vec::new();
        let (mut last, mut walls_ns) = (None, Vec::new());
        resumable.run(self.resumable, |op, mut output| {
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
        let messages =
            Messages { transport: &**transport, op: self.runs.repeat, deadline: self.runs.deadline };
        let trace = match &self.outputs.trace {
            Some(path) => {
                let track = Track { rank, device: backend.info().name.clone(), spans };
                let told = track.tell(path, &messages, &*self.runs.options.clock);
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
            progress: Progress { op: self.runs.repeat, step: 0 },
        });
        failure
    }
}

/// Exit code of a result that is right and lacks the answers of ranks that were lost.
pub(crate) const EXIT_LACKS: u8 = 3;
/// How long a rank that failed waits for the others to hear of it.
const LEAVE: Duration = Duration::from_secs(3);
