//! Runs that are interrupted at given steps. The survivors finish them.

use std::sync::{Arc, Condvar, Mutex};

use kyklos::backend::Backend;
use kyklos::collective::HostStaged;
use kyklos::host::{Tensors, shard};
use kyklos::plan::{ProvedPlans, Step, StepProgress, World};
use kyklos::{Carryover, Executor, Inputs, LoweredPlan, Observer, RankOutput, RunOptions};
use kyklos_backend_suite::{DEADLINE, Whole, options, proved};
use kyklos_transport::{Abort, AbortCause, Progress, Rank, Transport, in_process_group};

/// The contents of a rank's device after the abort of its group.
pub struct CutOff<B: Backend> {
    pub inputs: Inputs<B::Buffer>,
    pub carryover: Carryover<B::Buffer>,
}

/// The number of steps that each rank of `world` has done if `choose` schedules the ranks. `choose` gets the ranks that
/// can continue, and returns the index of one of them, or `None` to end.
pub fn reach(world: &World, mut choose: impl FnMut(&[u32]) -> Option<usize>) -> Vec<usize> {
    let mut at = vec![0; world.plans.len()];
    loop {
        let can: Vec<u32> = (0..)
            .zip(&world.plans)
            .filter(|(_, plan)| can_go_on(world, plan, &at))
            .map(|(rank, _)| rank)
            .collect();
        match (!can.is_empty()).then(|| choose(&can)).flatten() {
            Some(place) => at[can[place] as usize] += 1,
            None => return at,
        }
    }
}

/// Whether a rank can do its next step. A wait ends when the peer has posted its side of the exchange.
fn can_go_on(world: &World, plan: &kyklos::plan::Plan, at: &[usize]) -> bool {
    match plan.steps.get(at[plan.rank as usize]) {
        None => false,
        Some(Step::Wait { id }) => peers(plan, *id).all(|peer| {
            let posts = |step: &Step| matches!(step, Step::Exchange { id: other, .. } if other == id);
            world.plans[peer as usize].steps[..at[peer as usize]].iter().any(posts)
        }),
        Some(_) => true,
    }
}

fn peers(plan: &kyklos::plan::Plan, exchange: u32) -> impl Iterator<Item = u32> {
    let (sends, recvs) = plan
        .steps
        .iter()
        .find_map(|step| match step {
            Step::Exchange { id, sends, recvs } if *id == exchange => Some((sends, recvs)),
            _ => None,
        })
        .expect("it is posted");
    sends.iter().map(|send| send.to).chain(recvs.iter().map(|recv| recv.from)).collect::<Vec<_>>().into_iter()
}

/// Lets all ranks reach their steps, then aborts the group.
#[derive(Debug)]
struct Gate {
    steps: Vec<usize>,
    there: Mutex<usize>,
    all: Condvar,
    transport: Arc<dyn Transport>,
    culprit: Rank,
}

impl Gate {
    fn arrive(&self) {
        let mut there = self.there.lock().unwrap();
        *there += 1;
        if *there == self.steps.len() {
            let cause = AbortCause::Failed("cut off by a test".to_owned());
            self.transport.abort(Abort { culprit: self.culprit, cause, progress: Progress::default() });
            self.all.notify_all();
        }
        let (there, late) =
            self.all.wait_timeout_while(there, DEADLINE, |there| *there < self.steps.len()).unwrap();
        assert!(!late.timed_out(), "{} of {:?} are there", *there, self.steps);
    }
}

impl Observer for Gate {
    fn step(&self, rank: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if self.steps[rank.0 as usize] == step {
            self.arrive();
        }
    }
}

/// Runs `world` until every rank is before its step of `steps`, and then loses `culprit`. Returns the state of each
/// rank, including the lost one.
pub fn cut_off<B>(
    world: &World,
    tensors: &Tensors,
    steps: &[usize],
    culprit: Rank,
    make: impl Fn() -> B + Sync,
) -> Vec<(B, CutOff<B>)>
where
    B: Backend + Send,
    B::Buffer: Send,
{
    let group = in_process_group(world.mesh.world());
    let gate = Arc::new(Gate {
        steps: steps.to_vec(),
        there: Mutex::new(0),
        all: Condvar::new(),
        transport: Arc::clone(&group[culprit.0 as usize]),
        culprit,
    });
    let plans = proved(world);
    let rank = |transport: Arc<dyn Transport>| {
        let (rank, backend) = (transport.rank(), make());
        let collective = HostStaged::new(transport, DEADLINE);
        let options = RunOptions { observer: Arc::clone(&gate) as Arc<dyn Observer>, ..options() };
        let lowered = LoweredPlan::new(plans.clone(), rank, &backend);
        let executor = Executor::new(&backend, &collective, &lowered, options).resumable();
        let mut inputs = executor.load(shard(world, rank, tensors).unwrap()).unwrap();
        let mut carryover = Carryover::default();
        let ended = pollster::block_on(executor.run_from(0, &mut inputs, &mut carryover));
        let steps = world.plan(rank).steps.len();
        assert!(
            ended.is_ok() || carryover.progress().steps < steps,
            "{rank}: {:?} after {:?}",
            ended.err(),
            carryover.progress()
        );
        if gate.steps[rank.0 as usize] == steps {
            gate.arrive();
        }
        drop(executor);
        (backend, CutOff { inputs, carryover })
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> =
            group.into_iter().map(|transport| scope.spawn(move || rank(transport))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `repair` on the states of the survivors.
pub fn go_on<B>(
    repair: &World,
    left: Vec<(B, CutOff<B>)>,
    whole: &mut Whole,
) -> Vec<kyklos::Result<RankOutput>>
where
    B: Backend + Send,
    B::Buffer: Send,
{
    let group = in_process_group(repair.mesh.world());
    // The callers prove repairs, or plant bugs in them.
    let plans = Arc::new(ProvedPlans::unproved(repair.clone()));
    let rank = |transport: Arc<dyn Transport>, (backend, mut cut): (B, CutOff<B>)| {
        let rank = transport.rank();
        let collective = HostStaged::new(transport.clone(), DEADLINE);
        let lowered = LoweredPlan::new(plans.clone(), rank, &backend);
        let executor = Executor::new(&backend, &collective, &lowered, options()).resumable();
        let output = pollster::block_on(executor.run_from(0, &mut cut.inputs, &mut cut.carryover));
        let _ = pollster::block_on(transport.close(DEADLINE));
        output
    };
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = group
            .into_iter()
            .zip(left)
            .map(|(transport, left)| scope.spawn(move || rank(transport, left)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, output) in outputs.iter().enumerate() {
        if let Ok(output) = output {
            whole.add(repair, rank, output);
        }
    }
    outputs
}

/// The progress of `ranks`.
pub fn reached_by<B: Backend>(all: &[(B, CutOff<B>)], ranks: &[Rank]) -> Vec<StepProgress> {
    ranks.iter().map(|rank| all[rank.0 as usize].1.carryover.progress().clone()).collect()
}
