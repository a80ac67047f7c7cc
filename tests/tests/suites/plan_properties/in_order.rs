//! Plans on a stream of a device: every plan of every strategy ends where each rank carries out one
//! exchange after the other.

use kyklos::plan::{PlanSet, Step, check, check_in_order};
use kyklos::{
    AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_backward_placed, plan_forward,
};
use proptest::prelude::*;

use super::{Drawn, sets};

fn backward_of(set: &PlanSet) -> Option<PlanSet> {
    let PlanSet { problem, mesh, q_placement, kv_placement, strategy, .. } = set;
    plan_backward_placed(problem, *mesh, q_placement.clone(), kv_placement.clone(), *strategy).ok()
}

proptest! {
    #![proptest_config(crate::cases(400, 3000))]

    #[test]
    fn every_plan_ends_on_one_stream_for_each_rank(Drawn(set) in sets()) {
        for set in backward_of(&set).iter().chain([&set]) {
            check_in_order(set).map_err(|error| TestCaseError::fail(format!("{}: {error}", set.strategy)))?;
        }
    }
}

/// Both ranks post both exchanges before they wait, in opposite order. Messages that move side by
/// side end; one after the other they do not.
#[test]
fn exchanges_in_opposite_order_are_found() {
    let problem = AttentionProblem::new([1, 8, 1, 1, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(1, 2).unwrap();
    let mut set =
        plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap();
    for plan in &mut set.plans {
        let Step::Exchange { sends, recvs, .. } = plan.steps[0].clone() else {
            panic!("the ring posts first")
        };
        let (receive, send) = if plan.rank == 0 { (0, 1) } else { (1, 0) };
        plan.steps[0] = Step::Exchange { id: receive, sends: vec![], recvs };
        plan.steps.insert(1, Step::Exchange { id: send, sends, recvs: vec![] });
        let old = plan.steps.iter().rposition(|step| matches!(step, Step::Wait { .. })).unwrap();
        plan.steps.splice(old..=old, [Step::Wait { id: 0 }, Step::Wait { id: 1 }]);
    }
    check(&set).unwrap();
    let error = check_in_order(&set).unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains("one after the other"), "{error}");
    // The same order on both ranks ends.
    set.plans[1].steps.swap(0, 1);
    check_in_order(&set).unwrap();
    // An exchange for which no rank waits must end too.
    for plan in &mut set.plans {
        plan.steps.retain(|step| !matches!(step, Step::Wait { .. }));
    }
    check_in_order(&set).unwrap();
    set.plans[1].steps.swap(0, 1);
    assert!(check_in_order(&set).is_err());
}
