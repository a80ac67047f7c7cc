//! Logits of any size, and finite numbers in the place of −∞.

use bytes::Bytes;
use kyklos::backend::Backend;
use kyklos::{Dtype, Mesh, PlacementKind, Split, Strategy, plan_forward};
use kyklos_oracle::inputs::{Case, CaseBias, cases};

use crate::{Prepared, Whole, dense_set, run_alone, run_together};

/// Largest logits of about 10⁻²⁹ to 10³¹, of many rows and of few, alone and on a ring.
pub(super) async fn logits_of_any_size<B: Backend>(backend: &B, who: &str) {
    for (n, name) in ["logits of a million", "logits of a million, few queries"]
        .iter()
        .copied()
        .cycle()
        .take(8)
        .enumerate()
    {
        let factor = [1e-30, 1e-30, 1e-3, 1e3, 1e9, 1e9, 1e30, 1e30][n];
        let mut case = named(name);
        case.problem.scale = factor;
        let prepared = Prepared::new(case, [Dtype::F32, Dtype::Bf16, Dtype::F16][n % 3]);
        let who = format!("{who}, scale {factor:e}");
        let whole = run_alone(backend, &dense_set(&prepared.problem), &prepared).await;
        let alone = prepared.judge(&whole, &who);
        alone.assert_within(&prepared.limit_on(backend));
        let together = on_a_ring(backend, &prepared).await;
        prepared.judge(&together, &who).assert_within(&prepared.parallel_limit_on(backend, &alone));
    }
}

/// A row whose logits are all the same finite number is the mean of the values, as in PyTorch: on
/// one rank, and where each rank has some of the keys.
pub(super) async fn rows_of_huge_logits<B: Backend>(backend: &B, who: &str) {
    for stand_in in [f32::MIN, -1e30, -1e10, 1e38] {
        let mut case = named("logits of a million, few queries");
        case.problem.scale = 1.0;
        case.bias =
            Some(CaseBias { additive: true, batch: 1, heads: 1, shared_rows: false, stand_in: false });
        let mut prepared = Prepared::new(case, Dtype::F32);
        let [rows, keys, dim] = [prepared.oracle.q_len, prepared.oracle.kv_len, prepared.oracle.head_dim];
        let bias = vec![stand_in; rows * keys];
        prepared.tensors.bias = Some(Bytes::copy_from_slice(bytemuck::cast_slice(&bias)));
        let outputs = [
            run_alone(backend, &dense_set(&prepared.problem), &prepared).await,
            on_a_ring(backend, &prepared).await,
        ];
        // The bias is far above the scores' rounding, so all logits of a row are one number. One KV head.
        let v: &[f32] = bytemuck::cast_slice(&prepared.tensors.v);
        let (heads, of_entry) = (prepared.oracle.q_heads, keys * dim);
        for whole in &outputs {
            let o: &[f32] = bytemuck::cast_slice(&whole.o);
            for (index, value) in o.iter().enumerate() {
                let (d, batch) = (index % dim, index / (rows * heads * dim));
                let values = v[batch * of_entry..][..of_entry].iter().skip(d).step_by(dim);
                let mean = values.map(|value| f64::from(*value)).sum::<f64>() / keys as f64;
                assert!(
                    (f64::from(*value) - mean).abs() < 1e-6,
                    "{who}, bias {stand_in:e}: {value} instead of {mean}"
                );
            }
            assert!(whole.lse.iter().all(|lse| lse.is_finite()), "{who}: {:?}", whole.lse);
        }
    }
}

/// Where scale · q, or q · k, is out of the range of f32 and the logits are not: with many queries
/// and with few, with a softcap and without.
pub(super) async fn scales_of_any_size<B: Backend>(backend: &B, who: &str) {
    for (name, softcap) in [("logits of a million", None), ("logits of a million, few queries", Some(4.0))] {
        let prepared = |scale: i32| {
            let mut case = named(name);
            (case.problem.scale, case.problem.softcap) = (2.0_f64.powi(scale), softcap);
            Prepared::new(case, Dtype::F32)
        };
        let usual = prepared(20);
        for (scale, of_q, of_k) in [(70, 60, -110), (-110, 65, 65)] {
            let mut other = prepared(scale);
            let (q, k) = (times(&usual.tensors.q, of_q), times(&usual.tensors.k, of_k));
            (other.tensors.q, other.tensors.k) = (q, k);
            let whole = run_alone(backend, &dense_set(&other.problem), &other).await;
            usual
                .judge(&whole, &format!("{who}, {name}, scale 2^{scale}"))
                .assert_within(&usual.dense_limit());
        }
    }
}

/// Denormal elements of q, k and v count as they are or as 0.
pub(super) async fn denormal_elements<B: Backend>(backend: &B, who: &str) {
    for name in ["logits of a million", "logits of a million, few queries"] {
        let mut case = named(name);
        // All logits are about 0, with any elements.
        case.problem.scale = 1e-30;
        let mut prepared = Prepared::new(case, Dtype::F32);
        let right = run_alone(backend, &dense_set(&prepared.problem), &prepared).await;
        prepared.judge(&right, who).assert_within(&prepared.limit_on(backend));
        let tensors = &mut prepared.tensors;
        for tensor in [&mut tensors.q, &mut tensors.k, &mut tensors.v] {
            *tensor = times(tensor, -130);
        }
        let found = run_alone(backend, &dense_set(&prepared.problem), &prepared).await;
        let [o, right_o] = [&found, &right].map(|whole| bytemuck::cast_slice::<u8, f32>(&whole.o));
        for (value, right) in o.iter().zip(right_o) {
            let right = f64::from(*right) * 2.0_f64.powi(-130);
            assert!(
                (f64::from(*value) - right).abs() <= f64::from(f32::MIN_POSITIVE),
                "{who}: {value:e} for {right:e}"
            );
        }
        for (lse, right) in found.lse.iter().zip(&right.lse) {
            assert!(
                lse == right || (lse - right).abs() <= 1e-6 * (1.0 + right.abs()),
                "{who}: {lse} for {right}"
            );
        }
    }
}

/// f32 elements times a power of two.
fn times(tensor: &Bytes, exponent: i32) -> Bytes {
    let values = bytemuck::pod_collect_to_vec::<u8, f32>(tensor);
    let scaled: Vec<f32> = values.iter().map(|value| value * 2.0_f32.powi(exponent)).collect();
    Bytes::copy_from_slice(bytemuck::cast_slice(&scaled))
}

async fn on_a_ring<B: Backend>(backend: &B, prepared: &Prepared) -> Whole {
    let mesh = Mesh::new(1, 3).unwrap();
    let set = plan_forward(&prepared.problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring)
        .unwrap();
    run_together(backend, &set, prepared).await
}

fn named(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}
