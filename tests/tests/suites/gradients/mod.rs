//! Gradients: of sessions against the oracle, alone and on groups of ranks.

mod bias;
mod calls;
mod prepared;
mod random;
mod ties;
mod traps;
mod wgpu;

use kyklos::backend::Device;
use kyklos::{Dtype, Execution, Mesh, Placement, PlacementKind, Split, Strategy};
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::cases;
use kyklos_transport::in_process_group;
use prepared::{OnSessions, Sharing};
use proptest::prelude::*;
use random::sets;

/// All tokens on one rank.
fn alone(case: &GradientCase, device: &Device) -> Sharing {
    let mesh = Mesh::new(1, 1).unwrap();
    let problem = &case.prepared.problem;
    let place = |total| Placement::new(PlacementKind::Contiguous, mesh, total, &Split::Even).unwrap();
    Sharing {
        mesh,
        q: place(problem.q_len),
        kv: place(problem.kv_len),
        forward: Strategy::Dense,
        execution: Execution::new(),
        device: device.clone(),
    }
}

/// A case alone on a device, in the limits of a device.
fn assert_alone(case: &GradientCase, device: &Device) {
    let errors = case.run(in_process_group(1), &alone(case, device));
    for (error, limit) in errors.iter().zip(case.dense_limits()) {
        if let Err(fault) = error.within(&limit) {
            let (name, dtype) = (case.prepared.case.name, case.prepared.problem.dtype);
            panic!("{name} in {dtype}: {fault}\n  {}", case.prepared.oracle);
        }
    }
}

#[test]
fn one_rank_agrees_with_the_oracle_in_every_case() {
    for dtype in Dtype::ALL {
        for case in cases() {
            assert_alone(&GradientCase::new(case, dtype).with_bias_gradient(), &Device::cpu());
        }
    }
}

proptest! {
    #![proptest_config(crate::cases(40, 400))]

    #[test]
    fn every_random_world_agrees_with_the_oracle(call in sets(&[8, 24, 64], &Dtype::ALL)) {
        call.check(&Device::cpu())?;
    }
}
