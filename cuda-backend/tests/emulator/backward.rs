//! The kernels of the backward pass against the oracle.

use kyklos::Dtype;
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::OracleMask;

use crate::amount::amount;
use crate::backward_call::{BackwardCall, NanCall, every_bias, gives_nothing, plain, without_finite_logits};
use crate::job::Timing;
use crate::parallel::in_parallel;
use crate::program::emulator;

/// Whether all tests run in full.
fn everything() -> bool {
    amount(false, true)
}

/// Compares calls with the oracle and lists all that failed.
fn judge(calls: &[(BackwardCall, Timing)]) {
    let failures = in_parallel(calls.len(), |n| calls[n].0.judge(emulator(), calls[n].1).err());
    assert!(
        failures.is_empty(),
        "{} of {} calls failed:\n{}",
        failures.len(),
        calls.len(),
        failures.join("\n\n")
    );
}

#[test]
fn gradients_of_every_case_agree_with_the_oracle() {
    let mut calls = Vec::new();
    for (n, case) in cases().into_iter().enumerate() {
        // A sample has every case in one type.
        let types = Dtype::ALL.into_iter().enumerate().filter(|(i, _)| everything() || *i == n % 3);
        for (i, dtype) in types {
            let call = BackwardCall::new(GradientCase::new(case.clone(), dtype), (n + i) % 2 == 0);
            calls.push((call, Timing::ALL[(n / 2 + i) % 3]));
        }
    }
    judge(&calls);
}

/// What the kernels for Hopper support, in one type and all schedules, or in both types.
#[test]
fn gradients_of_every_case_without_mask_or_bias_tensor_agree_with_the_oracle_on_hopper() {
    let mut calls = Vec::new();
    let supported = |case: &Case| case.bias.is_none() && case.problem.head_dim <= 128;
    for (n, case) in cases().into_iter().filter(supported).enumerate() {
        let types = [Dtype::F16, Dtype::Bf16].into_iter().enumerate();
        for (i, dtype) in types.filter(|(i, _)| everything() || *i == n % 2) {
            let call = BackwardCall::new(GradientCase::new(case.clone(), dtype), (n / 2 + i) % 2 == 0);
            calls.push((call.on_hopper(), Timing::ALL[(n / 2 + i) % 3]));
        }
    }
    judge(&calls);
}

/// Enough tiles to use every stage three times, tiles that need mask tests, empty tiles, blocks
/// whose second consumer has no row or key, and heads that are padded.
#[test]
fn gradients_of_every_head_dim_agree_with_the_oracle_around_tile_sizes_on_hopper() {
    let mut calls = Vec::new();
    for (n, dim) in [8, 64, 72, 128].into_iter().enumerate() {
        for (i, (q_len, kv_len)) in [(129, 520), (450, 129), (65, 64), (1, 17)].into_iter().enumerate() {
            // A sample has the sizes of both long sides once for each kernel.
            if !everything() && i < 2 && n % 2 != i {
                continue;
            }
            let mut case = plain();
            let problem = &mut case.problem;
            (problem.head_dim, problem.q_len, problem.kv_len) = (dim, q_len, kv_len);
            (problem.q_heads, problem.kv_heads) = [(3, 1), (2, 2)][n / 2];
            problem.scale = (dim as f64).sqrt().recip();
            if i < 2 {
                (problem.mask, problem.q_offset) = (OracleMask::causal(), [400, 0][i]);
            }
            let dtype = [Dtype::F16, Dtype::Bf16][(n + i) % 2];
            let call = BackwardCall::new(GradientCase::new(case, dtype), i % 2 == 1);
            calls.push((call.on_hopper(), Timing::ALL[(n + i) % 3]));
        }
    }
    judge(&calls);
}

/// Sizes around the tiles of both kernels of every head dim, with a GQA group of three and tiles
/// that are full, partial and empty.
#[test]
fn gradients_of_every_head_dim_agree_with_the_oracle_around_tile_sizes() {
    let mut calls = Vec::new();
    for (n, dim) in [8, 64, 72, 96, 128, 184, 192, 200, 256].into_iter().enumerate() {
        for (i, (q_len, kv_len)) in [(65, 191), (130, 64), (1, 65), (64, 17)].into_iter().enumerate() {
            let mut case = plain();
            let problem = &mut case.problem;
            (problem.head_dim, problem.q_len, problem.kv_len) = (dim, q_len, kv_len);
            (problem.q_heads, problem.kv_heads) = (3, 1);
            problem.scale = (dim as f64).sqrt().recip();
            if i == 0 {
                (problem.mask, problem.q_offset) = (OracleMask::causal(), 100);
            }
            let dtype = [Dtype::F16, Dtype::Bf16, Dtype::F32][(n + i) % 3];
            calls.push((
                BackwardCall::new(GradientCase::new(case, dtype), i % 2 == 1),
                Timing::ALL[(n + i) % 3],
            ));
        }
    }
    judge(&calls);
}

/// Over several tiles of both sides, some of them partial and some empty. In all types; a sample
/// has each shape in one type, and each type and head dim with some shapes.
#[test]
fn gradients_of_every_shape_of_bias_agree_with_the_oracle() {
    let mut calls = Vec::new();
    for (n, bias) in every_bias().enumerate() {
        for (i, dtype) in Dtype::ALL.into_iter().enumerate().filter(|(i, _)| everything() || *i == n % 3) {
            let mut case = plain();
            let problem = &mut case.problem;
            (problem.batch, problem.q_len, problem.kv_len) = (2, 133, 150);
            (problem.q_heads, problem.kv_heads) = (4, 2);
            (problem.mask, problem.q_offset) = (OracleMask::causal(), 17);
            problem.head_dim = [32, 72, 136, 200][(n + i) % 4];
            problem.scale = (problem.head_dim as f64).sqrt().recip();
            problem.softcap = ((n + i) % 2 == 0).then_some(1.5);
            case.bias = Some(bias);
            let call = BackwardCall::new(GradientCase::new(case, dtype), (n / 2 + i) % 3 == 0);
            calls.push((call, Timing::ALL[(n / 3 + i) % 3]));
        }
    }
    judge(&calls);
}

/// Logits of about 100: the logit of a pair must have the rounding that it has in the log-sum-exp.
#[test]
fn gradients_of_large_logits_agree_with_the_oracle() {
    let mut calls = Vec::new();
    for name in ["one row beyond a tile", "two rows beyond four tiles"] {
        for dtype in Dtype::ALL {
            for factor in [30.0, -30.0] {
                let mut case = cases().into_iter().find(|case| case.name == name).unwrap();
                case.problem.scale *= factor;
                let call = || BackwardCall::new(GradientCase::new(case.clone(), dtype), false);
                calls.push((call(), Timing::Eager));
                if dtype != Dtype::F32 {
                    calls.push((call().on_hopper(), Timing::Late));
                }
            }
        }
    }
    judge(&calls);
}

/// dS of some pairs is beyond the largest f16, as with a scaled loss.
#[test]
fn gradients_of_a_scaled_loss_agree_with_the_oracle() {
    let calls = [(64, false), (128, false), (256, false), (64, true), (128, true)].map(|(dim, wgmma)| {
        let mut case = plain();
        case.problem.head_dim = dim;
        case.problem.scale = (dim as f64).sqrt().recip();
        case.problem.mask = OracleMask::causal();
        let call = BackwardCall::new(GradientCase::of_scaled_loss(case, Dtype::F16, 8192.0), false);
        (if wgmma { call.on_hopper() } else { call }, Timing::Random)
    });
    judge(&calls);
}

#[test]
fn a_nan_in_the_gradient_of_a_row_reaches_only_what_the_row_sees() {
    for (n, dim) in [64, 192, 256].into_iter().enumerate() {
        for (i, dtype) in Dtype::ALL.into_iter().enumerate() {
            // A sample has the smallest head dim in all types and the others in 16 bits, for the kernel for
            // f32 is one for all.
            if !everything() && n > 0 && i != n {
                continue;
            }
            let mut case = plain();
            let problem = &mut case.problem;
            (problem.head_dim, problem.q_len, problem.kv_len) = (dim, 70, 150);
            (problem.q_heads, problem.kv_heads) = (4, 2);
            (problem.mask, problem.q_offset) = (OracleMask::causal(), 70);
            let call = NanCall::new(&case, dtype, [13, dim - 3]);
            call.judge(emulator(), Timing::Random).unwrap();
            if dim == 64 && dtype != Dtype::F32 {
                call.on_hopper().judge(emulator(), Timing::Random).unwrap();
            }
        }
    }
}

#[test]
fn rows_without_finite_logits_give_no_gradients() {
    for dtype in Dtype::ALL {
        let call = without_finite_logits(dtype, |case| case);
        gives_nothing(&call, emulator(), Timing::Random).unwrap();
        if dtype != Dtype::F32 {
            gives_nothing(&call.on_hopper(), emulator(), Timing::Random).unwrap();
        }
    }
}
