//! After an interrupted block, the backend's running state is exact.

use std::sync::Arc;

use futures_util::future::join_all;
use kyklos::backend::Backend;
use kyklos::collective::HostStaged;
use kyklos::host::shard;
use kyklos::plan::{ProvedPlans, Step, World};
use kyklos::{
    Carryover, Dtype, Error, Executor, Inputs, LoweredPlan, Mesh, Observer, PlacementKind, RunOptions, Split,
    Strategy, plan_world, repair,
};
use kyklos_transport::{Abort, AbortCause, Progress, Rank, Transport, in_process_group};

use crate::{DEADLINE, Prepared, Whole, chosen_cases, dense_world, options, proved, run_alone};

/// Aborts the group when a rank reaches a step.
#[derive(Debug)]
struct Cut {
    rank: Rank,
    step: usize,
    transport: Arc<dyn Transport>,
}

impl Observer for Cut {
    fn step(&self, rank: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if (rank, step) == (self.rank, self.step) {
            let cause = AbortCause::Failed("cut off by a test".to_owned());
            self.transport.abort(Abort { culprit: LOST, cause, progress: Progress::default() });
        }
    }
}

/// The lost one of the three ranks. The last rank receives the keys of the lost rank first.
const LOST: Rank = Rank(1);
const LEFT: [Rank; 2] = [Rank(0), Rank(2)];

pub(super) async fn finishes_what_was_cut_off<B: Backend>(backend: &B, who: &str) {
    let mut finished = 0;
    for dtype in [Dtype::F32, Dtype::F16] {
        for case in chosen_cases(backend.info()).skip(dtype as usize).step_by(4) {
            let mut prepared = Prepared::new(case, dtype);
            let mesh = Mesh::new(1, 3).unwrap();
            let world =
                plan_world(&prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Ring)
                    .unwrap();
            let alone = run_alone(backend, &dense_world(&prepared.problem), &prepared).await;
            let limit = prepared.parallel_limit(&prepared.judge(&alone, who));
            let Some(whole) = finish(backend, &world, &prepared).await else { continue };
            let lost = world.q_placement.of_rank(LOST);
            prepared.expected.retain(|row| lost.iter().all(|token| token as usize != row.id.row));
            if !prepared.expected.is_empty() {
                prepared.judge(&whole, &format!("{who} without rank 1")).assert_within(&limit);
                finished += 1;
            }
        }
    }
    assert!(finished > 1, "{who}: {finished} runs were finished");
}

/// Interrupts the last rank in its second block of keys, the block of the lost rank. `None` if the last rank has no
/// such block, or if keys are lost.
async fn finish<B: Backend>(backend: &B, world: &World, prepared: &Prepared) -> Option<Whole> {
    let attends = world.plan(Rank(2)).steps.iter().enumerate();
    let (step, _) = attends.filter(|(_, step)| matches!(step, Step::Attend { .. })).nth(1)?;
    let group = in_process_group(3);
    let cut = Arc::new(Cut { rank: Rank(2), step, transport: Arc::clone(&group[1]) });
    let options = RunOptions { observer: cut, ..options() };
    let plans = &proved(world);
    let left = join_all(group.into_iter().map(|transport| {
        let options = options.clone();
        async move {
            let rank = transport.rank();
            let collective = HostStaged::new(transport, DEADLINE);
            let lowered = LoweredPlan::new(plans.clone(), rank, backend);
            let executor = Executor::new(backend, &collective, &lowered, options).resumable();
            let mut inputs = executor.load(shard(world, rank, &prepared.tensors).unwrap()).unwrap();
            let mut carryover = Carryover::default();
            executor.run_from(0, &mut inputs, &mut carryover).await.unwrap_err();
            (inputs, carryover)
        }
    }))
    .await;
    let reached: Vec<_> = LEFT.iter().map(|rank| left[rank.0 as usize].1.progress().clone()).collect();
    assert_eq!(reached[1].steps, step, "it is cut off in the block");
    let repaired = match repair(world, &LEFT, &reached) {
        Err(Error::KeysLost { .. }) => return None,
        repaired => repaired.unwrap(),
    };
    let repaired = &Arc::new(ProvedPlans::of_repair(plans, &LEFT, &reached, repaired).unwrap());
    let survivors = left.into_iter().enumerate().filter(|(rank, _)| *rank != LOST.0 as usize);
    // Transports outlive the runs: a finished rank must not close its transport while other ranks still run.
    let collectives = in_process_group(2).into_iter().enumerate().map(|(rank, transport)| {
        assert_eq!(transport.rank().0 as usize, rank);
        HostStaged::new(transport, DEADLINE)
    });
    let collectives: Vec<_> = collectives.collect();
    let outputs =
        join_all(collectives.iter().zip(survivors).enumerate().map(|(rank, (collective, (_, left)))| {
            let rank = Rank(rank as u32);
            async move {
                let (mut inputs, mut carryover): (Inputs<B::Buffer>, Carryover<B::Buffer>) = left;
                let lowered = LoweredPlan::new(repaired.clone(), rank, backend);
                let executor = Executor::new(backend, collective, &lowered, crate::options());
                executor.run_from(0, &mut inputs, &mut carryover).await.unwrap()
            }
        }))
        .await;
    let mut whole = Whole::new(world);
    outputs.iter().enumerate().for_each(|(rank, output)| whole.add(repaired.world(), rank, output));
    Some(whole)
}
