//! Calls with few query rows, which have a path of their own.

use super::*;
use crate::backend::EMPTY_M;

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
        [1, 2, 130, 5, 1, 40],
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
    for backend in backends() {
        for mask in ["causal", "window:20,0", "valid:130"] {
            let clean = last_rows([1, 12, 150, 2, 1, 32], Dtype::F32, mask);
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let key = 142;
                let mut dirty = clean.clone();
                dirty.k[key * 32..key * 32 + 32].fill(poison);
                dirty.v[key * 32..key * 32 + 32].fill(poison);
                let got = run(&backend, &dirty, &all_keys(&dirty));
                for at in 0..12 * 2 {
                    let position = dirty.problem.q_position((at / 2) as u32);
                    if dirty.problem.mask.visible(0, position, 150).sees(key as u32) {
                        assert!(got.o[at * 32..at * 32 + 32].iter().all(|x| !x.is_finite()), "{mask} {at}");
                    } else {
                        let (o, lse) = naive(&clean, [0, at / 2, at % 2]);
                        assert!(
                            (f64::from(got.lse[at]) - lse).abs() < 4e-6 * (1.0 + lse.abs())
                                || lse.is_infinite()
                        );
                        for (exact, got) in o.iter().zip(&got.o[at * 32..]) {
                            assert!((exact - f64::from(*got)).abs() < 6e-6, "{mask} {poison}: row {at}");
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
