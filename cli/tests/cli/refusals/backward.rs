//! Refusals of backward passes.

use std::sync::Arc;

use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, Dtype, Error, Mask, Mesh, Output, PlacementKind, Saved, Split, Strategy,
    plan_backward, plan_forward,
};

use super::{alone, of_calls, tensor};
use crate::support::transcript_holds;

fn problem() -> AttentionProblem {
    AttentionProblem::new([1, 4, 2, 2, 8], Dtype::F32, Mask::full()).unwrap()
}

#[test]
fn backward() {
    let mesh = Mesh::new(2, 2).unwrap();
    let planned = |problem: &AttentionProblem, strategy| {
        plan_backward(problem, mesh, PlacementKind::Contiguous, &Split::Even, strategy).unwrap_err()
    };
    let [of_forward, of_backward] = of_given();
    let calls = of_calls([
        ("plan_backward with strategy relay", planned(&problem(), Strategy::Relay).into()),
        (
            "plan_backward in a fixed order",
            planned(&problem().with_fixed_order(true).unwrap(), Strategy::Unified).into(),
        ),
        ("Session::backward with a gradient of 5 tokens for q of 4", of_shape()),
        ("Session::attend with plans of plan_backward", of_forward),
        ("Session::backward with plans of plan_forward", of_backward),
    ]);
    transcript_holds("backward", &calls);
}

/// Of a gradient of the output with another number of tokens than q.
fn of_shape() -> Error {
    let (mut session, call, x) = (alone(), Attention::new(), tensor(4, 2));
    let Output { o, lse, .. } = session.attend(&call, &x, &x, &x).unwrap();
    let saved = Saved { q: x.clone(), k: x.clone(), v: x, o, lse };
    session.backward(&call, &saved, &tensor(5, 2), None).unwrap_err()
}

/// Of a call with plans of a backward pass, and of a backward pass with plans of a forward pass.
fn of_given() -> [Error; 2] {
    let mesh = Mesh::new(1, 1).unwrap();
    let (even, placement) = (Split::Even, PlacementKind::Contiguous);
    let forward = plan_forward(&problem(), mesh, placement, &even, Strategy::Dense).unwrap();
    let backward = plan_backward(&problem(), mesh, placement, &even, Strategy::Dense).unwrap();
    let [forward, backward] = [forward, backward].map(|set| Arc::new(ProvedPlans::new(set).unwrap()));
    let [forward, backward] = [&forward, &backward].map(Attention::planned);
    let (mut session, x) = (alone(), tensor(4, 2));
    let of_forward = session.attend(&backward, &x, &x, &x).unwrap_err();
    let Output { o, lse, .. } = session.attend(&forward, &x, &x, &x).unwrap();
    let saved = Saved { q: x.clone(), k: x.clone(), v: x.clone(), o, lse };
    let of_backward = session.backward(&forward, &saved, &x, None).unwrap_err();
    // The session stays usable.
    session.backward(&backward, &saved, &x, None).unwrap();
    [of_forward, of_backward]
}
