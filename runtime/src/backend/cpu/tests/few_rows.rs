//! Calls with few query rows, which have a path of their own.

use super::*;
use crate::backend::{BiasInput, EMPTY_M};
use kyklos_plan::{BiasKind, BiasTensor};

/// The last `rows` queries of `keys` tokens.
fn last_rows([batch, rows, keys, q_heads, kv_heads, dim]: [u32; 6], dtype: Dtype, mask: &str) -> Case {
    let mut case = case([batch, keys, q_heads, kv_heads, dim], dtype, mask);
    case.problem = case.problem.with_queries(rows, keys.saturating_sub(rows)).unwrap();
    case.q.truncate((batch * rows * q_heads * dim) as usize);
    case
}

#[test]
fn shapes_masks_and_types_agree_with_the_definition() {
    let shapes = [
        [1, 1, 1, 1, 1, 8],
        [1, 1, 700, 8, 2, 64],
        [2, 1, 1100, 3, 3, 24],
        [1, 2, 133, 5, 1, 40],
        [2, 5, 250, 4, 2, 72],
        [1, 16, 300, 6, 2, 128],
        [1, 17, 300, 2, 1, 16],
        [1, 3, 1930, 2, 1, 256],
    ];
    for backend in backends() {
        for shape in shapes {
            let keys = shape[2];
            for mask in ["full", "causal", "window:90,0", &format!("valid:{}", keys / 2), "valid:0"] {
                for dtype in Dtype::ALL {
                    let case = last_rows(shape, dtype, mask);
                    let output = run(&backend, &case, &all_keys(&case));
                    let what = format!("{:?} {shape:?} {mask} {dtype}", backend.level);
                    check(&case, &output, 1, tolerance(dtype), &what);
                }
            }
        }
    }
}

#[test]
fn softcap_and_growing_logits_agree_with_the_definition() {
    for backend in backends() {
        for (scale, softcap) in [(1.3, Some(3.0)), (-0.4, None)] {
            let mut case = last_rows([1, 3, 350, 4, 2, 32], Dtype::F32, "causal");
            case.problem = case.problem.with_logits(scale, softcap).unwrap();
            let output = run(&backend, &case, &all_keys(&case));
            check(&case, &output, 1, 6e-6, &format!("scale {scale} softcap {softcap:?}"));
        }
        for step in [0.9_f32, 60.0, -60.0] {
            let mut case = last_rows([1, 2, 2000, 1, 1, 16], Dtype::F32, "full");
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
            let tolerance = 6e-6 * (1.0 + 20.0 * f64::from(step.abs()));
            check(&case, &output, 1, tolerance, &format!("step {step}"));
        }
    }
}

#[test]
fn hidden_keys_may_hold_anything_and_seen_ones_reach_their_rows() {
    // Several rows of a KV head, and one row of each KV head.
    for (shape, keys) in [([1, 12, 151, 2, 1, 32], [142, 142]), ([1, 1, 151, 2, 2, 40], [20, 150])] {
        let [_, rows, len, heads, kv_heads, dim] = shape.map(|n: u32| n as usize);
        for (backend, dtype) in backends().iter().flat_map(|backend| Dtype::ALL.map(|dtype| (backend, dtype)))
        {
            for (mask, key) in
                ["causal", "window:20,0", "valid:130"].iter().flat_map(|mask| keys.map(|key| (mask, key)))
            {
                let clean = last_rows(shape, dtype, mask);
                let expected = run(backend, &clean, &all_keys(&clean));
                for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut dirty = clean.clone();
                    dirty.k[key * kv_heads * dim..][..kv_heads * dim].fill(poison);
                    dirty.v[key * kv_heads * dim..][..kv_heads * dim].fill(poison);
                    let got = run(backend, &dirty, &all_keys(&dirty));
                    for at in 0..rows * heads {
                        let position = dirty.problem.q_position((at / heads) as u32);
                        let o = at * dim..(at + 1) * dim;
                        if dirty.problem.mask.visible(0, position, len as u32).sees(key as u32) {
                            assert!(got.o[o].iter().all(|x| !x.is_finite()), "{dtype} {mask} {at}");
                        } else {
                            assert_eq!(got.o[o.clone()], expected.o[o], "{dtype} {mask} {poison}: row {at}");
                            assert_eq!(got.lse[at].to_bits(), expected.lse[at].to_bits());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn infinite_logits_and_empty_rows_are_those_of_many_rows() {
    for backend in backends() {
        let mut case = last_rows([1, 3, 70, 1, 1, 8], Dtype::F32, "full");
        case.q.fill(1.0);
        case.q[8..16].fill(-1.0);
        case.k[8 * 3..8 * 4].fill(f32::INFINITY);
        let blocks = [TokenRuns::contiguous(0..30), TokenRuns::contiguous(30..70)];
        let output = run(&backend, &case, &blocks);
        assert!(output.lse[0].is_nan() && output.o[..8].iter().all(|x| x.is_nan()));
        assert!(output.lse[1].is_finite() && output.o[8..16].iter().all(|x| x.is_finite()));
        case.k.fill(f32::INFINITY);
        let output = run(&backend, &case, &blocks);
        assert_eq!(output.lse[1], f32::NEG_INFINITY);
        assert_eq!(output.o[8..16], [0.0; 8]);

        let causal = last_rows([1, 4, 200, 1, 1, 16], Dtype::F32, "causal");
        let first = run(&backend, &causal, &[TokenRuns::contiguous(0..197)]);
        let both = run(&backend, &causal, &[TokenRuns::contiguous(0..197), TokenRuns::contiguous(197..200)]);
        // Row 0 is at position 196: it sees none of the second block.
        assert_eq!(first.state.0[..16 * 4], both.state.0[..16 * 4]);
        assert_eq!(first.state.1[..8], both.state.1[..8]);
        assert_ne!(first.state.1[8..], both.state.1[8..]);
        let nothing = run(&backend, &causal, &[]);
        assert_eq!(decode(Dtype::F32, &nothing.state.1)[..2], [EMPTY_M, 0.0]);
    }
}

#[test]
fn results_have_the_same_bytes_for_every_number_of_threads() {
    let case = last_rows([1, 2, 5000, 4, 2, 64], Dtype::F32, "causal");
    let expected = run(&CpuBackend::new(), &case, &all_keys(&case)).state;
    for threads in [1, 3, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let backend = CpuBackend::with_pool(Arc::new(pool));
        for _ in 0..3 {
            assert_eq!(run(&backend, &case, &all_keys(&case)).state, expected, "{threads} threads");
        }
    }
}

/// Runs the case with an attention bias tensor, on this path or, in a fixed order, on that of many
/// rows.
fn run_with_bias(backend: &CpuBackend, case: &Case, kind: BiasKind, bias: Vec<u8>, few: bool) -> Output {
    let p = &case.problem;
    let (b, rows, keys) = (p.batch as usize, p.q_len as usize, p.kv_len as usize);
    let (heads, kv_heads, d) = (p.q_heads as usize, p.kv_heads as usize, p.head_dim as usize);
    let shape = StateShape { batch: b, rows, heads, dim: d };
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| backend.upload("x", encode(p.dtype, x)).unwrap());
    let tensor = BiasTensor { kind, batch: p.batch, heads: p.q_heads, shared_rows: false };
    let row = tensor.row_elements(p.dtype, p.kv_len);
    let bias = backend.upload("bias", bias.into()).unwrap();
    let mut a = backend.alloc("a", shape.a_bytes()).unwrap();
    let mut ml = backend.alloc("ml", shape.ml_bytes()).unwrap();
    backend.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape }).unwrap();
    let tile = backend.tile_shape(p, shape);
    let (queries, keys_held) = (TokenRuns::contiguous(0..p.q_len), TokenRuns::contiguous(0..p.kv_len));
    let work = &BlockWork::layers(p, &queries, &keys_held, tile)[0];
    let kv_head_of: Vec<u32> = (0..p.q_heads).map(|head| head / p.group()).collect();
    let args = Attend {
        dtype: p.dtype,
        scale: p.scale,
        softcap: p.softcap,
        q: Operand { buffer: &q, layout: dense(rows, heads, d) },
        k: Operand { buffer: &k, layout: dense(keys, kv_heads, d) },
        v: Operand { buffer: &v, layout: dense(keys, kv_heads, d) },
        kv_head_of: &kv_head_of,
        work,
        bias: Some(BiasInput { buffer: &bias, layout: dense(rows, heads, row), kind }),
        fixed_order: !few,
        inference: true,
        state: StateMut { a: &mut a, ml: &mut ml, shape },
    };
    pollster::block_on(backend.attend(args, &Control::default())).unwrap();
    finish(backend, p.dtype, a, ml, shape)
}

#[test]
fn attention_bias_tensors_agree_with_the_path_of_many_rows() {
    for backend in backends() {
        for rows in [1, 3, 6] {
            for kind in [BiasKind::Mask, BiasKind::Additive] {
                let mut case = last_rows([2, rows, 250, 4, 2, 24], Dtype::F32, "causal");
                let hidden = |at: usize| at % 5 == 3 || at % 250 == 7;
                let bias: Vec<u8> = match kind {
                    BiasKind::Mask => (0..(2 * rows * 4) as usize)
                        .flat_map(|row| BiasTensor::pack((0..250).map(move |key| !hidden(row * 250 + key))))
                        .flat_map(u32::to_ne_bytes)
                        .collect(),
                    BiasKind::Additive => (0..(2 * rows * 4) as usize * 250)
                        .map(|at| if hidden(at) { f32::NEG_INFINITY } else { (at as f32).sin() })
                        .flat_map(f32::to_ne_bytes)
                        .collect(),
                };
                for poisoned in [false, true] {
                    if poisoned {
                        // Key 7 is hidden from all rows: it may hold anything.
                        for batch in 0..2 {
                            let key = (batch * 250 + 7) * 2 * 24;
                            case.k[key..key + 48].fill(f32::NAN);
                            case.v[key..key + 48].fill(f32::NAN);
                        }
                    }
                    let few = run_with_bias(&backend, &case, kind, bias.clone(), true);
                    let many = run_with_bias(&backend, &case, kind, bias.clone(), false);
                    assert!(few.o != many.o, "both took one path");
                    for (few, many) in few.o.iter().chain(&few.lse).zip(many.o.iter().chain(&many.lse)) {
                        assert!((few - many).abs() < 6e-6 * (1.0 + many.abs()), "{kind:?}: {few} and {many}");
                    }
                }
            }
        }
    }
}
