//! Refusals of tensors and of calls on sessions. The tests cause each of them.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, BiasTensor, CallShapes, Dtype, Error, Execution, MAX_LABEL_BYTES, Mask,
    Mesh, Placement, PlacementKind, Session, Split, Strategy, Tensor, WireFormat, plan_forward,
};
use kyklos_transport::in_process_group;

use super::Entry;
use super::library::entry;

fn tensor(tokens: usize, heads: usize) -> Tensor {
    Tensor::new([1, tokens, heads, 8], vec![0.0_f32; tokens * heads * 8]).unwrap()
}

/// The error of rank 0 of two, whose ranks make the calls that `call` returns for them.
fn of_two(call: impl Fn(bool) -> (Attention, [Tensor; 3]) + Sync) -> Error {
    let errors = on_threads(in_process_group(2), |transport| {
        let (call, [q, k, v]) = call(transport.rank().0 == 1);
        Session::new(transport, Device::cpu()).attend(&call, &q, &k, &v).unwrap_err()
    });
    errors.into_iter().next().unwrap()
}

fn of_one(call: &Attention, [q, k, v]: [Tensor; 3]) -> Error {
    let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    session.attend(call, &q, &k, &v).unwrap_err()
}

fn same(call: Attention) -> (Attention, [Tensor; 3]) {
    (call, [tensor(4, 2), tensor(4, 2), tensor(4, 2)])
}

/// Refusals of calls of given plans: of 8 tokens and of another type than the tensors, with another option, and in a larger group.
fn of_given() -> [Error; 4] {
    let plans = |tokens: u32, dtype| {
        let problem = AttentionProblem::new([1, tokens, 2, 2, 8], dtype, Mask::full()).unwrap();
        let mesh = Mesh::new(1, 1).unwrap();
        let set =
            plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap();
        Attention::planned(&Arc::new(ProvedPlans::new(set).unwrap()))
    };
    let x = || [tensor(4, 2), tensor(4, 2), tensor(4, 2)];
    let four = plans(4, Dtype::F32);
    [
        of_one(&plans(8, Dtype::F32), x()),
        of_one(&plans(4, Dtype::F16), x()),
        of_one(&four.clone().mask(Mask::causal()), x()),
        of_two(|_| same(four.clone())),
    ]
}

pub(super) fn refusals() -> Vec<Entry> {
    let x = || [tensor(4, 2), tensor(4, 2), tensor(4, 2)];
    let halves = Tensor::new([1, 4, 2, 8], vec![half::f16::ZERO; 64]).unwrap();
    let place = |counts: Vec<u32>| {
        let mesh = Mesh::new(1, 2).unwrap();
        Placement::new(PlacementKind::Contiguous, mesh, 8, &Split::Tokens(counts)).unwrap()
    };
    let owners = Execution::new().owners(place(vec![4, 4]), place(vec![5, 3]));
    let whole = tensor(4, 2);
    let heads_only = whole.view([1, 4, 1, 8], [64, 16, 8, 1], 8).unwrap();
    let elsewhere = whole.to_device(&Device::cpu()).unwrap();
    let [other_tokens, other_type, other_option, other_group] = of_given();
    let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    let mut calls = session.prepare(&Attention::new(), &CallShapes::of(&whole, &whole), 1).unwrap();
    let other_shape = calls.run(&tensor(5, 2), &whole, &whole).unwrap_err();
    calls.run(&whole, &whole, &whole).unwrap();
    let beyond = calls.run(&whole, &whole, &whole).unwrap_err();
    let large = Tensor::new([1, 4, 2, 8], vec![1e5_f32; 64]).unwrap();
    let as_f16 = || Attention::new().execution(Execution::new().wire(WireFormat::F16));
    vec![
        entry(
            "Session::attend with f16 on the wire and keys of 100,000",
            of_two(|_| (as_f16(), [large.clone(), large.clone(), large.clone()])),
            "From a magnitude of 65,520 on f16 has infinity. Also --wire f16 of the program, at the end of the call.",
        ),
        entry(
            "Attention::plans with the queries of two ranks and the keys of one",
            Attention::new().plans([1, 2, 2, 8], Dtype::F32, &[4, 4], &[8]).unwrap_err(),
            "Each rank has a number of queries and a number of keys; either may be 0.",
        ),
        entry(
            "Attention::plans with same_queries and other numbers of them",
            Attention::new()
                .execution(Execution::new().same_queries())
                .plans([1, 2, 2, 8], Dtype::F32, &[1, 2], &[4, 4])
                .unwrap_err(),
            "All ranks have the same queries, so also the same number.",
        ),
        entry(
            "Prepared::run with 5 queries, after Session::prepare with 4",
            other_shape,
            "Calls after one vote have one plan.",
        ),
        entry(
            "Prepared::run for the second time, after Session::prepare for 1 call",
            beyond,
            "Or vote for each call.",
        ),
        entry(
            "Session::attend with owners of keys that have spare rows",
            of_two(|_| {
                let keys = place(vec![4, 4]).with_spare(vec![1, 1]).unwrap();
                same(Attention::new().execution(Execution::new().owners(place(vec![4, 4]), keys)))
            }),
            "Only the keys of a cache have them.",
        ),
        entry(
            "Session::attend with plans of 8 tokens for 4",
            other_tokens,
            "Each rank passes the tokens of the plans.",
        ),
        entry(
            "Session::attend with plans of f16 and tensors of f32",
            other_type,
            "The plans are of one problem.",
        ),
        entry(
            "Session::attend with plans and another mask",
            other_option,
            "The mask of a call of given plans is that of the plans.",
        ),
        entry(
            "Session::attend of two ranks with plans of one",
            other_group,
            "Plans are of all ranks of a group.",
        ),
        entry(
            "Session::attend, where rank 1 has another mask",
            of_two(|odd| same(if odd { Attention::new().mask(Mask::causal()) } else { Attention::new() })),
            "The error is the same on all ranks, and the session stays usable.",
        ),
        entry(
            "Session::attend with a long label",
            of_one(&Attention::new().label("x".repeat(MAX_LABEL_BYTES + 1)), x()),
            "Labels travel in votes.",
        ),
        entry(
            "Session::attend, 4 keys and 3 values",
            of_one(&Attention::new(), [tensor(4, 2), tensor(4, 2), tensor(3, 2)]),
            "Each key has one value.",
        ),
        entry(
            "Session::attend with q of 2 batch entries and k of 1",
            of_one(
                &Attention::new(),
                [Tensor::new([2, 4, 2, 8], vec![0.0_f32; 128]).unwrap(), tensor(4, 2), tensor(4, 2)],
            ),
            "Shapes are [batch, tokens, heads, dim].",
        ),
        entry(
            "Session::attend with q in f32, k and v in f16",
            of_one(&Attention::new(), [tensor(4, 2), halves.clone(), halves.clone()]),
            "Convert them first.",
        ),
        entry(
            "Session::attend with 5 replicated keys and 4 keys",
            of_one(&Attention::new().execution(Execution::new().replicated(0..5)), x()),
            "Each rank passes the replicated keys too, before its own.",
        ),
        entry(
            "Session::attend on 2 ranks with a mesh of 3",
            of_two(|_| same(Attention::new().execution(Execution::new().mesh(Mesh::new(1, 3).unwrap())))),
            "A mesh has all ranks of the group.",
        ),
        entry(
            "Session::attend with placement zigzag and no mesh",
            of_two(|_| same(Attention::new().execution(Execution::new().placement(PlacementKind::Zigzag)))),
            "Or give the owners of tokens as lists.",
        ),
        entry(
            "Session::attend with owners of other counts",
            of_two(|_| same(Attention::new().execution(owners.clone()))),
            "The lists say how many tokens a rank passes.",
        ),
        entry(
            "Session::attend on one rank with owners for two",
            of_one(&Attention::new().execution(owners.clone()), x()),
            "Every rank of the group has a list.",
        ),
        entry(
            "Session::attend with a tensor of another device",
            of_one(&Attention::new(), [elsewhere, tensor(4, 2), tensor(4, 2)]),
            "Two handles of one device are the same device; two devices that were opened are not.",
        ),
        entry(
            "BiasTensor::key_mask with 15 bools for 2 batch entries",
            BiasTensor::key_mask(2, &[true; 15]).unwrap_err(),
            "All batch entries have the same keys.",
        ),
        entry(
            "Tensor::new with 63 elements for 64",
            Tensor::new([1, 4, 2, 8], vec![0.0_f32; 63]).unwrap_err(),
            "Host tensors are dense.",
        ),
        entry(
            "Tensor::view whose elements share memory",
            whole.view([1, 4, 2, 8], [64, 4, 8, 1], 0).unwrap_err(),
            "Strides count elements.",
        ),
        entry(
            "Tensor::view of a part",
            heads_only.view([1, 4, 1, 8], [64, 16, 8, 1], 0).unwrap_err(),
            "Strides are those of the whole memory.",
        ),
        entry("Tensor::to_vec of another type", whole.to_vec::<half::f16>().unwrap_err(), "No conversion."),
    ]
}
