//! Runs a plan set on a backend.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use kyklos::backend::Backend;
use kyklos::collective::HostStaged;
use kyklos::host::{Tensors, shard};
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::{
    Attention, AttentionProblem, DeviceOutput, Executor, LoweredPlan, Mesh, NoObserver, PlacementKind,
    RunOptions, Session, Split, Strategy, SystemClock, plan_forward,
};
use kyklos_transport::{Group, in_process_group};

use crate::{Prepared, RankOutput, Whole};

/// Long enough for a loaded machine, short enough that a hang is a failure.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Plans that are proved.
pub fn proved(set: &PlanSet) -> Arc<ProvedPlans> {
    Arc::new(ProvedPlans::new(set.clone()).unwrap())
}

/// The call of `plans` with this rank's part of the tensors.
pub fn planned(plans: &Arc<ProvedPlans>, part: &Tensors) -> Attention {
    let call = Attention::planned(plans);
    match (plans.set().problem.bias, &part.bias) {
        (Some(tensor), Some(rows)) => call.bias(tensor, rows.clone()),
        _ => call,
    }
}

/// Runs `plans` in a session, on the rank's part of the tensors.
pub async fn attend_planned(
    session: &mut Session,
    plans: &Arc<ProvedPlans>,
    part: &Tensors,
) -> kyklos::Result<RankOutput> {
    let [q, k, v] = part.qkv(&plans.set().problem)?;
    RankOutput::of(session.attend_async(&planned(plans, part), &q, &k, &v).await?).await
}

/// Runs one operation of a rank, on its own part of the tensors, without an agreement of the ranks.
pub async fn run_rank<B: Backend>(
    backend: &B,
    transport: Group,
    plans: &Arc<ProvedPlans>,
    tensors: Tensors,
) -> kyklos::Result<RankOutput> {
    let rank = transport.rank();
    let lowered = LoweredPlan::new(plans.clone(), rank, backend);
    let collective = HostStaged::new(transport, DEADLINE);
    let executor = Executor::new(backend, &collective, &lowered, options());
    let mut inputs = executor.load(tensors)?;
    let DeviceOutput { mut results, report, spans } = executor.run(0, &mut inputs).await?;
    let problem = &plans.set().problem;
    let tokens = plans.set().output_tokens(rank).len();
    let numbers = problem.batch as usize * tokens * problem.q_heads as usize;
    let o_bytes = numbers * problem.head_dim as usize * problem.dtype.bytes();
    let o = backend.download(&mut results[0], 0..o_bytes).await?;
    let pairs = backend.download(&mut results[1], 0..numbers * 8).await?;
    Ok(RankOutput::new(o, &pairs, report, spans))
}

/// Runs a plan set of one rank.
pub async fn run_alone<B: Backend>(backend: &B, set: &PlanSet, prepared: &Prepared) -> Whole {
    let transport = in_process_group(1).remove(0);
    let output = run_rank(backend, transport, &proved(set), prepared.tensors.clone()).await.unwrap();
    let mut whole = Whole::new(set);
    whole.add(set, 0, &output);
    whole
}

/// A plan set of one rank that computes `problem` whole.
pub fn dense_set(problem: &AttentionProblem) -> PlanSet {
    let mesh = Mesh::new(1, 1).unwrap();
    plan_forward(problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap()
}

/// Runs all ranks of a plan set on one backend. Their futures take turns on this thread.
pub async fn run_together<B: Backend>(backend: &B, set: &PlanSet, prepared: &Prepared) -> Whole {
    let plans = &proved(set);
    let ranks = in_process_group(set.mesh.size()).into_iter().map(async |transport| {
        let part = shard(set, transport.rank(), &prepared.tensors).unwrap();
        let output = run_rank(backend, transport.clone(), plans, part).await;
        let _ = transport.close(DEADLINE).await;
        output
    });
    let outputs = join_all(ranks).await;
    let mut whole = Whole::new(set);
    for (rank, output) in outputs.into_iter().enumerate() {
        whole.add(set, rank, &output.unwrap());
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
