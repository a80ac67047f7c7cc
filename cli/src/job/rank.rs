//! The work of one rank. The same for a rank in its own process and for ranks of one process.

use std::time::Duration;

use kyklos::backend::{Backend, Device, DeviceClass};
use kyklos::host::Tensors;
use kyklos::machine::memory_bytes;
use kyklos::{Session, SessionOptions, Span, plan};
use kyklos_transport::{Abort, AbortCause, Group, Progress, Rank, Transport};

use crate::devices::DeviceReport;
use crate::failure::{Failure, Result, note};
use crate::job::call::{Agreed, Job};
use crate::job::collective::AgreedWays;
use crate::job::refusal::refuse;
use crate::job::results::collect::Results;
use crate::job::results::gradients::{BACKWARD_ROWS, Backward};
use crate::job::results::page::PageParts;
use crate::job::results::publish::Pictures;
use crate::job::settings::Outputs;
use crate::messages::Messages;
use crate::observe::clocks::Ahead;
use crate::observe::page::model::TimelineRow;
use crate::observe::page::target::{PageFile, PageTarget};
use crate::observe::record::Flight;
use crate::observe::trace::Track;
use crate::request::Request;
use crate::run::call::RankCall;
use crate::tensors::GivenGradient;
use crate::tensors::output::OutputFile;
use crate::tensors::results::{HostGradients, HostOutput};

/// The results of a rank.
#[derive(Debug)]
pub(crate) struct RankDone {
    /// Why the computed result must not be used, or is not where it should be.
    pub(crate) rejected: Option<Failure>,
}

impl RankDone {
    /// Why the rank does not end well, if it does not.
    pub(crate) fn failure(self) -> Option<Failure> {
        self.rejected
    }
}

/// What a rank prepares before it votes.
struct Ready {
    device: Device,
    tensors: Tensors,
    /// With `--grad`.
    gradient: Option<GivenGradient>,
    files: Files,
}

/// The files that a rank writes, before they have their names.
#[derive(Default)]
struct Files {
    output: Option<OutputFile>,
    /// On rank 0.
    page: Option<PageFile>,
}

/// The output of a rank, before it is delivered.
struct Computed {
    output: HostOutput,
    /// With `--grad`.
    backward: Option<Backward>,
    /// Of all runs, if there is a trace of them, else of the last one.
    spans: Vec<Span>,
    last: LastRun,
    wall_ns: u64,
}

/// Indices of the first spans of the last run.
#[derive(Clone, Copy, Default)]
struct LastRun {
    forward: usize,
    /// With `--grad`.
    backward: Option<usize>,
}

/// What timelines are made from.
struct Drawn<'a> {
    /// Name of the device.
    device: &'a str,
    spans: Vec<Span>,
    last: LastRun,
}

/// Runs a rank, tells the others if it fails, and leaves the group.
pub(crate) fn run(job: &Job, transport: &Group, device: Result<Device>) -> Result<RankDone> {
    let result = work(job, transport, device);
    leave(job, transport, &result);
    result
}

/// Runs a rank, and tells the others if it fails.
pub(crate) fn work(job: &Job, transport: &Group, device: Result<Device>) -> Result<RankDone> {
    let flight = job.list(transport);
    let Ready { device, tensors, gradient, files } = match job.get_ready(&**transport, device) {
        Ok(ready) => ready,
        Err(failure) => {
            let result = Err(failure);
            flight.ended(&result);
            return result;
        }
    };
    let result = open(job, transport, device, &flight.0).and_then(|mut session| {
        let computed = pollster::block_on(job.compute(&mut session, tensors, gradient.as_ref()))?;
        job.deliver(transport, session.device(), computed, files)
    });
    flight.ended(&result);
    result
}

/// Leaves the group.
pub(crate) fn leave(job: &Job, transport: &Group, result: &Result<RankDone>) {
    let well = result.as_ref().is_ok_and(|done| done.rejected.is_none());
    let left = pollster::block_on(transport.close(if well { job.runs.deadline } else { LEAVE }));
    // The work is done: a peer that fails now changes nothing.
    if let (true, Err(error)) = (well, left) {
        note(&format!("warning: rank {}: {error}", transport.rank()));
    }
}

impl Job {
    /// Checks the device, agrees with all ranks on the call and its inputs, and reads this rank's
    /// tensors. If that fails here, all ranks get the failure.
    fn get_ready(&self, transport: &dyn Transport, device: Result<Device>) -> Result<Ready> {
        let refused = |failure| refuse(transport, self.named(transport.rank(), failure));
        let device = device.and_then(|device| self.check(transport.rank(), device)).map_err(refused)?;
        self.agree(transport)?;
        if self.outputs.watched {
            let devices = self.tell_devices(transport, &DeviceReport::new(device.info()).label())?;
            if let (Some(live), 0) = (&self.outputs.live, transport.rank().0) {
                live.devices(devices);
            }
        }
        let (tensors, gradient, files) = self.read_inputs(transport.rank()).map_err(refused)?;
        Ok(Ready { device, tensors, gradient, files })
    }

    /// Refuses a device that cannot run this rank's plan.
    fn check(&self, rank: Rank, device: Device) -> Result<Device> {
        let problem = &self.agreed.request.problem;
        device.supports(problem.dtype, problem.head_dim as usize)?;
        if self.agreed.backward.is_some() {
            device.supports_backward(problem.dtype, problem.head_dim as usize)?;
            if problem.bias_gradient {
                device.supports_bias_gradient()?;
            }
        }
        if matches!(device.info().class, DeviceClass::Cpu | DeviceClass::SoftwareGpu) {
            self.fits_in_memory(rank)?;
        }
        Ok(device)
    }

    /// Refuses a plan whose buffers do not fit the memory of this machine, which the ranks here
    /// share. Ranks of one process share buffers too, so theirs cannot be added up.
    fn fits_in_memory(&self, rank: Rank) -> Result<()> {
        let Agreed { plans, backward, .. } = &self.agreed;
        let peak = backward.iter().chain([plans]).map(|plans| plans.peak_bytes(rank)).max().unwrap_or(0);
        let ranks = self.runs.ranks_here;
        match memory_bytes() {
            Some(memory) if self.runs.are_processes && peak.saturating_mul(u64::from(ranks)) > memory => {
                Err(Failure::request(
                    format!(
                        "the plan of rank {rank} takes {}, and the {ranks} ranks of its machine share {}",
                        plan::bytes(peak),
                        plan::bytes(memory)
                    ),
                    "use fewer tokens, heads or ranks here, or another strategy: kyklos plan prints the memory of each",
                ))
            }
            _ => Ok(()),
        }
    }

    fn read_inputs(&self, rank: Rank) -> Result<(Tensors, Option<GivenGradient>, Files)> {
        let Request { problem, source, .. } = &self.agreed.request;
        let (q_tokens, kv_tokens) =
            (self.set().q_placement.of_rank(rank), &self.set().kv_placement.held_by(rank));
        let tensors = source.all(problem, q_tokens, kv_tokens)?;
        let wanted = self.agreed.backward.is_some();
        let gradient = wanted.then(|| source.output_gradient(problem, q_tokens)).transpose()?;
        source.check_unchanged()?;
        Ok((tensors, gradient, self.open_files(rank)?))
    }

    /// The files that this rank writes, if any.
    fn open_files(&self, rank: Rank) -> Result<Files> {
        let output = match &self.outputs.result {
            Some(target) => {
                let names = (rank, self.agreed.members[rank.0 as usize]);
                target.open(self.set(), names, self.agreed.backward.is_some())?
            }
            None => None,
        };
        let page = self.outputs.page.as_ref().filter(|_| rank.0 == 0);
        Ok(Files { output, page: page.map(PageTarget::open).transpose()? })
    }

    async fn compute(
        &self,
        session: &mut Session,
        tensors: Tensors,
        gradient: Option<&GivenGradient>,
    ) -> Result<Computed> {
        let Agreed { plans, backward, .. } = &self.agreed;
        let call = RankCall::open(session, plans, tensors, backward.as_ref().zip(gradient)).await?;
        let rank = session.rank();
        let mut spans = Vec::new();
        let (mut results, mut last, mut walls_ns) = (None, LastRun::default(), [Vec::new(), Vec::new()]);
        let mut ops = 0..;
        for _ in 0..self.runs.repeat {
            // They stay on the device until they are dropped.
            drop(results.take());
            let mut output = call.attend(session).await?;
            walls_ns[0].push(self.watch.since_start_ns(rank));
            self.watch.done(rank, ops.next().unwrap_or_default());
            if self.outputs.trace.is_none() {
                spans.clear();
            }
            last = LastRun { forward: spans.len(), backward: None };
            spans.append(&mut output.spans);
            let mut gradients = call.backward(session, &output).await?;
            if let Some(backward) = &mut gradients {
                walls_ns[1].push(self.watch.since_start_ns(rank));
                self.watch.done(rank, ops.next().unwrap_or_default());
                last.backward = Some(spans.len());
                spans.append(&mut backward.spans);
            }
            results = Some((output, gradients));
        }
        let (output, gradients) = results.ok_or_else(|| Failure::run("no run took place"))?;
        // The median: the first run also allocates memory and compiles shaders.
        let [wall_ns, backward_ns] = walls_ns.map(|mut walls_ns| {
            walls_ns.sort_unstable();
            walls_ns.get(walls_ns.len() / 2).copied().unwrap_or(0)
        });
        let to_host = async {
            let gradients = match gradients {
                Some(gradients) => Some(HostGradients::of(gradients).await?),
                None => None,
            };
            Ok::<_, kyklos::Error>((HostOutput::of(output).await?, gradients))
        };
        let (output, gradients) =
            to_host.await.map_err(|error| self.give_up(&**session.group(), error.into()))?;
        let backward = gradients.map(|gradients| Backward { gradients, wall_ns: backward_ns });
        Ok(Computed { output, backward, spans, last, wall_ns })
    }

    /// Collects timelines, reports and output, and publishes them.
    fn deliver(
        &self,
        transport: &Group,
        device: &Device,
        computed: Computed,
        files: Files,
    ) -> Result<RankDone> {
        let Computed { output, backward, spans, last, wall_ns } = computed;
        let Files { output: file, page } = files;
        let messages =
            Messages { transport: &**transport, op: self.operations(), deadline: self.runs.deadline };
        let drawn = Drawn { device: &device.info().name, spans, last };
        let pictures =
            self.draw(&messages, drawn, page).map_err(|failure| self.give_up(&**transport, failure))?;
        let collected = self
            .collect(transport, device, &Results { output, wall_ns, backward }, file)
            .map_err(|failure| self.give_up(&**transport, failure))?;
        let rejected = self.publish(&**transport, collected, pictures)?;
        Ok(RankDone { rejected })
    }

    /// Collects timelines, if they are asked for: for the trace, and on rank 0 for the page.
    fn draw(&self, messages: &Messages<'_>, drawn: Drawn<'_>, page: Option<PageFile>) -> Result<Pictures> {
        let Outputs { trace, .. } = &self.outputs;
        let wanted = self.outputs.has_page();
        if trace.is_none() && !wanted {
            return Ok(Pictures::default());
        }
        let Drawn { device, spans, last: LastRun { forward, backward } } = drawn;
        let rank = messages.transport.rank();
        let ahead = Ahead::measure(messages, &*self.runs.options.clock)?;
        let row = |spans: &[Span]| TimelineRow::of_spans(spans, ahead, messages.transport.size());
        let (mut rows, mut backward_rows) = (None, None);
        if wanted {
            rows = row(&spans[forward..backward.unwrap_or(spans.len())]).collect(messages)?;
            if let Some(backward) = backward {
                // The messages of each pass have an operation of their own.
                let messages = Messages { op: messages.op + BACKWARD_ROWS, ..*messages };
                backward_rows = row(&spans[backward..]).collect(&messages)?;
            }
        }
        let trace = match trace {
            Some(path) => Track { rank, device: device.to_owned(), spans }.tell(path, messages, ahead)?,
            None => None,
        };
        Ok(Pictures { trace, page: rows.map(|rows| PageParts { file: page, rows, backward_rows }) })
    }

    /// Aborts the group after a failure that only this rank knows.
    fn give_up(&self, transport: &dyn Transport, failure: Failure) -> Failure {
        transport.abort(Abort {
            culprit: transport.rank(),
            cause: AbortCause::Failed(failure.text.clone()),
            progress: Progress { op: self.operations(), step: 0 },
        });
        failure
    }
}

/// How long a failed rank stays, so that the others learn of the failure.
const LEAVE: Duration = Duration::from_secs(3);

/// A session of this rank. `flight` knows how the messages go.
fn open(job: &Job, transport: &Group, device: Device, flight: &Flight) -> Result<Session> {
    let options = SessionOptions {
        deadline: job.runs.deadline,
        run: job.runs.options.clone(),
        ..SessionOptions::default()
    };
    let (session, agreed) = job.runs.ways.open(transport, device, options)?;
    if let Some(AgreedWays { ways, nccl, .. }) = agreed {
        flight.messages_go(ways, nccl);
    }
    Ok(session)
}
