//! Every strategy, placement and split, with every mask, against the oracle: `E_par <= 2·E_dense +
//! a` for any number of ranks size. The bytes are as planned. The same comparison must find planted
//! bugs.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::amount::amount;
use crate::common::devices::{Broken, Fault};
use crate::common::{run_plans, run_set};
use kyklos::backend::Device;
use kyklos::plan::{PlanSet, ProvedPlans, Step, check};
use kyklos::{AttentionProblem, Dtype, Mesh, PlacementKind, Split, Strategy, plan_forward};
use kyklos_backend_suite::{Prepared, Whole};
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::tolerance::{Comparison, discriminates};
use kyklos_transport::{Rank, in_process_group};

/// Strategies that run on `mesh`, without dense, ring and Ulysses, which are special cases of
/// unified.
fn strategies_on(mesh: Mesh) -> Vec<Strategy> {
    let own = Strategy::ALL
        .into_iter()
        .filter(|strategy| !matches!(strategy, Strategy::Dense | Strategy::Ring | Strategy::Ulysses));
    own.filter(|strategy| strategy.accepts(mesh).is_ok()).collect()
}

pub(crate) fn dense(problem: &AttentionProblem) -> PlanSet {
    let mesh = Mesh::new(1, 1).unwrap();
    plan_forward(problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap()
}

pub(crate) fn run_on_cpu(set: &PlanSet, prepared: &Prepared) -> Whole {
    run_set(set, in_process_group(set.mesh.size()), &prepared.tensors, Device::cpu).0
}

/// Uneven weights for a plan set of `ranks`. With four or more ranks, one rank has no tokens.
fn uneven(ranks: u32) -> Split {
    Split::Weights((0..ranks).map(|rank| if rank == 3 { 0.0 } else { f64::from(1 + rank % 3) }).collect())
}

fn every_world_agrees(dtype: Dtype) {
    // Cells are counted over all cases. A sample has every case, mesh, placement, split and strategy,
    // but not every combination.
    let (mut cell, step) = (dtype as usize, amount(7, 1));
    let mut occurred = BTreeSet::new();
    for case in cases() {
        let prepared = Prepared::new(case, dtype);
        let name = prepared.case.name;
        let alone = prepared.judge(&run_on_cpu(&dense(&prepared.problem), &prepared), "cpu dense");
        alone.assert_within(&prepared.dense_limit());
        let limit = prepared.parallel_limit(&alone);
        for (ulysses, ring) in [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2), (3, 2), (2, 4)] {
            if ulysses > prepared.problem.q_heads {
                continue;
            }
            let mesh = Mesh::new(ulysses, ring).unwrap();
            for kind in PlacementKind::ALL {
                for (index, split) in [Split::Even, uneven(mesh.size())].into_iter().enumerate() {
                    cell += 1;
                    if cell % step != 0 {
                        continue;
                    }
                    // Every strategy has its turn on every case, mesh and placement or split.
                    let strategies = strategies_on(mesh);
                    let turn = prepared.case.seed as usize + index + kind as usize;
                    let strategy = strategies[turn % strategies.len()];
                    let set = plan_forward(&prepared.problem, mesh, kind, &split, strategy).unwrap();
                    let who = format!("cpu {strategy} {mesh} {kind} {split:?}");
                    occurred.extend([
                        strategy.to_string(),
                        mesh.to_string(),
                        kind.to_string(),
                        index.to_string(),
                    ]);
                    let whole = run_on_cpu(&set, &prepared);
                    let judged = prepared.judge(&whole, &who);
                    if let Err(failure) = judged.within(&limit) {
                        panic!("{name} on {who}: {failure}");
                    }
                    if mesh.size() == 1 {
                        let again = run_on_cpu(&dense(&prepared.problem), &prepared);
                        assert_eq!(whole.o, again.o, "{name}: one rank is the dense run, bit for bit");
                    }
                }
            }
        }
    }
    // All strategies except dense, ring and Ulysses; meshes, placements, splits.
    assert_eq!(occurred.len(), Strategy::ALL.len() - 3 + 8 + PlacementKind::ALL.len() + 2, "{occurred:?}");
}

#[test]
fn every_world_agrees_with_the_oracle_in_f32() {
    every_world_agrees(Dtype::F32);
}

#[test]
fn every_world_agrees_with_the_oracle_in_f16() {
    every_world_agrees(Dtype::F16);
}

#[test]
fn every_world_agrees_with_the_oracle_in_bf16() {
    every_world_agrees(Dtype::Bf16);
}

fn case(name: &str) -> Prepared {
    let case = cases().into_iter().find(|case| case.name == name);
    Prepared::new(case.unwrap_or_else(|| panic!("no case `{name}`")), Dtype::F32)
}

#[test]
fn ranks_send_exactly_what_their_plans_say() {
    let prepared = case("six query heads in groups of two");
    for (ulysses, ring) in [(1, 4), (4, 1), (2, 3)] {
        let mesh = Mesh::new(ulysses, ring).unwrap();
        let kind = PlacementKind::Zigzag;
        let set =
            plan_forward(&prepared.problem, mesh, kind, &uneven(mesh.size()), Strategy::Unified).unwrap();
        let (_, outputs) = run_set(&set, in_process_group(mesh.size()), &prepared.tensors, Device::cpu);
        for (output, planned) in outputs.iter().zip(check(&set).unwrap()) {
            assert_eq!(output.report.bytes_sent, planned.bytes_sent, "{mesh}");
            assert_eq!(output.report.messages_sent, planned.messages_sent, "{mesh}");
        }
    }
}

/// A rank that computes for a long time differs from a stuck rank. It reports progress at every
/// piece of attention, and its work is open in every step except a wait.
#[test]
fn a_rank_beats_at_every_piece_and_its_work_ends_with_it() {
    let prepared = case("six query heads in groups of two");
    let mesh = Mesh::new(1, 3).unwrap();
    let kind = PlacementKind::Contiguous;
    let set = plan_forward(&prepared.problem, mesh, kind, &Split::Even, Strategy::Unified).unwrap();
    let group = in_process_group(3);
    let pulses: Vec<_> = group.iter().map(|rank| rank.pulse()).collect();
    let (_, outputs) = run_set(&set, group, &prepared.tensors, Device::cpu);
    for (rank, (pulse, output)) in pulses.iter().zip(&outputs).enumerate() {
        let report = &output.report;
        let steps = &set.plan(Rank(rank as u32)).steps;
        let own = steps.iter().filter(|step| !matches!(step, Step::Wait { .. })).count() as u64;
        assert!(report.pieces > 0, "rank {rank}");
        assert!(pulse.beats() >= 2 * own + report.pieces, "{} of {own} steps: {report:?}", pulse.beats());
        assert!(!pulse.works(), "rank {rank} still works");
    }
}

#[test]
fn an_unexpected_attention_bias_tensor_is_refused_and_so_is_a_missing_one() {
    let rank = Rank(0);
    for name in ["mask tensor", "seven rows"] {
        let prepared = case(name);
        let mut tensors = prepared.tensors.clone();
        tensors.bias = match tensors.bias {
            Some(_) => None,
            None => Some(bytes::Bytes::from(vec![0; 64])),
        };
        let error = kyklos::host::shard(&dense(&prepared.problem), rank, &tensors).unwrap_err();
        assert!(error.is_request(), "{error}");
        assert!(error.to_string().contains("attention bias tensor"), "{error}");
    }
}

#[test]
fn the_same_plan_gives_the_same_bytes() {
    let prepared = case("two rows beyond four tiles");
    let mesh = Mesh::new(2, 2).unwrap();
    let set = plan_forward(&prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Unified)
        .unwrap();
    let first = run_on_cpu(&set, &prepared);
    for _ in 0..4 {
        let again = run_on_cpu(&set, &prepared);
        assert_eq!(first.o, again.o);
        assert_eq!(first.lse, again.lse);
    }
}

#[test]
fn sockets_and_channels_give_the_same_bytes() {
    let prepared = case("two rows beyond four tiles");
    for (ulysses, ring, strategy) in [
        (1, 3, Strategy::Unified),
        (2, 1, Strategy::Unified),
        (2, 2, Strategy::TwoWay),
        (1, 3, Strategy::Pipelined),
        (1, 4, Strategy::Bidirectional),
        (2, 2, Strategy::PassQ),
        (1, 3, Strategy::Gather),
    ] {
        let mesh = Mesh::new(ulysses, ring).unwrap();
        let kind = PlacementKind::Zigzag;
        let set = plan_forward(&prepared.problem, mesh, kind, &uneven(mesh.size()), strategy).unwrap();
        let over_channels = run_on_cpu(&set, &prepared);
        let sockets = kyklos_transport::quic::quic_loopback_group(mesh.size()).unwrap();
        let (over_sockets, outputs) = run_set(&set, sockets, &prepared.tensors, Device::cpu);
        assert_eq!(over_channels.o, over_sockets.o, "{mesh}");
        assert_eq!(over_channels.lse, over_sockets.lse, "{mesh}");
        for (output, planned) in outputs.iter().zip(check(&set).unwrap()) {
            assert_eq!(output.report.bytes_sent, planned.bytes_sent, "{mesh}");
        }
    }
}

/// Runs a plan set with possibly wrong plans. It skips the proof, because the proof would refuse
/// these plans.
fn run_unproved(set: &PlanSet, prepared: &Prepared) -> Whole {
    let plans = Arc::new(ProvedPlans::unproved(set.clone()));
    run_plans(&plans, in_process_group(set.mesh.size()), &prepared.tensors, Device::cpu).0
}

/// A planted bug must exceed the tolerance by far. Otherwise the suites above prove nothing.
fn must_be_caught(prepared: &Prepared, right: &Comparison, broken: &Whole, bug: &str) {
    let wrong = prepared.judge(broken, bug);
    let limit = prepared.parallel_limit(right);
    assert!(wrong.within(&limit).is_err(), "{bug} passes: {wrong}");
    let ratio = discriminates(
        right.max_abs_error,
        wrong.max_abs_error,
        kyklos_backend_suite::oracle_dtype(Dtype::F32),
    );
    ratio.unwrap_or_else(|error| panic!("{bug}: {error}"));
}

fn controls(kind: PlacementKind) -> (Prepared, PlanSet, Comparison) {
    let prepared = case("two rows beyond four tiles");
    let mesh = Mesh::new(1, 4).unwrap();
    let set = plan_forward(&prepared.problem, mesh, kind, &Split::Even, Strategy::Ring).unwrap();
    let right = prepared.judge(&run_unproved(&set, &prepared), "no bug");
    (prepared, set, right)
}

#[test]
fn a_dropped_hop_is_caught() {
    let (prepared, mut set, right) = controls(PlacementKind::Zigzag);
    let steps = &mut set.plans[2].steps;
    let last = steps.iter().rposition(|step| matches!(step, Step::Attend { .. })).unwrap();
    steps.remove(last);
    must_be_caught(&prepared, &right, &run_unproved(&set, &prepared), "a dropped hop");
}

#[test]
fn a_mask_that_is_off_by_one_is_caught() {
    let (prepared, mut set, right) = controls(PlacementKind::Zigzag);
    let q_len = set.problem.q_len;
    set.problem = set.problem.with_queries(q_len, 1).unwrap();
    must_be_caught(&prepared, &right, &run_unproved(&set, &prepared), "a mask off by one");
}

#[test]
fn a_block_under_the_wrong_owner_is_caught() {
    let (prepared, mut set, right) = controls(PlacementKind::Striped);
    // Zigzag and contiguous blocks are completely visible or completely hidden, for every owner.
    // Striped blocks have a diagonal. Rank 1 treats the block of the next shard as the block of the
    // previous shard.
    let plan = &mut set.plans[1];
    let block = |name: &str| plan.buffers.iter().position(|buffer| buffer.name.to_string() == name).unwrap();
    let (theirs, mistaken) = (block("kv of shard 2"), block("kv of shard 0"));
    let count = plan.buffers[theirs].tokens.len();
    plan.buffers[theirs].tokens = plan.buffers[mistaken].tokens.slice(0..count);
    must_be_caught(&prepared, &right, &run_unproved(&set, &prepared), "a wrong owner");
}

#[test]
fn a_missing_rescale_is_caught() {
    let (prepared, set, right) = controls(PlacementKind::Zigzag);
    let group = in_process_group(set.mesh.size());
    let broken = || Broken::device(Fault::WithoutRescale);
    let (whole, _) = run_set(&set, group, &prepared.tensors, broken);
    must_be_caught(&prepared, &right, &whole, "a missing rescale");
}

#[test]
fn keys_that_a_row_cannot_see_do_not_change_it() {
    for poisoned in cases().into_iter().filter(|case: &Case| !case.poison.is_empty()) {
        let name = poisoned.name;
        let clean =
            Case { poison: Vec::new(), ..cases().into_iter().find(|case| case.name == name).unwrap() };
        let ids = poisoned.problem.row_ids();
        let seeing: Vec<_> = ids.iter().filter(|id| poisoned.sees_poison(**id)).copied().collect();
        let (bad, good) = (Prepared::new(poisoned, Dtype::F32), Prepared::new(clean, Dtype::F32));
        for (ulysses, ring) in [(1, 1), (1, 3)] {
            let mesh = Mesh::new(ulysses, ring).unwrap();
            let set =
                plan_forward(&bad.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Unified)
                    .unwrap();
            let (with, without) = (run_on_cpu(&set, &bad), run_on_cpu(&set, &good));
            let dim = bad.problem.head_dim as usize;
            let (with_o, without_o): (Vec<f32>, Vec<f32>) =
                (bytemuck::pod_collect_to_vec(&with.o), bytemuck::pod_collect_to_vec(&without.o));
            for id in &ids {
                let at = bad.oracle.o_index(*id);
                let row = at..at + dim;
                let same = with_o[row.clone()]
                    .iter()
                    .zip(&without_o[row.clone()])
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                if seeing.contains(id) {
                    let lost = with_o[row].iter().all(|x| x.is_finite());
                    assert!(!lost, "{name} {mesh}: {id:?} sees a NaN or infinity and does not show it");
                } else {
                    assert!(same, "{name} {mesh}: {id:?} changed by what it cannot see");
                }
            }
        }
    }
}
