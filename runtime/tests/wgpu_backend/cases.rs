//! Attention against [`naive`](crate::naive).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use kyklos::backend::wgpu::WgpuBackend;
use kyklos::backend::{Backend, Control, DeviceClass};
use kyklos::{AttentionProblem, Dtype, Error, Mask, TokenRuns};
use pollster::block_on;

use crate::Test;
use crate::amount::amount;
use crate::case::{Case, TOLERANCE, poisoned, read};
use crate::naive::{Random, loaded, stored};

pub(crate) const ALL: &[(&str, Test)] = &[
    ("every_dtype_and_head_dim_equals_f64", every_dtype_and_head_dim_equals_f64),
    ("every_f16_head_dim_equals_f64", every_f16_head_dim_equals_f64),
    ("every_mask_equals_f64_over_any_tokens", every_mask_equals_f64_over_any_tokens),
    ("softcap_and_large_logits_equal_f64", softcap_and_large_logits_equal_f64),
    ("large_heads_equal_f64", large_heads_equal_f64),
    ("nan_reaches_exactly_the_rows_that_see_it", nan_reaches_exactly_the_rows_that_see_it),
    ("a_row_that_sees_nothing_keeps_its_state", a_row_that_sees_nothing_keeps_its_state),
    ("long_work_goes_in_pieces_and_can_be_cancelled", long_work_goes_in_pieces_and_can_be_cancelled),
    ("a_wrong_request_is_an_error", a_wrong_request_is_an_error),
];

/// The head dims of `dims` that are tested. Some drivers need minutes to compile large ones;
/// `KYKLOS_TEST_MOST_HEAD_DIM` sets the largest that is tested.
pub(crate) fn head_dims(dims: &[u32]) -> Vec<u32> {
    let most = std::env::var("KYKLOS_TEST_MOST_HEAD_DIM");
    let most: u32 =
        most.map_or(u32::MAX, |text| text.parse().expect("KYKLOS_TEST_MOST_HEAD_DIM is a number"));
    dims.iter().copied().filter(|dim| *dim <= most).collect()
}

fn every_dtype_and_head_dim_equals_f64(backend: &WgpuBackend) {
    // Head dims of all kinds: below, at and above a subgroup's worth of units; with a ragged last pass;
    // of two passes.
    let all: [(Dtype, &[u32]); 2] = [(Dtype::F32, &[8, 64, 72, 128]), (Dtype::Bf16, &[64, 96])];
    // Other tests of the sample have 64 elements in every type, and `large_heads_equal_f64` has several
    // passes.
    let some: [(Dtype, &[u32]); 2] = [(Dtype::F32, &[8, 72]), (Dtype::Bf16, &[])];
    for (dtype, dims) in if compiles_slowly(backend) { amount(some, all) } else { all } {
        for dim in head_dims(dims) {
            let case = Case::new([2, 67, 6, 2, dim], dtype, "causal");
            case.check(backend, &format!("{dtype}, head dim {dim}"));
        }
    }
}

/// Passes of 64 elements and of 32, whole and ragged, with units of 4 elements and of 8.
pub(crate) fn every_variant_equals_f64(backend: &WgpuBackend) {
    for (dtype, dim) in [(Dtype::F32, 40), (Dtype::F16, 96), (Dtype::F16, 136)] {
        if head_dims(&[dim]).is_empty() {
            continue;
        }
        for mask in ["full", "window:40,3"] {
            let case = Case::new([1, 149, 2, 1, dim], dtype, mask);
            case.check(backend, &format!("{}, {dtype}, head dim {dim}, {mask}", backend.info().kernel));
        }
    }
}

/// A maximum is exact in every order.
pub(crate) fn shuffles_change_no_bit(shuffles: &WgpuBackend, without: &WgpuBackend) {
    let case = Case::new([1, 149, 2, 1, 40], Dtype::F32, "window:40,3");
    let bits = |backend: &WgpuBackend| {
        let (o, lse) = case.output(backend, Dtype::F32);
        [o, lse].map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    assert_eq!(bits(shuffles), bits(without), "{}", shuffles.info().kernel);
}

/// A separate test, because matrix units take these head dims.
fn every_f16_head_dim_equals_f64(backend: &WgpuBackend) {
    for dim in head_dims(&[16, 32, 80]) {
        let case = Case::new([2, 67, 6, 2, dim], Dtype::F16, "causal");
        case.check(backend, &format!("f16, head dim {dim}"));
    }
}

/// One, two and four subgroups share rows, with matrices for each and with too few; the maxima of
/// rows grow from tile to tile, so that the accumulator is rescaled.
pub(crate) fn every_sharing_of_matrices_equals_f64(backend: &WgpuBackend) {
    for dim in head_dims(&[16, 24, 136]) {
        let mut case = Case::new([1, 107, 2, 1, dim], Dtype::F16, "causal");
        for (at, k) in case.k.iter_mut().enumerate() {
            *k *= f32::from(1u8 << (at / (32 * dim as usize)));
        }
        case.check(backend, &format!("{}, head dim {dim}", backend.info().kernel));
        // Rows before key 50 do not see it, in the same tile.
        let clean = case.output(backend, Dtype::F32).0;
        case.v[50 * dim as usize + 1] = f32::NAN;
        let poisoned = case.output(backend, Dtype::F32).0;
        let changed: Vec<usize> =
            (0..clean.len()).filter(|at| clean[*at].to_bits() != poisoned[*at].to_bits()).collect();
        let seeing = (50 * 2..107 * 2).map(|row| row * dim as usize + 1).collect::<Vec<_>>();
        assert_eq!(changed, seeing, "{}, head dim {dim}", backend.info().kernel);
    }
}

/// Whether the driver compiles a portable kernel of a large head dim for 20 to 40 s. A sample has
/// few of them.
fn compiles_slowly(backend: &WgpuBackend) -> bool {
    backend.info().class == DeviceClass::SoftwareGpu && backend.info().kernel.starts_with("portable")
}

fn large_heads_equal_f64(backend: &WgpuBackend) {
    let all = &[(Dtype::F32, 256), (Dtype::Bf16, 264)][..];
    // The smallest of those with fewer rows in a thread.
    let some = &[(Dtype::F32, 136)][..];
    for (dtype, dim) in (if compiles_slowly(backend) { amount(some, all) } else { all }).iter().copied() {
        if head_dims(&[dim]).is_empty() {
            continue;
        }
        let case = Case::new([1, 41, 2, 1, dim], dtype, "causal");
        case.check(backend, &format!("{dtype}, head dim {dim}"));
    }
}

/// On a device whose bindings hold only some dozens of rows.
pub(crate) fn tensors_beyond_one_binding_equal_f64(backend: &WgpuBackend) {
    for mask in ["full", "causal", "valid:97,0", "documents:0,20,170//causal+window:30,0"] {
        let mut case = Case::new([2, 170, 4, 2, 64], Dtype::F32, mask);
        case.check(backend, &format!("{mask}, one block"));
        case.kv_blocks = vec![
            TokenRuns::from_positions((0..170).step_by(2)),
            TokenRuns::from_positions((1..170).step_by(2)),
        ];
        case.check(backend, &format!("{mask}, two blocks"));
    }
}

fn every_mask_equals_f64_over_any_tokens(backend: &WgpuBackend) {
    for mask in [
        "full",
        "causal",
        "window:5,3",
        "window:20,0",
        "documents:0,9,30,31,150",
        "valid:97,0",
        "valid:0,150",
        "causal+valid:33,150",
        "documents:0,31,150//causal+documents:0,9,100,150",
    ] {
        let mut case = Case::new([2, 150, 4, 1, 64], Dtype::F32, mask);
        case.check(backend, &format!("{mask}, one block"));
        // Queries as the zigzag placement assigns them. Keys are striped over three blocks, and one block
        // has a single key.
        case.q_tokens = TokenRuns::from_positions((0..21).chain(101..150));
        case.kv_blocks = vec![
            TokenRuns::from_positions((0..150).step_by(2)),
            TokenRuns::from_positions((3..150).step_by(2)),
            TokenRuns::from_positions([1]),
        ];
        case.check(backend, &format!("{mask}, zigzag queries, striped keys"));
    }
    let queries = AttentionProblem::new([1, 90, 2, 2, 64], Dtype::F32, Mask::causal())
        .unwrap()
        .with_queries(5, 40)
        .unwrap();
    Case::of(queries).check(backend, "five queries in the middle");
}

fn softcap_and_large_logits_equal_f64(backend: &WgpuBackend) {
    // The last case has logits of ±15, which f32 represents only to 1e-6.
    for (scale, softcap, tolerance) in [
        (0.125, Some(2.0), TOLERANCE),
        (0.02, Some(30.0), TOLERANCE),
        (4.0, Some(0.5), TOLERANCE),
        (0.5, None, 1e-5),
    ] {
        let problem = AttentionProblem::new([1, 100, 2, 2, 64], Dtype::F32, Mask::causal())
            .unwrap()
            .with_logits(scale, softcap)
            .unwrap();
        let what = format!("scale {scale}, softcap {softcap:?}");
        Case::of(problem).check_within(tolerance, backend, &what);
    }
}

/// A non-finite key or value changes the rows that see it, and no bit of any other row.
pub(crate) fn nan_reaches_exactly_the_rows_that_see_it(backend: &WgpuBackend) {
    for (mask, dtype, softcap) in [
        ("causal", Dtype::F32, None),
        ("window:40,0", Dtype::F16, None),
        ("documents:0,50,140", Dtype::Bf16, None),
        ("causal", Dtype::F32, Some(5.0)),
    ] {
        let problem = AttentionProblem::new([1, 140, 2, 1, 64], dtype, mask.parse().unwrap()).unwrap();
        let scale = problem.scale;
        let clean = Case::of(problem.with_logits(scale, softcap).unwrap());
        let (clean_o, clean_lse) = clean.output(backend, Dtype::F32);
        for key in [0, 31, 77, 139] {
            for (in_key, poison) in [(true, f32::NAN), (false, f32::NAN), (false, f32::INFINITY)] {
                let mut case = Case::of(clean.problem.clone());
                let tensor = if in_key { &mut case.k } else { &mut case.v };
                tensor[key * 64 + 13] = poison;
                let (o, lse) = case.output(backend, Dtype::F32);
                for row in 0..140 {
                    let span = case.problem.mask.visible(0, row as u32, 140);
                    let sees = span.sees(key as u32);
                    for at in [2 * row, 2 * row + 1] {
                        let what = format!("{mask}, {dtype}: row {row}, key {key}, {poison} in key {in_key}");
                        let (got, want) = (&o[at * 64..][..64], &clean_o[at * 64..][..64]);
                        if !sees {
                            assert_eq!(lse[at].to_bits(), clean_lse[at].to_bits(), "{what}");
                            let mut pairs = got.iter().zip(want);
                            assert!(pairs.all(|(a, b)| a.to_bits() == b.to_bits()), "{what}");
                        } else if in_key {
                            assert!(lse[at].is_nan(), "{what}: lse {}", lse[at]);
                            assert!(got.iter().all(|x| x.is_nan()), "{what}");
                        } else {
                            assert!(!got[13].is_finite(), "{what}: o {}", got[13]);
                            assert_eq!(got[12], want[12], "{what}");
                        }
                    }
                }
            }
        }
    }
}

fn a_row_that_sees_nothing_keeps_its_state(backend: &WgpuBackend) {
    let case = Case::new([1, 70, 2, 1, 32], Dtype::F32, "causal");
    let shape = case.shape();
    let mut random = Random(3);
    let a_before = random.tensor(Dtype::F32, shape.a_bytes() / 4);
    let ml_before: Vec<f32> = (0..shape.ml_bytes() / 4).map(|_| random.normal().abs()).collect();
    let upload = |data: &[f32]| backend.upload("state", Bytes::from(stored(Dtype::F32, data))).unwrap();
    let (mut a, mut ml) = (upload(&a_before), upload(&ml_before));
    // Keys 33, 34, …: rows below 33 see none of them.
    let late = TokenRuns::contiguous(33..70);
    block_on(case.attend(backend, &late, &mut a, &mut ml, &Control::default())).unwrap();
    let a = loaded(Dtype::F32, &read(backend, &mut a, shape.a_bytes()));
    let ml = loaded(Dtype::F32, &read(backend, &mut ml, shape.ml_bytes()));
    for row in 0..70 {
        let kept = a[row * 64..][..64] == a_before[row * 64..][..64];
        assert_eq!(kept, row < 33, "a of row {row}");
        for head in 0..2 {
            let at = 2 * (head * 70 + row);
            assert_eq!(ml[at..at + 2] == ml_before[at..at + 2], row < 33, "ml of row {row}");
        }
    }
}

fn long_work_goes_in_pieces_and_can_be_cancelled(backend: &WgpuBackend) {
    let case = Case::new([1, 1500, 4, 4, 64], Dtype::F32, "full");
    let shape = case.shape();
    let (mut a, mut ml) = (poisoned(backend, shape.a_bytes()), poisoned(backend, shape.ml_bytes()));
    let control = Control::default();
    let tokens = &case.kv_blocks[0];
    block_on(case.attend(backend, tokens, &mut a, &mut ml, &control)).unwrap();
    assert!(control.pieces_done() > 1, "{} pieces", control.pieces_done());
    let risen = Control::new(Arc::new(AtomicBool::new(true)));
    let cancelled = block_on(case.attend(backend, tokens, &mut a, &mut ml, &risen));
    assert_eq!(cancelled, Err(Error::Cancelled));
    assert_eq!(risen.pieces_done(), 1);
    block_on(backend.wait()).unwrap();
}

fn a_wrong_request_is_an_error(backend: &WgpuBackend) {
    assert!(matches!(backend.alloc("everything", usize::MAX / 2), Err(Error::OutOfMemory { .. })));
    let mut buffer = backend.alloc("a buffer", 64).unwrap();
    assert!(block_on(backend.download(&mut buffer, 60..68)).is_err());
    assert!(backend.write(&mut buffer, 3, &[0; 4]).is_err());
    let none = backend.upload("nothing", Bytes::new());
    assert_eq!(block_on(backend.download(&mut none.unwrap(), 0..0)).unwrap().len(), 0);
    drop(backend.download(&mut buffer, 0..64));
    block_on(backend.wait()).unwrap();
    assert!(WgpuBackend::new(1000).is_err());
}
