//! Rows in which all visible logits are one number: their weights are 1/n, whatever the number is.

use half::{bf16, f16};
use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, Dtype, Mask, Saved, Session, Tensor};
use kyklos_oracle::oracle::Element;
use kyklos_transport::in_process_group;

const RANKS: usize = 3;
/// Queries and keys of each rank.
const TOKENS: usize = 22;
/// Of queries, over one of keys.
const HEADS: usize = 2;
const DIM: usize = 32;

#[test]
fn equal_logits_of_any_size_have_equal_shares_of_the_gradients() {
    every_size(&Device::cpu());
}

/// The control: the log-sum-exp of one number, as it is without its rest.
#[test]
fn a_rounded_log_sum_exp_gives_other_shares() {
    for (logit, times) in [(-1e4, 5.0), (3e6, 1e3), (1e8, 1e5), (-1e20, 1e5)] {
        let worst = worst_error::<f32>(&Device::cpu(), logit, Log::Rounded);
        assert!(worst > times, "{logit:e}: {worst} of the limit");
    }
}

/// Of an additive bias alone, as q is 0. Finite numbers in the place of −∞ are among them.
pub(super) fn every_size(device: &Device) {
    let of_f32 = [-1e4, 3e6, 1e8, -1e20, f32::MIN].map(|at| (at, worst_error::<f32>(device, at, Log::Pair)));
    let of_f16 = [3e3, -65_504.0].map(|at| (at, worst_error::<f16>(device, at, Log::Pair)));
    let of_bf16 = [-1e4, 1e10, -1e38].map(|at| (at, worst_error::<bf16>(device, at, Log::Pair)));
    for (logit, worst) in of_f32.into_iter().chain(of_f16).chain(of_bf16) {
        assert!(worst <= 1.0, "{logit:e}: {worst} of the limit");
    }
}

/// The log-sum-exp that gradients are computed from.
#[derive(Clone, Copy, PartialEq)]
enum Log {
    Rounded,
    Pair,
}

/// The worst error of dv and of dbias, in limits of the type. A query at position p has p + 1 keys,
/// because of the causal mask.
fn worst_error<E: Element + kyklos::Element>(device: &Device, logit: f32, log: Log) -> f64 {
    let keys = RANKS * TOKENS;
    let made = |seed: usize, token: usize, head: usize, d: usize| {
        E::from_f32(((seed + 37 * token + 11 * head + 7 * d) % 23) as f32 / 8.0 - 1.375)
    };
    let d_o_at = |token: usize, head: usize, d: usize| made(0, token, head, d).to_f64();
    let v_at = |token: usize, d: usize| made(5, token, 0, d).to_f64();
    let found = on_threads(in_process_group(RANKS as u32), |transport| {
        let first = transport.rank().0 as usize * TOKENS;
        let tensor = |heads: usize, value: &dyn Fn(usize, usize, usize) -> E| {
            let rows = (0..TOKENS * heads * DIM)
                .map(|index| value(first + index / DIM / heads, index / DIM % heads, index % DIM));
            Tensor::new([1, TOKENS, heads, DIM], rows.collect()).unwrap()
        };
        let zero = |_, _, _| E::from_f32(0.0);
        let (q, k) = (tensor(HEADS, &zero), tensor(1, &|token, _, d| made(9, token, 0, d)));
        let (v, d_o) =
            (tensor(1, &|token, _, d| made(5, token, 0, d)), tensor(HEADS, &|t, h, d| made(0, t, h, d)));
        let bias = Tensor::new([1, TOKENS, 1, keys], vec![E::from_f32(logit); TOKENS * keys]).unwrap();
        let call = Attention::new().mask(Mask::causal()).bias_tensor(&bias).unwrap().bias_gradient();
        let mut session = Session::new(transport, device.clone());
        let output = session.attend(&call, &q, &k, &v).unwrap();
        let lse = if log == Log::Rounded { output.lse } else { output.lse_pair };
        let saved = Saved { q, k, v, o: output.o, lse };
        let gradients = session.backward(&call, &saved, &d_o, None).unwrap();
        let d_bias = gradients.d_bias.unwrap().to_vec::<f32>().unwrap();
        (gradients.dv.to_vec::<E>().unwrap(), d_bias)
    });
    // Of the rounding of o, dO · v and, in 16 bits, of P and the sums; n values cancel in dP − δ.
    let limit = if <E as kyklos::Element>::DTYPE == Dtype::F32 { 1e-5 } else { 0.02 };
    let mut worst = 0.0_f64;
    let mut compare = |value: f64, right: f64| {
        let error = (value - right).abs() / (limit * (1.0 + right.abs()));
        worst = if error > worst || error.is_nan() { error } else { worst };
    };
    for key in 0..keys {
        let (dv, d_bias) = &found[key / TOKENS];
        for d in 0..DIM {
            let share = |query: usize| {
                (0..HEADS).map(move |head| d_o_at(query, head, d)).sum::<f64>() / (query + 1) as f64
            };
            let right = (key..keys).map(share).sum();
            compare(dv[key % TOKENS * DIM + d].to_f64(), right);
        }
        // Row `key` of dbias.
        let dp = |head, of: usize| (0..DIM).map(|d| d_o_at(key, head, d) * v_at(of, d)).sum::<f64>();
        let seen = (key + 1) as f64;
        let delta = [0, 1].map(|head| (0..=key).map(|of| dp(head, of)).sum::<f64>() / seen);
        for of in 0..keys {
            let right = if of > key {
                0.0
            } else {
                (0..HEADS).map(|head| dp(head, of) - delta[head]).sum::<f64>() / seen
            };
            compare(f64::from(d_bias[key % TOKENS * keys + of]), right);
        }
    }
    worst
}
