//! Gradients of several ranks on a device, against the oracle; with graphs and without them.

use kyklos::backend::Device;
use kyklos::{Dtype, Execution, Mesh, Placement, PlacementKind, Split, Strategy};
use kyklos_backend_suite::GradientCase;
use kyklos_cuda::{CudaBackend, CudaOptions};
use kyklos_oracle::inputs::{Case, cases};
use kyklos_transport::in_process_group;

use crate::scenario::{Ends, Scenario};

#[expect(unreachable_pub, reason = "in the other program its module is public")]
#[path = "../suites/gradients/prepared.rs"]
pub(crate) mod prepared;

use prepared::{OnSessions, Sharing};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let ring = || shared([1, 4], Strategy::Ring, Dtype::F32, "two rows beyond four tiles");
    let unified = || shared([2, 2], Strategy::Unified, Dtype::Bf16, "two rows beyond four tiles");
    let biased = || shared([1, 3], Strategy::TwoWay, Dtype::F16, "bias, softcap and sinks");
    let of_keys = || shared([2, 2], Strategy::Unified, Dtype::F32, "bias over keys for each entry and head");
    let mut all = vec![
        Scenario::new("gradients of a ring of four ranks", "seed=91,capability=90", ring),
        Scenario::new("gradients of a 2x2 mesh", "seed=92,capability=80", unified),
        Scenario::new("gradients of three ranks with a bias tensor", "seed=93,capability=80", biased),
        Scenario::new("gradients of a bias over keys", "seed=96,capability=90", of_keys),
        Scenario::new("gradients of a 2x2 mesh on Hopper", "seed=98,capability=90", unified),
        Scenario::new("gradients with a bias tensor on Hopper", "seed=99,capability=90", biased),
    ];
    all[0].says = &["launched accumulate ", "launched backward_keys_f32 ", "launched clear_words "];
    all[1].says = &["launched backward_queries_bf16_", "launched backward_keys_bf16_"];
    all[2].says =
        &["launched backward_queries_f16_", "launched row_stats_f16 ", "launched backward_bias_f16_"];
    all[3].says = &["launched backward_bias_f32 "];
    all[1].says_not = &["launched hopper_keys_", "launched hopper_queries_"];
    all[4].says = &["launched hopper_queries_bf16_", "launched hopper_keys_bf16_"];
    all[5].says = &["launched backward_queries_f16_", "launched backward_keys_f16_"];
    all[5].says_not = &["launched hopper_keys_", "launched hopper_queries_"];
    for (name, fake) in [
        ("gradients on streams that wait for no copy fail the check", "ignore_waits=1,seed=94"),
        ("gradients that leave the device before they are complete fail the check", "ignore_waits=4,seed=95"),
    ] {
        let mut planted = Scenario::new(name, &format!("delay_us=3000,{fake}"), ring);
        planted.ends = Ends::Failing;
        all.push(planted);
    }
    all
}

/// A case on a mesh whose ranks share a device: within the limits of its error on one rank, and
/// with the same bytes again, with graphs and without.
fn shared([ulysses, ring]: [u32; 2], strategy: Strategy, dtype: Dtype, name: &str) {
    let case = cases().into_iter().find(|case| case.name == name).unwrap();
    let case = GradientCase::new(case, dtype).with_bias_gradient();
    let sharing = |mesh, strategy, device: &Device| sharing(&case, mesh, strategy, device);
    let [with, without] = [true, false].map(|graphs| {
        Device::from(CudaBackend::with_options(0, &CudaOptions { graphs, ..CudaOptions::default() }).unwrap())
    });
    let mesh = Mesh::new(ulysses, ring).unwrap();
    let alone = case.run(in_process_group(1), &sharing(Mesh::new(1, 1).unwrap(), Strategy::Dense, &with));
    let ranks = mesh.size();
    let first = case.gradients(in_process_group(ranks), &sharing(mesh, strategy, &with));
    for (error, limit) in case.judge(&first).iter().zip(case.parallel_limits(&alone)) {
        error.within(&limit).unwrap();
    }
    for device in [&with, &without] {
        let again = case.gradients(in_process_group(ranks), &sharing(mesh, strategy, device));
        assert!(bits(&first) == bits(&again), "{name}: other bytes");
    }
}

/// A case on one rank: within the limits of its error, and with the same bytes again.
pub(crate) fn alone(backend: CudaBackend, case: Case, dtype: Dtype) {
    let case = GradientCase::new(case, dtype);
    let device = Device::from(backend);
    let sharing = sharing(&case, Mesh::new(1, 1).unwrap(), Strategy::Dense, &device);
    let first = case.gradients(in_process_group(1), &sharing);
    for (error, limit) in case.judge(&first).iter().zip(case.dense_limits()) {
        error.within(&limit).unwrap();
    }
    assert!(bits(&first) == bits(&case.gradients(in_process_group(1), &sharing)), "other bytes");
}

fn sharing(case: &GradientCase, mesh: Mesh, strategy: Strategy, device: &Device) -> Sharing {
    let problem = &case.prepared.problem;
    let place = |total| Placement::new(PlacementKind::Zigzag, mesh, total, &Split::Even).unwrap();
    Sharing {
        mesh,
        q: place(problem.q_len),
        kv: place(problem.kv_len),
        forward: strategy,
        execution: Execution::new().strategy(strategy),
        device: device.clone(),
    }
}

fn bits(all: &[Vec<f64>]) -> Vec<Vec<u64>> {
    all.iter().map(|gradient| gradient.iter().map(|x| x.to_bits()).collect()).collect()
}
