//! The claims about plans, for token lists that no dealer made.

use super::closed_form::closed_form;
use super::faults::FAULTS;
use super::{Drawn, Random, sets};
use crate::open_placement::any_placement;
use kyklos::plan::{PlanSet, check, explain};
use kyklos::{placed_meshes_by_bytes, plan_placed};
use proptest::prelude::*;

/// The problem, mesh and strategy of a drawn plan set, with other owners and another order.
fn placed(Drawn(set): &Drawn, seed: u64) -> PlanSet {
    let PlanSet { problem, mesh, strategy, .. } = set;
    let mut chance = Random(seed);
    let q = any_placement(*mesh, problem.q_len, 0..0, &mut chance);
    let kv = any_placement(*mesh, problem.kv_len, problem.replicated.clone(), &mut chance);
    plan_placed(problem, *mesh, q, kv, *strategy).expect("drawn to fit")
}

proptest! {
    #![proptest_config(crate::cases(300, 3000))]

    #[test]
    fn every_plan_over_given_lists_is_proved_and_sends_what_the_closed_form_says(drawn in sets(), seed in any::<u64>()) {
        let set = placed(&drawn, seed);
        let checks = check(&set).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let mut sum = 0;
        for (rank, check) in (0u32..).zip(&checks) {
            prop_assert_eq!((check.bytes_sent, check.messages_sent), closed_form(&set, rank), "rank {}", rank);
            sum += check.bytes_sent;
        }
        let PlanSet { problem, mesh, q_placement, kv_placement, strategy, .. } = &set;
        let priced = placed_meshes_by_bytes(problem, q_placement, kv_placement, Some(*strategy)).expect("fits");
        prop_assert!(priced.contains(&(*mesh, sum)), "{} is not among {:?}", sum, priced);
    }

    #[test]
    fn no_seeded_fault_over_given_lists_passes_the_proof(drawn in sets(), seed in any::<u64>()) {
        let (set, mut random) = (placed(&drawn, seed), Random(seed));
        for fault in FAULTS {
            let mut broken = set.clone();
            if let Some(what) = fault(&mut broken, &mut random) {
                let proof = check(&broken);
                prop_assert!(proof.is_err(), "{} passed the proof:\n{}", what,
                    explain(&broken, &proof.unwrap_or_default(), None));
            }
        }
    }
}
