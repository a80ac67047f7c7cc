//! A world of one rank on one device: for probes, and for what a device reaches by itself.

use std::time::{Duration, Instant};

use kyklos::local::{RankTask, Tensors};
use kyklos::plan::World;
use kyklos::{RankOutput, RunOptions};
use kyklos_transport::in_process_group;

use crate::device::AnyBackend;
use crate::failure::{Failure, Result};

/// The last of several runs.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) output: RankOutput,
    pub(crate) wall_s: f64,
}

/// Runs a world of one rank `repeat` times on `backend`.
pub(crate) fn run(
    backend: &AnyBackend,
    world: &World,
    Tensors { q, k, v, bias: pairs }: Tensors,
    repeat: u64,
    options: &RunOptions,
) -> Result<Alone> {
    let transport =
        in_process_group(1).pop().ok_or_else(|| Failure::run("a group of one rank has no rank"))?;
    let task = RankTask {
        world,
        transport,
        plan_hash: [0; 32],
        peak_bytes: 0,
        q,
        k,
        v,
        bias: pairs,
        repeat,
        deadline: Duration::from_secs(60),
        options: options.clone(),
    };
    let mut started = Instant::now();
    let mut last = None;
    backend.run(task, |_, output| {
        let wall_s = started.elapsed().as_secs_f64();
        last = Some(Alone { output, wall_s });
        started = Instant::now();
    })?;
    last.ok_or_else(|| Failure::run("no run took place"))
}
