//! How the messages of a job's plans go between devices.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::{Session, SessionOptions};
use kyklos_cuda::{NcclCollective, NcclDecision, NcclOptions};
use kyklos_transport::Transport;

use crate::failure::{Failure, Result, note};
use crate::job::call::Job;
use crate::observe::record::Flight;
use crate::options::CollectiveName;

/// A session of this rank. Where NCCL may be used, all ranks agree first whether they use it, rank 0 says so, and `flight` knows it.
pub(super) fn open(
    job: &Job,
    transport: &Arc<dyn Transport>,
    device: Device,
    flight: &Flight,
) -> Result<Session> {
    let deadline = job.runs.deadline;
    let options = SessionOptions {
        deadline,
        resumable: job.resumable,
        run: job.runs.options.clone(),
        ..SessionOptions::default()
    };
    let collective = job.runs.collective;
    if collective == CollectiveName::Host {
        return Ok(Session::with_options(Arc::clone(transport), device, options));
    }
    let form_within = deadline.min(NcclOptions::default().form_within);
    let nccl = NcclOptions {
        deadline,
        form_within,
        resumable: job.resumable,
        cluster: job.runs.nccl_cluster,
        partial: collective == CollectiveName::Auto,
        ..NcclOptions::default()
    };
    let decision = pollster::block_on(NcclCollective::form(transport, &device, nccl))?;
    let say = |text: String| {
        if transport.rank().0 == 0 {
            note(&text);
        }
    };
    match decision {
        NcclDecision::Use(nccl) => {
            let ways = nccl.to_string();
            say(format!("messages go by {ways}; this has never been tried on a GPU"));
            flight.messages_go(ways, nccl.observe());
            Ok(Session::with_collective(Arc::clone(transport), device, nccl, options))
        }
        NcclDecision::Leave(refusal) if collective == CollectiveName::Auto => {
            say(format!("{refusal}; messages go through host memory"));
            flight.messages_go(format!("host memory ({refusal})"), None);
            Ok(Session::with_options(Arc::clone(transport), device, options))
        }
        NcclDecision::Leave(refusal) => Err(Failure::run(format!("{refusal}: use --collective host"))),
    }
}
