//! Attention bias tensors whose row all queries share: they are in no plan, they give the same
//! bytes as one row for each query, ranks with unlike tensors get one error, and the oracle finds
//! wrong rows.

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::local::on_threads;
use kyklos::plan::{PlanSet, ProvedPlans, Step, check, plan_hash};
use kyklos::{
    Attention, AttentionProblem, BiasKind, BiasTensor, Dtype, Error, Mesh, PlacementKind, Session, Split,
    Strategy, Tensor, WireFormat, plan_forward, plan_placed,
};
use kyklos_backend_suite::{Prepared, Whole, attend_planned, oracle_dtype};
use kyklos_oracle::inputs::cases;
use kyklos_oracle::tolerance::discriminates;
use kyklos_transport::in_process_group;
use kyklos_transport::quic::quic_loopback_group;
use proptest::prelude::*;
use std::sync::Arc;

use crate::amount::amount;
use crate::common::devices::{Broken, Fault};
use crate::common::run_set;
use crate::plan_properties::{Drawn, sets};

fn run(set: &PlanSet, tensors: &Tensors) -> Whole {
    run_set(set, in_process_group(set.mesh.size()), tensors, Device::cpu).0
}

fn shared_cases(dtype: Dtype) -> impl Iterator<Item = Prepared> {
    let shared = cases().into_iter().filter(|case| case.bias.is_some_and(|bias| bias.shared_rows));
    shared.map(move |case| Prepared::new(case, dtype))
}

/// The same call with a row for each query.
fn with_own_rows(problem: &AttentionProblem, tensors: &Tensors) -> (AttentionProblem, Tensors) {
    let tensor = problem.bias.unwrap();
    let whole = tensors.bias.clone().unwrap();
    let entry = whole.len() / tensor.batch as usize;
    let rows: Vec<u8> = whole.chunks(entry).flat_map(|rows| rows.repeat(problem.q_len as usize)).collect();
    let own = BiasTensor { shared_rows: false, ..tensor };
    let problem = problem.clone().with_bias(Some(own)).unwrap();
    (problem, Tensors { bias: Some(rows.into()), ..tensors.clone() })
}

proptest! {
    #![proptest_config(crate::cases(100, 1000))]

    #[test]
    fn plans_are_those_without_the_tensor_and_each_rank_counts_its_bytes(
        Drawn(set) in sets(),
        additive in any::<bool>(),
        (entries, heads) in (any::<bool>(), any::<bool>()),
    ) {
        let PlanSet { problem, mesh, q_placement, kv_placement, strategy, .. } = set;
        prop_assume!(problem.kv_len > 0);
        let tensor = BiasTensor {
            kind: if additive { BiasKind::Additive } else { BiasKind::Mask },
            batch: if entries { problem.batch } else { 1 },
            heads: if heads { problem.q_heads } else { 1 },
            shared_rows: true,
        };
        let plans = |bias| {
            let problem = problem.clone().with_bias(bias).expect("drawn to fit");
            plan_placed(&problem, mesh, q_placement.clone(), kv_placement.clone(), strategy).expect("drawn to fit")
        };
        let (with, without) = (plans(Some(tensor)), plans(None));
        prop_assert_eq!(&with.plans, &without.plans);
        prop_assert_ne!(plan_hash(&with, &[]), plan_hash(&without, &[]));
        let bytes = tensor.bytes(problem.dtype, problem.q_len, problem.kv_len);
        for (with, without) in check(&with).unwrap().iter().zip(check(&without).unwrap()) {
            prop_assert_eq!(with.peak_bytes, without.peak_bytes + bytes);
        }
        // A plan that took rows of such a tensor along is refused.
        let mut travelling = with.clone();
        travelling.plans[0].bias = Some(travelling.plans[0].q);
        prop_assert!(ProvedPlans::new(travelling).is_err());
        let mut reading = with;
        let mut steps = reading.plans.iter_mut().flat_map(|plan| &mut plan.steps);
        let attends = steps.find_map(|step| match step {
            Step::Attend { q, bias, .. } => Some((q.clone(), bias)),
            _ => None,
        });
        if let Some((q, bias)) = attends {
            *bias = Some(Box::new(q));
            prop_assert!(ProvedPlans::new(reading).is_err());
        }
    }
}

#[test]
fn a_shared_row_gives_the_bytes_of_that_row_for_each_query() {
    let (mut cell, step) = (0, amount(6, 1));
    for dtype in Dtype::ALL {
        for prepared in shared_cases(dtype).filter(|prepared| prepared.case.poison.is_empty()) {
            for (ulysses, ring) in [(1, 1), (1, 3), (2, 2), (3, 1)] {
                let mesh = Mesh::new(ulysses, ring).unwrap();
                for strategy in Strategy::ALL.into_iter().filter(|strategy| strategy.accepts(mesh).is_ok()) {
                    for wire in WireFormat::ALL {
                        cell += 1;
                        let queries = strategy.moves_queries();
                        if cell % step != 0 || (queries && wire.rounds()) {
                            continue;
                        }
                        let replicated = if cell % 2 == 0 { 3..20 } else { 0..0 };
                        let Ok(problem) = prepared.problem.clone().with_wire(wire) else { continue };
                        let problem = problem.with_replicated(replicated).unwrap();
                        let (own, tensors) = with_own_rows(&problem, &prepared.tensors);
                        let weights = (0..mesh.size()).map(|rank| f64::from(rank % 3 + u32::from(rank == 0)));
                        let split = Split::Weights(weights.collect());
                        let Ok(shared) =
                            plan_forward(&problem, mesh, PlacementKind::Zigzag, &split, strategy)
                        else {
                            continue;
                        };
                        let own = plan_forward(&own, mesh, PlacementKind::Zigzag, &split, strategy).unwrap();
                        let (shared, own) = (run(&shared, &prepared.tensors), run(&own, &tensors));
                        let what = format!("{} {dtype} {mesh} {strategy} {wire}", prepared.case.name);
                        assert!(shared.o == own.o, "{what}: o");
                        assert!(shared.lse == own.lse, "{what}: lse");
                    }
                }
            }
        }
    }
}

/// Rows of another batch entry or of another head, and no rows at all, exceed the tolerance by far.
#[test]
fn wrong_rows_are_caught() {
    let mut caught = [0; 3];
    for prepared in shared_cases(Dtype::F32).filter(|prepared| prepared.case.poison.is_empty()) {
        let tensor = prepared.problem.bias.unwrap();
        let mesh = Mesh::new(2, 2).unwrap();
        let set =
            plan_forward(&prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Unified)
                .unwrap();
        let right = prepared.judge(&run(&set, &prepared.tensors), "no bug");
        right.assert_within(&prepared.parallel_limit(&right));
        let faults = [
            (Fault::NoBias, true),
            (Fault::BiasOfFirstEntry, tensor.batch > 1),
            (Fault::BiasFromFirstHead, tensor.heads > 1),
        ];
        for (index, (fault, _)) in faults.into_iter().enumerate().filter(|(_, (_, shows))| *shows) {
            let broken = || Broken::device(fault);
            let (whole, _) = run_set(&set, in_process_group(4), &prepared.tensors, broken);
            let wrong = prepared.judge(&whole, "a planted bug");
            let what = format!("{}: {fault:?}", prepared.case.name);
            assert!(wrong.within(&prepared.parallel_limit(&right)).is_err(), "{what} passes: {wrong}");
            let ratio = discriminates(right.max_abs_error, wrong.max_abs_error, oracle_dtype(Dtype::F32));
            ratio.unwrap_or_else(|error| panic!("{what}: {error}"));
            caught[index] += 1;
        }
    }
    assert!(caught.iter().all(|count| *count >= 3), "{caught:?}");
}

const KEYS: BiasTensor = BiasTensor { kind: BiasKind::Mask, batch: 1, heads: 1, shared_rows: true };

fn key_mask(hidden: u32) -> Bytes {
    let words = BiasTensor::pack((0..8).map(|key| key != hidden));
    words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>().into()
}

#[test]
fn ranks_with_unlike_tensors_get_one_error_and_can_go_on() {
    for group in [in_process_group(2), quic_loopback_group(2).unwrap()] {
        let errors = on_threads(group, |transport| {
            let rank = transport.rank().0;
            let mut session = Session::new(transport, Device::cpu());
            let values = (0..4 * 2 * 8).map(|index| (index as f32 * 0.37 + rank as f32).sin()).collect();
            let x = Tensor::new([1, 4, 2, 8], values).unwrap();
            let mut attend = |rows: Bytes| {
                let call = Attention::new().bias(KEYS, rows);
                session.attend(&call, &x, &x, &x).map(|output| output.o.to_vec::<f32>().unwrap())
            };
            let first = attend(key_mask(1)).unwrap();
            let errors =
                [attend(key_mask(rank)).unwrap_err(), attend(Bytes::from(vec![0xFF; 12])).unwrap_err()];
            // Other bytes are no other call: the plan is that of the first one.
            let other = attend(key_mask(2)).unwrap();
            assert!(first != other && session.plans_made() == 1);

            // The same with plans that the caller has made.
            let shape = [1, 8, 2, 2, 8];
            let problem = AttentionProblem::new(shape, Dtype::F32, kyklos::Mask::full()).unwrap();
            let problem = problem.with_bias(Some(KEYS)).unwrap();
            let mesh = Mesh::new(1, 2).unwrap();
            let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring)
                .unwrap();
            let plans = Arc::new(ProvedPlans::new(set).unwrap());
            let run = |session: &mut Session, rows: Bytes| {
                let part = pollster::block_on(x.bytes()).unwrap();
                let tensors = Tensors { q: part.clone(), k: part.clone(), v: part, bias: Some(rows) };
                pollster::block_on(attend_planned(session, &plans, &tensors))
            };
            let unlike = run(&mut session, key_mask(rank)).unwrap_err();
            let good = run(&mut session, key_mask(2)).unwrap();
            assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&good.o), other);
            let errors: Vec<Error> = errors.into_iter().chain([unlike]).collect();
            assert!(errors.iter().all(Error::is_request), "{errors:?}");
            errors.iter().map(ToString::to_string).collect::<Vec<_>>()
        });
        assert_eq!(errors[0], errors[1]);
        for (error, words) in errors[0].iter().zip([
            "rank 1 calls with another attention bias tensor",
            "has 12 bytes, its shape needs 4",
            "rank 1 calls with another attention bias tensor",
        ]) {
            assert!(error.contains(words), "{error}");
        }
    }
}
