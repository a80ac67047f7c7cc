//! Refusals of attention bias tensors in calls of several ranks.

use std::sync::Arc;

use bytes::Bytes;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, BiasKind, BiasTensor, Dtype, Mask, Mesh, PlacementKind, Split, Strategy,
    Tensor, plan_forward,
};

use super::{of_calls, of_two, tensor};
use crate::support::transcript_holds;

/// A mask of 8 keys for all queries: 4 bytes.
const KEYS: BiasTensor = BiasTensor { kind: BiasKind::Mask, batch: 1, heads: 1, shared_rows: true };

#[test]
fn bias() {
    let x = tensor(4, 2);
    let of_both = |call: &Attention| of_two(|session, _| session.attend(call, &x, &x, &x).unwrap_err());
    let axes = |tensor, bytes, rows, keys| {
        of_both(&Attention::new().bias(tensor, Bytes::from(vec![0; bytes])).bias_axes(rows, keys))
    };
    let halves =
        |keys| Tensor::from_bytes([1, 4, 2, keys], Dtype::F16, Bytes::from(vec![0; 16 * keys])).unwrap();
    let problem = AttentionProblem::new([1, 8, 2, 2, 8], Dtype::F32, Mask::full()).unwrap();
    let problem = problem.with_bias(Some(KEYS)).unwrap();
    let (mesh, placement) = (Mesh::new(1, 2).unwrap(), PlacementKind::Contiguous);
    let set = plan_forward(&problem, mesh, placement, &Split::Even, Strategy::Ring).unwrap();
    let plans = Arc::new(ProvedPlans::new(set).unwrap());
    let calls = of_calls([
        (
            "Attention::bias_tensor with rows of 7 keys in f16",
            Attention::new().bias_tensor(&halves(7)).unwrap_err(),
        ),
        (
            "Session::attend with a bias tensor of another type",
            of_both(&Attention::new().bias_tensor(&halves(8)).unwrap()),
        ),
        (
            "Session::attend with an attention bias tensor of another size",
            of_both(&Attention::new().bias(KEYS, Bytes::from(vec![0; 12]))),
        ),
        // 7 keys are 4 bytes, as 8 are.
        ("Session::attend with bias_axes of 7 keys", axes(KEYS, 4, 1, 7)),
        (
            "Session::attend with bias_axes of 5 rows for 4 queries",
            axes(BiasTensor { shared_rows: false, ..KEYS }, 20, 5, 8),
        ),
        (
            "Session::attend with plans, where ranks hold unlike tensors of shared rows",
            of_two(|session, odd| {
                let call = Attention::planned(&plans).bias(KEYS, Bytes::from(vec![u8::from(odd); 4]));
                session.attend(&call, &x, &x, &x).unwrap_err()
            }),
        ),
        (
            "BiasTensor::key_mask with 15 bools for 2 batch entries",
            BiasTensor::key_mask(2, &[true; 15]).unwrap_err().into(),
        ),
    ]);
    transcript_holds("bias", &calls);
}
