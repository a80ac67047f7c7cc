//! Runs of one rank on one device: probes, and the accuracy of a device alone.

use std::time::{Duration, Instant};

use kyklos::local::Tensors;
use kyklos::{RankOutput, RunOptions};
use kyklos_transport::in_process_group;

use crate::devices::AnyBackend;
use crate::failure::{Failure, Result};
use crate::run::plans::{Plans, Runs};

/// The last of several runs: its output and wall time.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) output: RankOutput,
    pub(crate) wall_s: f64,
}

/// Runs the plan of one rank `repeat` times on `backend`.
pub(crate) fn run(
    backend: &AnyBackend,
    plans: &Plans,
    tensors: Tensors,
    repeat: u64,
    options: &RunOptions,
) -> Result<Alone> {
    let transport =
        in_process_group(1).pop().ok_or_else(|| Failure::run("a group of one rank has no rank"))?;
    let runs = Runs { repeat, deadline: DEADLINE, options: options.clone() };
    let mut started = Instant::now();
    let mut last = None;
    backend.run(plans.task(transport, tensors, &runs), |_, output| {
        let wall_s = started.elapsed().as_secs_f64();
        last = Some(Alone { output, wall_s });
        started = Instant::now();
    })?;
    last.ok_or_else(|| Failure::run("no run took place"))
}

/// No message is sent, so nothing waits.
const DEADLINE: Duration = Duration::from_secs(60);
