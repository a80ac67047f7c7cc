//! A job whose ranks are all in this process.

use kyklos::backend::Device;
use kyklos_transport::Group;

use crate::failure::{Failure, Result};
use crate::job::call::Job;
use crate::job::rank;
use crate::run::threads::on_threads;

/// Runs every rank on a thread of its own, rank i on `devices[i]`. Returns the failure that caused
/// the others, if any.
pub(crate) fn run_here(
    job: &Job,
    transports: Vec<Group>,
    devices: Vec<Result<Device>>,
) -> Result<Vec<Option<Failure>>> {
    let ranks = transports.into_iter().zip(devices);
    let done = on_threads(ranks, |(transport, device)| rank::run(job, &transport, device));
    job.watch.phase(None);
    done
}
