//! Ranks on threads. A browser has no threads.

use std::sync::Arc;

use kyklos::RankOutput;
use kyklos::backend::Backend;
use kyklos::host::{Tensors, shard};
use kyklos::plan::{ProvedPlans, World};
use kyklos_transport::Transport;

use super::{DEADLINE, Whole, proved, run_rank};

/// Runs a world with one backend per rank, and assembles the result.
pub fn run_world<B: Backend>(
    world: &World,
    transports: Vec<Arc<dyn Transport>>,
    tensors: &Tensors,
    make: impl Fn() -> B + Sync,
) -> (Whole, Vec<RankOutput>) {
    run_plans(&proved(world), transports, tensors, make)
}

/// As [`run_world`], of plans that may lack a proof.
pub fn run_plans<B: Backend>(
    plans: &Arc<ProvedPlans>,
    transports: Vec<Arc<dyn Transport>>,
    tensors: &Tensors,
    make: impl Fn() -> B + Sync,
) -> (Whole, Vec<RankOutput>) {
    let world = plans.world();
    let run = |transport: Arc<dyn Transport>| {
        let part = shard(world, transport.rank(), tensors).unwrap();
        let output = pollster::block_on(run_rank(&make(), transport.clone(), plans, part));
        // Peers that still wait for a message report their own error.
        let _ = pollster::block_on(transport.close(DEADLINE));
        output
    };
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            transports.into_iter().map(|transport| scope.spawn(move || run(transport))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut whole = Whole::new(world);
    let mut all = Vec::new();
    for (rank, output) in outputs.into_iter().enumerate() {
        let output = output.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        whole.add(world, rank, &output);
        all.push(output);
    }
    (whole, all)
}
