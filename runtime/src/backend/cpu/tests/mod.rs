//! Against a naive f64 reference written here. The wide suite is in the `tests` crate.

mod backward;
mod edges;
mod few_rows;

use half::{bf16, f16};

use super::arithmetic::simd;
use super::*;
use crate::backend::{Operand, StateShape};
use kyklos_plan::{AttentionProblem, BlockWork, Mask, TokenRuns};

/// Host tensors of one attention call.
#[derive(Clone)]
struct Case {
    problem: AttentionProblem,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// A result: o `[batch, rows, heads, dim]`, lse `[batch, rows, heads]`.
struct Output {
    o: Vec<f32>,
    lse: Vec<f32>,
    state: (Bytes, Bytes),
}

fn case(shape: [u32; 5], dtype: Dtype, mask: &str) -> Case {
    let problem = AttentionProblem::new(shape, dtype, mask.parse::<Mask>().unwrap()).unwrap();
    let [b, s, hq, hkv, d] = shape.map(|n| n as usize);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |n: usize| -> Vec<f32> {
        (0..n)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                round(dtype, (seed >> 40) as f32 / (1 << 22) as f32 - 2.0)
            })
            .collect()
    };
    Case { q: random(b * s * hq * d), k: random(b * s * hkv * d), v: random(b * s * hkv * d), problem }
}

fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

fn encode(dtype: Dtype, values: &[f32]) -> Bytes {
    values
        .iter()
        .flat_map(|x| match dtype {
            Dtype::F32 => x.to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
            Dtype::Bf16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
        })
        .collect::<Vec<u8>>()
        .into()
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(dtype.bytes())
        .map(|x| match dtype {
            Dtype::F32 => f32::from_le_bytes([x[0], x[1], x[2], x[3]]),
            Dtype::F16 => f16::from_le_bytes([x[0], x[1]]).to_f32(),
            Dtype::Bf16 => bf16::from_le_bytes([x[0], x[1]]).to_f32(),
        })
        .collect()
}

/// One for each instruction set and kernel shape that can run here, and products of bf16 in f32
/// arithmetic for both shapes.
fn backends() -> Vec<CpuBackend> {
    let (best, portable) = (simd::Level::detect(), simd::Level::portable());
    [
        best,
        best.without_tiles(),
        simd::Level::of_eight_lanes(),
        best.wide(),
        best.wide().with_emulated_bf16(),
        portable,
        portable.wide(),
        portable.with_emulated_bf16(),
        portable.with_emulated_tiles(),
    ]
    .map(|level| CpuBackend { level, ..CpuBackend::new() })
    .into()
}

fn dense(rows: usize, heads: usize, dim: usize) -> Layout {
    Layout { offset: 0, batch_stride: rows * heads * dim, row_stride: heads * dim, head_stride: dim }
}

/// Runs the case with its keys cut into these blocks, each attended on top of the last.
fn run(backend: &CpuBackend, case: &Case, kv_blocks: &[TokenRuns]) -> Output {
    let p = &case.problem;
    let (b, sq, skv) = (p.batch as usize, p.q_len as usize, p.kv_len as usize);
    let (hq, hkv, d) = (p.q_heads as usize, p.kv_heads as usize, p.head_dim as usize);
    let shape = StateShape { batch: b, rows: sq, heads: hq, dim: d };
    let q = backend.upload("q", encode(p.dtype, &case.q)).unwrap();
    let mut a = backend.alloc("a", shape.a_bytes()).unwrap();
    let mut ml = backend.alloc("ml", shape.ml_bytes()).unwrap();
    for buffer in [&mut a, &mut ml] {
        buffer.bytes_mut().unwrap().fill(0xff);
    }
    let mut state = StateMut { a: &mut a, ml: &mut ml, shape };
    backend.reset_state(&mut state).unwrap();
    let kv_head_of: Vec<u32> = (0..p.q_heads).map(|h| h / p.group()).collect();
    let queries = TokenRuns::contiguous(0..p.q_len);
    for block in kv_blocks {
        let pick = |all: &[f32]| -> Vec<f32> {
            (0..b)
                .flat_map(|batch| block.iter().map(move |t| (batch * skv + t as usize) * hkv * d))
                .flat_map(|at| all[at..at + hkv * d].to_vec())
                .collect()
        };
        let k = backend.upload("k", encode(p.dtype, &pick(&case.k))).unwrap();
        let v = backend.upload("v", encode(p.dtype, &pick(&case.v))).unwrap();
        let work = &BlockWork::layers(p, &queries, block, backend.tile_shape(p, shape))[0];
        let args = Attend {
            dtype: p.dtype,
            scale: p.scale,
            softcap: p.softcap,
            q: Operand { buffer: &q, layout: dense(sq, hq, d) },
            k: Operand { buffer: &k, layout: dense(block.len(), hkv, d) },
            v: Operand { buffer: &v, layout: dense(block.len(), hkv, d) },
            kv_head_of: &kv_head_of,
            work,
            bias: None,
            fixed_order: false,
            inference: true,
            state: StateMut { a: &mut a, ml: &mut ml, shape },
        };
        pollster::block_on(backend.attend(args, &Control::default())).unwrap();
    }
    finish(backend, p.dtype, a, ml, shape)
}

fn finish(
    backend: &CpuBackend,
    dtype: Dtype,
    mut a: CpuBuffer,
    mut ml: CpuBuffer,
    shape: StateShape,
) -> Output {
    let elements = shape.batch * shape.rows * shape.heads;
    let mut o = backend.alloc("o", elements * shape.dim * dtype.bytes()).unwrap();
    let mut lse = backend.alloc("lse", shape.lse_bytes()).unwrap();
    let state = State { a: &a, ml: &ml, shape };
    backend.finalize(&state, &[], dtype, &mut o, &mut lse).unwrap();
    Output {
        o: decode(dtype, &o.share()),
        lse: decode(Dtype::F32, &lse.share()).into_iter().step_by(2).collect(),
        state: (a.share(), ml.share()),
    }
}

fn all_keys(case: &Case) -> Vec<TokenRuns> {
    vec![TokenRuns::contiguous(0..case.problem.kv_len)]
}

/// One row of one head by the definition, in f64: o and lse.
fn naive(case: &Case, [batch, row, head]: [usize; 3]) -> (Vec<f64>, f64) {
    let p = &case.problem;
    let (sq, skv) = (p.q_len as usize, p.kv_len as usize);
    let (hq, hkv, d) = (p.q_heads as usize, p.kv_heads as usize, p.head_dim as usize);
    let kv_head = head / p.group() as usize;
    let spans = p.mask.visible(batch, p.q_position(row as u32), p.kv_len);
    let q = &case.q[((batch * sq + row) * hq + head) * d..][..d];
    let at = |key: u32| ((batch * skv + key as usize) * hkv + kv_head) * d;
    let seen = || (0..p.kv_len).filter(|key| spans.sees(*key));
    let logits: Vec<f64> = seen()
        .map(|key| {
            let dot: f64 = q.iter().zip(&case.k[at(key)..]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let x = dot * f64::from(p.scale);
            p.softcap.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh())
        })
        .collect();
    let m = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let l: f64 = logits.iter().map(|x| (x - m).exp()).sum();
    let mut o = vec![0.0; d];
    for (key, x) in seen().zip(&logits) {
        for (o, v) in o.iter_mut().zip(&case.v[at(key)..]) {
            *o += (x - m).exp() / l * f64::from(*v);
        }
    }
    (o, m + l.ln())
}

/// Compares every `step`-th row with the definition.
fn check(case: &Case, output: &Output, step: usize, tolerance: f64, what: &str) {
    let p = &case.problem;
    let (sq, hq, d) = (p.q_len as usize, p.q_heads as usize, p.head_dim as usize);
    let rows = p.batch as usize * sq * hq;
    for at in (0..rows).step_by(step) {
        let (batch, row, head) = (at / hq / sq, at / hq % sq, at % hq);
        let (o, lse) = naive(case, [batch, row, head]);
        let got = f64::from(output.lse[at]);
        assert!(
            got == lse || (got - lse).abs() <= 4e-6 * (1.0 + lse.abs()),
            "{what}: lse of {batch},{row},{head} is {got}, not {lse}"
        );
        for (i, (exact, got)) in o.iter().zip(&output.o[at * d..]).enumerate() {
            let error = (exact - f64::from(*got)).abs();
            assert!(error <= tolerance, "{what}: o of {batch},{row},{head},{i} is {got}, not {exact}");
        }
    }
}

fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 6e-6,
        Dtype::F16 => 1e-3,
        Dtype::Bf16 => 8e-3,
    }
}

#[test]
fn shapes_masks_and_types_agree_with_the_definition() {
    let shapes =
        [[1, 1, 1, 1, 8], [2, 37, 2, 2, 24], [1, 300, 8, 1, 64], [2, 200, 4, 2, 128], [1, 129, 2, 1, 512]];
    let masks = |s: u32| {
        vec![
            "full".to_owned(),
            "causal".to_owned(),
            "window:5,3".to_owned(),
            "window:40,-1".to_owned(),
            format!("valid:{}", s / 2),
            "valid:0".to_owned(),
            format!("causal+documents:0,{s}"),
        ]
    };
    for backend in backends() {
        for shape in shapes {
            for mask in masks(shape[1]) {
                for dtype in Dtype::ALL {
                    let case = case(shape, dtype, &mask);
                    let output = run(&backend, &case, &all_keys(&case));
                    let what = format!("{:?} {shape:?} {mask} {dtype}", backend.level);
                    check(&case, &output, 7, tolerance(dtype), &what);
                }
            }
        }
    }
}

#[test]
fn softcap_scale_and_offset_agree_with_the_definition() {
    for (backend, dtype) in
        backends().iter().flat_map(|backend| [(backend, Dtype::F32), (backend, Dtype::Bf16)])
    {
        for (scale, softcap) in [(1.3, Some(3.0)), (0.02, Some(50.0)), (-0.4, None)] {
            let mut case = case([1, 150, 2, 1, 32], dtype, "causal");
            case.problem = case.problem.with_logits(scale, softcap).unwrap();
            case.problem = case.problem.with_queries(70, 80).unwrap();
            case.q.truncate(70 * 2 * 32);
            let output = run(backend, &case, &all_keys(&case));
            let what = format!("{:?} scale {scale} softcap {softcap:?} {dtype}", backend.level);
            check(&case, &output, 1, tolerance(dtype), &what);
        }
    }
}

#[test]
fn blocks_of_keys_in_any_order_accumulate_to_the_whole() {
    let backend = CpuBackend::new();
    let case = case([2, 211, 4, 2, 64], Dtype::F32, "causal");
    let blocks = [
        TokenRuns::from_positions((100..211).rev()),
        TokenRuns::contiguous(0..0),
        TokenRuns::from_positions((0..100).step_by(2)),
        TokenRuns::from_positions((1..100).step_by(2)),
    ];
    let output = run(&backend, &case, &blocks);
    check(&case, &output, 1, 2e-6, "four blocks");
}

#[test]
fn merging_two_states_is_attending_to_both() {
    let backend = CpuBackend::new();
    let case = case([2, 130, 2, 1, 40], Dtype::F32, "causal");
    let halves = [TokenRuns::contiguous(0..64), TokenRuns::contiguous(64..130)];
    let parts = halves.map(|half| run(&backend, &case, &[half]).state);
    let shape = StateShape { batch: 2, rows: 130, heads: 2, dim: 40 };
    let [(mut a, mut ml), (from_a, from_ml)] =
        parts.map(|(a, ml)| (backend.upload("a", a).unwrap(), backend.upload("ml", ml).unwrap()));
    let mut into = StateMut { a: &mut a, ml: &mut ml, shape };
    let from = State { a: &from_a, ml: &from_ml, shape };
    backend.merge(&mut into, &from).unwrap();
    let output = finish(&backend, Dtype::F32, a, ml, shape);
    check(&case, &output, 1, 2e-6, "merged");
}

#[test]
fn logits_that_grow_from_tile_to_tile_by_little_or_by_much_agree_with_the_definition() {
    // Steps below the kernel's slack, around it, and far above it; and falling ones.
    for backend in backends() {
        for step in [0.9_f32, 5.4, 5.7, 60.0, -3.0] {
            let mut case = case([1, 600, 1, 1, 16], Dtype::F32, "full");
            case.problem = case.problem.with_logits(1.0, None).unwrap();
            for q in case.q.as_chunks_mut::<16>().0 {
                q[0] = 1.0;
                q[1..].iter_mut().for_each(|q| *q *= 0.1);
            }
            for (key, k) in case.k.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                k[0] += step * (key / 100) as f32;
            }
            let output = run(&backend, &case, &all_keys(&case));
            // The magnitude of a logit is the magnitude of its rounding, and of the weight's relative error.
            let tolerance = 6e-6 * (1.0 + 6.0 * f64::from(step.abs()));
            check(&case, &output, 5, tolerance, &format!("{:?} step {step}", backend.level));
        }
    }
}

#[test]
fn products_of_bf16_by_instructions_are_those_of_f32_arithmetic() {
    let level = simd::Level::detect().without_tiles();
    if level.bf16().is_none() {
        eprintln!("not run: this processor has no products of bf16");
        return;
    }
    agree_in_bf16([level, level.with_emulated_bf16()]);
}

/// With `KYKLOS_REQUIRE_AMX=1` it fails where there are no tile registers.
#[test]
fn products_of_tiles_by_instructions_are_those_of_f32_arithmetic() {
    let level = simd::Level::detect();
    if level.tiles().is_none() {
        let wanted = std::env::var_os("KYKLOS_REQUIRE_AMX").is_some_and(|value| value == "1");
        assert!(!wanted, "no tile registers: {}", level.name());
        eprintln!("not run: this processor has no tile registers");
        return;
    }
    agree_in_bf16([level, level.with_emulated_tiles()]);
    agree_in_bf16([level, level.without_tiles()]);
}

fn agree_in_bf16(levels: [simd::Level; 2]) {
    for (shape, mask) in
        [([1, 301, 4, 2, 64], "causal"), ([2, 97, 2, 1, 72], "window:31,7"), ([1, 250, 1, 1, 256], "full")]
    {
        let case = case(shape, Dtype::Bf16, mask);
        let [native, emulated] = levels.map(|level| {
            let (a, ml) = run(&CpuBackend { level, ..CpuBackend::new() }, &case, &all_keys(&case)).state;
            [decode(Dtype::F32, &a), decode(Dtype::F32, &ml)].concat()
        });
        // Both round a weight to the same bf16 but where an f32 rounding of its score moves it over a
        // boundary: by at most 2^-8 of a weight, which is at most 2^8 by the kernel's slack and
        // usually 1.
        let largest = native.iter().map(|x| x.abs()).fold(0.0, f32::max);
        let error = native.iter().zip(&emulated).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error <= 1e-3 * largest, "{levels:?} {shape:?} {mask}: {error} of {largest}");
        assert!(native != vec![0.0; native.len()]);
    }
}
