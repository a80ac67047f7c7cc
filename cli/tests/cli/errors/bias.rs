//! Refusals of attention bias tensors in calls of several ranks.

use std::sync::Arc;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, BiasKind, BiasTensor, Dtype, Error, Mask, Mesh, PlacementKind, Session,
    Split, Strategy, Tensor, plan_forward,
};
use kyklos_transport::in_process_group;

use super::Entry;
use super::library::entry;

/// A mask of 8 keys for all queries: 4 bytes.
const KEYS: BiasTensor = BiasTensor { kind: BiasKind::Mask, batch: 1, heads: 1, shared_rows: true };

pub(super) fn refusals() -> Vec<Entry> {
    let zeros = Bytes::from(vec![0; 4 * 2 * 8 * 4]);
    let mut errors: Vec<[Error; 5]> = on_threads(in_process_group(2), |transport| {
        let rank = transport.rank().0;
        let mut session = Session::new(transport, Device::cpu());
        let x = Tensor::from_bytes([1, 4, 2, 8], Dtype::F32, zeros.clone()).unwrap();
        let call = Attention::new().bias(KEYS, Bytes::from(vec![0; 12]));
        let size = session.attend(&call, &x, &x, &x).unwrap_err();

        // 7 keys are 4 bytes, as 8 are.
        let mut axes = |tensor, bytes, rows, keys| {
            let call = Attention::new().bias(tensor, Bytes::from(vec![0; bytes])).bias_axes(rows, keys);
            session.attend(&call, &x, &x, &x).unwrap_err()
        };
        let keys = axes(KEYS, 4, 1, 7);
        let queries = axes(BiasTensor { shared_rows: false, ..KEYS }, 20, 5, 8);

        let rows = Tensor::from_bytes([1, 4, 2, 8], Dtype::F16, Bytes::from(vec![0; 128])).unwrap();
        let call = Attention::new().bias_tensor(&rows).unwrap();
        let dtype = session.attend(&call, &x, &x, &x).unwrap_err();

        let problem = AttentionProblem::new([1, 8, 2, 2, 8], Dtype::F32, Mask::full()).unwrap();
        let problem = problem.with_bias(Some(KEYS)).unwrap();
        let (mesh, placement) = (Mesh::new(1, 2).unwrap(), PlacementKind::Contiguous);
        let set = plan_forward(&problem, mesh, placement, &Split::Even, Strategy::Ring).unwrap();
        let plans = Arc::new(ProvedPlans::new(set).unwrap());
        let own = u8::try_from(rank).unwrap();
        let call = Attention::planned(&plans).bias(KEYS, Bytes::from(vec![own; 4]));
        let unlike = session.attend(&call, &x, &x, &x);
        [size, keys, queries, dtype, unlike.unwrap_err()]
    });
    let [size, keys, queries, dtype, unlike] = errors.swap_remove(0);
    let odd = Tensor::from_bytes([1, 4, 2, 7], Dtype::F16, Bytes::from(vec![0; 112])).unwrap();
    vec![
        entry(
            "Attention::bias_tensor with rows of 7 keys in f16",
            Attention::new().bias_tensor(&odd).unwrap_err(),
            "Each row begins on a 4-byte boundary.",
        ),
        entry("Session::attend with a bias tensor of another type", dtype, "Kernels read it as they read q."),
        entry(
            "Session::attend with an attention bias tensor of another size",
            size,
            "The tensor has whole rows, for the keys of all ranks.",
        ),
        entry(
            "Session::attend with bias_axes of 7 keys",
            keys,
            "Rows are padded, so their bytes do not tell a key more or less.",
        ),
        entry(
            "Session::attend with bias_axes of 5 rows for 4 queries",
            queries,
            "A bias has a row for each query of its rank.",
        ),
        entry(
            "Session::attend with plans, where ranks hold unlike tensors of shared rows",
            unlike,
            "All queries share its rows, so every rank holds the same bytes.",
        ),
    ]
}
