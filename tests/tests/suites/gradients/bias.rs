//! Gradients of additive bias tensors of every shape, on every kind of mesh.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::backend::cpu::CpuBackend;
use kyklos::{
    AttentionProblem, BiasKind, BiasTensor, Dtype, Execution, Mask, Mesh, PlacementKind, Split, Strategy,
    deal_tokens, plan_backward,
};
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::{Case, CaseBias};
use kyklos_oracle::oracle::{OracleMask, OracleProblem, OracleTerm};
use kyklos_transport::in_process_group;
use kyklos_transport::quic::quic_loopback_group;

use super::alone;
use super::prepared::{OnSessions, Sharing};

/// Two batch entries, 150 queries at the end of 190 keys, four heads over two.
fn case(bias: CaseBias, softcap: Option<f64>) -> Case {
    let problem = OracleProblem {
        batch: 2,
        q_len: 150,
        kv_len: 190,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        scale: 0.25,
        softcap,
        mask: OracleMask::causal(),
        q_offset: 40,
        sinks: vec![1.0, 0.5, 2.0, 1.5],
    };
    Case { name: "a bias", seed: 31, problem, poison: Vec::new(), bias: Some(bias) }
}

/// One for all, or one for each: of batch entries, heads and rows.
fn every_shape() -> impl Iterator<Item = CaseBias> {
    (0..8).map(|bits| CaseBias {
        additive: true,
        batch: if bits & 1 == 0 { 1 } else { 2 },
        heads: if bits & 2 == 0 { 1 } else { 4 },
        shared_rows: bits & 4 == 0,
        stand_in: false,
    })
}

fn sharing(case: &GradientCase, mesh: Mesh, strategy: Strategy, device: Device) -> Sharing {
    let ranks = mesh.size() as usize;
    // Unlike shares; with three ranks or more, the second one has no tokens.
    let weights = (0..ranks).map(|rank| if rank == 1 && ranks > 2 { 0.0 } else { 1.0 + rank as f64 });
    let split = Split::Weights(weights.collect());
    let (q, kv) = deal_tokens(&case.prepared.problem, mesh, PlacementKind::Zigzag, &split).unwrap();
    Sharing { mesh, q, kv, forward: strategy, execution: Execution::new().strategy(strategy), device }
}

#[test]
fn every_shape_of_bias_has_its_gradient_on_every_kind_of_mesh() {
    every_shape_agrees_with_the_oracle(&Device::cpu(), true);
}

/// On one rank and on several, whose devices are all `device`.
pub(super) fn every_shape_agrees_with_the_oracle(device: &Device, every_mesh: bool) {
    for (index, bias) in every_shape().enumerate() {
        let softcap = (index % 2 == 1).then_some(1.5);
        let dtype = Dtype::ALL[index % 3];
        let case = GradientCase::new(case(bias, softcap), dtype).with_bias_gradient();
        let errors = case.run(in_process_group(1), &alone(&case, device));
        assert_eq!(errors.len(), 5);
        for (error, limit) in errors.iter().zip(case.dense_limits()) {
            error.within(&limit).unwrap_or_else(|fault| panic!("{bias:?} alone: {fault}"));
        }
        let sets = [
            ((1, 3), Strategy::Ring),
            ((2, 2), Strategy::Unified),
            ((3, 1), Strategy::Ulysses),
            ((4, 1), Strategy::Chunked),
            ((1, 4), Strategy::Gather),
            // Where queries travel, only a bias with one row for all of them has its gradient: the default
            // takes its place.
            ((1, 3), Strategy::PassQ),
            ((1, 4), Strategy::Tree),
        ];
        for (mesh, strategy) in sets.into_iter().take(if every_mesh { sets.len() } else { 2 }) {
            let mesh = Mesh::new(mesh.0, mesh.1).unwrap();
            let together =
                case.run(in_process_group(mesh.size()), &sharing(&case, mesh, strategy, device.clone()));
            for (error, limit) in together.iter().zip(case.parallel_limits(&errors)) {
                error
                    .within(&limit)
                    .unwrap_or_else(|fault| panic!("{bias:?} {dtype} {strategy} on {mesh}: {fault}"));
            }
        }
    }
}

#[test]
fn the_gradient_of_a_bias_has_the_same_bytes_with_any_number_of_threads_and_over_quic() {
    for bias in every_shape() {
        let case = GradientCase::new(case(bias, Some(2.0)), Dtype::F32).with_bias_gradient();
        for (mesh, strategy) in [((1, 3), Strategy::Ring), ((2, 1), Strategy::Ulysses)] {
            let mesh = Mesh::new(mesh.0, mesh.1).unwrap();
            let on = |device| sharing(&case, mesh, strategy, device);
            let first = case.gradients(in_process_group(mesh.size()), &on(Device::cpu()));
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let device = Device::from(CpuBackend::with_pool(Arc::new(pool)));
                assert!(first == case.gradients(in_process_group(mesh.size()), &on(device)), "{bias:?}");
            }
            let quic = quic_loopback_group(mesh.size()).unwrap();
            assert!(first == case.gradients(quic, &on(Device::cpu())), "{bias:?} over QUIC");
        }
    }
}

/// The same bytes when the same ranks compute them again on `device`.
pub(super) fn every_shape_has_the_same_bytes_again(device: &Device) {
    for bias in every_shape() {
        let case = GradientCase::new(case(bias, None), Dtype::F32).with_bias_gradient();
        let mesh = Mesh::new(2, 2).unwrap();
        let run = || {
            let sharing = sharing(&case, mesh, Strategy::Unified, device.clone());
            case.gradients(in_process_group(mesh.size()), &sharing)
        };
        assert!(run() == run(), "{bias:?}");
    }
}

#[test]
fn rows_that_see_no_key_add_nothing_to_the_gradient_of_a_bias() {
    rows_without_keys_add_nothing(&Device::cpu());
}

/// Rows from 110 on see no key. What the gradient of their output holds must not matter.
pub(super) fn rows_without_keys_add_nothing(device: &Device) {
    for bias in every_shape() {
        let mut case = case(bias, None);
        let problem = &mut case.problem;
        (problem.q_len, problem.kv_len, problem.q_offset) = (150, 100, 0);
        problem.mask = OracleMask::causal().and(OracleTerm::Window { left: 10, right: -1 });
        problem.sinks.clear();
        let mut case = GradientCase::new(case, Dtype::F32).with_bias_gradient();
        let on =
            |case: &GradientCase| case.gradients(in_process_group(1), &alone(case, device)).pop().unwrap();
        let right = on(&case);
        let mut d_o = case.d_o.to_vec();
        let row = 4 * 16 * 4;
        for at in (0..d_o.len()).step_by(row).filter(|at| at / row % 150 >= 110) {
            d_o[at..at + row].fill(0xFF);
        }
        case.d_o = d_o.into();
        assert!(right.iter().all(|value| value.is_finite()));
        assert!(right == on(&case), "{bias:?}");
    }
}

#[test]
fn what_has_no_gradient_of_a_bias_is_refused() {
    let problem = AttentionProblem::new([1, 40, 4, 2, 8], Dtype::F32, Mask::full()).unwrap();
    let refused = |problem: Result<AttentionProblem, kyklos::PlanError>, words: &str| {
        let error = problem.unwrap_err();
        assert!(error.is_request() && error.to_string().contains(words), "{error}");
    };
    refused(problem.clone().with_bias_gradient(true), "without an additive bias tensor");
    let mask = BiasTensor { kind: BiasKind::Mask, batch: 1, heads: 1, shared_rows: false };
    let masked = problem.clone().with_bias(Some(mask)).unwrap();
    refused(masked.with_bias_gradient(true), "without an additive bias tensor");
    let bias = BiasTensor { kind: BiasKind::Additive, ..mask };
    let wanted = problem.with_bias(Some(bias)).and_then(|problem| problem.with_bias_gradient(true)).unwrap();
    let (mesh, kind) = (Mesh::new(1, 4).unwrap(), PlacementKind::Contiguous);
    for strategy in [Strategy::PassQ, Strategy::Tree] {
        let error = plan_backward(&wanted, mesh, kind, &Split::Even, strategy).unwrap_err();
        assert!(error.to_string().contains("the gradient of a bias tensor"), "{error}");
    }
    let shared = BiasTensor { shared_rows: true, ..bias };
    let wanted = wanted.with_bias(Some(shared)).unwrap();
    plan_backward(&wanted, mesh, kind, &Split::Even, Strategy::Tree).unwrap();
}
