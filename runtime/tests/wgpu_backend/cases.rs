//! Attention against [`naive`](crate::naive).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use kyklos::backend::wgpu::{WgpuBackend, WgpuBuffer};
use kyklos::backend::{Attend, Backend, Control, Layout, Operand, State, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Dtype, Error, Mask, TokenRuns};
use pollster::block_on;

use crate::Test;
use crate::naive::{self, Random, loaded, rounded, stored};

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

/// A problem with data, and how it is cut into blocks.
pub(crate) struct Case {
    pub(crate) problem: AttentionProblem,
    q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    q_tokens: TokenRuns,
    pub(crate) kv_blocks: Vec<TokenRuns>,
}

impl Case {
    pub(crate) fn new(shape: [u32; 5], dtype: Dtype, mask: &str) -> Self {
        let problem = AttentionProblem::new(shape, dtype, mask.parse().unwrap()).unwrap();
        Self::of(problem)
    }

    pub(crate) fn of(problem: AttentionProblem) -> Self {
        let mut random = Random(7);
        let elements = |seq: u32, heads: u32| (problem.batch * seq * heads * problem.head_dim) as usize;
        Self {
            q: random.tensor(problem.dtype, elements(problem.q_len, problem.q_heads)),
            k: random.tensor(problem.dtype, elements(problem.kv_len, problem.kv_heads)),
            v: random.tensor(problem.dtype, elements(problem.kv_len, problem.kv_heads)),
            q_tokens: TokenRuns::contiguous(0..problem.q_len),
            kv_blocks: vec![TokenRuns::contiguous(0..problem.kv_len)],
            problem,
        }
    }

    pub(crate) fn shape(&self) -> StateShape {
        StateShape {
            batch: self.problem.batch as usize,
            rows: self.q_tokens.len(),
            heads: self.problem.q_heads as usize,
            dim: self.problem.head_dim as usize,
        }
    }

    /// The rows `tokens` of a tensor, spread out in a buffer: an offset, gaps between heads, rows and batch entries, and
    /// NaN in the gaps.
    fn operand(
        &self,
        backend: &WgpuBackend,
        data: &[f32],
        tokens: &TokenRuns,
        seq: u32,
        heads: u32,
    ) -> Result<(WgpuBuffer, Layout), Error> {
        let [seq, heads, dim, batch] =
            [seq, heads, self.problem.head_dim, self.problem.batch].map(|n| n as usize);
        let layout = Layout {
            offset: 24,
            head_stride: dim + 8,
            row_stride: heads * (dim + 8) + 16,
            batch_stride: tokens.len() * (heads * (dim + 8) + 16) + 40,
        };
        let mut spread = vec![f32::NAN; layout.offset + batch * layout.batch_stride];
        for b in 0..batch {
            for (row, token) in tokens.iter().enumerate() {
                for h in 0..heads {
                    let from = ((b * seq + token as usize) * heads + h) * dim;
                    let into = layout.offset
                        + b * layout.batch_stride
                        + row * layout.row_stride
                        + h * layout.head_stride;
                    spread[into..into + dim].copy_from_slice(&data[from..from + dim]);
                }
            }
        }
        let bytes = Bytes::from(stored(self.problem.dtype, &spread));
        Ok((backend.upload("operand", bytes)?, layout))
    }

    /// Attends to every block, into a state that holds nothing at first.
    fn state(&self, backend: &WgpuBackend) -> (WgpuBuffer, WgpuBuffer) {
        let shape = self.shape();
        let mut a = poisoned(backend, shape.a_bytes());
        let mut ml = poisoned(backend, shape.ml_bytes());
        let mut state = StateMut { a: &mut a, ml: &mut ml, shape };
        backend.reset_state(&mut state).unwrap();
        for kv_tokens in &self.kv_blocks {
            block_on(self.attend(backend, kv_tokens, &mut a, &mut ml, &Control::default())).unwrap();
        }
        (a, ml)
    }

    pub(crate) async fn attend(
        &self,
        backend: &WgpuBackend,
        kv_tokens: &TokenRuns,
        a: &mut WgpuBuffer,
        ml: &mut WgpuBuffer,
        control: &Control,
    ) -> Result<(), Error> {
        let p = &self.problem;
        let (q, q_layout) = self.operand(backend, &self.q, &self.q_tokens, p.q_len, p.q_heads)?;
        let (k, k_layout) = self.operand(backend, &self.k, kv_tokens, p.kv_len, p.kv_heads)?;
        let (v, v_layout) = self.operand(backend, &self.v, kv_tokens, p.kv_len, p.kv_heads)?;
        let tile = backend.tile_shape(p, self.shape());
        let work = &BlockWork::layers(p, &self.q_tokens, kv_tokens, tile)[0];
        let kv_head_of: Vec<u32> = (0..p.q_heads).map(|head| head / p.group()).collect();
        let args = Attend {
            dtype: p.dtype,
            scale: p.scale,
            softcap: p.softcap,
            q: Operand { buffer: &q, layout: q_layout },
            k: Operand { buffer: &k, layout: k_layout },
            v: Operand { buffer: &v, layout: v_layout },
            kv_head_of: &kv_head_of,
            work,
            pairs: None,
            fixed_order: false,
            state: StateMut { a, ml, shape: self.shape() },
        };
        backend.attend(args, control).await
    }

    /// Output in `dtype` and log-sum-exp, `[batch, rows, heads, ·]`.
    pub(crate) fn output(&self, backend: &WgpuBackend, dtype: Dtype) -> (Vec<f32>, Vec<f32>) {
        let (a, ml) = self.state(backend);
        let shape = self.shape();
        let mut o = poisoned(backend, shape.a_bytes() / 4 * dtype.bytes());
        let mut lse = poisoned(backend, shape.ml_bytes() / 2);
        let state = State { a: &a, ml: &ml, shape };
        backend.finalize(&state, &[], dtype, &mut o, &mut lse).unwrap();
        let o = read(backend, &mut o, shape.a_bytes() / 4 * dtype.bytes());
        let lse = read(backend, &mut lse, shape.ml_bytes() / 2);
        (loaded(dtype, &o), loaded(Dtype::F32, &lse))
    }

    /// Matrix units take weights in f16: each is off by 2^-11 of itself, and o by as much of the largest value.
    fn weight_rounding(&self, backend: &WgpuBackend) -> f64 {
        if self.problem.dtype == Dtype::F16 && backend.info().kernel.starts_with("cooperative") {
            let largest = self.v.iter().map(|v| f64::from(v.abs())).filter(|v| v.is_finite());
            largest.fold(0.0, f64::max) / 2048.0
        } else {
            0.0
        }
    }

    /// Compares with f64, and the rounded output with the output rounded.
    pub(crate) fn check(&self, backend: &WgpuBackend, what: &str) {
        self.check_within(TOLERANCE, backend, what);
    }

    pub(crate) fn check_within(&self, tolerance: f64, backend: &WgpuBackend, what: &str) {
        let tolerance = tolerance + self.weight_rounding(backend);
        let (o, lse) = self.output(backend, Dtype::F32);
        let shape = self.shape();
        let mut worst = (0.0, String::new());
        for b in 0..shape.batch {
            for (r, token) in self.q_tokens.iter().enumerate() {
                for h in 0..shape.heads {
                    let at = (b * shape.rows + r) * shape.heads + h;
                    let (want_o, want_lse) =
                        naive::row(&self.problem, [&self.q, &self.k, &self.v], b, token as usize, h);
                    let got = &o[at * shape.dim..][..shape.dim];
                    for (d, (got, want)) in got.iter().zip(&want_o).enumerate() {
                        let error = (f64::from(*got) - want).abs();
                        if error.is_nan() || error > worst.0 {
                            worst = (
                                if error.is_nan() { f64::INFINITY } else { error },
                                format!("o[{b}, {token}, {h}, {d}] = {got}, f64 says {want}"),
                            );
                        }
                    }
                    let got = f64::from(lse[at]);
                    let error = (got - want_lse).abs() / want_lse.abs().max(1.0);
                    if got != want_lse && (error.is_nan() || error > worst.0) {
                        worst = (
                            if error.is_nan() { f64::INFINITY } else { error },
                            format!("lse[{b}, {token}, {h}] = {got}, f64 says {want_lse}"),
                        );
                    }
                }
            }
        }
        assert!(
            worst.0 < tolerance,
            "{what} on {}: {} (error {:e})",
            backend.info().kernel,
            worst.1,
            worst.0
        );
        if self.problem.dtype != Dtype::F32 {
            let (narrow, _) = self.output(backend, self.problem.dtype);
            for (at, (narrow, o)) in narrow.iter().zip(&o).enumerate() {
                assert_eq!(*narrow, rounded(self.problem.dtype, *o), "{what}: o rounded at {at}");
            }
        }
    }
}

/// For outputs of size 1 from sums of some hundred keys in f32.
pub(crate) const TOLERANCE: f64 = 3e-6;

/// Those of `dims` that are tested: where a driver compiles large ones for minutes, `KYKLOS_TEST_MOST_HEAD_DIM` says
/// how large they may be.
pub(crate) fn head_dims(dims: &[u32]) -> Vec<u32> {
    let most = std::env::var("KYKLOS_TEST_MOST_HEAD_DIM");
    let most: u32 =
        most.map_or(u32::MAX, |text| text.parse().expect("KYKLOS_TEST_MOST_HEAD_DIM is a number"));
    dims.iter().copied().filter(|dim| *dim <= most).collect()
}

/// Memory full of NaN.
fn poisoned(backend: &WgpuBackend, bytes: usize) -> WgpuBuffer {
    backend.upload("poisoned", Bytes::from(vec![0xff; bytes])).unwrap()
}

pub(crate) fn read(backend: &WgpuBackend, buffer: &mut WgpuBuffer, bytes: usize) -> Bytes {
    block_on(backend.download(buffer, 0..bytes)).unwrap()
}

fn every_dtype_and_head_dim_equals_f64(backend: &WgpuBackend) {
    // Head dims of all kinds: below, at and above a subgroup's worth of units; with a ragged last pass; of two passes.
    let dims: [(Dtype, &[u32]); 2] = [(Dtype::F32, &[8, 64, 72, 128]), (Dtype::Bf16, &[64, 96])];
    for (dtype, dims) in dims {
        for dim in head_dims(dims) {
            let case = Case::new([2, 67, 6, 2, dim], dtype, "causal");
            case.check(backend, &format!("{dtype}, head dim {dim}"));
        }
    }
}

/// A test of its own: matrix units take these.
fn every_f16_head_dim_equals_f64(backend: &WgpuBackend) {
    for dim in head_dims(&[16, 32, 80]) {
        let case = Case::new([2, 67, 6, 2, dim], Dtype::F16, "causal");
        case.check(backend, &format!("f16, head dim {dim}"));
    }
}

fn large_heads_equal_f64(backend: &WgpuBackend) {
    for (dtype, dim) in [(Dtype::F32, 256), (Dtype::Bf16, 264)] {
        if head_dims(&[dim]).is_empty() {
            continue;
        }
        let case = Case::new([1, 41, 2, 1, dim], dtype, "causal");
        case.check(backend, &format!("{dtype}, head dim {dim}"));
    }
}

/// On a device whose bindings hold some dozens of rows.
pub(crate) fn tensors_beyond_one_binding_equal_f64(backend: &WgpuBackend) {
    for mask in ["full", "causal", "valid:97,0"] {
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
    ] {
        let mut case = Case::new([2, 150, 4, 1, 64], Dtype::F32, mask);
        case.check(backend, &format!("{mask}, one block"));
        // Queries as zigzag deals them; keys striped over three blocks, one of them of a single key.
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
    // The last: logits of ±15, which f32 knows to 1e-6 only.
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

/// A non-finite key or value changes the rows that see it, and no bit of any other.
fn nan_reaches_exactly_the_rows_that_see_it(backend: &WgpuBackend) {
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
                            let same = |a: f32, b: f32| {
                                a.to_bits() == b.to_bits()
                                    || clean.weight_rounding(backend) > 0.0
                                        && (a - b).abs() <= 1e-5 * (1.0 + b.abs())
                            };
                            assert!(got.iter().zip(want).all(|(a, b)| same(*a, *b)), "{what}");
                        } else if in_key {
                            assert!(lse[at].is_nan(), "{what}: lse {}", lse[at]);
                            assert!(got.iter().all(|x| x.is_nan()), "{what}");
                        } else {
                            assert!(!got[13].is_finite(), "{what}: o {}", got[13]);
                            // Matrix units give way to another order of summation where a value is not finite.
                            let allowed = if case.weight_rounding(backend) > 0.0 {
                                1e-5 * (1.0 + want[12].abs())
                            } else {
                                0.0
                            };
                            assert!(
                                (got[12] - want[12]).abs() <= allowed,
                                "{what}: {} {}",
                                got[12],
                                want[12]
                            );
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
