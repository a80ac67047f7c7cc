//! `kyklos bench strategies`: every strategy, mesh and placement on the ranks of a group, cell by
//! cell.
//!
//! All ranks know the same list of cells. Rank 0 names the next one, collects what the ranks
//! measured, compares sampled rows with the oracle, and writes a line for each cell that ends. An
//! error in a cell ends the group; the program, or its launcher, starts the next one, which goes on
//! behind that cell.

mod args;
mod bench;
mod cells;
mod journal;
mod leader;
mod memory;
mod page;
mod predict;
mod rank;
mod record;
mod report;
mod times;

use std::collections::BTreeSet;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos_launch::{Assignment, is_under_kyklos_launch, rank_variables};
use kyklos_transport::quic::quic_loopback_group_over;
use kyklos_transport::{Rank, in_process_group};

pub(crate) use self::args::StrategiesArgs;
use self::bench::Bench;
use self::cells::{Way, cases, cells};
use self::leader::{Leader, Settings};
use self::memory::RanksHere;
use self::predict::Predictor;
use self::rank::work;
use crate::devices::{self, BackendKind, DeviceId, DeviceRequest, let_in_nowhere};
use crate::failure::{Failure, Result, note};
use crate::group;
use crate::interrupt;
use crate::options::{OnLoss, TransportName};
use crate::run::threads::on_threads;

/// Runs the command.
pub(crate) fn strategies(args: &StrategiesArgs) -> Result<()> {
    if args.group.rejoin {
        return Err(Failure::request(
            "--rejoin of a bench",
            "leave it out: run the command again on all ranks, and it goes on where it ended",
        ));
    }
    if let (Some(ranks), false) = (args.ranks, is_under_kyklos_launch()) {
        if let Some(flag) = args.group.first() {
            return Err(Failure::request(
                format!("--ranks {ranks} of a bench with {flag}"),
                "--ranks puts all ranks into this process, so leave one of the two out",
            ));
        }
        if let Some(set) = rank_variables() {
            note(&format!(
                "warning: --ranks puts all ranks into this process; {set} in the environment is not used"
            ));
        }
        return here(args);
    }
    match Assignment::find(&args.group.options(args.network.settings(), OnLoss::Stop))? {
        Some(assignment) => as_rank(args, assignment),
        None => here(args),
    }
}

/// Refuses what no process of a launched bench can run.
pub(crate) fn check_launched(args: &StrategiesArgs, size: u32) -> Result<()> {
    if let Some(ranks) = args.ranks {
        return Err(Failure::request(
            format!("--ranks {ranks} of a bench under a launcher that starts {size} processes"),
            "leave --ranks out: every process is one rank",
        ));
    }
    if args.transport == Some(TransportName::InProcess) {
        return Err(Failure::request(
            format!("--transport in-process of a bench between {size} processes"),
            "leave it out, or use quic",
        ));
    }
    args.collective.fits(&args.device.0, false)?;
    cases(args).map(|_| ())
}

/// How many cells a group of `ranks` ranks has still to run. With `failed`, cells that have failed
/// count as over.
pub(crate) fn cells_left(args: &StrategiesArgs, ranks: u32, failed: bool) -> Result<usize> {
    let over: BTreeSet<_> = journal::over(&args.output, failed)?.into_iter().collect();
    let all = cells(args, &cases(args)?, ranks)?;
    Ok(all.iter().filter(|cell| matches!(cell.way, Way::Run(_)) && !over.contains(&cell.name)).count())
}

/// Runs all ranks on threads of this process. A cell that fails ends their group; the next group
/// goes on.
fn here(args: &StrategiesArgs) -> Result<()> {
    let ranks = args.ranks.map_or(1, std::num::NonZeroU32::get);
    if ranks > MAX_RANKS_HERE {
        return Err(Failure::request(
            format!("a bench of {ranks} ranks in one process"),
            format!("use at most {MAX_RANKS_HERE}, or more processes with kyklos launch"),
        ));
    }
    let transport = args.transport.unwrap_or(TransportName::InProcess);
    let link = match transport {
        TransportName::Quic => Some(args.network.here(ranks)?),
        TransportName::InProcess => {
            args.network.refuse_without_network()?;
            None
        }
    };
    args.collective.fits(&args.device.0, true)?;
    let bench = Bench::new(args, ranks)?;
    let ids = (0..ranks as usize).map(|rank| device(args, rank, None)).collect::<Result<Vec<_>>>()?;
    interrupt::end_on_interrupt()?;
    let predictor = Predictor::new(args.hardware.as_deref(), &args.output, Some(ids.clone()), transport)?;
    let mut leader = Leader::new(&bench, settings(args, transport, false), predictor);
    let devices: Vec<Device> = on_threads(ids, DeviceId::open)?;
    loop {
        let transports = match link {
            Some(link) => quic_loopback_group_over(ranks, link)?,
            None => in_process_group(ranks),
        };
        let mut first = Some(&mut leader);
        let all =
            transports.into_iter().zip(&devices).map(|(transport, device)| (transport, device, first.take()));
        let all: Vec<_> = all.collect();
        let ended = on_threads(all, |(transport, device, leader)| {
            work(&bench, &RanksHere::All(ranks), &transport, Ok(device.clone()), leader)
        });
        report::write(&leader)?;
        match ended {
            Ok(_) => return report::tell(&leader),
            Err(failure) if !leader.goes_on() => return Err(failure),
            Err(_) => {}
        }
    }
}

/// Runs the rank of `assignment`.
fn as_rank(args: &StrategiesArgs, mut assignment: Assignment) -> Result<()> {
    if assignment.by_kyklos_launch {
        assignment.set_identity(group::read_identity(std::io::stdin().lock())?);
        group::end_with_launcher();
    }
    interrupt::end_on_interrupt()?;
    check_launched(args, assignment.size)?;
    let bench = Bench::new(args, assignment.size)?;
    let own = device(args, assignment.local_rank as usize, assignment.device.as_deref());
    let group = assignment.join()?;
    interrupt::tell_on_interrupt(&group);
    let transport = &group;
    let here = RanksHere::Like(transport.rank(), assignment.local_size);
    let open = own.and_then(DeviceId::open);
    if transport.rank() != Rank(0) {
        return work(&bench, &here, transport, open, None);
    }
    let transport_name = TransportName::Quic;
    let are_here = assignment.local_size == assignment.size && assignment.device.is_none();
    let local =
        (0..assignment.size as usize).map(|rank| device(args, rank, None)).collect::<Result<Vec<_>>>();
    let local = local.ok().filter(|_| are_here);
    let predictor = Predictor::new(args.hardware.as_deref(), &args.output, local, transport_name);
    let (predictor, open) = match predictor {
        Ok(predictor) => (predictor, open),
        // The refusal of all ranks.
        Err(failure) => (Predictor::Nothing, Err(failure)),
    };
    let mut leader = Leader::new(&bench, settings(args, transport_name, true), predictor);
    let ended = work(&bench, &here, transport, open, Some(&mut leader));
    // After an error too: the files have all cells so far.
    let written = report::write(&leader);
    ended.and(written)?;
    report::tell(&leader)
}

/// The device of a rank, by its place on this machine, or by the cluster file.
fn device(args: &StrategiesArgs, local_rank: usize, named: Option<&str>) -> Result<DeviceId> {
    let named = named.map(str::parse::<DeviceRequest>).transpose()?;
    let device = match named {
        Some(named) => devices::choose(&[named], 0)?,
        None => devices::choose(&args.device.0, local_rank)?,
    };
    match device.kind {
        BackendKind::Tab => Err(let_in_nowhere()),
        _ => Ok(device),
    }
}

fn settings(args: &StrategiesArgs, transport: TransportName, processes: bool) -> Settings {
    let seconds = |seconds: std::num::NonZeroU32| Duration::from_secs(u64::from(seconds.get()));
    Settings {
        folder: args.output.clone(),
        retry: args.retry,
        longest: args.longest.map(seconds),
        cell_limit: seconds(args.cell_limit),
        processes,
        transport: transport.name(),
    }
}

/// Each rank is a thread.
const MAX_RANKS_HERE: u32 = 256;
