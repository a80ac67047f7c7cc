//! What `kyklos attend` checks and plans before any rank runs.

use std::sync::Arc;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos_transport::{Group, Rank};

use super::args::AttendArgs;
use crate::devices::{BackendKind, DeviceId, DeviceRequest};
use crate::failure::{Failure, Result};
use crate::job::shares::share;
use crate::job::{Job, Outputs, Settings};
use crate::observe::live::{self, Live};
use crate::observe::page::target::PageTarget;
use crate::observe::{metrics, record};
use crate::options::{OnLoss, SplitName, TransportName};
use crate::request::Request;
use crate::tensors::output::{OutputTarget, keep_apart};

/// The request of a launched `attend`. Refuses options that make sense only without a launcher.
pub(crate) fn launched_request(args: &AttendArgs, size: u32, local_size: u32) -> Result<Request> {
    if let Some(ranks) = args.problem.ranks {
        return Err(Failure::request(
            format!("--ranks {ranks} under a launcher that starts {size} processes"),
            "leave --ranks out: every process is one rank",
        ));
    }
    if args.transport == Some(TransportName::InProcess) {
        return Err(Failure::request(
            format!("--transport in-process between {size} processes"),
            "leave it out, or use quic",
        ));
    }
    metrics::check(&args.metrics)?;
    live::check(&args.watch, &args.metrics, local_size)?;
    devices_fit(args, local_size)?;
    args.collective.fits(&args.device.0, false)?;
    let request = Request::new(&args.problem, args.seed, Some(size))?;
    fits_fewer_ranks(args)?;
    Ok(request)
}

/// Refuses options that fit one number of ranks only, where a loss always leaves fewer.
fn fits_fewer_ranks(args: &AttendArgs) -> Result<()> {
    if args.on_loss != OnLoss::Shrink {
        return Ok(());
    }
    let problem = &args.problem;
    let fixed = [
        ("--mesh", problem.mesh.chosen().is_some()),
        ("--split", !matches!(problem.split, None | Some(SplitName::Auto | SplitName::Even))),
        ("--tokens", problem.tokens.is_some()),
        ("--q-tokens and --kv-tokens", problem.q_tokens.is_some()),
    ];
    match fixed.into_iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(Failure::request(
            format!("--on-loss shrink with {option}, which fits one number of ranks only"),
            "leave it out, or use another --on-loss",
        )),
        None => Ok(()),
    }
}

/// Refuses more devices than ranks.
pub(super) fn devices_fit(args: &AttendArgs, ranks: u32) -> Result<()> {
    let devices = args.device.0.len();
    if devices <= ranks as usize {
        return Ok(());
    }
    Err(Failure::request(
        format!("{devices} devices for {ranks} ranks here"),
        "give at most one for each rank",
    ))
}

/// Lets browser tabs in, if they are devices of ranks here. `are_all`: whether no rank elsewhere
/// has the same options and another device.
pub(super) fn tabs(args: &AttendArgs, devices: &[DeviceId], are_all: bool) -> Result<()> {
    if devices.iter().any(|device| device.kind == BackendKind::Tab) {
        // The other ranks wait as long for this one.
        return args.tabs.let_in(Duration::from_secs(u64::from(args.deadline.get())));
    }
    let is_tab = |device: &DeviceRequest| matches!(device, DeviceRequest::Of(BackendKind::Tab, _));
    if are_all && !args.device.0.iter().any(is_tab) {
        return args.tabs.refuse_without_tabs();
    }
    Ok(())
}

/// A call before its plans are made.
pub(super) struct Prepared {
    pub(super) request: Request,
    settings: Settings,
    outputs: Outputs,
}

impl Prepared {
    /// `ranks_here` ranks share the memory of this machine, as processes or as threads of this one.
    pub(super) fn new(
        args: &AttendArgs,
        request: Request,
        (ranks_here, are_processes): (u32, bool),
    ) -> Result<Self> {
        request.fits_in_memory(ranks_here, if are_processes { ranks_here } else { 1 })?;
        let outputs = outputs(args, &request)?;
        let settings = Settings {
            repeat: args.repeat.get(),
            deadline: Duration::from_secs(u64::from(args.deadline.get())),
            verify: args.verify,
            progress: args.progress,
            ranks_here,
            are_processes,
            on_loss: args.on_loss,
            ways: args.collective.ways(),
        };
        Ok(Self { request, settings, outputs })
    }

    /// The same with the live page that this process serves, if any.
    pub(super) fn shown_on(mut self, live: Option<&Arc<Live>>) -> Self {
        self.outputs.live = live.cloned();
        self
    }

    /// The request with the shares on which the ranks agree, for a rank with this device.
    pub(super) fn shared(&self, transport: &Group, device: &Device) -> Result<Request> {
        share(self.request.clone(), self.settings, &self.outputs, transport, device)
    }

    /// Plans and proves the call. `members` are the numbers of all ranks in the first group.
    pub(super) fn job(self, args: &AttendArgs, members: Vec<Rank>) -> Result<Job> {
        let Self { request, settings, outputs } = self;
        let mut job = Job::new(request, settings, outputs, members)?;
        // Last, because this creates the folder.
        job.outputs.record = record::folder(args.record.as_deref())?;
        Ok(job)
    }
}

/// The files to write; refuses one that is another file of the call.
fn outputs(args: &AttendArgs, request: &Request) -> Result<Outputs> {
    let ranks = request.mesh.size();
    let result = match &args.output {
        Some(path) => Some(OutputTarget::new(path, request.source.path(), ranks)?),
        None => None,
    };
    if let Some(trace) = &args.trace {
        keep_apart(("--trace", trace), ("the input", request.source.path()), ranks)?;
        keep_apart(("--trace", trace), ("the output", args.output.as_deref()), ranks)?;
    }
    if let Some(page) = &args.report {
        keep_apart(("--report", page), ("the input", request.source.path()), ranks)?;
        keep_apart(("--report", page), ("the output", args.output.as_deref()), ranks)?;
        keep_apart(("--report", page), ("the trace", args.trace.as_deref()), ranks)?;
    }
    let page = args.report.as_deref().map(PageTarget::new).transpose()?;
    let watched = args.watch.watch.is_some();
    Ok(Outputs { result, trace: args.trace.clone(), page, watched, json: args.json, ..Outputs::default() })
}
