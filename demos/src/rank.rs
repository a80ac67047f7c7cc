//! One rank, from its own tokens to everyone's result. The same for ranks of one process and for a rank that is one.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kyklos::collect::{receive_output, send_output};
use kyklos::local::{RankTask, Tensors};
use kyklos::plan::{RankCheck, World};
use kyklos::{Error, Finished, RankOutput, RunOptions, Span, Survivors};
use kyklos_tests::oracle::Row;
use kyklos_transport::{Abort, AbortCause, Posted, Progress, Rank, Tag, Transport, TransportError, Vote};

use crate::device::{AnyBackend, AnyLasting, DeviceId};
use crate::failure::{Failure, Result, note};
use crate::on_loss::Losses;
use crate::output::{OutputFile, OutputTarget};
use crate::progress::Watch;
use crate::record::Flight;
use crate::report::{Lost, NOTE_BYTES, RankNote, Summary};
use crate::request::Request;
use crate::trace::{Trace, Track};
use crate::verify::{Sample, Verdict};

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
        let Tensors { q, k, v, pairs } = tensors;
        RankTask {
            world: &self.world,
            transport: transport.clone(),
            plan_hash: self.plan_hash,
            peak_bytes: self.checks[transport.rank().0 as usize].peak_bytes,
            q,
            k,
            v,
            pairs,
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

    /// Reports, sampled rows and output go to rank 0. Returns rank 0's summary, and why the result is rejected if it is.
    fn collect(
        &self,
        transport: &Arc<dyn Transport>,
        backend: &AnyBackend,
        output: &RankOutput,
        wall_ns: u64,
        file: Option<OutputFile>,
    ) -> Result<(Option<Summary>, Option<Failure>)> {
        let lines = Lines { transport: &**transport, op: self.repeat, deadline: self.deadline };
        let mine = RankNote::new(backend.info(), &output.report, wall_ns);
        let rank = transport.rank();
        if rank.0 != 0 {
            lines.send(Rank(0), NOTE, mine.encode()?.into())?;
            if let Some(sample) = &self.sample {
                self.send_rows(&lines, sample, backend, output)?;
            }
            let rejected = match (&self.output, file) {
                (_, Some(file)) => self.write_part(&**transport, file, output, None),
                (Some(OutputTarget::Whole(_)), None) => {
                    self.watch.phase(Some("sending the output"));
                    pollster::block_on(send_output(
                        lines.transport,
                        &self.world,
                        self.repeat + 1,
                        &output.o,
                        &output.lse,
                        self.deadline,
                    ))?;
                    None
                }
                _ => None,
            };
            return Ok((None, rejected));
        }

        let mut ranks = vec![mine];
        for other in (1..transport.world()).map(Rank) {
            ranks.push(RankNote::decode(&lines.recv(other, NOTE, NOTE_BYTES)?)?);
        }
        let verdict = match &self.sample {
            Some(sample) => Some(self.verify(&lines, sample, backend, output, &ranks)?),
            None => None,
        };
        let wrong = verdict.as_ref().and_then(|verdict| verdict.failure.as_ref());
        let wrong = wrong.map(|failure| Failure::run(format!("verification failed: {failure}")));
        let mut output_bytes = 0;
        let rejected = match (&self.output, file) {
            (Some(OutputTarget::Parts(_)), Some(file)) => self.write_part(&**transport, file, output, wrong),
            (Some(OutputTarget::Whole(_)), Some(file)) => {
                self.watch.phase(Some("writing the output"));
                pollster::block_on(receive_output::<Failure>(
                    lines.transport,
                    &self.world,
                    self.repeat + 1,
                    &output.o,
                    &output.lse,
                    self.deadline,
                    |piece| {
                        if piece.rank.0 != 0 {
                            output_bytes += (piece.o.len() + piece.lse.len()) as u64;
                        }
                        file.write_piece(&self.world, &piece)
                    },
                ))?;
                // A result that is known to be wrong gets no name.
                if wrong.is_none() {
                    file.commit()?;
                }
                wrong
            }
            _ => wrong,
        };
        let summary = Summary {
            wall_s: ranks.iter().map(|rank| rank.wall_s).fold(0.0, f64::max),
            ranks,
            verdict,
            output_bytes,
            lost: Lost::of(self),
        };
        Ok((Some(summary), rejected))
    }

    /// Writes this rank's part, and names it once all ranks have written theirs and rank 0 has found nothing `wrong`.
    /// Returns what came between: to every rank the same reason, except that rank 0 tells its own in full.
    fn write_part(
        &self,
        transport: &dyn Transport,
        file: OutputFile,
        output: &RankOutput,
        wrong: Option<Failure>,
    ) -> Option<Failure> {
        self.watch.phase(Some("writing the output"));
        if let Some(wrong) = wrong {
            refuse(transport, Failure::run("verification failed, rank 0 says how: no part is kept"));
            return Some(wrong);
        }
        if let Err(failure) = file.write_part(&output.o, &output.lse) {
            return Some(refuse(transport, self.named(transport.rank(), failure)));
        }
        let vote = Vote::Ready { plan_hash: self.plan_hash };
        // Rank 0 votes after it has verified, which no deadline for messages has anything to do with.
        match pollster::block_on(transport.agree(vote, self.deadline.max(REFUSE))) {
            Ok(()) => file.commit().map_err(|failure| self.named(transport.rank(), failure)).err(),
            Err(error) => Some(error.into()),
        }
    }

    /// A rank's part in the verification: its sampled rows, and all of them computed alone if rank 0 wants that.
    fn send_rows(
        &self,
        lines: &Lines<'_>,
        sample: &Sample,
        backend: &AnyBackend,
        output: &RankOutput,
    ) -> Result<()> {
        let tokens = self.world.q_placement.of_rank(lines.transport.rank());
        let rows = sample.extract(tokens, &output.o, &output.lse);
        if !rows.is_empty() {
            lines.send(Rank(0), ROWS, rows)?;
        }
        let asked = lines.recv(Rank(0), ALONE, 1)?;
        if asked[..] == [1] {
            self.watch.phase(Some("computing the sampled rows alone"));
            let rows = sample.dense(backend, self.begun(), &sample.whole_kv()?, &self.quiet())?;
            if !rows.is_empty() {
                lines.send(Rank(0), ALONE_ROWS, rows)?;
            }
        }
        Ok(())
    }

    /// Rank 0's part: everybody's rows against the oracle, within what the devices reach alone.
    fn verify(
        &self,
        lines: &Lines<'_>,
        sample: &Sample,
        backend: &AnyBackend,
        output: &RankOutput,
        ranks: &[RankNote],
    ) -> Result<Verdict> {
        self.watch.phase(Some("verifying"));
        let others = || (1..lines.transport.world()).map(Rank);
        let mut rows: Vec<Row> = Vec::new();
        for rank in std::iter::once(Rank(0)).chain(others()) {
            let ids = sample.rows_of(&self.world, rank);
            let bytes = match (rank.0, ids.len()) {
                (_, 0) => continue,
                (0, _) => sample.extract(self.world.q_placement.of_rank(rank), &output.o, &output.lse),
                (_, count) => lines.recv(rank, ROWS, sample.row_bytes(count))?,
            };
            rows.extend(sample.decode(&ids, &bytes));
        }
        // One rank of every kind of device computes alone.
        let mut seen = vec![&ranks[0].device];
        let mut asked = Vec::new();
        for (rank, note) in others().zip(&ranks[1..]) {
            let first = !seen.contains(&&note.device);
            lines.send(rank, ALONE, vec![u8::from(first)].into())?;
            if first {
                seen.push(&note.device);
                asked.push((rank, note));
            }
        }
        let kv = sample.whole_kv()?;
        let alone = sample.dense(backend, self.begun(), &kv, &self.quiet())?;
        let mut dense = vec![(ranks[0].device.label(), sample.decode(sample.rows(), &alone))];
        for (rank, note) in asked {
            let bytes = match sample.row_bytes(sample.rows().len()) {
                0 => Bytes::new(),
                size => lines.recv(rank, ALONE_ROWS, size)?,
            };
            dense.push((note.device.label(), sample.decode(sample.rows(), &bytes)));
        }
        let shared =
            format!("{} on {} ranks, mesh {}", self.request.strategy, ranks.len(), self.request.mesh);
        sample.judge(rows, &dense, &kv, &shared)
    }

    /// Options for runs that nobody watches.
    fn quiet(&self) -> RunOptions {
        RunOptions { observer: Arc::new(kyklos::NoObserver), trace: false, ..self.options.clone() }
    }
}

/// Small messages of an operation of their own.
pub(crate) struct Lines<'a> {
    pub(crate) transport: &'a dyn Transport,
    op: u64,
    deadline: Duration,
}

impl Lines<'_> {
    pub(crate) fn send(&self, to: Rank, message: u32, bytes: Bytes) -> Result<()> {
        Ok(pollster::block_on(self.post(to, message, bytes))?)
    }

    /// Starts sending.
    pub(crate) fn post(&self, to: Rank, message: u32, bytes: Bytes) -> Posted<()> {
        let tag = Tag { op: self.op, message };
        self.transport.post_send(to, tag, vec![bytes], self.deadline)
    }

    pub(crate) fn recv(&self, from: Rank, message: u32, bytes: usize) -> Result<Bytes> {
        let tag = Tag { op: self.op, message };
        let mut parts = pollster::block_on(self.transport.post_recv(from, tag, &[bytes], self.deadline))?;
        parts.pop().ok_or_else(|| {
            Error::from(TransportError::PeerMisbehaved { peer: from, text: "an empty message".to_owned() })
                .into()
        })
    }
}

/// Exit code of a result that is right and lacks the answers of ranks that were lost.
pub(crate) const EXIT_LACKS: u8 = 3;
/// A rank's [`RankNote`].
const NOTE: u32 = 0;
/// Whether a rank is asked to compute the sample alone.
const ALONE: u32 = 1;
/// The sampled rows that a rank owns.
const ROWS: u32 = 2;
/// All sampled rows, computed alone.
const ALONE_ROWS: u32 = 3;
/// How long a refusal waits for the others' votes: as long as they may take to get there.
const REFUSE: Duration = Duration::from_secs(600);
/// How long a rank that failed waits for the others to hear of it.
const LEAVE: Duration = Duration::from_secs(3);
