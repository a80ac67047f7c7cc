//! Gradients: of sessions against the oracle, alone and on groups of ranks.

mod calls;
mod prepared;

use kyklos::{Dtype, Execution, Mesh, Placement, PlacementKind, Split, Strategy};
use kyklos_oracle::inputs::cases;
use kyklos_transport::in_process_group;

use crate::random_worlds::{case, masks};
use prepared::{GradientCase, Sharing};
use proptest::prelude::*;

/// All tokens on one rank.
fn alone(case: &GradientCase) -> Sharing {
    let mesh = Mesh::new(1, 1).unwrap();
    let problem = &case.prepared.problem;
    let place = |total| Placement::new(PlacementKind::Contiguous, mesh, total, &Split::Even).unwrap();
    Sharing {
        mesh,
        q: place(problem.q_len),
        kv: place(problem.kv_len),
        forward: Strategy::Dense,
        execution: Execution::new(),
    }
}

#[test]
fn one_rank_agrees_with_the_oracle_in_every_case() {
    for dtype in Dtype::ALL {
        for case in cases() {
            let case = GradientCase::new(case, dtype);
            let errors = case.run(in_process_group(1), &alone(&case));
            for (error, limit) in errors.iter().zip(case.dense_limits()) {
                if let Err(fault) = error.within(&limit) {
                    panic!("{} in {dtype}: {fault}\n  {}", case.prepared.case.name, case.prepared.oracle);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::cases(40, 400))]

    #[test]
    fn every_random_world_agrees_with_the_oracle(
        (batch, q_len, seq, kv_heads, group, dim) in (1usize..3, 1usize..120, 1usize..120, 1usize..4, 1usize..4, prop::sample::select(vec![8usize, 24, 64])),
        (ulysses, ring) in (1u32..4, 1u32..4),
        (kind, dtype) in (prop::sample::select(PlacementKind::ALL.to_vec()), prop::sample::select(Dtype::ALL.to_vec())),
        terms in masks(),
        (offset, weights, seed) in (0u64..20, prop::collection::vec(0u8..4, 9), any::<u64>()),
    ) {
        let mut case = case([batch, q_len, seq, kv_heads, group, dim], &terms, offset, seed);
        case.problem.softcap = (seed % 5 == 2).then_some(1.5);
        case.seed = seed / 2;
        let case = GradientCase::new(case, dtype);
        let errors = case.run(in_process_group(1), &alone(&case));
        let proves = |fault: &String| !fault.contains("the limit proves nothing");
        let what = |mesh: Mesh, fault: String| format!("{mesh} {kind} {dtype} {}: {fault}", case.prepared.oracle);
        for (error, limit) in errors.iter().zip(case.dense_limits()) {
            if let Err(fault) = error.within(&limit) {
                prop_assert!(!proves(&fault), "{}", what(Mesh::new(1, 1).unwrap(), fault));
                return Ok(());
            }
        }
        let mesh = Mesh::new(ulysses.min((kv_heads * group) as u32), ring).unwrap();
        let mut weights: Vec<f64> = weights[..mesh.world() as usize].iter().map(|weight| f64::from(*weight)).collect();
        weights[0] += 1.0;
        let fits = |strategy: &Strategy| strategy.accepts(mesh).is_ok();
        let draw = |among: Vec<Strategy>, by: u64| among[(seed / by % among.len() as u64) as usize];
        let forward = draw(Strategy::ALL.into_iter().filter(fits).collect(), 11);
        let backward = draw(Strategy::ALL.into_iter().filter(fits).filter(|one| one.has_backward()).collect(), 77);
        let deal = Split::Weights(weights);
        let (q, kv) = kyklos::deal_tokens(&case.prepared.problem, mesh, kind, &deal).unwrap();
        let sharing = Sharing { mesh, q, kv, forward, execution: Execution::new().strategy(backward) };
        let together = case.run(in_process_group(mesh.world()), &sharing);
        for (error, limit) in together.iter().zip(case.parallel_limits(&errors)) {
            if let Err(fault) = error.within(&limit) {
                let fault = what(mesh, format!("{forward}, then {backward}: {fault}"));
                prop_assert!(!proves(&fault), "{fault}");
            }
        }
    }
}
