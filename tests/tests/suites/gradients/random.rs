//! Random problems on random plan sets.

use kyklos::backend::{Backend, Device};
use kyklos::{Dtype, Execution, Mesh, PlacementKind, Split, Strategy};
use kyklos_backend_suite::GradientCase;
use kyklos_transport::in_process_group;
use proptest::prelude::*;
use proptest::strategy::Strategy as _;
use proptest::test_runner::TestCaseError;

use super::alone;
use super::prepared::{OnSessions, Sharing};
use crate::random_sets::{case, masks};

/// A problem, and how ranks share it.
#[derive(Clone, Debug)]
pub struct RandomCall {
    /// Batch, queries, keys, KV heads, query heads of each, head dim.
    shape: [usize; 6],
    mesh: (u32, u32),
    kind: PlacementKind,
    dtype: Dtype,
    terms: Vec<(u8, f64, f64)>,
    offset: u64,
    weights: Vec<u8>,
    seed: u64,
}

/// Problems whose heads have one of `dims` elements.
pub fn sets(
    dims: &[usize],
    dtypes: &[Dtype],
) -> impl proptest::strategy::Strategy<Value = RandomCall> + use<> {
    let (dims, dtypes) = (dims.to_vec(), dtypes.to_vec());
    (
        (1usize..3, 1usize..120, 1usize..120, 1usize..4, 1usize..4, prop::sample::select(dims)),
        (1u32..4, 1u32..4),
        (prop::sample::select(PlacementKind::ALL.to_vec()), prop::sample::select(dtypes)),
        masks(),
        (0u64..20, prop::collection::vec(0u8..4, 9), any::<u64>()),
    )
        .prop_map(|((batch, q_len, kv_len, kv_heads, group, dim), mesh, (kind, dtype), terms, rest)| {
            let (offset, weights, seed) = rest;
            let shape = [batch, q_len, kv_len, kv_heads, group, dim];
            RandomCall { shape, mesh, kind, dtype, terms, offset, weights, seed }
        })
}

impl RandomCall {
    fn case(&self) -> GradientCase {
        let mut case = case(self.shape, &self.terms, self.offset, self.seed);
        case.problem.softcap = (self.seed % 5 == 2).then_some(1.5);
        case.seed = self.seed / 2;
        if self.dtype == Dtype::F16 {
            // f16 has normal numbers from 6e-5 to 65,504, and dQ has the size of the scale.
            case.problem.scale = case.problem.scale.clamp(1e-2, 1e5);
        }
        GradientCase::new(case, self.dtype)
    }

    /// One rank on `device` agrees with the oracle, and several ranks on it agree as well as one
    /// does.
    pub fn check(&self, device: &Device) -> Result<(), TestCaseError> {
        let Self { mesh: (ulysses, ring), kind, dtype, weights, seed, .. } = self;
        let case = self.case();
        let mut case = match device.supports_bias_gradient() {
            Ok(()) => case.with_bias_gradient(),
            Err(_) => case,
        };
        let errors = case.run(in_process_group(1), &alone(&case, device));
        let proves = |fault: &String| !fault.contains("the limit proves nothing");
        let what =
            |mesh: Mesh, fault: String| format!("{mesh} {kind} {dtype} {}: {fault}", case.prepared.oracle);
        for (error, limit) in errors.iter().zip(case.dense_limits()) {
            if let Err(fault) = error.within(&limit) {
                prop_assert!(!proves(&fault), "{}", what(Mesh::new(1, 1).unwrap(), fault));
                return Ok(());
            }
        }
        let q_heads = (self.shape[3] * self.shape[4]) as u32;
        let mesh = Mesh::new((*ulysses).min(q_heads), *ring).unwrap();
        let mut weights: Vec<f64> =
            weights[..mesh.size() as usize].iter().map(|weight| f64::from(*weight)).collect();
        weights[0] += 1.0;
        let fits = |strategy: &Strategy| strategy.accepts(mesh).is_ok();
        let draw = |among: Vec<Strategy>, by: u64| among[(seed / by % among.len() as u64) as usize];
        let forward = draw(Strategy::ALL.into_iter().filter(fits).collect(), 11);
        let backward =
            draw(Strategy::ALL.into_iter().filter(fits).filter(|one| one.has_backward()).collect(), 77);
        if seed / 5 % 3 == 1 {
            // Keys that every rank holds.
            let (keys, by) = (self.shape[2] as u32, (seed / 7) as u32);
            let first = by % keys;
            let problem = case.prepared.problem.clone();
            case.prepared.problem =
                problem.with_replicated(first..(first + 1 + by / 64 % 60).min(keys)).unwrap();
        }
        let deal = Split::Weights(weights);
        let (q, kv) = kyklos::deal_tokens(&case.prepared.problem, mesh, *kind, &deal).unwrap();
        let execution = Execution::new().strategy(backward);
        let sharing = Sharing { mesh, q, kv, forward, execution, device: device.clone() };
        let together = case.run(in_process_group(mesh.size()), &sharing);
        for (error, limit) in together.iter().zip(case.parallel_limits(&errors)) {
            if let Err(fault) = error.within(&limit) {
                let fault = what(mesh, format!("{forward}, then {backward}: {fault}"));
                prop_assert!(!proves(&fault), "{fault}");
            }
        }
        Ok(())
    }
}
