//! Ranks on threads.

use std::sync::Arc;

use kyklos::backend::Backend;
use kyklos::host::{Tensors, shard};
use kyklos::local::on_threads;
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos_backend_suite::{RankOutput, Whole, proved, run_rank};
use kyklos_transport::Group;

/// Runs a plan set with one backend per rank, and assembles the result.
pub fn run_set<B: Backend>(
    set: &PlanSet,
    transports: Vec<Group>,
    tensors: &Tensors,
    make: impl Fn() -> B + Sync,
) -> (Whole, Vec<RankOutput>) {
    run_plans(&proved(set), transports, tensors, make)
}

/// As [`run_set`], of plans that may lack a proof.
pub fn run_plans<B: Backend>(
    plans: &Arc<ProvedPlans>,
    transports: Vec<Group>,
    tensors: &Tensors,
    make: impl Fn() -> B + Sync,
) -> (Whole, Vec<RankOutput>) {
    let set = plans.set();
    let outputs = on_threads(transports, |transport| {
        let part = shard(set, transport.rank(), tensors).unwrap();
        pollster::block_on(run_rank(&make(), transport, plans, part))
    });
    let mut whole = Whole::new(set);
    let mut all = Vec::new();
    for (rank, output) in outputs.into_iter().enumerate() {
        let output = output.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        whole.add(set, rank, &output);
        all.push(output);
    }
    (whole, all)
}
