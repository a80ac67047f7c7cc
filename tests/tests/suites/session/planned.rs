//! Calls of plans that the caller has made.

use std::sync::Arc;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{Tensors, shard};
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, BiasKind, BiasTensor, Dtype, Execution, Mask, Mesh, Output, PlacementKind,
    Results, Saved, Session, Split, Strategy, plan_backward, plan_forward, plan_placed,
};
use kyklos_backend_suite::{attend_planned, planned};
use kyklos_transport::{Rank, in_process_group};

fn problem() -> AttentionProblem {
    AttentionProblem::new([1, 32, 4, 2, 16], Dtype::F32, Mask::causal()).unwrap()
}

fn plans(problem: &AttentionProblem, kind: PlacementKind, strategy: Strategy) -> Arc<ProvedPlans> {
    let mesh = if strategy == Strategy::Ulysses { Mesh::new(2, 1) } else { Mesh::new(1, 2) };
    let set = plan_forward(problem, mesh.unwrap(), kind, &Split::Even, strategy).unwrap();
    Arc::new(ProvedPlans::new(set).unwrap())
}

fn ring(problem: &AttentionProblem) -> Arc<ProvedPlans> {
    plans(problem, PlacementKind::Contiguous, Strategy::Ring)
}

/// The part of `rank` of made-up tensors.
fn part(plans: &ProvedPlans, rank: Rank) -> Tensors {
    let problem = &plans.set().problem;
    let numbers = |heads: u32, seed: f32| {
        let values = (0..problem.kv_len * heads * 16).map(|index| (index as f32 * 0.37 + seed).sin());
        let bytes = |value: f32| match problem.dtype {
            Dtype::F32 => value.to_ne_bytes().to_vec(),
            _ => half::f16::from_f32(value).to_ne_bytes().to_vec(),
        };
        Bytes::from(values.flat_map(bytes).collect::<Vec<u8>>())
    };
    let bias =
        problem.bias.map(|bias| vec![0; bias.bytes(problem.dtype, problem.q_len, problem.kv_len) as usize]);
    let [k, v] = [0.2, 0.3].map(|seed| numbers(problem.kv_heads, seed));
    let whole = Tensors { q: numbers(problem.q_heads, 0.1), k, v, bias: bias.map(Into::into) };
    shard(plans.set(), rank, &whole).unwrap()
}

/// Every way in which a call does not fit given plans is one error of all ranks, and the session
/// stays usable.
#[test]
fn calls_that_do_not_fit_their_plans_are_refused_on_all_ranks() {
    let right = ring(&problem());
    let biased = BiasTensor { kind: BiasKind::Additive, batch: 1, heads: 1, shared_rows: false };
    let uneven = Split::Tokens(vec![15, 17]);
    let mesh = Mesh::new(1, 2).unwrap();
    let uneven = plan_forward(&problem(), mesh, PlacementKind::Contiguous, &uneven, Strategy::Ring).unwrap();
    let alone = Mesh::new(1, 1).unwrap();
    let alone =
        plan_forward(&problem(), alone, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap();
    let backward =
        plan_backward(&problem(), mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap();
    let proved = |set| Attention::planned(&Arc::new(ProvedPlans::new(set).unwrap()));
    let (q, keys) = (right.set().q_placement.clone(), right.set().kv_placement.clone());
    let with_room = keys.with_spare(vec![4, 4]).unwrap();
    let spare = proved(plan_placed(&problem(), mesh, q.clone(), with_room.clone(), Strategy::Ring).unwrap());
    let more_heads = AttentionProblem::new([1, 32, 2, 2, 16], Dtype::F32, Mask::causal()).unwrap();
    let wrong = [
        (proved(uneven), "rank 0 has 16 queries, the placement gives it 15"),
        (proved(alone), "plans of 1 ranks for a group of 2"),
        (proved(backward), "plans of a backward pass"),
        (Attention::planned(&ring(&problem().with_dtype(Dtype::F16).unwrap())), "in f16"),
        (Attention::planned(&ring(&more_heads)), "and plans of [1, 2, 2, 16]"),
        (
            Attention::planned(&ring(&problem().with_bias(Some(biased)).unwrap())),
            "has 0 bytes, its shape needs 2048",
        ),
        (Attention::planned(&right).mask(Mask::full()), "with another mask, scale or other option"),
        (Attention::planned(&right).softcap(20.0), "with another mask, scale or other option"),
        (Attention::planned(&right).q_offset(1), "with another mask, scale or other option"),
        (Attention::planned(&right).execution(Execution::new()), "with another mask, scale or other option"),
        (
            Attention::planned(&right).execution(Execution::new().fixed_order(true)),
            "with another mask, scale or other option",
        ),
        (spare, "keys with spare rows"),
        (Attention::new().execution(Execution::new().owners(q, with_room)), "keys with spare rows"),
    ];
    let errors = on_threads(in_process_group(2), |transport| {
        let rank = transport.rank();
        let part = part(&right, rank);
        let [q, k, v] = part.qkv(&problem()).unwrap();
        let mut session = Session::new(transport, Device::cpu());
        let mut errors: Vec<_> =
            wrong.iter().map(|(call, _)| session.attend(call, &q, &k, &v).unwrap_err()).collect();
        // Other plans on one rank: of the same tokens, by another strategy.
        let other = plans(&problem(), PlacementKind::Contiguous, Strategy::Ulysses);
        let mine = if rank.0 == 1 { &other } else { &right };
        errors.push(session.attend(&Attention::planned(mine), &q, &k, &v).unwrap_err());
        session.attend(&Attention::planned(&right), &q, &k, &v).unwrap();
        assert!(errors.iter().all(kyklos::Error::is_request), "{errors:?}");
        errors.iter().map(ToString::to_string).collect::<Vec<_>>()
    });
    assert_eq!(errors[0], errors[1]);
    let words = wrong.iter().map(|(_, words)| *words).chain(["rank 1 calls with another mesh or strategy"]);
    for (error, words) in errors[0].iter().zip(words) {
        assert!(error.contains(words), "{error} does not say {words}");
    }
}

/// The bytes of calls that the session plans, and of calls of plans that the caller makes from the
/// same options.
#[test]
fn given_plans_give_the_bytes_of_a_call_that_the_session_plans() {
    let same = on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let call = Attention::new().mask(Mask::causal());
        let given = call.plans([1, 4, 2, 16], Dtype::F32, &[16, 16], &[16, 16]).unwrap();
        let part = part(&given, session.rank());
        let [q, k, v] = part.qkv(&given.set().problem).unwrap();
        let mut bytes =
            |call: &Attention| session.attend(call, &q, &k, &v).unwrap().o.to_vec::<f32>().unwrap();
        let outputs = [bytes(&call), bytes(&Attention::planned(&given)), bytes(&Attention::planned(&given))];
        assert_eq!(session.plans_made(), 2, "given plans are lowered once");
        outputs.iter().all(|output| *output == outputs[0])
    });
    assert_eq!(same, [true, true]);
}

/// The gradients of given plans are those of the session's own.
#[test]
fn given_backward_plans_give_the_gradients_of_a_call_that_the_session_plans() {
    let problem = problem().with_inference(false);
    let forward = ring(&problem);
    let mesh = Mesh::new(1, 2).unwrap();
    let set = plan_backward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap();
    let backward = Arc::new(ProvedPlans::new(set).unwrap());
    let same = on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let [q, k, v] = part(&forward, session.rank()).qkv(&problem).unwrap();
        let own = Attention::new().mask(Mask::causal());
        let own = own.execution(Execution::new().mesh(mesh).strategy(Strategy::Ring));
        let mut gradients = |call: &Attention, back: &Attention| {
            let Output { o, lse, .. } = session.attend(call, &q, &k, &v).unwrap();
            let saved = Saved { q: q.clone(), k: k.clone(), v: v.clone(), o, lse };
            let gradients = session.backward(back, &saved, &q, None).unwrap();
            [gradients.dq, gradients.dk, gradients.dv].map(|tensor| tensor.to_vec::<f32>().unwrap())
        };
        let planned = Attention::planned(&forward);
        let given = gradients(&planned, &planned.with_plans(&backward));
        given == gradients(&own, &own)
    });
    assert_eq!(same, [true, true]);
}

/// Plans that put all results on one rank, or on all of them.
#[test]
fn given_plans_put_their_results_where_they_say() {
    for (results, rows) in [(Results::One(Rank(1)), [0, 32]), (Results::All, [32, 32])] {
        let problem = problem().with_results(results).unwrap();
        let given = ring(&problem);
        let held = on_threads(in_process_group(2), |transport| {
            let part = part(&given, transport.rank());
            let mut session = Session::new(transport, Device::cpu());
            let output = pollster::block_on(attend_planned(&mut session, &given, &part)).unwrap();
            output.o.len() / (4 * 16 * 4)
        });
        assert_eq!(held, rows, "{results:?}");
    }
}

/// A bias tensor that is brought to the device once serves several calls.
#[test]
fn a_bias_on_the_device_serves_several_calls() {
    for shared_rows in [false, true] {
        let bias = BiasTensor { kind: BiasKind::Additive, batch: 1, heads: 1, shared_rows };
        let given = ring(&problem().with_bias(Some(bias)).unwrap());
        on_threads(in_process_group(2), |transport| {
            let part = part(&given, transport.rank());
            let (device, [q, k, v]) = (Device::cpu(), part.qkv(&problem()).unwrap());
            let mut session = Session::new(transport, device.clone());
            let from_host = planned(&given, &part);
            let there = from_host.clone().to_device(&device).unwrap();
            let mut bytes =
                |call: &Attention| session.attend(call, &q, &k, &v).unwrap().o.to_vec::<f32>().unwrap();
            let right = bytes(&from_host);
            assert!(bytes(&there) == right && bytes(&there) == right);
            let elsewhere = from_host.to_device(&Device::cpu()).unwrap();
            let error = session.attend(&elsewhere, &q, &k, &v).unwrap_err().to_string();
            assert!(error.contains("attention bias tensor is on"), "{error}");
        });
    }
}
