//! Gradients of bf16 tensors in words, on every kernel shape, against the definition in f64. The
//! suites of the `tests` crate run the path of this processor only; here the products of bf16 in
//! f32 arithmetic run on any.

use super::*;
use crate::backend::cpu::arithmetic::simd;
use crate::backend::{AttendBackward, RowStats};

/// dQ, dK and dV.
type Gradients = [Vec<f32>; 3];

fn d_o_of(case: &Case) -> Vec<f32> {
    (0..case.q.len()).map(|i| round(case.problem.dtype, ((i * 37 % 101) as f32 - 50.0) / 40.0)).collect()
}

/// The sums of [`CpuBackend::attend_backward`], after the forward pass.
fn gradients(backend: &CpuBackend, case: &Case, d_o: &[f32]) -> Gradients {
    let p = &case.problem;
    let (b, sq, skv) = (p.batch as usize, p.q_len as usize, p.kv_len as usize);
    let (hq, hkv, d) = (p.q_heads as usize, p.kv_heads as usize, p.head_dim as usize);
    let shape = StateShape { batch: b, rows: sq, heads: hq, dim: d };
    let output = run(backend, case, &all_keys(case));
    let upload = |values: &[f32]| backend.upload("x", encode(p.dtype, values)).unwrap();
    let [q, k, v, d_o, o] = [&case.q, &case.k, &case.v, d_o, &output.o].map(upload);
    let pairs: Vec<f32> = output.lse.iter().flat_map(|lse| [*lse, 0.0]).collect();
    let lse = backend.upload("lse", encode(Dtype::F32, &pairs)).unwrap();
    let mut stats = backend.alloc("stats", shape.stats_bytes()).unwrap();
    let args =
        RowStats { dtype: p.dtype, shape, o: &o, d_o: &d_o, lse: &lse, d_lse: None, stats: &mut stats };
    backend.row_stats(args).unwrap();
    let kv_bytes = b * skv * hkv * d * 4;
    let mut sums = [shape.a_bytes(), kv_bytes, kv_bytes].map(|bytes| backend.alloc("sum", bytes).unwrap());
    let [dq, dk, dv] = &mut sums;
    let (queries, keys) = (TokenRuns::contiguous(0..p.q_len), TokenRuns::contiguous(0..p.kv_len));
    let work = &BlockWork::layers(p, &queries, &keys, backend.backward_tile_shape(p, shape))[0];
    let kv_head_of: Vec<u32> = (0..p.q_heads).map(|head| head / p.group()).collect();
    let args = AttendBackward {
        dtype: p.dtype,
        scale: p.scale,
        softcap: p.softcap,
        q: Operand { buffer: &q, layout: dense(sq, hq, d) },
        d_o: Operand { buffer: &d_o, layout: dense(sq, hq, d) },
        stats: Operand { buffer: &stats, layout: dense(sq, hq, 4) },
        k: Operand { buffer: &k, layout: dense(skv, hkv, d) },
        v: Operand { buffer: &v, layout: dense(skv, hkv, d) },
        kv_head_of: &kv_head_of,
        work,
        bias: None,
        shape,
        dq,
        dk,
        dv,
        kv_layout: dense(skv, hkv, d),
        d_bias: None,
    };
    pollster::block_on(backend.attend_backward(args, &Control::default())).unwrap();
    sums.map(|mut sum| decode(Dtype::F32, &sum.share()))
}

/// The gradients by the definition, in f64: dS = P · (dP − δ), with the slope of a softcap.
fn by_definition(case: &Case, d_o: &[f32]) -> [Vec<f64>; 3] {
    let p = &case.problem;
    let (sq, skv) = (p.q_len as usize, p.kv_len as usize);
    let (hq, hkv, d) = (p.q_heads as usize, p.kv_heads as usize, p.head_dim as usize);
    let mut sums = [vec![0.0; case.q.len()], vec![0.0; case.k.len()], vec![0.0; case.v.len()]];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    for (batch, row, head) in (0..p.batch as usize)
        .flat_map(|b| (0..sq).flat_map(move |row| (0..hq).map(move |head| (b, row, head))))
    {
        let spans = p.mask.visible(batch, p.q_position(row as u32), p.kv_len);
        let seen: Vec<usize> = (0..skv).filter(|key| spans.sees(*key as u32)).collect();
        let at = ((batch * sq + row) * hq + head) * d;
        let of_key = |key: usize| ((batch * skv + key) * hkv + head / p.group() as usize) * d;
        let (q, d_o) = (&case.q[at..at + d], &d_o[at..at + d]);
        let (logits, slopes): (Vec<f64>, Vec<f64>) = seen
            .iter()
            .map(|key| {
                let x = dot(q, &case.k[of_key(*key)..]) * f64::from(p.scale);
                p.softcap.map_or((x, 1.0), |c| {
                    let t = (x / f64::from(c)).tanh();
                    (f64::from(c) * t, 1.0 - t * t)
                })
            })
            .unzip();
        let m = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let l: f64 = logits.iter().map(|x| (x - m).exp()).sum();
        let weights: Vec<f64> = logits.iter().map(|x| (x - m).exp() / l).collect();
        let d_weights: Vec<f64> = seen.iter().map(|key| dot(d_o, &case.v[of_key(*key)..])).collect();
        let delta: f64 = weights.iter().zip(&d_weights).map(|(p, dp)| p * dp).sum();
        for (i, key) in seen.iter().enumerate() {
            let ds = weights[i] * (d_weights[i] - delta) * slopes[i] * f64::from(p.scale);
            for e in 0..d {
                sums[0][at + e] += ds * f64::from(case.k[of_key(*key) + e]);
                sums[1][of_key(*key) + e] += ds * f64::from(q[e]);
                sums[2][of_key(*key) + e] += weights[i] * f64::from(d_o[e]);
            }
        }
    }
    sums
}

/// ‖got − right‖ / ‖right‖.
fn error(got: &[f32], right: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let off: f64 = got.iter().zip(right).map(|(got, right)| square(f64::from(*got) - right)).sum();
    (off / right.iter().copied().map(square).sum::<f64>()).sqrt()
}

/// The same sums in another order.
fn assert_same(got: &[f32], expected: &[f32], level: simd::Level) {
    let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
    let error = error(got, &expected);
    assert!(error < 1e-6, "{level:?}: {error:e}");
}

#[test]
fn gradients_of_bf16_agree_with_the_definition() {
    let cases = [
        ([1, 130, 2, 1, 24], "causal", None),
        ([2, 97, 2, 2, 40], "window:31,7", None),
        ([1, 200, 4, 2, 72], "full", Some(2.5)),
        ([1, 55, 1, 1, 128], "valid:33", None),
    ];
    for (shape, mask, softcap) in cases {
        let mut case = case(shape, Dtype::Bf16, mask);
        // Logits of some units, so that weights differ.
        case.problem = case.problem.with_logits(0.2, softcap).unwrap();
        let d_o = d_o_of(&case);
        let right = by_definition(&case, &d_o);
        for backend in backends() {
            let got = gradients(&backend, &case, &d_o);
            for (name, (got, right)) in ["dQ", "dK", "dV"].iter().zip(got.iter().zip(&right)) {
                // A factor of a product is rounded by at most 2^-8 of it, half of it on average, and o by as
                // much, which is in δ of every pair of its row. Sums of many signs lose as
                // much as their roundings gain.
                let error = error(got, right);
                assert!(error < 2.0 / 512.0, "{name} {shape:?} {mask} on {:?}: {error:e}", backend.level);
            }
        }
    }
}

#[test]
fn hidden_rows_and_keys_of_bf16_may_hold_anything() {
    let (rows, heads, dim) = (130, 2, 24);
    for backend in backends() {
        // With a causal mask row 70 sees keys 0 to 70: NaN in its q and dO reaches their gradients, and no
        // others. Key 100 is seen by rows from 100 on.
        let clean = case([1, rows, heads, heads, dim], Dtype::Bf16, "causal");
        let d_o = d_o_of(&clean);
        let expected = gradients(&backend, &clean, &d_o);
        let token = (heads * dim) as usize;
        let of = |token_at: usize| token_at * token..(token_at + 1) * token;
        let mut dirty = clean.clone();
        dirty.q[of(70)].fill(f32::NAN);
        let got = gradients(&backend, &dirty, &d_o);
        for gradient in 1..3 {
            let unseen = of(71).start..;
            assert_same(&got[gradient][unseen.clone()], &expected[gradient][unseen], backend.level);
            assert!(got[gradient][of(70)].iter().all(|x| x.is_nan()));
        }
        let mut dirty = clean.clone();
        dirty.k[of(100)].fill(f32::NAN);
        let got = gradients(&backend, &dirty, &d_o);
        assert_same(&got[0][..of(100).start], &expected[0][..of(100).start], backend.level);
        assert!(got[0][of(100)].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn gradients_of_one_type_after_another_share_no_memory_of_the_wrong_size() {
    let shape = [1, 97, 2, 1, 24];
    for backend in backends() {
        let of = |dtype| {
            let case = case(shape, dtype, "causal");
            gradients(&backend, &case, &d_o_of(&case))
        };
        let first = of(Dtype::Bf16);
        of(Dtype::F32);
        assert_eq!(of(Dtype::Bf16), first, "{:?}", backend.level);
    }
}

#[test]
fn gradients_by_instructions_are_those_of_f32_arithmetic() {
    let level = simd::Level::detect();
    if level.bf16().is_none() {
        eprintln!("not run: this processor has no products of bf16");
        return;
    }
    let case = case([1, 301, 4, 2, 72], Dtype::Bf16, "causal");
    let d_o = d_o_of(&case);
    // With tile registers, where there are any, and without.
    for level in [level, level.without_tiles()] {
        let [native, emulated] = [level, level.with_emulated_bf16()]
            .map(|level| gradients(&CpuBackend { level, ..CpuBackend::new() }, &case, &d_o));
        for (native, emulated) in native.iter().zip(&emulated) {
            // A factor is rounded to the same bf16 unless an f32 rounding moves it over a boundary.
            let emulated: Vec<f64> = emulated.iter().map(|x| f64::from(*x)).collect();
            let error = error(native, &emulated);
            assert!(error < 2e-4, "{level:?}: {error:e}");
        }
    }
}
