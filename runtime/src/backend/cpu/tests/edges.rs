//! Non-finite values, empty rows, strides, determinism, cancellation.

use super::*;
use crate::backend::EMPTY_M;
use crate::error::Error;

#[test]
fn keys_that_a_row_cannot_see_do_not_reach_it_even_if_they_are_nan() {
    for (backend, dtype) in
        backends().iter().flat_map(|backend| [(backend, Dtype::F32), (backend, Dtype::Bf16)])
    {
        for mask in ["causal", "window:20,4", "valid:130", "documents:0,61,150", "documents:0,136,150"] {
            let clean = case([1, 150, 2, 1, 32], dtype, mask);
            let expected = run(backend, &clean, &all_keys(&clean));
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let key = 140;
                let mut dirty = clean.clone();
                dirty.k[key * 32..key * 32 + 32].fill(poison);
                dirty.v[key * 32..key * 32 + 32].fill(poison);
                let got = run(backend, &dirty, &all_keys(&dirty));
                for at in 0..150 * 2 {
                    let sees = clean.problem.mask.visible(0, (at / 2) as u32, 150).sees(key as u32);
                    let o = at * 32..at * 32 + 32;
                    if sees {
                        assert!(
                            got.o[o].iter().all(|x| !x.is_finite()),
                            "{mask} {poison}: row {} sees it",
                            at / 2
                        );
                    } else {
                        assert_eq!(got.o[o.clone()], expected.o[o], "{mask} {poison}: row {}", at / 2);
                        assert_eq!(got.lse[at].to_bits(), expected.lse[at].to_bits());
                    }
                }
            }
        }
    }
}

#[test]
fn an_infinite_logit_makes_its_row_nan_and_a_row_of_minus_infinities_saw_no_key() {
    for (backend, dtype) in
        backends().iter().flat_map(|backend| [(backend, Dtype::F32), (backend, Dtype::Bf16)])
    {
        let mut case = case([1, 70, 1, 1, 8], dtype, "full");
        case.q.fill(1.0);
        case.q[8..16].fill(-1.0);
        case.k[8 * 3..8 * 4].fill(f32::INFINITY);
        let blocks = [TokenRuns::contiguous(0..30), TokenRuns::contiguous(30..70)];
        let output = run(backend, &case, &blocks);
        assert!(output.lse[0].is_nan() && output.o[..8].iter().all(|x| x.is_nan()));
        assert!(output.lse[1].is_finite(), "its logit of that key is -inf: weight 0");
        assert!(output.o[8..16].iter().all(|x| x.is_finite()));
        // All logits −∞: all weights are 0, which is the empty state.
        case.k.fill(f32::INFINITY);
        let output = run(backend, &case, &blocks);
        assert_eq!(output.lse[1], f32::NEG_INFINITY);
        assert_eq!(output.o[8..16], [0.0; 8]);
        assert!(output.lse[2].is_nan());
    }
}

#[test]
fn rows_that_see_no_key_keep_their_state_bit_for_bit() {
    let backend = CpuBackend::new();
    let case = case([1, 200, 1, 1, 16], Dtype::F32, "causal");
    let first = run(&backend, &case, &[TokenRuns::contiguous(0..100)]);
    let both = run(&backend, &case, &[TokenRuns::contiguous(0..100), TokenRuns::contiguous(100..200)]);
    // Rows 0..100 see none of the second block; the tile that holds row 96 is partial.
    assert_eq!(first.state.0[..100 * 16 * 4], both.state.0[..100 * 16 * 4]);
    assert_eq!(first.state.1[..100 * 8], both.state.1[..100 * 8]);
    assert_ne!(first.state.1[100 * 8..], both.state.1[100 * 8..]);
    let nothing = run(&backend, &case, &[]);
    assert!(nothing.lse.iter().all(|x| *x == f32::NEG_INFINITY));
    assert_eq!(decode(Dtype::F32, &nothing.state.1)[..2], [EMPTY_M, 0.0]);
}

#[test]
fn results_have_the_same_bytes_for_every_number_of_threads() {
    let case = case([1, 700, 3, 1, 64], Dtype::F32, "causal");
    let expected = run(&CpuBackend::new(), &case, &all_keys(&case)).state;
    for threads in [1, 3, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let backend = CpuBackend::with_pool(Arc::new(pool));
        for _ in 0..3 {
            assert_eq!(run(&backend, &case, &all_keys(&case)).state, expected, "{threads} threads");
        }
    }
}

#[test]
fn a_raised_cancel_token_ends_the_call() {
    let backend = CpuBackend::new();
    let case = case([1, 64, 1, 1, 8], Dtype::F32, "full");
    let tokens = TokenRuns::contiguous(0..64);
    let shape = StateShape { batch: 1, rows: 64, heads: 1, dim: 8 };
    let tile = backend.tile_shape(&case.problem, shape);
    let work = &BlockWork::layers(&case.problem, &tokens, &tokens, tile)[0];
    let x = backend.upload("x", encode(Dtype::F32, &case.q)).unwrap();
    let mut a = backend.alloc("a", shape.a_bytes()).unwrap();
    let mut ml = backend.alloc("ml", shape.ml_bytes()).unwrap();
    let operand = || Operand { buffer: &x, layout: dense(64, 1, 8) };
    let args = Attend {
        dtype: Dtype::F32,
        scale: 1.0,
        softcap: None,
        q: operand(),
        k: operand(),
        v: operand(),
        kv_head_of: &[0],
        work,
        bias: None,
        fixed_order: false,
        inference: true,
        state: StateMut { a: &mut a, ml: &mut ml, shape },
    };
    let control = Control::new(Arc::new(true.into()));
    let error = pollster::block_on(backend.attend(args, &control)).unwrap_err();
    assert_eq!(error, Error::Cancelled);
    assert_eq!(control.pieces_done(), 1);
}

#[test]
fn strided_operands_are_read_where_they_are() {
    let backend = CpuBackend::new();
    let case = case([2, 50, 4, 2, 16], Dtype::F32, "causal");
    let expected = run(&backend, &case, &all_keys(&case));
    // Head-major with gaps of NaN: [batch, heads, rows, dim + 8].
    let spread = |data: &[f32], heads: usize| {
        let mut out = vec![f32::NAN; 3 + 2 * heads * 50 * 24];
        for (at, row) in data.chunks_exact(16).enumerate() {
            let (batch, token, head) = (at / heads / 50, at / heads % 50, at % heads);
            out[3 + ((batch * heads + head) * 50 + token) * 24..][..16].copy_from_slice(row);
        }
        let layout =
            Layout { offset: 3, batch_stride: heads * 50 * 24, row_stride: 24, head_stride: 50 * 24 };
        (backend.upload("x", encode(Dtype::F32, &out)).unwrap(), layout)
    };
    let [q, k, v] = [spread(&case.q, 4), spread(&case.k, 2), spread(&case.v, 2)];
    let shape = StateShape { batch: 2, rows: 50, heads: 4, dim: 16 };
    let mut a = backend.alloc("a", shape.a_bytes()).unwrap();
    let mut ml = backend.alloc("ml", shape.ml_bytes()).unwrap();
    backend.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape }).unwrap();
    let tokens = TokenRuns::contiguous(0..50);
    let work =
        &BlockWork::layers(&case.problem, &tokens, &tokens, backend.tile_shape(&case.problem, shape))[0];
    let args = Attend {
        dtype: Dtype::F32,
        scale: case.problem.scale,
        softcap: None,
        q: Operand { buffer: &q.0, layout: q.1 },
        k: Operand { buffer: &k.0, layout: k.1 },
        v: Operand { buffer: &v.0, layout: v.1 },
        kv_head_of: &[0, 0, 1, 1],
        work,
        bias: None,
        fixed_order: false,
        inference: true,
        state: StateMut { a: &mut a, ml: &mut ml, shape },
    };
    pollster::block_on(backend.attend(args, &Control::default())).unwrap();
    let output = finish(&backend, Dtype::F32, a, ml, shape);
    assert_eq!(output.state, expected.state);
}
