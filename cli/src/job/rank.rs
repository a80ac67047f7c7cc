//! The work of one rank. The same for a rank in its own process and for ranks of one process.

use std::time::Duration;

use kyklos::backend::{Backend, Device, DeviceClass};
use kyklos::host::Tensors;
use kyklos::{LoweredPlan, Session, SessionOptions, Span, plan};
use kyklos_transport::{Abort, AbortCause, Group, Progress, Rank, Transport};

use crate::activity;
use crate::devices::DeviceReport;
use crate::failure::{Failure, Result, note};
use crate::job::call::Job;
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
use crate::observe::trace::{self, Track};
use crate::request::Request;
use crate::run::call::RankCall;
use crate::tensors::output::OutputFile;
use crate::tensors::results::{HostGradients, HostOutput};
use crate::tensors::{GivenGradient, Source};

/// What a rank prepares before it votes.
struct Ready {
    device: Device,
    tensors: Tensors,
    /// With `--grad`.
    gradient: Option<GivenGradient>,
    /// The files that this rank writes, before they have their names; the page on rank 0.
    output: Option<OutputFile>,
    page: Option<PageFile>,
}

/// The output of a rank, before it is delivered.
struct Computed {
    output: HostOutput,
    /// With `--grad`.
    backward: Option<Backward>,
    /// Of runs before the last one, if there is a trace of them.
    earlier: Vec<Span>,
    /// Of the last run, forward and backward.
    spans: [Vec<Span>; 2],
    wall_ns: u64,
}

/// Runs a rank, tells the others if it fails, and leaves the group. Returns why the computed result
/// must not be used or is not where it should be, if so.
pub(crate) fn run(job: &Job, transport: &Group, device: Result<Device>) -> Result<Option<Failure>> {
    let result = work(job, transport, device);
    leave(job, transport, &result);
    result
}

/// As [`run`], and stays in the group.
pub(crate) fn work(job: &Job, transport: &Group, device: Result<Device>) -> Result<Option<Failure>> {
    let flight = job.list(transport);
    let Ready { device, tensors, gradient, output, page } = match job.get_ready(&**transport, device) {
        Ok(ready) => ready,
        Err(failure) => {
            let result = Err(failure);
            flight.ended(&result);
            return result;
        }
    };
    let result = open(job, transport, device, &flight.0).and_then(|mut session| {
        let computed = pollster::block_on(job.compute(&mut session, tensors, gradient.as_ref()))?;
        job.deliver(transport, session.device(), computed, (output, page))
    });
    flight.ended(&result);
    result
}

/// Leaves the group.
pub(crate) fn leave(job: &Job, transport: &Group, result: &Result<Option<Failure>>) {
    let well = matches!(result, Ok(None));
    let left = pollster::block_on(transport.close(if well { job.settings.deadline } else { LEAVE }));
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
        if transport.size() > 1 {
            activity::doing("waiting until every rank has agreed on the call");
        }
        self.agree(transport)?;
        if self.outputs.watched {
            let devices = self.tell_devices(transport, &DeviceReport::new(device.info()).label())?;
            if let (Some(live), 0) = (&self.outputs.live, transport.rank().0) {
                live.devices(devices);
            }
        }
        self.read_inputs(transport.rank(), device).map_err(refused)
    }

    /// Refuses a device that cannot run this rank's plan.
    fn check(&self, rank: Rank, device: Device) -> Result<Device> {
        let problem = &self.request.problem;
        device.supports(problem.dtype, problem.head_dim as usize)?;
        LoweredPlan::check_states(self.set(), rank, device.most_state_bytes())?;
        if problem.fixed_order {
            device.supports_fixed_order()?;
        }
        if self.backward.is_some() {
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
        let Self { plans, backward, .. } = self;
        let peak = backward.iter().chain([plans]).map(|plans| plans.peak_bytes(rank)).max().unwrap_or(0);
        let ranks = self.settings.ranks_here;
        match self.settings.memory_bytes() {
            Some(memory) if self.settings.are_processes && peak.saturating_mul(u64::from(ranks)) > memory => {
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

    fn read_inputs(&self, rank: Rank, device: Device) -> Result<Ready> {
        let Request { problem, source, .. } = &self.request;
        let (q_tokens, kv_tokens) =
            (self.set().q_placement.of_rank(rank), &self.set().kv_placement.held_by(rank));
        activity::doing(match source {
            Source::Random { .. } => "making random tensors",
            Source::File(_) => "reading the input",
        });
        let tensors = source.all(problem, q_tokens, kv_tokens)?;
        let wanted = self.backward.is_some();
        let gradient = wanted.then(|| source.output_gradient(problem, q_tokens)).transpose()?;
        source.check_unchanged()?;
        let output = match &self.outputs.result {
            Some(target) => {
                let names = (rank, self.members[rank.0 as usize]);
                target.open(self.set(), names, self.backward.is_some())?
            }
            None => None,
        };
        if let Some(path) = &self.outputs.trace {
            trace::check(path, rank)?;
        }
        let page = self.outputs.page.as_ref().filter(|_| rank.0 == 0);
        let page = page.map(PageTarget::open).transpose()?;
        Ok(Ready { device, tensors, gradient, output, page })
    }

    async fn compute(
        &self,
        session: &mut Session,
        tensors: Tensors,
        gradient: Option<&GivenGradient>,
    ) -> Result<Computed> {
        let Self { plans, backward, .. } = self;
        activity::doing("copying the tensors to the device");
        let call = RankCall::open(session, plans, tensors, backward.as_ref().zip(gradient)).await?;
        let rank = session.rank();
        activity::doing(match self.set().mesh.size() {
            1 => "preparing the call",
            _ => "preparing the call, for which every rank has to be ready",
        });
        let (mut earlier, mut spans) = (Vec::new(), [Vec::new(), Vec::new()]);
        let (mut results, mut walls_ns) = (None, [Vec::new(), Vec::new()]);
        let mut ops = 0..;
        for _ in 0..self.settings.repeat {
            // They stay on the device until they are dropped.
            drop(results.take());
            let mut output = call.attend(session).await?;
            walls_ns[0].push(self.watch.since_start_ns(rank));
            self.watch.done(rank, ops.next().unwrap_or_default());
            if self.outputs.trace.is_some() {
                spans.iter_mut().for_each(|spans| earlier.append(spans));
            }
            spans = [std::mem::take(&mut output.spans), Vec::new()];
            let mut gradients = call.backward(session, &output).await?;
            if let Some(backward) = &mut gradients {
                walls_ns[1].push(self.watch.since_start_ns(rank));
                self.watch.done(rank, ops.next().unwrap_or_default());
                spans[1] = std::mem::take(&mut backward.spans);
            }
            results = Some((output, gradients));
        }
        let (output, gradients) = results.ok_or_else(|| Failure::run("no run took place"))?;
        // The median: the first run also allocates memory and compiles shaders.
        let [wall_ns, backward_ns] = walls_ns.map(|mut walls_ns| {
            walls_ns.sort_unstable();
            walls_ns.get(walls_ns.len() / 2).copied().unwrap_or(0)
        });
        activity::doing("copying the results from the device");
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
        Ok(Computed { output, backward, earlier, spans, wall_ns })
    }

    /// Collects timelines, reports and output, and publishes them.
    fn deliver(
        &self,
        transport: &Group,
        device: &Device,
        computed: Computed,
        (file, page): (Option<OutputFile>, Option<PageFile>),
    ) -> Result<Option<Failure>> {
        let Computed { output, backward, earlier, spans, wall_ns } = computed;
        activity::doing("collecting the reports of all ranks");
        let messages =
            Messages { transport: &**transport, op: self.operations(), deadline: self.settings.deadline };
        let pictures = self
            .draw(&messages, &device.info().name, (earlier, spans), page)
            .map_err(|failure| self.give_up(&**transport, failure))?;
        let collected = self
            .collect(transport, device, &Results { output, wall_ns, backward }, file)
            .map_err(|failure| self.give_up(&**transport, failure))?;
        self.publish(&**transport, collected, pictures)
    }

    /// Collects timelines, if they are asked for: for the trace, and on rank 0 for the page.
    fn draw(
        &self,
        messages: &Messages<'_>,
        device: &str,
        (mut earlier, [forward, backward]): (Vec<Span>, [Vec<Span>; 2]),
        page: Option<PageFile>,
    ) -> Result<Pictures> {
        let Outputs { trace, .. } = &self.outputs;
        let wanted = self.outputs.has_page();
        if trace.is_none() && !wanted {
            return Ok(Pictures::default());
        }
        let rank = messages.transport.rank();
        let ahead = Ahead::measure(messages, &*self.options.clock)?;
        let row = |spans: &[Span]| TimelineRow::of_spans(spans, ahead, messages.transport.size());
        let (mut rows, mut backward_rows) = (None, None);
        if wanted {
            rows = row(&forward).collect(messages)?;
            if self.backward.is_some() {
                // The messages of each pass have an operation of their own.
                let messages = Messages { op: messages.op + BACKWARD_ROWS, ..*messages };
                backward_rows = row(&backward).collect(&messages)?;
            }
        }
        let trace = match trace {
            Some(path) => {
                earlier.extend(forward.into_iter().chain(backward));
                Track { rank, device: device.to_owned(), spans: earlier }.tell(path, messages, ahead)?
            }
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
        deadline: job.settings.deadline,
        run: job.options.clone(),
        ..SessionOptions::default()
    };
    let (session, agreed) = job.settings.ways.open(transport, device, options)?;
    if let Some((words, nccl)) = agreed {
        flight.messages_go(words, nccl);
    }
    Ok(session)
}
