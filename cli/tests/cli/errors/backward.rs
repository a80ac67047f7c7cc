//! Refusals of backward passes. The tests cause each of them.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, Dtype, Error, Mask, Mesh, Output, PlacementKind, Saved, Session, Split,
    Strategy, Tensor, plan_backward,
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

/// Of a call with plans of a backward pass, and of a backward pass with plans of a forward pass.
fn of_given() -> [Error; 2] {
    let mesh = Mesh::new(1, 1).unwrap();
    let (even, placement) = (Split::Even, PlacementKind::Contiguous);
    let forward = kyklos::plan_forward(&problem(), mesh, placement, &even, Strategy::Dense).unwrap();
    let backward = plan_backward(&problem(), mesh, placement, &even, Strategy::Dense).unwrap();
    let [forward, backward] = [forward, backward].map(|set| Arc::new(ProvedPlans::new(set).unwrap()));
    let [forward, backward] = [&forward, &backward].map(Attention::planned);
    let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    let x = tensor(4);
    let of_forward = session.attend(&backward, &x, &x, &x).unwrap_err();
    let Output { o, lse, .. } = session.attend(&forward, &x, &x, &x).unwrap();
    let saved = Saved { q: x.clone(), k: x.clone(), v: x.clone(), o, lse };
    let of_backward = session.backward(&forward, &saved, &x, None).unwrap_err();
    // The session stays usable.
    session.backward(&backward, &saved, &x, None).unwrap();
    [of_forward, of_backward]
}

pub(super) fn refusals() -> Vec<Entry> {
    let (mesh, even) = (Mesh::new(2, 2).unwrap(), Split::Even);
    let planned = |problem: &AttentionProblem, strategy| {
        plan_backward(problem, mesh, PlacementKind::Contiguous, &even, strategy).unwrap_err()
    };
    let in_order = problem().with_fixed_order(true).unwrap();
    let [of_forward, of_backward] = of_given();
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
            "Session::attend with plans of plan_backward",
            of_forward,
            "Backward plans read the gradient of the output.",
        ),
        entry(
            "Session::backward with plans of plan_forward",
            of_backward,
            "Plans of a forward pass have no steps for gradients.",
        ),
    ]
}
