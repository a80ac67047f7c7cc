//! Few query rows against many keys: the kernels that split the keys.

use bytes::Bytes;
use kyklos::backend::wgpu::WgpuBackend;
use kyklos::backend::{Backend, Control};
use kyklos::{AttentionProblem, Dtype, TokenRuns};
use pollster::block_on;

use crate::Test;
use crate::case::{Case, TOLERANCE, read};
use crate::cases::head_dims;
use crate::naive::{Random, loaded, stored};

pub(crate) const ALL: &[(&str, Test)] = &[
    (
        "every_group_and_number_of_rows_decodes_as_f64_does",
        every_group_and_number_of_rows_decodes_as_f64_does,
    ),
    ("any_number_of_keys_decodes_as_f64_does", any_number_of_keys_decodes_as_f64_does),
    ("every_dtype_and_head_dim_decodes_as_f64_does", every_dtype_and_head_dim_decodes_as_f64_does),
    ("many_rows_in_a_workgroup_decode_as_f64_does", many_rows_in_a_workgroup_decode_as_f64_does),
    ("masks_and_blocks_decode_as_f64_does", masks_and_blocks_decode_as_f64_does),
    ("softcap_decodes_as_f64_does", softcap_decodes_as_f64_does),
    ("decoding_lets_nan_reach_exactly_the_rows_that_see_it", nan_reaches_exactly_the_rows_that_see_it),
    ("decoding_keeps_the_state_of_a_row_that_sees_nothing", unseen_rows_keep_their_state),
    ("decoding_gives_the_same_bytes_every_time", same_bytes),
];

/// The last `rows` rows of a sequence of `keys` tokens.
fn last_rows(rows: u32, [batch, keys, heads, kv_heads, dim]: [u32; 5], dtype: Dtype, mask: &str) -> Case {
    let problem =
        AttentionProblem::new([batch, keys, heads, kv_heads, dim], dtype, mask.parse().unwrap()).unwrap();
    Case::of(problem.with_queries(rows, keys - rows).unwrap())
}

fn every_group_and_number_of_rows_decodes_as_f64_does(backend: &WgpuBackend) {
    // The last two cases: heads that do not fit one workgroup, and too many rows for these kernels.
    for (rows, heads, kv_heads) in
        [(1, 3, 3), (1, 4, 2), (1, 8, 2), (2, 4, 2), (3, 4, 1), (2, 8, 1), (1, 24, 1), (5, 4, 1)]
    {
        last_rows(rows, [2, 700, heads, kv_heads, 32], Dtype::F32, "causal")
            .check(backend, &format!("{rows} rows, {heads} heads over {kv_heads}"));
    }
}

fn any_number_of_keys_decodes_as_f64_does(backend: &WgpuBackend) {
    for keys in [1, 255, 256, 257, 300, 1023, 5000] {
        last_rows(1, [1, keys, 4, 1, 64], Dtype::F32, "full").check(backend, &format!("{keys} keys"));
    }
}

fn every_dtype_and_head_dim_decodes_as_f64_does(backend: &WgpuBackend) {
    let dims: [(Dtype, &[u32]); 3] =
        [(Dtype::F32, &[8, 80, 128, 264]), (Dtype::F16, &[8, 64, 80]), (Dtype::Bf16, &[64, 128, 256])];
    for (dtype, dims) in dims {
        for dim in head_dims(dims) {
            last_rows(1, [1, 333, 2, 1, dim], dtype, "full")
                .check(backend, &format!("{dtype}, head dim {dim}"));
        }
    }
}

/// The threads of a workgroup share rows: with none left over, with some, with threads that have
/// none, with several columns in a thread.
fn many_rows_in_a_workgroup_decode_as_f64_does(backend: &WgpuBackend) {
    for (dtype, rows, heads, dim) in [
        (Dtype::F32, 4, 4, 128),
        (Dtype::F16, 2, 7, 128),
        (Dtype::F16, 2, 8, 80),
        (Dtype::Bf16, 1, 8, 256),
        (Dtype::F32, 1, 7, 264),
    ] {
        if !head_dims(&[dim]).is_empty() {
            let case = last_rows(rows, [1, 333, heads, 1, dim], dtype, "causal");
            case.check(backend, &format!("{dtype}, {rows} rows, {heads} heads of {dim}"));
        }
    }
}

fn masks_and_blocks_decode_as_f64_does(backend: &WgpuBackend) {
    // The window of 2 and the valid key leave most splits empty.
    for mask in [
        "full",
        "window:2,0",
        "window:600,0",
        "documents:0,300,998,1000",
        "valid:1,997",
        "valid:0,1000",
        "documents:0,300,998,1000//window:2,0",
    ] {
        let mut case = last_rows(3, [2, 1000, 4, 2, 32], Dtype::F32, mask);
        case.check(backend, &format!("{mask}, one block"));
        // Into a state that has seen keys. The last block is too short to be split.
        case.kv_blocks = vec![
            TokenRuns::from_positions((0..1000).step_by(2)),
            TokenRuns::from_positions((3..1000).step_by(2)),
            TokenRuns::from_positions([1]),
        ];
        case.check(backend, &format!("{mask}, three blocks"));
    }
}

fn softcap_decodes_as_f64_does(backend: &WgpuBackend) {
    for (scale, softcap, tolerance) in [(0.125, Some(2.0), TOLERANCE), (0.5, None, 1e-5)] {
        let case = last_rows(1, [1, 600, 4, 2, 32], Dtype::F32, "causal");
        Case::of(case.problem.with_logits(scale, softcap).unwrap()).check_within(
            tolerance,
            backend,
            &format!("scale {scale}, softcap {softcap:?}"),
        );
    }
}

fn nan_reaches_exactly_the_rows_that_see_it(backend: &WgpuBackend) {
    // Few rows in a workgroup, and many.
    for heads in [1, 2] {
        nan_reaches_exactly_the_rows_of(backend, heads);
    }
}

fn nan_reaches_exactly_the_rows_of(backend: &WgpuBackend, heads: u32) {
    let clean = last_rows(3, [1, 600, heads, 1, 32], Dtype::F32, "window:400,0");
    let heads = heads as usize;
    let (clean_o, clean_lse) = clean.output(backend, Dtype::F32);
    // Row r is at 597 + r and sees 400 keys before it.
    for key in [0, 197, 198, 199, 300, 597, 598, 599] {
        for (in_key, poison) in [(true, f32::NAN), (false, f32::NAN), (false, f32::NEG_INFINITY)] {
            let mut case = Case::of(clean.problem.clone());
            (if in_key { &mut case.k } else { &mut case.v })[key * 32 + 13] = poison;
            let (o, lse) = case.output(backend, Dtype::F32);
            for at in 0..3 * heads {
                let row = 597 + at / heads;
                let sees = case.problem.mask.visible(0, row as u32, 600).sees(key as u32);
                let what = format!("row {row}, key {key}, {poison} in key {in_key}");
                let (got, want) = (&o[at * 32..][..32], &clean_o[at * 32..][..32]);
                if !sees {
                    assert_eq!(lse[at].to_bits(), clean_lse[at].to_bits(), "{what}");
                    assert!(got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}");
                } else if in_key {
                    assert!(lse[at].is_nan() && got.iter().all(|x| x.is_nan()), "{what}");
                } else {
                    assert!(!got[13].is_finite() && got[12] == want[12], "{what}: {got:?}");
                }
            }
        }
    }
}

/// The first of three rows sees no key of the block, whatever keys it has seen before.
fn unseen_rows_keep_their_state(backend: &WgpuBackend) {
    // The rows are at 897, 898 and 899. No row sees keys 0..300. The last two rows see key 898.
    let case = last_rows(3, [1, 900, 4, 2, 32], Dtype::F32, "documents:0,300,898,900");
    let tokens = TokenRuns::from_positions((0..300).chain([898]));
    let shape = case.shape();
    let mut random = Random(3);
    let a_before = random.tensor(Dtype::F32, shape.a_bytes() / 4);
    let ml_before: Vec<f32> = (0..shape.ml_bytes() / 4).map(|_| random.normal().abs()).collect();
    let upload = |data: &[f32]| backend.upload("state", Bytes::from(stored(Dtype::F32, data))).unwrap();
    let (mut a, mut ml) = (upload(&a_before), upload(&ml_before));
    block_on(case.attend(backend, &tokens, &mut a, &mut ml, &Control::default())).unwrap();
    let a = loaded(Dtype::F32, &read(backend, &mut a, shape.a_bytes()));
    let ml = loaded(Dtype::F32, &read(backend, &mut ml, shape.ml_bytes()));
    for row in 0..3 {
        assert_eq!(a[row * 128..][..128] == a_before[row * 128..][..128], row == 0, "a of row {row}");
        for head in 0..4 {
            let at = 2 * (head * 3 + row);
            assert_eq!(ml[at..at + 2] == ml_before[at..at + 2], row == 0, "ml of row {row}");
        }
    }
}

fn same_bytes(backend: &WgpuBackend) {
    let case = last_rows(1, [1, 2000, 4, 1, 32], Dtype::F32, "full");
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let first = bits(case.output(backend, Dtype::F32).0);
    for _ in 0..5 {
        assert_eq!(bits(case.output(backend, Dtype::F32).0), first);
    }
}

/// On a device whose bindings hold only some hundred keys.
pub(crate) fn keys_beyond_one_binding_decode_as_f64_does(backend: &WgpuBackend) {
    for mask in ["full", "window:500,0"] {
        last_rows(2, [2, 700, 4, 2, 32], Dtype::F32, mask).check(backend, mask);
    }
}
