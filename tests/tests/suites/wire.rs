//! Wire formats of keys and values. Their error is not larger than the error of the same rounding
//! on one device. Non-finite values reach exactly the rows that see them. The suite finds wrong
//! scales.

use std::collections::BTreeSet;

use crate::common::devices::{Broken, Fault};
use crate::common::run_set;
use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::local::on_threads;
use kyklos::plan::{Content, PlanSet, Step, check};
use kyklos::{
    Attention, AttentionProblem, CacheOptions, CallShapes, Dtype, Execution, Mask, Mesh, Output,
    PlacementKind, Saved, Session, Split, Strategy, Tensor, WireFormat, plan_forward,
};
use kyklos_backend_suite::{Prepared, Whole, oracle_dtype};
use kyklos_oracle::inputs::{TensorId, cases, fill};
use kyklos_oracle::wire;
use kyklos_transport::in_process_group;

/// Strategies that send keys, with a mesh for each.
const MESHES: &[(u32, u32, Strategy)] = &[
    (1, 2, Strategy::Ring),
    (1, 3, Strategy::Ring),
    (2, 2, Strategy::Unified),
    (2, 2, Strategy::Chunked),
    (1, 4, Strategy::Bidirectional),
    (1, 3, Strategy::TwoWay),
    (2, 2, Strategy::Pipelined),
    (2, 3, Strategy::Line),
    (1, 3, Strategy::Gather),
    (2, 3, Strategy::Relay),
];

fn set(problem: &AttentionProblem, (ulysses, ring, strategy): (u32, u32, Strategy)) -> PlanSet {
    let mesh = Mesh::new(ulysses, ring).unwrap();
    let weights = (0..mesh.size()).map(|rank| f64::from(1 + rank % 3)).collect();
    let split = if ring == 2 { Split::Even } else { Split::Weights(weights) };
    let set = plan_forward(problem, mesh, PlacementKind::Zigzag, &split, strategy).unwrap();
    check(&set).unwrap();
    set
}

fn run(set: &PlanSet, tensors: &Tensors) -> Whole {
    run_set(set, in_process_group(set.mesh.size()), tensors, Device::cpu).0
}

fn alone(problem: &AttentionProblem, tensors: &Tensors) -> Whole {
    let problem = problem.clone().with_wire(WireFormat::Same).unwrap();
    let mesh = Mesh::new(1, 1).unwrap();
    let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap();
    run(&set, tensors)
}

fn case(name: &str, dtype: Dtype) -> Prepared {
    let case = cases().into_iter().find(|case| case.name == name);
    Prepared::new(case.unwrap_or_else(|| panic!("no case `{name}`")), dtype)
}

/// Lists of tokens that a plan set sends together.
fn lists(set: &PlanSet) -> Vec<Vec<u32>> {
    let buffers = set.plans.iter().flat_map(|plan| &plan.buffers);
    let sent = buffers.filter(|buffer| buffer.content == Content::WireKeyValue);
    sent.map(|buffer| buffer.tokens.iter().collect()).collect::<BTreeSet<_>>().into_iter().collect()
}

fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    wire::load(oracle_dtype(dtype), bytes)
}

fn stored(dtype: Dtype, numbers: &[f32]) -> Bytes {
    wire::store(oracle_dtype(dtype), numbers).into()
}

fn kv_shape(problem: &AttentionProblem) -> wire::Shape {
    [problem.batch, problem.kv_len, problem.kv_heads, problem.head_dim].map(|n| n as usize)
}

/// The tensors, with all keys and values that `set` sends rounded.
fn rounded(set: &PlanSet, exact: &Tensors) -> Tensors {
    let problem = &set.problem;
    let round = |tensor: &Bytes, int8: fn(&mut [f32], wire::Shape, &[Vec<u32>])| {
        let mut numbers = floats(problem.dtype, tensor);
        match problem.wire {
            WireFormat::Same => {}
            WireFormat::F16 => wire::f16_each(&mut numbers),
            WireFormat::Int8 => int8(&mut numbers, kv_shape(problem), &lists(set)),
        }
        stored(problem.dtype, &numbers)
    };
    let (k, v) = (round(&exact.k, wire::int8_keys), round(&exact.v, wire::int8_values));
    Tensors { k, v, ..exact.clone() }
}

#[test]
fn every_strategy_that_sends_keys_has_a_mesh_here() {
    for strategy in Strategy::ALL {
        let sends_keys = strategy.example_mesh().ring() > 1 && !strategy.moves_queries();
        let is_listed = MESHES.iter().any(|(_, _, listed)| *listed == strategy);
        assert_eq!(sends_keys, is_listed, "{strategy}");
    }
}

#[test]
fn keys_on_the_wire_are_rounded_once_and_cost_no_more_than_that() {
    let formats =
        [(Dtype::F32, WireFormat::F16)].into_iter().chain(Dtype::ALL.map(|d| (d, WireFormat::Int8)));
    for (dtype, format) in formats {
        for name in ["two rows beyond four tiles", "three batch entries", "groups of eight", "mask tensor"] {
            let prepared = case(name, dtype);
            let unrounded = prepared.judge(&alone(&prepared.problem, &prepared.tensors), "alone");
            let problem = prepared.problem.clone().with_wire(format).unwrap();
            for shared in MESHES.iter().copied() {
                let set = set(&problem, shared);
                // One device with these keys and values rounded: the cost of rounding on these inputs.
                let tensors = rounded(&set, &prepared.tensors);
                let rounded = prepared.judge(&alone(&problem, &tensors), "rounded, alone");
                let limit = prepared.parallel_limit(&rounded);
                let limit = if format == WireFormat::Int8 { limit.of_coarse_keys() } else { limit };
                let who = format!("{dtype} as {format}, {shared:?}");
                let judged = prepared.judge(&run(&set, &prepared.tensors), &who);
                judged.assert_within(&limit);
                // The rounding of 16-bit outputs hides much of this error.
                if dtype == Dtype::F32 {
                    let shows = 5.0 * unrounded.max_abs_error;
                    assert!(rounded.max_abs_error > 2.0 * shows, "{name} {who}: rounding shows");
                    assert!(judged.max_abs_error > shows, "{name} {who}: nothing was rounded");
                }
            }
        }
    }
}

#[test]
fn keys_that_go_both_ways_are_converted_once_by_their_owner() {
    let problem = case("two rows beyond four tiles", Dtype::F32).problem;
    for format in [WireFormat::F16, WireFormat::Int8] {
        let problem = problem.clone().with_wire(format).unwrap();
        for strategy in [Strategy::Bidirectional, Strategy::Line] {
            for plan in &set(&problem, (1, 5, strategy)).plans {
                let own = |step: &&Step| matches!(step, Step::Convert { from, .. } if from.buffer == plan.kv);
                assert_eq!(plan.steps.iter().filter(own).count(), 1, "{strategy}, rank {}", plan.rank);
            }
        }
    }
}

/// One element beyond the range of f16 on one rank. Whoever gets these keys, all ranks get one
/// error that names the rank, and the next call is right. Infinite elements are no error: they
/// travel as they are.
#[test]
fn elements_beyond_f16_on_the_wire_are_one_error_of_all_ranks() {
    for (ulysses, ring, strategy) in MESHES.iter().copied() {
        let ranks = ulysses * ring;
        // Of a mesh with shards of several ranks the first one, which sends the heads of the element.
        for (mask, culprit) in [("causal", 0), ("full", ring / 2 * ulysses)] {
            let ended = on_threads(in_process_group(ranks), |transport| {
                let rank = transport.rank().0;
                let mut session = Session::new(transport, Device::cpu());
                let tensor = |scale: f32| {
                    let mut numbers = vec![0_f32; 12 * 6 * 16];
                    fill(u64::from(rank), TensorId::V, 0..numbers.len() as u64, &mut numbers);
                    numbers[777] *= scale;
                    numbers[777] += scale - 1.0;
                    Tensor::new([1, 12, 6, 16], numbers).unwrap()
                };
                let mesh = Mesh::new(ulysses, ring).unwrap();
                let execution = Execution::new().mesh(mesh).strategy(strategy).wire(WireFormat::F16);
                let call = Attention::new().mask(mask.parse().unwrap()).execution(execution);
                let (x, beyond) = (tensor(1.0), tensor(if rank == culprit { 1e6 } else { 1.0 }));
                let infinite = tensor(if rank == culprit { f32::INFINITY } else { 1.0 });
                let mut errors = Vec::new();
                for [k, v] in [[&beyond, &x], [&x, &beyond]] {
                    errors.push(session.attend(&call, &x, k, v).map(drop).unwrap_err());
                    session.attend(&call, &x, &x, &infinite).unwrap();
                    session.attend(&call, &x, &x, &x).unwrap();
                }
                let Output { o, lse, .. } = session.attend(&call, &x, &x, &x).unwrap();
                let saved = |k: &Tensor| Saved {
                    q: x.clone(),
                    k: k.clone(),
                    v: x.clone(),
                    o: o.clone(),
                    lse: lse.clone(),
                };
                errors.push(session.backward(&call, &saved(&beyond), &x, None).map(drop).unwrap_err());
                session.backward(&call, &saved(&x), &x, None).unwrap();
                errors
            });
            for (rank, errors) in (0..).zip(&ended) {
                for error in errors {
                    let words = format!("keys or values of rank {culprit} that are beyond ±65504");
                    assert!(error.to_string().contains(&words), "{strategy}, rank {rank}: {error}");
                    assert_eq!(error.is_request(), rank == culprit, "{strategy}, rank {rank}: {error}");
                }
            }
        }
    }
}

/// Of calls after one vote, the one that the ranks refuse is made again, on the same cache.
#[test]
fn announced_calls_beyond_f16_are_made_again() {
    let ended = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank().0 == 1;
        let mut session = Session::new(transport, Device::cpu());
        let tensor = |x: f32| Tensor::new([1, 12, 2, 16], vec![x; 12 * 2 * 16]).unwrap();
        let (x, beyond) = (tensor(0.5), tensor(if odd { 1e6 } else { 0.5 }));
        let execution = Execution::new().mesh(Mesh::new(1, 2).unwrap()).wire(WireFormat::F16);
        let call = Attention::new().execution(execution);
        let mut calls = session.prepare(&call, &CallShapes::of(&x, &x), 2).unwrap();
        calls.run(&x, &x, &beyond).map(drop).unwrap_err();
        assert_eq!(calls.remaining(), 2);
        while calls.remaining() > 0 {
            calls.run(&x, &x, &x).unwrap();
        }
        drop(calls);
        let options = CacheOptions::new([1, 2, 16], Dtype::F32);
        let mut caches = [0; 2].map(|_| session.kv_cache(options.clone()).unwrap());
        let mut calls = session.cached_calls(&call, &mut caches, &x, &x, &x).unwrap();
        calls.attend(&x, &x, &x).unwrap();
        calls.attend(&x, &x, &beyond).map(drop).unwrap_err();
        assert_eq!(calls.remaining(), 1);
        let output = calls.attend(&x, &x, &x).unwrap();
        drop(calls);
        let of_last = session.attend(&call, &x, &x, &x).unwrap();
        (
            output.o.to_vec::<f32>().unwrap(),
            of_last.o.to_vec::<f32>().unwrap(),
            caches.map(|cache| cache.len()),
        )
    });
    for (output, wanted, tokens) in ended {
        assert_eq!((output, tokens), (wanted, [24, 24]));
    }
}

/// A case with outliers. Four channels of the keys are 16 times larger, and the same channels of
/// the queries are 16 times smaller. So the logits and the right result do not change.
fn with_outliers() -> Prepared {
    let mut prepared = case("two rows beyond four tiles", Dtype::F32);
    let dim = prepared.problem.head_dim as usize;
    let outlier = |index: &usize| index % dim < 16 && index % 4 == 1;
    let scaled = |tensor: &Bytes, factor: f32| {
        let numbers = floats(Dtype::F32, tensor).into_iter().enumerate();
        let numbers = numbers.map(|(index, x)| if outlier(&index) { x * factor } else { x });
        stored(Dtype::F32, &numbers.collect::<Vec<_>>())
    };
    prepared.tensors.k = scaled(&prepared.tensors.k, 16.0);
    prepared.tensors.q = scaled(&prepared.tensors.q, 1.0 / 16.0);
    prepared
}

#[test]
fn a_scale_of_anything_but_the_channel_of_these_tokens_is_caught() {
    let prepared = with_outliers();
    let problem = prepared.problem.clone().with_wire(WireFormat::Int8).unwrap();
    let set = set(&problem, (1, 2, Strategy::Ring));
    let exact = &prepared.tensors;
    let dense = prepared.judge(&alone(&problem, &rounded(&set, exact)), "rounded, alone");
    let limit = prepared.parallel_limit(&dense).of_coarse_keys();
    prepared.judge(&run(&set, exact), "channels").assert_within(&limit);

    let keys = |round: &dyn Fn(&mut [f32])| {
        let mut numbers = floats(Dtype::F32, &exact.k);
        round(&mut numbers);
        alone(&problem, &Tensors { k: stored(Dtype::F32, &numbers), ..exact.clone() })
    };
    let broken = || Broken::device(Fault::ScalesOfOthers);
    for (bug, wrong) in [
        ("one scale for all keys", keys(&wire::int8_with_one_scale)),
        ("a scale for each key", keys(&|keys| wire::int8_values(keys, kv_shape(&problem), &lists(&set)))),
        ("the scales of other tokens", run_set(&set, in_process_group(2), exact, broken).0),
    ] {
        let judged = prepared.judge(&wrong, bug);
        assert!(judged.within(&limit).is_err(), "{bug} passes: {judged}");
        assert!(judged.max_abs_error > 2.0 * limit.o_abs(), "{bug} is near the limit: {judged}");
    }
}

#[test]
fn non_finite_values_show_in_the_rows_that_see_them_and_in_no_others() {
    for dtype in Dtype::ALL {
        let prepared = case("two rows beyond four tiles", dtype);
        let problem = prepared.problem.clone().with_wire(WireFormat::Int8).unwrap();
        let dim = problem.head_dim as usize;
        let (in_k, in_v) = (40, 90);
        let with = |k: f32, v: f32| {
            let put = |tensor: &Bytes, token: usize, x: f32| {
                let mut numbers = floats(dtype, tensor);
                numbers[token * dim + 3] = x;
                stored(dtype, &numbers)
            };
            let exact = &prepared.tensors;
            Tensors { k: put(&exact.k, in_k, k), v: put(&exact.v, in_v, v), ..exact.clone() }
        };
        for shared in MESHES.iter().copied() {
            let set = set(&problem, shared);
            // Non-finite values and 0 do not influence a scale. All other codes are the same.
            let clean = run(&set, &with(0.0, 0.0));
            for (k, v) in [(f32::NAN, f32::INFINITY), (f32::NEG_INFINITY, f32::NAN)] {
                let poisoned = run(&set, &with(k, v));
                let (clean_o, poisoned_o) = (floats(dtype, &clean.o), floats(dtype, &poisoned.o));
                for id in prepared.oracle.row_ids() {
                    let at = prepared.oracle.o_index(id);
                    let (clean, poisoned) = (&clean_o[at..at + dim], &poisoned_o[at..at + dim]);
                    // Rows may stop seeing a key of −∞, as on one device.
                    let shown = poisoned.iter().any(|x| !x.is_finite());
                    let sees = |key| prepared.oracle.sees(id.batch, id.row, key);
                    if sees(in_v) || (k.is_nan() && sees(in_k)) {
                        assert!(
                            shown,
                            "{dtype} {shared:?}: {id:?} sees what is not finite and does not show it"
                        );
                    } else if !sees(in_k) {
                        assert!(
                            clean == poisoned,
                            "{dtype} {shared:?}: {id:?} changed by what it cannot see"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_error_that_a_plan_expects_is_the_one_that_is_measured() {
    for (dim, scale) in [(64, 1.0), (128, 1.0), (32, 2.0)] {
        let problem = AttentionProblem::new([1, 1024, 2, 2, dim], Dtype::F32, Mask::full()).unwrap();
        let problem = problem.clone().with_logits(problem.scale * scale, None).unwrap();
        let tensor = |id| {
            let mut numbers = vec![0f32; 1024 * 2 * dim as usize];
            fill(5, id, 0..numbers.len() as u64, &mut numbers);
            stored(Dtype::F32, &numbers)
        };
        let [q, k, v] = [TensorId::Q, TensorId::K, TensorId::V].map(tensor);
        let tensors = Tensors { q, k, v, bias: None };
        let exact = floats(Dtype::F32, &alone(&problem, &tensors).o);
        let norm =
            |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>();
        for format in [WireFormat::F16, WireFormat::Int8] {
            let problem = problem.clone().with_wire(format).unwrap();
            let set = set(&problem, (1, 8, Strategy::Ring));
            let o = floats(Dtype::F32, &run(&set, &tensors).o);
            let off = norm(&mut o.iter().zip(&exact).map(|(x, y)| x - y));
            let measured = (off / norm(&mut exact.iter().copied())).sqrt();
            // The share of keys from other shards: the split has unequal weights.
            let own = set.kv_placement.ranks().iter().map(|tokens| (tokens.len() as f64 / 1024.0).powi(2));
            let expected = format.expected_error(dim, problem.scale) * (1.0 - own.sum::<f64>()).sqrt();
            let ratio = measured / expected;
            println!("{format} dim {dim} scale x{scale}: expected {expected:.3e}, measured {measured:.3e}");
            assert!((0.8..1.25).contains(&ratio), "{format}, dim {dim}: {measured:.3e} for {expected:.3e}");
        }
    }
    assert_eq!(WireFormat::Same.expected_error(64, 0.125), 0.0);
}
