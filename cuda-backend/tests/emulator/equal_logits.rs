//! Gradients of rows whose logits are all the same number, far from 0: there m + ln l rounds to m,
//! and every key has the share 1 / n.

use half::{bf16, f16};
use kyklos::Dtype;
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::{Case, CaseBias};
use kyklos_oracle::oracle::OracleMask;

use crate::backward_call::{BackwardCall, plain};
use crate::job::{Timing, numbers};
use crate::program::{Program, emulator};

/// A call whose logits are all `-scale`, under a causal mask: rows see 18 keys and more. Values are
/// 0, so only the gradient of the log-sum-exp is in dS, with the share of the pair. A bias of 0 is
/// for its gradient.
pub(crate) fn equal_logits(
    dtype: Dtype,
    scale: f32,
    bias: bool,
    change: impl FnOnce(&mut Case),
) -> BackwardCall {
    let mut case = plain();
    let problem = &mut case.problem;
    (problem.batch, problem.q_len, problem.kv_len) = (1, 133, 150);
    (problem.q_heads, problem.kv_heads) = (3, 1);
    (problem.mask, problem.q_offset) = (OracleMask::causal(), 17);
    case.bias =
        bias.then_some(CaseBias { additive: true, batch: 1, heads: 3, shared_rows: false, stand_in: false });
    change(&mut case);
    let mut case = GradientCase::new(case, dtype);
    case.prepared.problem = case.prepared.problem.with_logits(scale, None).unwrap();
    let (bytes, row) = (dtype.bytes(), case.prepared.problem.head_dim as usize * dtype.bytes());
    let [minus_one, one]: [&[u8]; 2] = match dtype {
        Dtype::F32 => [&[0, 0, 0x80, 0xBF], &[0, 0, 0x80, 0x3F]],
        Dtype::F16 => [&[0, 0xBC], &[0, 0x3C]],
        Dtype::Bf16 => [&[0x80, 0xBF], &[0x80, 0x3F]],
    };
    let tensors = &mut case.prepared.tensors;
    for (tensor, first) in [(&mut tensors.q, minus_one), (&mut tensors.k, one)] {
        let mut stored = vec![0; tensor.len()];
        stored.chunks_mut(row).for_each(|row| row[..bytes].copy_from_slice(first));
        *tensor = stored.into();
    }
    tensors.v = vec![0; tensors.v.len()].into();
    tensors.bias = tensors.bias.as_ref().map(|bias| vec![0; bias.len()].into());
    BackwardCall::new(case, false)
}

/// Every pair has the share 1 / n in dV, dK, dQ and the gradient of the bias.
pub(crate) fn shares_are_equal(call: &BackwardCall, program: &Program, timing: Timing) -> Result<(), String> {
    let prepared = &call.case.prepared;
    let (problem, scale) = (&prepared.oracle, f64::from(prepared.problem.scale));
    let (dim, heads, keys) = (problem.head_dim, problem.q_heads, problem.kv_len);
    let dtype = prepared.problem.dtype;
    let d_o: Vec<f64> = match dtype {
        Dtype::F32 => numbers::<f32>(&call.case.d_o).into_iter().map(f64::from).collect(),
        Dtype::F16 => numbers::<f16>(&call.case.d_o).into_iter().map(f64::from).collect(),
        Dtype::Bf16 => numbers::<bf16>(&call.case.d_o).into_iter().map(f64::from).collect(),
    };
    let d_lse = numbers::<f32>(&call.case.d_lse);
    let (sums, _) = call.run(program, timing)?;
    // Of each sum: the right numbers, and the sums of magnitudes, which rounding is relative to.
    let mut right: Vec<Vec<[f64; 2]>> = sums.iter().map(|sum| vec![[0.0; 2]; sum.len()]).collect();
    let mut add = |sum: usize, at: usize, term: f64| {
        right[sum][at][0] += term;
        right[sum][at][1] += term.abs();
    };
    for row in 0..problem.q_len {
        let seen = Vec::from_iter((0..keys).filter(|key| problem.sees(0, row, *key)));
        let share = 1.0 / seen.len() as f64;
        for head in 0..heads {
            let at = row * heads + head;
            let ds = f64::from(d_lse[at]) * share;
            for key in &seen {
                add(0, at * dim, scale * ds);
                add(1, key * dim, -scale * ds);
                (0..dim).for_each(|d| add(2, key * dim + d, d_o[at * dim + d] * share));
                if sums.len() > 3 {
                    add(3, (head * problem.q_len + row) * keys + key, ds);
                }
            }
        }
    }
    let some_roundings = if dtype == Dtype::F32 { 1e-5 } else { 8e-3 };
    for (which, name) in ["dq", "dk", "dv", "dbias"].into_iter().enumerate().take(sums.len()) {
        for (n, (found, [right, of])) in sums[which].iter().zip(&right[which]).enumerate() {
            if (f64::from(*found) - right).abs().is_nan()
                || (f64::from(*found) - right).abs() > some_roundings * of
            {
                return Err(format!("{name} in {dtype}, {timing:?}: {found} at {n}, not {right}"));
            }
        }
    }
    Ok(())
}

#[test]
fn equal_logits_far_from_0_have_equal_shares() {
    for dtype in Dtype::ALL {
        for (scale, timing) in [(1e20, Timing::Eager), (1e4, Timing::Random), (1.0, Timing::Late)] {
            shares_are_equal(&equal_logits(dtype, scale, true, |_| ()), emulator(), timing).unwrap();
            if dtype != Dtype::F32 {
                let call = equal_logits(dtype, scale, false, |_| ()).on_hopper();
                shares_are_equal(&call, emulator(), timing).unwrap();
            }
        }
    }
}
