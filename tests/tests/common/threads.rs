//! Ranks on threads. A browser has no threads.

use std::sync::Arc;

use kyklos::RankOutput;
use kyklos::backend::Backend;
use kyklos::local::{RankTask, Tensors, run_ranks};
use kyklos::plan::World;
use kyklos_transport::Transport;

use super::{DEADLINE, Whole, options};

/// Runs a world with one backend per rank, and assembles the result.
pub fn run_world<B: Backend>(
    world: &World,
    transports: Vec<Arc<dyn Transport>>,
    tensors: &Tensors,
    make: impl Fn() -> B + Sync,
) -> (Whole, Vec<RankOutput>) {
    let run = |task: RankTask<'_>| {
        let mut last = None;
        task.run_on(&make(), |_, output| last = Some(output)).map(|()| last.expect("one run"))
    };
    let outputs = run_ranks(world, transports, tensors, 1, DEADLINE, &options(), run).unwrap();
    let mut whole = Whole::new(world);
    let mut all = Vec::new();
    for (rank, output) in outputs.into_iter().enumerate() {
        let output = output.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        whole.add(world, rank, &output);
        all.push(output);
    }
    (whole, all)
}
