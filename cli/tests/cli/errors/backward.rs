//! Refusals of backward passes. The tests cause each of them.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::plan::{ProvedPlans, StepProgress};
use kyklos::{
    Attention, AttentionProblem, Dtype, Error, Mask, Mesh, PlacementKind, Saved, Session, Split, Strategy,
    Tensor, plan_backward,
};
use kyklos_transport::{Rank, in_process_group};

use super::Entry;
use super::library::entry;

fn tensor(tokens: usize) -> Tensor {
    Tensor::new([1, tokens, 2, 8], vec![0.0_f32; tokens * 2 * 8]).unwrap()
}

fn problem() -> AttentionProblem {
    AttentionProblem::new([1, 4, 2, 2, 8], Dtype::F32, Mask::full()).unwrap()
}

/// Of a gradient of the output with another number of tokens than q.
fn of_shape() -> Error {
    let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    let (call, x) = (Attention::new(), tensor(4));
    let output = session.attend(&call, &x, &x, &x).unwrap();
    let saved = Saved { q: x.clone(), k: x.clone(), v: x, o: output.o, lse: output.lse };
    session.backward(&call, &saved, &tensor(5), None).unwrap_err()
}

/// Of backward plans that run on inputs of a forward pass.
fn of_inputs() -> Error {
    let mesh = Mesh::new(1, 1).unwrap();
    let even = Split::Even;
    let world = plan_backward(&problem(), mesh, PlacementKind::Contiguous, &even, Strategy::Dense).unwrap();
    let plans = Arc::new(ProvedPlans::new(world).unwrap());
    let zeros = || bytes::Bytes::from(vec![0; 4 * 2 * 8 * 4]);
    let tensors = Tensors { q: zeros(), k: zeros(), v: zeros(), bias: None };
    let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    pollster::block_on(async {
        let mut inputs = session.load(&plans, tensors).await.unwrap();
        session.run(&plans, &mut inputs).await.unwrap_err()
    })
}

/// Of survivors of a backward pass that would complete it.
fn of_repair() -> Error {
    let mesh = Mesh::new(1, 2).unwrap();
    let even = Split::Even;
    let world = plan_backward(&problem(), mesh, PlacementKind::Contiguous, &even, Strategy::Ring).unwrap();
    kyklos::repair(&world, &[Rank(0)], &[StepProgress::default()]).unwrap_err()
}

pub(super) fn refusals() -> Vec<Entry> {
    let mesh = Mesh::new(1, 2).unwrap();
    let pass_q = plan_backward(&problem(), mesh, PlacementKind::Contiguous, &Split::Even, Strategy::PassQ)
        .unwrap_err();
    vec![
        entry(
            "plan_backward with strategy pass-q",
            pass_q,
            "A backward pass that has no plans; also over replicated keys, with all queries on every rank, of results on other ranks, \
             in a fixed order, and with int8 on the wire.",
        ),
        entry(
            "Session::backward with a gradient of 5 tokens for q of 4",
            of_shape(),
            "A tensor that does not fit q.",
        ),
        entry(
            "Session::run of plans of plan_backward",
            of_inputs(),
            "Backward plans read the gradient of the output, which these inputs do not have.",
        ),
        entry(
            "repair of a plan of plan_backward",
            of_repair(),
            "A lost rank in a backward pass: sums of several ranks are under way.",
        ),
    ]
}
