//! Repairs of real interrupted runs, on the CPU backend.

use kyklos::backend::Device;
use kyklos::plan::{Step, StepProgress, World, check_repair};
use kyklos::{Dtype, Error, Mesh, PlacementKind, Split, Strategy, plan_world, repair};
use kyklos_backend_suite::{Prepared, Whole, oracle_dtype};
use kyklos_oracle::inputs::cases;
use kyklos_oracle::tolerance::{Cause, Comparison, discriminates};
use kyklos_transport::{Rank, in_process_group};
use proptest::prelude::*;

use crate::common::cut::{cut_off, go_on, reach, reached_by};
use crate::common::run_world;
use crate::survivors::drawn::{self, Chance};

/// The result of a loss.
enum End {
    /// The output of the survivors, with NaN in rows of lost ranks.
    Finished(Whole),
    Refused,
}

/// Runs `world` to `steps`, loses all ranks except `ranks`, and finishes the run. `lie` may change the reported
/// progress.
fn lose(
    world: &World,
    prepared: &Prepared,
    steps: &[usize],
    ranks: &[Rank],
    lie: impl FnOnce(&mut [StepProgress]) -> bool,
) -> End {
    let lost = (0..world.mesh.world()).map(Rank).find(|rank| !ranks.contains(rank)).unwrap();
    let all = cut_off(world, &prepared.tensors, steps, lost, Device::cpu);
    let mut reached = reached_by(&all, ranks);
    let lied = lie(&mut reached);
    let repaired = match repair(world, ranks, &reached) {
        Ok(repaired) => repaired,
        Err(Error::KeysLost { .. }) => return End::Refused,
        Err(error) => panic!("{error}"),
    };
    if !lied {
        check_repair(world, ranks, &reached, &repaired).unwrap();
    }
    let left =
        (0..).map(Rank).zip(all).filter(|(rank, _)| ranks.contains(rank)).map(|(_, left)| left).collect();
    let mut whole = Whole::new(world);
    for output in go_on(&repaired, left, &mut whole) {
        output.unwrap();
    }
    End::Finished(whole)
}

/// Only the rows of the survivors are judged.
fn of_survivors(prepared: &mut Prepared, world: &World, ranks: &[Rank]) {
    let tokens: Vec<u32> = ranks.iter().flat_map(|rank| world.q_placement.of_rank(*rank).iter()).collect();
    prepared.expected.retain(|row| tokens.contains(&(row.id.row as u32)));
}

/// No row of a lost rank has an output.
fn lost_rows_have_none(whole: &Whole, world: &World, ranks: &[Rank]) {
    let seq = world.problem.q_len as usize;
    let lost = (0..).map(Rank).zip(world.q_placement.ranks()).filter(|(rank, _)| !ranks.contains(rank));
    for token in lost.flat_map(|(_, tokens)| tokens.iter()) {
        assert!(whole.lse.chunks(seq).all(|head| head[token as usize].is_nan()), "{token}");
    }
}

proptest! {
    #![proptest_config(crate::cases(50, 250))]

    #[test]
    fn survivors_of_any_loss_agree_with_the_oracle(seed in any::<u64>()) {
        let mut chance = Chance(seed);
        let dtype = [Dtype::F32, Dtype::F32, Dtype::F16, Dtype::Bf16][chance.below(4)];
        let mut prepared = Prepared::new(drawn::case(&mut chance, 140), dtype);
        let world = drawn::world(&mut chance, &prepared.case, dtype, false);
        let whole: usize = world.plans.iter().map(|plan| plan.steps.len()).sum();
        let (mut done, patience) = (0, chance.below(whole + whole / 3 + 1));
        let steps = reach(&world, |can| {
            done += 1;
            (done <= patience).then(|| chance.below(can.len()))
        });
        let (_, ranks) = chance.losses(world.mesh.world());
        let alone = plan_world(
            &prepared.problem,
            Mesh::new(1, 1).unwrap(),
            PlacementKind::Contiguous,
            &Split::Even,
            Strategy::Dense,
        ).unwrap();
        let alone = run_world(&alone, in_process_group(1), &prepared.tensors, Device::cpu).0;
        let alone = prepared.judge(&alone, "cpu alone");
        let limit = prepared.parallel_limit(&alone);
        if let End::Finished(output) = lose(&world, &prepared, &steps, &ranks, |_| false) {
            lost_rows_have_none(&output, &world, &ranks);
            of_survivors(&mut prepared, &world, &ranks);
            if prepared.expected.is_empty() {
                return Ok(());
            }
            let who = format!("{} {} {dtype} {:?} at {steps:?}, left {ranks:?}", world.strategy, world.q_placement.name(), world.mesh);
            if let Err(failure) = prepared.judge(&output, &who).within(&limit) {
                // A few rows over many keys have a small output. A large limit proves nothing about them.
                prop_assert!(matches!(failure.cause, Cause::Vacuous(_)), "{who}: {failure}");
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::cases(20, 80))]

    /// The rounding of keys does not depend on the sending rank. Only the order of sums differs.
    #[test]
    fn survivors_get_the_undisturbed_output_with_any_wire_format(seed in any::<u64>()) {
        let mut chance = Chance(seed);
        let prepared = Prepared::new(drawn::case(&mut chance, 140), Dtype::F32);
        let world = drawn::world(&mut chance, &prepared.case, Dtype::F32, true);
        let whole: usize = world.plans.iter().map(|plan| plan.steps.len()).sum();
        let (mut done, patience) = (0, chance.below(whole + 1));
        let steps = reach(&world, |can| {
            done += 1;
            (done <= patience).then(|| chance.below(can.len()))
        });
        let (_, ranks) = chance.losses(world.mesh.world());
        let right = run_world(&world, in_process_group(world.mesh.world()), &prepared.tensors, Device::cpu).0;
        if let End::Finished(whole) = lose(&world, &prepared, &steps, &ranks, |_| false) {
            lost_rows_have_none(&whole, &world, &ranks);
            let seq = world.problem.q_len as usize;
            for token in ranks.iter().flat_map(|rank| world.q_placement.of_rank(*rank).iter()) {
                for (there, here) in whole.lse.chunks(seq).zip(right.lse.chunks(seq)) {
                    let (there, here) = (there[token as usize], here[token as usize]);
                    prop_assert!(there == here || (there - here).abs() < 1e-5, "{token}: {there}, {here}");
                }
            }
            let row = (world.problem.q_heads * world.problem.head_dim) as usize;
            let floats = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<u8, f32>(bytes);
            let owned: Vec<u32> = ranks.iter().flat_map(|rank| world.q_placement.of_rank(*rank).iter()).collect();
            for (at, (there, here)) in floats(&whole.o).chunks(row).zip(floats(&right.o).chunks(row)).enumerate() {
                if owned.contains(&((at % seq) as u32)) {
                    let off = there.iter().zip(here).map(|(there, here)| (there - here).abs()).fold(0.0, f32::max);
                    prop_assert!(off < 1e-5, "row {at}: {off}");
                }
            }
        }
    }
}

/// A causal ring of four over zigzag shards, large enough for every fault to show.
fn ring() -> (Prepared, World, Comparison) {
    let case = cases().into_iter().find(|case| case.name == "two rows beyond four tiles").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let mesh = Mesh::new(1, 4).unwrap();
    let world =
        plan_world(&prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Ring).unwrap();
    let whole = run_world(&world, in_process_group(4), &prepared.tensors, Device::cpu).0;
    let right = prepared.judge(&whole, "nothing is lost");
    (prepared, world, right)
}

/// `victim` pauses before `step`, and the other ranks run as far as possible. With `late` they stay as far behind as
/// possible.
fn held_at(world: &World, victim: u32, step: usize, late: bool) -> Vec<usize> {
    let mut at = vec![0; world.plans.len()];
    reach(world, |can| {
        let mine = can.iter().position(|rank| *rank == victim).filter(|_| at[victim as usize] < step);
        let others = can.iter().position(|rank| *rank != victim);
        // Late ranks stop when the victim reaches its step.
        let there = at[victim as usize] >= step;
        let place = if late && there {
            None
        } else if late {
            mine.or(others)
        } else {
            others.or(mine)
        };
        place.inspect(|place| at[can[*place] as usize] += 1)
    })
}

#[test]
fn a_ring_that_loses_a_rank_at_any_step_is_finished_if_survivors_hold_its_keys() {
    let (_, world, right) = ring();
    let (mut finished, mut refused) = (0, 0);
    for victim in 0..4 {
        for step in 0..=world.plan(Rank(victim)).steps.len() {
            for late in [false, true] {
                let (mut prepared, world, _) = ring();
                let ranks: Vec<Rank> = (0..4).filter(|rank| *rank != victim).map(Rank).collect();
                let steps = held_at(&world, victim, step, late);
                match lose(&world, &prepared, &steps, &ranks, |_| false) {
                    End::Finished(whole) => {
                        let limit = prepared.parallel_limit(&right);
                        lost_rows_have_none(&whole, &world, &ranks);
                        of_survivors(&mut prepared, &world, &ranks);
                        let who = format!("without rank {victim} at step {step} of {steps:?}");
                        prepared.judge(&whole, &who).assert_within(&limit);
                        finished += 1;
                    }
                    End::Refused => {
                        // The victim's neighbour receives its keys in the first exchange. This exchange begins at step
                        // 1.
                        assert!(step <= 2, "rank {victim} at step {step} of {steps:?}");
                        refused += 1;
                    }
                }
            }
        }
    }
    println!("{finished} finished, {refused} refused");
    assert!(finished > 40 && refused > 3, "{finished} finished, {refused} refused");
}

/// Wrongly reported progress that passes the proof must exceed the tolerance by far.
fn must_be_caught(bug: &str, lie: impl Fn(&World, &mut [StepProgress]) -> bool) {
    let (_, world, right) = ring();
    let ranks = [0, 1, 3].map(Rank);
    let mut caught = 0;
    for step in 0..=world.plan(Rank(2)).steps.len() {
        let (mut prepared, world, _) = ring();
        let steps = held_at(&world, 2, step, true);
        let mut lied = false;
        let end = lose(&world, &prepared, &steps, &ranks, |reached| {
            lied = lie(&world, reached);
            lied
        });
        let End::Finished(whole) = end else { continue };
        if !lied {
            continue;
        }
        of_survivors(&mut prepared, &world, &ranks);
        let wrong = prepared.judge(&whole, bug);
        assert!(wrong.within(&prepared.parallel_limit(&right)).is_err(), "{bug} passes: {wrong}");
        discriminates(right.max_abs_error, wrong.max_abs_error, oracle_dtype(Dtype::F32))
            .unwrap_or_else(|error| panic!("{bug}: {error}"));
        caught += 1;
    }
    assert!(caught > 0, "{bug} had no occasion");
}

#[test]
fn an_attend_half_done_that_is_taken_for_done_is_caught() {
    must_be_caught("an attend half done", |world, reached| {
        let half = |(rank, reached): (Rank, &mut StepProgress)| {
            let next = world.plan(rank).steps.get(reached.steps);
            let is = matches!(next, Some(Step::Attend { .. })) && reached.steps > 1;
            reached.steps += usize::from(is);
            is
        };
        [0, 1, 3].map(Rank).into_iter().zip(reached).map(half).fold(false, |any, one| any | one)
    });
}

#[test]
fn a_block_that_is_attended_twice_is_caught() {
    must_be_caught("a pair counted twice", |world, reached| {
        let again = |(rank, reached): (Rank, &mut StepProgress)| {
            let steps = &world.plan(rank).steps[..reached.steps];
            let last = steps.iter().rposition(|step| matches!(step, Step::Attend { .. }));
            let earlier = steps.iter().filter(|step| matches!(step, Step::Attend { .. })).count();
            let is = last == steps.len().checked_sub(1) && earlier > 1;
            reached.steps -= usize::from(is);
            is
        };
        [0, 1, 3].map(Rank).into_iter().zip(reached).map(again).fold(false, |any, one| any | one)
    });
}
