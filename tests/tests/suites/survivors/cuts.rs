//! Proofs of repairs at random times.

use kyklos::plan::{
    BufferId, Content, Recv, RemainingBuffers, Step, StepProgress, World, check_repair, remaining_buffers,
};
use kyklos::{Dtype, Error, repair};
use kyklos_transport::Rank;
use proptest::prelude::*;

use crate::common::cut::reach;
use crate::survivors::drawn::{self, Chance};

/// The progress of all ranks at a random time, with the messages that may have arrived.
fn some_time(world: &World, chance: &mut Chance) -> Vec<StepProgress> {
    let whole: usize = world.plans.iter().map(|plan| plan.steps.len()).sum();
    let (mut steps, patience) = (0, chance.below(whole + 1));
    // One rank may be slow. Only a rank that does not wait for another rank can be slow.
    let slow = chance.below(world.plans.len() * 2) as u32;
    let at = reach(world, |can| {
        steps += 1;
        let place = chance.below(can.len());
        let place = if can[place] == slow { chance.below(can.len()) } else { place };
        (steps <= patience).then_some(place)
    });
    let reached = (0u32..).zip(&at).map(|(rank, steps)| {
        let all = on_the_way(world, rank, *steps, &at);
        let arrived = all.into_iter().filter(|_| chance.below(2) == 0).flatten().collect();
        StepProgress { op: 3, steps: *steps, arrived: sorted(arrived) }
    });
    reached.collect()
}

fn sorted(mut ids: Vec<BufferId>) -> Vec<BufferId> {
    ids.sort_unstable();
    ids
}

/// The buffers of each message that may have arrived, although the rank has not finished its wait.
fn on_the_way(world: &World, rank: u32, steps: usize, at: &[usize]) -> Vec<Vec<BufferId>> {
    let done = &world.plans[rank as usize].steps[..steps];
    let waited = |id: &u32| done.iter().any(|step| matches!(step, Step::Wait { id: other } if other == id));
    let posts = |from: u32, id: u32| {
        let theirs = &world.plans[from as usize].steps[..at[from as usize]];
        theirs.iter().any(|step| matches!(step, Step::Exchange { id: other, .. } if *other == id))
    };
    let open = done.iter().filter_map(|step| match step {
        Step::Exchange { id, recvs, .. } if !waited(id) => Some((*id, recvs)),
        _ => None,
    });
    open.flat_map(|(id, recvs)| recvs.iter().filter(move |recv| posts(recv.from, id)))
        .map(|Recv { parts, .. }| parts.clone())
        .collect()
}

/// The keys that a rank has in one buffer.
fn holds(world: &World, rank: Rank, left: &RemainingBuffers, key: u32) -> bool {
    let has = |id: &BufferId| world.plan(rank).buffer(*id).tokens.iter().any(|token| token == key);
    left.blocks.iter().any(has)
}

/// A world, the progress of its ranks, and the survivors.
struct Loss {
    world: World,
    ranks: Vec<Rank>,
    reached: Vec<StepProgress>,
}

fn loss(seed: u64) -> Loss {
    let mut chance = Chance(seed);
    let case = drawn::case(&mut chance, 60);
    let world = drawn::world(&mut chance, &case, Dtype::F32, true);
    let all = some_time(&world, &mut chance);
    let (_, ranks) = chance.losses(world.mesh.world());
    let reached = ranks.iter().map(|rank| all[rank.0 as usize].clone()).collect();
    Loss { world, ranks, reached }
}

fn proved(loss: &Loss, repair: &World) -> Result<(), Error> {
    check_repair(&loss.world, &loss.ranks, &loss.reached, repair).map(|_| ())
}

/// Checks that no survivor has all of these keys, and that some query sees one of them.
fn are_really_lost(loss: &Loss, owner: u32, keys: &kyklos::TokenRuns, seen_by: u32) {
    let world = &loss.world;
    assert!(!loss.ranks.contains(&Rank(owner)), "rank {owner} is left");
    for (rank, reached) in loss.ranks.iter().zip(&loss.reached) {
        let left = remaining_buffers(world, *rank, reached).unwrap();
        assert!(!keys.iter().all(|key| holds(world, *rank, &left, key)), "rank {rank} has {keys}");
    }
    let problem = &world.problem;
    let sees = |query: u32| {
        (0..problem.batch as usize).any(|batch| {
            let spans = problem.mask.visible(batch, problem.q_position(query), problem.kv_len);
            keys.iter().any(|key| spans.iter().any(|span| span.sees(key)))
        })
    };
    assert!(world.q_placement.of_rank(Rank(seen_by)).iter().any(sees), "nobody sees {keys}");
}

/// Faults in reported progress or in plans. Each fault returns `None` if there is nothing to break.
type Fault = fn(&mut Loss, &mut Option<World>, &mut Chance) -> Option<&'static str>;

/// Plans the repair from wrong progress that a rank reports.
fn said(loss: &Loss, at: usize, reached: StepProgress) -> Option<World> {
    let mut said = loss.reached.clone();
    said[at] = reached;
    repair(&loss.world, &loss.ranks, &said).ok()
}

const FAULTS: [Fault; 8] = [
    |loss, broken, chance| {
        let at = chance.below(loss.ranks.len());
        let truth = &loss.reached[at];
        let plan = loss.world.plan(loss.ranks[at]);
        let half = matches!(plan.steps.get(truth.steps), Some(Step::Attend { .. }));
        *broken = said(loss, at, StepProgress { steps: truth.steps + 1, ..truth.clone() }).filter(|_| half);
        broken.as_ref().map(|_| "an attend half done is taken for done")
    },
    |loss, broken, chance| {
        let at = chance.below(loss.ranks.len());
        let truth = &loss.reached[at];
        let plan = loss.world.plan(loss.ranks[at]);
        let done = truth.steps > 0 && matches!(plan.steps[truth.steps - 1], Step::Attend { .. });
        *broken = said(loss, at, StepProgress { steps: truth.steps.saturating_sub(1), ..truth.clone() });
        // The fault applies only if the state is kept. The first state may start again instead.
        broken.as_ref().filter(|_| done)?.plans[at]
            .kept
            .iter()
            .find(|kept| plan.buffer(kept.was).content == Content::State)?;
        Some("a block that was met is met again")
    },
    |loss, broken, chance| {
        let at = chance.below(loss.ranks.len());
        let truth = loss.reached[at].clone();
        let rank = loss.ranks[at];
        let everybody: Vec<usize> = loss.world.plans.iter().map(|plan| plan.steps.len()).collect();
        let open = on_the_way(&loss.world, rank.0, truth.steps, &everybody).concat();
        let more = open.into_iter().find(|id| !truth.arrived.contains(id))?;
        let arrived = sorted([&truth.arrived[..], &[more]].concat());
        *broken = said(loss, at, StepProgress { arrived, ..truth });
        broken.as_ref()?.plans[at].kept.iter().find(|kept| kept.was == more)?;
        Some("a block that is not here is taken for held")
    },
    |_, broken, chance| {
        let world = broken.as_mut()?;
        let at = chance.below(world.plans.len());
        let steps = &mut world.plans[at].steps;
        let step = steps.iter().position(|step| matches!(step, Step::Attend { .. }))?;
        let again = steps[step].clone();
        steps.insert(step, again);
        Some("a pair counted twice")
    },
    |_, broken, chance| {
        let world = broken.as_mut()?;
        let at = chance.below(world.plans.len());
        let steps = &mut world.plans[at].steps;
        let step = steps.iter().position(|step| matches!(step, Step::Attend { .. }))?;
        steps.remove(step);
        Some("a block left out")
    },
    |_, broken, chance| {
        let world = broken.as_mut()?;
        let at = chance.below(world.plans.len());
        let plan = &mut world.plans[at];
        let kept = plan.kept.iter().find(|kept| plan.buffers[kept.buffer.0].content == Content::State)?;
        let met = &mut plan.buffers[kept.buffer.0].met;
        *met = met.slice(1..met.len());
        Some("a state that has met a key more than it says")
    },
    |_, broken, chance| {
        let world = broken.as_mut()?;
        let at = chance.below(world.plans.len());
        let plan = &mut world.plans[at];
        let place =
            plan.kept.iter().position(|kept| plan.buffers[kept.buffer.0].content != Content::Output)?;
        let kept = plan.kept.remove(place);
        let tokens = plan.buffers[kept.buffer.0].tokens.len();
        (tokens > 0).then_some("a buffer that is used and not kept")
    },
    |loss, broken, _| {
        let world = broken.as_mut()?;
        world.problem =
            world.problem.clone().with_queries(world.problem.q_len, world.problem.q_offset + 1).unwrap();
        (world.problem != loss.world.problem).then_some("another problem")
    },
];

proptest! {
    #![proptest_config(crate::cases(500, 4000))]

    #[test]
    fn every_repair_is_proved_and_every_refusal_is_true(seed in any::<u64>()) {
        let loss = loss(seed);
        match repair(&loss.world, &loss.ranks, &loss.reached) {
            Ok(world) => {
                let proof = proved(&loss, &world);
                prop_assert!(proof.is_ok(), "{:?}", proof);
            }
            Err(Error::KeysLost { rank, keys, seen_by }) => are_really_lost(&loss, rank, &keys, seen_by),
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn no_seeded_fault_passes_the_proof(seed in any::<u64>()) {
        let mut chance = Chance(seed ^ 0x5eed);
        for fault in FAULTS {
            let mut loss = loss(seed);
            let mut broken = repair(&loss.world, &loss.ranks, &loss.reached).ok();
            if let Some(what) = fault(&mut loss, &mut broken, &mut chance) {
                let broken = broken.expect("a fault is in something");
                prop_assert!(proved(&loss, &broken).is_err(), "{} passed the proof", what);
            }
        }
    }

    #[test]
    fn encoded_progress_decodes_to_itself_and_other_bytes_are_refused(seed in any::<u64>()) {
        let loss = loss(seed);
        let mut chance = Chance(seed);
        for (rank, reached) in loss.ranks.iter().zip(&loss.reached) {
            let plan = loss.world.plan(*rank);
            let mut bytes = reached.encode(plan);
            prop_assert_eq!(bytes.len(), StepProgress::encoded_bytes(plan));
            prop_assert_eq!(&StepProgress::decode(&bytes, plan).unwrap(), reached);
            prop_assert!(StepProgress::decode(&bytes[1..], plan).is_err());
            let place = chance.below(bytes.len());
            bytes[place] ^= 1 << chance.below(8);
            // Every change is refused, or results in another valid progress.
            if let Ok(other) = StepProgress::decode(&bytes, plan) {
                prop_assert_ne!(&other, reached);
                let _ = remaining_buffers(&loss.world, *rank, &other);
            }
        }
    }
}

#[test]
fn all_faults_and_all_outcomes_occur() {
    let (mut faults, mut repaired, mut refused, mut moved) = ([0; FAULTS.len()], 0, 0, 0);
    for seed in 0..400 {
        let mut chance = Chance(seed ^ 0x5eed);
        for (fault, count) in FAULTS.iter().zip(&mut faults) {
            let mut loss = loss(seed);
            let mut broken = repair(&loss.world, &loss.ranks, &loss.reached).ok();
            *count += usize::from(fault(&mut loss, &mut broken, &mut chance).is_some());
        }
        let loss = loss(seed);
        match repair(&loss.world, &loss.ranks, &loss.reached) {
            Ok(world) => {
                repaired += 1;
                moved += usize::from(world.plans.iter().any(|plan| plan.volume(&world.problem).1 > 0));
            }
            Err(_) => refused += 1,
        }
    }
    println!(
        "of 400: {repaired} repaired, {moved} of them with messages, {refused} refused; faults {faults:?}"
    );
    assert!(faults.iter().all(|count| *count > 5) && repaired > 100 && moved > 50 && refused > 50);
}
