//! `kyklos attend`: as one rank of a launcher's, or with all ranks in this process.

mod args;

use std::sync::Arc;
use std::time::Duration;

use kyklos::{Mesh, RunOptions, SystemClock, can_repair, plan};
use kyklos_transport::quic::quic_loopback_group_over;
use kyklos_transport::{Rank, Transport, in_process_group};

pub(crate) use self::args::AttendArgs;
use crate::devices::{self, DeviceId, DeviceRequest};
use crate::entrance::Entrance;
use crate::failure::{Failure, Result, note, print};
use crate::interrupt;
use crate::job::on_loss::{self, LossPolicy, Losses, Lost};
use crate::job::rank::{self, Job, RankDone};
use crate::launchers::{self, Launched, Variables};
use crate::observe::metrics;
use crate::observe::progress::Watch;
use crate::observe::record;
use crate::observe::trace;
use crate::options::{OnLoss, OrAuto, TransportName};
use crate::request::Request;
use crate::tensors::output::{OutputTarget, keep_apart};
use crate::verify::Sample;

/// Runs the command.
pub(crate) fn attend(args: &AttendArgs) -> Result<()> {
    let variables = Variables::of_this_process();
    if let (Some(ranks), false) = (args.problem.ranks, launchers::by_kyklos(&variables)) {
        if let Some(flag) = args.group.first() {
            return Err(Failure::request(
                format!("--ranks {ranks} with {flag}"),
                "--ranks puts all ranks into this process, so leave one of the two away",
            ));
        }
        if let Some(said) = launchers::hints(&variables) {
            note(&format!(
                "warning: --ranks puts all ranks into this process; {said} in the environment is not used"
            ));
        }
        return here(args);
    }
    let entrance = Entrance::of(&args.group, &variables, &args.network)?;
    match launchers::find(&args.group, &variables, entrance.source()?)? {
        Some(launched) => as_rank(args, &launched, &entrance),
        None => here(args),
    }
}

/// What a launched `attend` is, refusing what only makes sense without a launcher.
pub(crate) fn launched_request(args: &AttendArgs, world: u32, local_world: u32) -> Result<Request> {
    if let Some(ranks) = args.problem.ranks {
        return Err(Failure::request(
            format!("--ranks {ranks} under a launcher that starts {world} processes"),
            "leave --ranks away: every process is one rank",
        ));
    }
    if args.transport == Some(TransportName::InProcess) {
        return Err(Failure::request(
            format!("--transport in-process between {world} processes"),
            "leave it away, or use quic",
        ));
    }
    metrics::check(&args.metrics)?;
    devices_fit(args, local_world)?;
    let request = Request::new(&args.problem, args.seed, Some(world))?;
    if args.on_loss.finishes() {
        can_repair(&request.problem, request.mesh, request.strategy)?;
    }
    Ok(request)
}

fn as_rank(args: &AttendArgs, launched: &Launched, entrance: &Entrance) -> Result<()> {
    launched.end_with_launcher();
    interrupt::end_on_interrupt()?;
    record::write_on_request()?;
    if args.group.rejoin && args.on_loss != OnLoss::Rejoin {
        return Err(Failure::request(
            "--rejoin without --on-loss rejoin",
            "give both, as the other ranks have the latter",
        ));
    }
    let mut metrics = metrics::serve(&args.metrics, launched.rank, launched.local_rank);
    let mut group = launched.connect(&args.group, &args.network, entrance)?;
    let patience = Duration::from_secs(u64::from(args.group.join_deadline.get()));
    let policy = LossPolicy { on_loss: args.on_loss, patience };
    let mut lost: Option<Lost> = None;
    loop {
        let transport = &group.transport;
        on_loss::end_if_stuck(&group);
        let refuse = |failure| {
            let failure = rank::refuse(&**transport, failure);
            let _ = pollster::block_on(transport.close(Duration::from_secs(3)));
            failure
        };
        let world = transport.world();
        let request = launched_request(args, world, launched.local_world).map_err(|failure| {
            if world == launched.world { failure } else { on_loss::does_not_fit(world, &failure) }
        });
        let job = std::mem::replace(&mut metrics, Ok(()))
            .and(request)
            .and_then(|request| job(args, request, launched.local_world, group.members.clone()))
            .map_err(refuse)?;
        if transport.rank().0 == 0 {
            match &lost {
                Some(lost) => lost.tell(&group, &job),
                None if args.group.rejoin => on_loss::tell_rejoined(&group, &job),
                None => job.request.source.warning().iter().for_each(|warning| note(warning)),
            }
        }
        let mut losses = Losses::new(policy, &group);
        let done = rank::work(&job, transport, device_of(args, launched), Some(&mut losses));
        job.watch.phase(None);
        if let Some((ended, next, begins_again)) = losses.into_next() {
            group = next;
            if begins_again {
                if let (0, Err(failure)) = (group.transport.rank().0, &done) {
                    note(&format!("it cannot be finished: {}", failure.text));
                }
                lost = Some(ended);
                continue;
            }
            rank::leave(&job, &group.transport, &done);
            return tell(args, &job, vec![(group.transport.rank().0, done?)]);
        }
        let begins_again = matches!(args.on_loss, OnLoss::Shrink | OnLoss::Rejoin);
        let failure = done.as_ref().err().filter(|_| begins_again);
        let Some(ended) = failure.and_then(|failure| Lost::of(&group, failure)) else {
            rank::leave(&job, transport, &done);
            return tell(args, &job, vec![(transport.rank().0, done?)]);
        };
        group = ended.go_on(policy, &**transport)?;
        lost = Some(ended);
    }
}

/// The device of a launched rank: by `--device`, or by the cluster file.
fn device_of(args: &AttendArgs, launched: &Launched) -> Result<DeviceId> {
    match (launched.device, &args.device.0[..]) {
        (Some(device), [DeviceRequest::Auto]) => devices::choose(&[device], 0),
        (Some(device), _) if args.device.0 != [device] => Err(Failure::request(
            format!("--device {} and device {device} of the cluster file", args.device),
            "leave one of them away",
        )),
        (_, devices) => devices::choose(devices, launched.local_rank as usize),
    }
}

/// A device that no rank would use is a mistake.
fn devices_fit(args: &AttendArgs, ranks: u32) -> Result<()> {
    let devices = args.device.0.len();
    if devices <= ranks as usize {
        return Ok(());
    }
    Err(Failure::request(
        format!("{devices} devices for {ranks} ranks here"),
        "give at most one for each rank",
    ))
}

fn here(args: &AttendArgs) -> Result<()> {
    let ranks = args.problem.ranks.map_or(1, std::num::NonZeroU32::get);
    let ranks = ranks.max(match args.problem.mesh {
        OrAuto::Is(mesh) => Mesh::world(mesh),
        OrAuto::Auto => 1,
    });
    if ranks > MAX_RANKS_HERE {
        return Err(Failure::request(
            format!("{ranks} ranks in one process"),
            format!("use at most {MAX_RANKS_HERE}, or more processes with kyklos launch"),
        ));
    }
    if let Some(seconds) = args.group.stuck_after {
        return Err(Failure::request(
            format!("--stuck-after {seconds} with all ranks in one process"),
            "leave it away: there --deadline ends a run that does not get on",
        ));
    }
    if args.on_loss != OnLoss::Stop || args.group.rejoin {
        return Err(Failure::request(
            "--on-loss or --rejoin with all ranks in one process",
            "leave it away, or start a process for each rank with kyklos launch",
        ));
    }
    metrics::check(&args.metrics)?;
    let request = Request::new(&args.problem, args.seed, None)?;
    let world = request.mesh.world();
    devices_fit(args, world)?;
    let link = match args.transport {
        Some(TransportName::Quic) => Some(args.network.here(world)?),
        Some(TransportName::InProcess) | None => {
            args.network.refuse_without_network()?;
            None
        }
    };
    let job = job(args, request, world, (0..world).map(Rank).collect())?;
    if let Some(warning) = job.request.source.warning() {
        note(&warning);
    }
    let devices =
        (0..world as usize).map(|rank| devices::choose(&args.device.0, rank)).collect::<Result<Vec<_>>>()?;
    interrupt::end_on_interrupt()?;
    record::write_on_request()?;
    metrics::serve(&args.metrics, 0, 0)?;
    let transports = match link {
        Some(link) => quic_loopback_group_over(world, link)?,
        None => in_process_group(world),
    };
    let done = run_here(&job, transports, &devices)?;
    tell(args, &job, (0..).zip(done).collect())
}

/// Plans, proves and prepares; `here` ranks share this machine's memory, and each has a number among `members`.
fn job(args: &AttendArgs, request: Request, here: u32, members: Vec<Rank>) -> Result<Job> {
    request.fits_in_memory(here)?;
    let output = match &args.output {
        Some(path) => Some(OutputTarget::new(path, request.source.path(), request.mesh.world())?),
        None => None,
    };
    if let Some(trace) = &args.trace {
        let ranks = request.mesh.world();
        keep_apart(("--trace", trace), ("the input", request.source.path()), ranks)?;
        keep_apart(("--trace", trace), ("the output", args.output.as_deref()), ranks)?;
    }
    let sample = match args.verify {
        true => Some(Sample::of(&request)?),
        false => None,
    };
    let (world, checks) = request.plan()?;
    let steps = world.plans.iter().map(|plan| plan.steps.len() as u64).sum::<u64>();
    let clock = Arc::new(SystemClock::new());
    let ranks = world.mesh.world();
    let here_steps = steps * args.repeat.get() * u64::from(here.min(ranks)) / u64::from(ranks.max(1));
    let watch = Arc::new(Watch::new(args.progress, clock.clone(), ranks, here_steps));
    let mut identities: Vec<String> = (0..ranks).map(|rank| format!("rank-{rank}")).collect();
    // What else must be the same everywhere, or the ranks would wait for each other in vain or mix their inputs.
    let input_bytes = request.source.path().map(|path| std::fs::metadata(path).map_or(0, |file| file.len()));
    identities.push(format!(
        "input of {input_bytes:?} bytes, seed {:?}, {} times, verify {}, output {}",
        args.seed,
        args.repeat,
        args.verify,
        match &output {
            None => "none",
            Some(OutputTarget::Whole(_)) => "whole",
            Some(OutputTarget::Parts(_)) => "parts",
        },
    ));
    identities.push(match &args.trace {
        None => "no trace".to_owned(),
        Some(path) => format!("a trace by rank: {}", trace::is_by_rank(path)),
    });
    Ok(Job {
        plan_hash: plan::plan_hash(&world, &identities),
        request,
        begun: None,
        world: Arc::new(world),
        checks,
        repeat: args.repeat.get(),
        deadline: Duration::from_secs(u64::from(args.deadline.get())),
        sample,
        output,
        trace: args.trace.clone(),
        record: record::folder(args.record.as_deref())?,
        options: RunOptions { clock, observer: watch.clone(), trace: args.trace.is_some(), poison: false },
        watch,
        lasting: args.on_loss.finishes(),
        members,
    })
}

/// Runs every rank on a thread of its own. Returns the error of the rank that is to blame, if any failed.
pub(crate) fn run_here(
    job: &Job,
    transports: Vec<Arc<dyn Transport>>,
    devices: &[DeviceId],
) -> Result<Vec<RankDone>> {
    let results: Vec<Result<RankDone>> = std::thread::scope(|scope| {
        let threads: Vec<_> = transports
            .into_iter()
            .zip(devices)
            .map(|(transport, device)| scope.spawn(move || rank::run(job, &transport, Ok(*device))))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Failure::run("a rank panicked: this is a bug")))
            })
            .collect()
    });
    job.watch.phase(None);
    let blame =
        results.iter().filter_map(|result| result.as_ref().err()).min_by_key(|failure| failure.of_group);
    match blame {
        Some(failure) => Err(failure.clone()),
        None => results.into_iter().collect(),
    }
}

/// Prints and writes what is to be known of a run.
fn tell(args: &AttendArgs, job: &Job, mut done: Vec<(u32, RankDone)>) -> Result<()> {
    if let Some(path) = &args.trace {
        for (rank, done) in &mut done {
            if let Some(trace) = done.trace.take() {
                trace.write(path, *rank)?;
            }
        }
    }
    for summary in done.iter().filter_map(|(_, done)| done.summary.as_ref()) {
        print(&if args.json { summary.json(&job.request)? } else { summary.table(&job.request) })?;
    }
    match done.into_iter().find_map(|(_, done)| done.rejected.or(done.lacks)) {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

/// Each rank here is a thread.
const MAX_RANKS_HERE: u32 = 256;
