//! `kyklos attend` with all ranks in this process.

use kyklos::Mesh;
use kyklos::backend::Device;
use kyklos_transport::quic::{LinkSettings, quic_loopback_group_over};
use kyklos_transport::{Rank, in_process_group};

use super::args::AttendArgs;
use super::prepare::{Prepared, devices_fit, tabs};
use crate::activity;
use crate::devices::{self, DeviceId};
use crate::failure::{Failure, Result, answers_for_group, note};
use crate::interrupt;
use crate::job::here::run_here;
use crate::observe::{live, metrics, record};
use crate::options::{OnLoss, OrAuto, TransportName};
use crate::request::Request;
use crate::run::threads::on_threads;

/// Runs all ranks on threads of this process.
pub(super) fn here(args: &AttendArgs) -> Result<()> {
    answers_for_group(true);
    let ranks = args.problem.ranks.map_or(1, std::num::NonZeroU32::get);
    let ranks = ranks.max(match args.problem.mesh {
        OrAuto::Is(mesh) => Mesh::size(mesh),
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
            "leave it out: in one process, --deadline ends a run that makes no progress",
        ));
    }
    if let Some(ms) = args.group.heartbeat {
        return Err(Failure::request(
            format!("--heartbeat {ms} with all ranks in one process"),
            "leave it out: the ranks of one process end together",
        ));
    }
    if args.on_loss != OnLoss::Stop || args.group.rejoin {
        return Err(Failure::request(
            "--on-loss or --rejoin with all ranks in one process",
            "leave it out, or start a process for each rank with kyklos launch",
        ));
    }
    metrics::check(&args.metrics)?;
    live::check(&args.watch, &args.metrics, 1)?;
    activity::doing("choosing a plan");
    let request = Request::new(&args.problem, args.seed, None)?;
    let size = request.mesh.size();
    devices_fit(args, size)?;
    args.collective.fits(&args.device.0, true)?;
    let link = match args.transport {
        Some(TransportName::Quic) => Some(args.network.here(size)?),
        Some(TransportName::InProcess) | None => {
            args.network.refuse_without_network()?;
            None
        }
    };
    let prepared = Prepared::new(args, request, (size, false))?;
    if let Some(warning) = prepared.request.source.warning() {
        note(&warning);
    }
    let devices =
        (0..size as usize).map(|rank| devices::choose(&args.device.0, rank)).collect::<Result<Vec<_>>>()?;
    tabs(args, &devices, true)?;
    interrupt::end_on_interrupt()?;
    record::write_on_request()?;
    metrics::serve(&args.metrics, 0, 0)?;
    let live = live::serve(&args.watch, None)?;
    let prepared = prepared.shown_on(live.as_ref());
    live::to_the_end(live.as_deref(), || run(args, prepared, devices, link))
}

/// Opens the devices, agrees on shares, and runs the call.
fn run(
    args: &AttendArgs,
    mut prepared: Prepared,
    devices: Vec<DeviceId>,
    link: Option<LinkSettings>,
) -> Result<()> {
    let size = prepared.request.mesh.size();
    let transports = match link {
        Some(link) => quic_loopback_group_over(size, link)?,
        None => in_process_group(size),
    };
    let are_measured =
        prepared.request.always_measures() || devices.iter().any(|device| *device != devices[0]);
    activity::doing("opening the devices");
    let devices: Vec<Result<Device>> = on_threads(devices, |device| Ok(device.open()))?;
    if are_measured && devices.iter().all(Result::is_ok) {
        let ranks = transports.iter().zip(devices.iter().flatten());
        let shared = on_threads(ranks, |(transport, device)| prepared.shared(transport, device))?;
        prepared.request = shared.into_iter().next().unwrap_or(prepared.request);
    }
    activity::doing("proving the plans");
    let job = prepared.job(args, (0..size).map(Rank).collect())?;
    let done = run_here(&job, transports, devices)?;
    done.into_iter().flatten().next().map_or(Ok(()), Err)
}

/// Each rank is a thread.
const MAX_RANKS_HERE: u32 = 256;
