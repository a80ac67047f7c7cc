//! Refusals of backward passes. The tests cause each of them.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, Dtype, Error, Mask, Mesh, OutputGradient, PlacementKind, Saved, Session,
    Split, Strategy, Tensor, plan_backward,
};
use kyklos_transport::in_process_group;

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

/// Of a backward pass of given plans: of plans of a forward pass, and of a gradient with too few tokens.
fn of_given() -> [Error; 2] {
    let mesh = Mesh::new(1, 1).unwrap();
    let (even, placement) = (Split::Even, PlacementKind::Contiguous);
    let forward = kyklos::plan_world(&problem(), mesh, placement, &even, Strategy::Dense).unwrap();
    let backward = plan_backward(&problem(), mesh, placement, &even, Strategy::Dense).unwrap();
    let [forward, backward] = [forward, backward].map(|world| Arc::new(ProvedPlans::new(world).unwrap()));
    let zeros = |tokens: usize| bytes::Bytes::from(vec![0; tokens * 2 * 8 * 4]);
    let tensors = Tensors { q: zeros(4), k: zeros(4), v: zeros(4), bias: None };
    let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    pollster::block_on(async {
        let mut inputs = session.load(&forward, tensors).await.unwrap();
        let output = session.run(&forward, &mut inputs).await.unwrap();
        let of = |tokens| OutputGradient { output: &output, d_o: zeros(tokens), d_lse: None };
        let of_plans = session.run_backward(&forward, &mut inputs, &of(4)).await.unwrap_err();
        let of_tokens = session.run_backward(&backward, &mut inputs, &of(3)).await.unwrap_err();
        // The session stays usable.
        session.run_backward(&backward, &mut inputs, &of(4)).await.unwrap();
        [of_plans, of_tokens]
    })
}

pub(super) fn refusals() -> Vec<Entry> {
    let (mesh, even) = (Mesh::new(2, 2).unwrap(), Split::Even);
    let planned = |problem: &AttentionProblem, strategy| {
        plan_backward(problem, mesh, PlacementKind::Contiguous, &even, strategy).unwrap_err()
    };
    let in_order = problem().with_fixed_order(true).unwrap();
    let [of_plans, of_tokens] = of_given();
    vec![
        entry(
            "plan_backward with strategy relay",
            planned(&problem(), Strategy::Relay),
            "A backward pass that has no plans; also with all queries on every rank, of results on other ranks, and with int8 on the wire.",
        ),
        entry(
            "plan_backward in a fixed order",
            planned(&in_order, Strategy::Unified),
            "Gradients of keys are sums over queries, which a fixed order of keys does not order.",
        ),
        entry(
            "AttentionProblem::with_bias_gradient without a bias",
            problem().with_bias_gradient(true).unwrap_err(),
            "There is no additive bias tensor: also for a mask, which has no gradient.",
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
            "Session::run_backward with plans of plan_world",
            of_plans,
            "Plans of a forward pass have no steps for gradients.",
        ),
        entry(
            "Session::run_backward with a gradient of 3 tokens for 4 queries",
            of_tokens,
            "A tensor that does not fit the output.",
        ),
    ]
}
