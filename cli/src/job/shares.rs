//! Shares of the tokens by the speed of the ranks' devices: `--split auto`.

use kyklos::backend::{Device, DeviceClass};
use kyklos::simulate::Candidate;
use kyklos::{Execution, Session, SessionOptions, SharedTokens, Split};
use kyklos_transport::{Group, Rank};

use super::agreement::agree_on_terms;
use super::settings::{Outputs, Settings};
use super::terms::Terms;
use crate::activity;
use crate::failure::{Result, note};
use crate::request::Request;

/// The request with the shares on which all ranks of the group agree. Unchanged where the options
/// decide the shares, and where all devices are of one kind and `--split auto` does not ask for a
/// measurement.
///
/// # Errors
/// The same on all ranks.
pub(crate) fn share(
    request: Request,
    settings: Settings,
    outputs: &Outputs,
    transport: &Group,
    device: &Device,
) -> Result<Request> {
    let Some(Candidate { mesh, strategy, placement }) = request.by_speed()? else { return Ok(request) };
    let Settings { ranks_here, deadline, .. } = settings;
    activity::doing("measuring the devices of all ranks for their shares");
    // First, because an option that differs has a better error than the shares.
    agree_on_terms(&**transport, &Terms::of(&request, settings, outputs), deadline)?;
    let on_cores = matches!(device.info().class, DeviceClass::Cpu | DeviceClass::SoftwareGpu);
    let memory =
        settings.memory_bytes().filter(|_| on_cores).map(|bytes| bytes / u64::from(ranks_here.max(1)));
    let options = SessionOptions { deadline, memory_bytes: memory, ..SessionOptions::default() };
    let mut session = Session::with_options(transport.clone(), device.clone(), options);
    let execution = Execution::new().mesh(mesh).strategy(strategy).placement(placement);
    if !request.always_measures() && !pollster::block_on(session.devices_differ())? {
        return Ok(request);
    }
    let SharedTokens { queries, shares, .. } =
        pollster::block_on(session.share_async(&request.problem, &execution))?;
    if shares.split == Split::Even {
        return Ok(request);
    }
    if transport.rank() == Rank(0) {
        let tokens: Vec<String> = queries.ranks().iter().map(|tokens| tokens.len().to_string()).collect();
        note(&format!("queries are shared by the measured speed of the devices: {}", tokens.join(", ")));
        for rank in &shares.left_out {
            note(&format!("rank {rank} gets no queries: with its device the call would not end sooner"));
        }
        for rank in &shares.limited {
            note(&format!("rank {rank} gets fewer queries than its device could do, because of its memory"));
        }
    }
    Ok(Request { mesh, strategy, placement, split: shares.split, ..request })
}
