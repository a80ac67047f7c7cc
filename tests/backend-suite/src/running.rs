//! Runs the plans of a world on a backend.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use kyklos::backend::Backend;
use kyklos::collective::HostStaged;
use kyklos::host::{Tensors, shard};
use kyklos::plan::{ProvedPlans, World};
use kyklos::{
    AttentionProblem, Executor, LoweredPlan, Mesh, NoObserver, PlacementKind, RankOutput, RunOptions, Split,
    Strategy, SystemClock, plan_world,
};
use kyklos_transport::{Transport, in_process_group};

use crate::{Prepared, Whole};

/// Long enough for a loaded machine, short enough that a hang is a failure.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Plans that are proved.
pub fn proved(world: &World) -> Arc<ProvedPlans> {
    Arc::new(ProvedPlans::new(world.clone()).unwrap())
}

/// Runs one operation of a rank, on its own part of the tensors.
pub async fn run_rank<B: Backend>(
    backend: &B,
    transport: Arc<dyn Transport>,
    plans: &Arc<ProvedPlans>,
    tensors: Tensors,
) -> kyklos::Result<RankOutput> {
    let lowered = LoweredPlan::new(plans.clone(), transport.rank(), backend);
    let collective = HostStaged::new(transport, DEADLINE);
    let executor = Executor::new(backend, &collective, &lowered, options());
    let mut inputs = executor.load(tensors)?;
    executor.run(0, &mut inputs).await
}

/// Runs a one-rank world.
pub async fn run_alone<B: Backend>(backend: &B, world: &World, prepared: &Prepared) -> Whole {
    let transport = in_process_group(1).remove(0);
    let output = run_rank(backend, transport, &proved(world), prepared.tensors.clone()).await.unwrap();
    let mut whole = Whole::new(world);
    whole.add(world, 0, &output);
    whole
}

/// A world of one rank that computes `problem` whole.
pub fn dense_world(problem: &AttentionProblem) -> World {
    let mesh = Mesh::new(1, 1).unwrap();
    plan_world(problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap()
}

/// Runs all ranks of a world on one backend. Their futures take turns on this thread.
pub async fn run_together<B: Backend>(backend: &B, world: &World, prepared: &Prepared) -> Whole {
    let plans = &proved(world);
    let ranks = in_process_group(world.mesh.world()).into_iter().map(async |transport| {
        let part = shard(world, transport.rank(), &prepared.tensors).unwrap();
        let output = run_rank(backend, transport.clone(), plans, part).await;
        let _ = transport.close(DEADLINE).await;
        output
    });
    let outputs = join_all(ranks).await;
    let mut whole = Whole::new(world);
    for (rank, output) in outputs.into_iter().enumerate() {
        whole.add(world, rank, &output.unwrap());
    }
    whole
}

/// Poisoned buffers, no trace, no observer.
pub fn options() -> RunOptions {
    RunOptions {
        clock: Arc::new(SystemClock::new()),
        observer: Arc::new(NoObserver),
        trace: false,
        poison: true,
    }
}
