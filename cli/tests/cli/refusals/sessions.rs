//! Refusals of tensors and of calls on sessions.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, CallShapes, Dtype, Error, Execution, MAX_LABEL_BYTES, Mask, Mesh, Placement,
    PlacementKind, Split, Strategy, Tensor, WireFormat, plan_forward,
};

use super::{alone, of_calls, of_two, tensor};
use crate::support::transcript_holds;

#[test]
fn sessions() {
    let calls = [of_tensors(), of_arrays(), of_options(), of_given(), of_prepared()];
    transcript_holds("sessions", &of_calls(calls.into_iter().flatten()));
}

fn of_tensors() -> Vec<(&'static str, Error)> {
    let whole = tensor(4, 2);
    let part = whole.view([1, 4, 1, 8], [64, 16, 8, 1], 8).unwrap();
    vec![
        ("Tensor::new with 63 elements for 64", Tensor::new([1, 4, 2, 8], vec![0.0_f32; 63]).unwrap_err()),
        ("Tensor::view whose elements share memory", whole.view([1, 4, 2, 8], [64, 4, 8, 1], 0).unwrap_err()),
        ("Tensor::view of a part", part.view([1, 4, 1, 8], [64, 16, 8, 1], 0).unwrap_err()),
        ("Tensor::to_vec of another type", whole.to_vec::<half::f16>().unwrap_err()),
    ]
}

/// The error of one rank.
fn of_one(call: &Attention, [q, k, v]: [&Tensor; 3]) -> Error {
    alone().attend(call, q, k, v).unwrap_err()
}

/// The error of two ranks that make the same call.
fn of_both(call: &Attention, x: &Tensor) -> Error {
    of_two(|session, _| session.attend(call, x, x, x).unwrap_err())
}

fn of_arrays() -> Vec<(&'static str, Error)> {
    let (call, x) = (Attention::new(), &tensor(4, 2));
    let two = &Tensor::new([2, 4, 2, 8], vec![0.0_f32; 128]).unwrap();
    let halves = &Tensor::new([1, 4, 2, 8], vec![half::f16::ZERO; 64]).unwrap();
    let large = Tensor::new([1, 4, 2, 8], vec![1e5_f32; 64]).unwrap();
    let as_f16 = Attention::new().execution(Execution::new().wire(WireFormat::F16));
    vec![
        ("Session::attend, 4 keys and 3 values", of_one(&call, [x, x, &tensor(3, 2)])),
        ("Session::attend with q of 2 batch entries and k of 1", of_one(&call, [two, x, x])),
        ("Session::attend with q in f32, k and v in f16", of_one(&call, [x, halves, halves])),
        (
            "Session::attend with a tensor of another device",
            of_one(&call, [&x.to_device(&Device::cpu()).unwrap(), x, x]),
        ),
        ("Session::attend with f16 on the wire and keys of 100,000", of_both(&as_f16, &large)),
    ]
}

fn of_options() -> Vec<(&'static str, Error)> {
    let x = &tensor(4, 2);
    let place = |counts: Vec<u32>| {
        let mesh = Mesh::new(1, 2).unwrap();
        Placement::new(PlacementKind::Contiguous, mesh, 8, &Split::Tokens(counts)).unwrap()
    };
    let with = |execution| Attention::new().execution(execution);
    let owners = with(Execution::new().owners(place(vec![4, 4]), place(vec![5, 3])));
    let spare = place(vec![4, 4]).with_spare(vec![1, 1]).unwrap();
    let zigzag = with(Execution::new().placement(PlacementKind::Zigzag));
    vec![
        (
            "Session::attend, where rank 1 has another mask",
            of_two(|session, odd| {
                let call = if odd { Attention::new().mask(Mask::causal()) } else { Attention::new() };
                session.attend(&call, x, x, x).unwrap_err()
            }),
        ),
        (
            "Session::attend with a long label",
            of_one(&Attention::new().label("x".repeat(MAX_LABEL_BYTES + 1)), [x; 3]),
        ),
        (
            "Session::attend with 5 replicated keys and 4 keys",
            of_one(&with(Execution::new().replicated(0..5)), [x; 3]),
        ),
        (
            "Session::attend on 2 ranks with a mesh of 3",
            of_both(&with(Execution::new().mesh(Mesh::new(1, 3).unwrap())), x),
        ),
        ("Session::attend with placement zigzag and no mesh", of_both(&zigzag, x)),
        ("Session::attend with owners of other counts", of_both(&owners, x)),
        ("Session::attend on one rank with owners for two", of_one(&owners, [x; 3])),
        (
            "Session::attend with owners of keys that have spare rows",
            of_both(&with(Execution::new().owners(place(vec![4, 4]), spare)), x),
        ),
    ]
}

/// Of calls of given plans: of 8 tokens and of another type than the tensors, with another option,
/// in a larger group, and where one of two ranks has too few queries.
fn of_given() -> Vec<(&'static str, Error)> {
    let plans = |tokens: u32, dtype, ranks| {
        let problem = AttentionProblem::new([1, tokens, 2, 2, 8], dtype, Mask::full()).unwrap();
        let (mesh, placement) = (Mesh::new(1, ranks).unwrap(), PlacementKind::Contiguous);
        let strategy = if ranks == 1 { Strategy::Dense } else { Strategy::Ring };
        let set = plan_forward(&problem, mesh, placement, &Split::Even, strategy).unwrap();
        Attention::planned(&Arc::new(ProvedPlans::new(set).unwrap()))
    };
    let (x, four, of_ring) = (&tensor(4, 2), plans(4, Dtype::F32, 1), plans(8, Dtype::F32, 2));
    vec![
        ("Session::attend with plans of 8 tokens for 4", of_one(&plans(8, Dtype::F32, 1), [x; 3])),
        ("Session::attend with plans of f16 and tensors of f32", of_one(&plans(4, Dtype::F16, 1), [x; 3])),
        ("Session::attend with plans and another mask", of_one(&four.clone().mask(Mask::causal()), [x; 3])),
        ("Session::attend of two ranks with plans of one", of_both(&four, x)),
        (
            "Session::attend with plans of 4 queries for 3 on rank 0",
            of_two(|session, odd| {
                session.attend(&of_ring, &tensor(if odd { 4 } else { 3 }, 2), x, x).unwrap_err()
            }),
        ),
        (
            "Attention::plans with the queries of two ranks and the keys of one",
            Attention::new().plans([1, 2, 2, 8], Dtype::F32, &[4, 4], &[8]).unwrap_err(),
        ),
        (
            "Attention::plans with same_queries and other numbers of them",
            Attention::new()
                .execution(Execution::new().same_queries())
                .plans([1, 2, 2, 8], Dtype::F32, &[1, 2], &[4, 4])
                .unwrap_err(),
        ),
    ]
}

fn of_prepared() -> Vec<(&'static str, Error)> {
    let (mut session, x) = (alone(), tensor(4, 2));
    let mut calls = session.prepare(&Attention::new(), &CallShapes::of(&x, &x), 1).unwrap();
    let other_shape = calls.run(&tensor(5, 2), &x, &x).unwrap_err();
    calls.run(&x, &x, &x).unwrap();
    let beyond = calls.run(&x, &x, &x).unwrap_err();
    vec![
        ("Prepared::run with 5 queries, after Session::prepare with 4", other_shape),
        ("Prepared::run for the second time, after Session::prepare for 1 call", beyond),
    ]
}
