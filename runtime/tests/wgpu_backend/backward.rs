//! Gradients of strided tensors against f64. The suites of gradients hold whole calls to the
//! oracle.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use kyklos::backend::wgpu::{WgpuBackend, WgpuBuffer};
use kyklos::backend::{AttendBackward, Backend, Control, Layout, Operand, RowStats};
use kyklos::{BlockWork, Dtype, Error};
use pollster::block_on;

use crate::Test;
use crate::case::{Case, read};
use crate::cases::head_dims;
use crate::naive::{self, Random, loaded, stored};

pub(crate) const ALL: &[(&str, Test)] = &[
    ("every_gradient_of_strided_tensors_equals_f64", every_gradient_of_strided_tensors_equals_f64),
    (
        "every_gradient_without_keys_is_zero_whatever_the_output_has",
        every_gradient_without_keys_is_zero_whatever_the_output_has,
    ),
    (
        "nan_reaches_exactly_the_gradients_of_the_pairs_that_have_it",
        nan_reaches_exactly_the_gradients_of_the_pairs_that_have_it,
    ),
    ("gradients_in_f16_equal_f64_whatever_the_size_of_the_output_gradient", |backend| {
        gradients_of_any_size_equal_f64(backend, 32);
    }),
    ("a_long_backward_pass_goes_in_pieces_and_can_be_cancelled", a_long_backward_pass_can_be_cancelled),
];

/// What a sum holds before: gradients are added to it, and what lies between them stays.
const BEFORE: f32 = 0.25;

/// A backward call on one block.
struct Backward {
    case: Case,
    d_o: Vec<f32>,
    /// Row statistics, `[batch, rows, heads, 4]`.
    stats: WgpuBuffer,
    dq: WgpuBuffer,
    dk: WgpuBuffer,
    dv: WgpuBuffer,
    kv_layout: Layout,
    kv_elements: usize,
}

impl Backward {
    fn new(backend: &WgpuBackend, case: Case) -> Self {
        Self::of(backend, case, |_| {})
    }

    /// With NaN in the gradients of the output of the rows and heads that are `dead`.
    fn with(backend: &WgpuBackend, case: Case, dead: &dyn Fn(usize) -> bool) -> Self {
        let dim = case.shape().dim;
        Self::of(backend, case, |d_o| {
            for (_, row) in d_o.chunks_mut(dim).enumerate().filter(|(row_head, _)| dead(*row_head)) {
                row.fill(f32::NAN);
            }
        })
    }

    /// With this element of the gradient of the output.
    fn poisoned(backend: &WgpuBackend, case: Case, element: Option<(usize, f32)>) -> Self {
        Self::of(backend, case, |d_o| {
            if let Some((at, poison)) = element {
                d_o[at] = poison;
            }
        })
    }

    fn of(backend: &WgpuBackend, case: Case, change: impl FnOnce(&mut [f32])) -> Self {
        let (p, shape) = (&case.problem, case.shape());
        let mut d_o = Random(21).tensor(p.dtype, shape.batch * shape.rows * shape.heads * shape.dim);
        change(&mut d_o);
        let (mut o, mut lse) = (Vec::new(), Vec::new());
        for row_head in 0..shape.batch * shape.rows * shape.heads {
            let (head, row) = (row_head % shape.heads, row_head / shape.heads % shape.rows);
            let batch = row_head / shape.heads / shape.rows;
            let (of_row, its_lse) = naive::row(p, [&case.q, &case.k, &case.v], batch, row, head);
            o.extend(of_row.iter().map(|x| *x as f32));
            lse.extend([its_lse as f32, (its_lse - f64::from(its_lse as f32)) as f32]);
        }
        let upload = |dtype, data: &[f32]| backend.upload("rows", Bytes::from(stored(dtype, data))).unwrap();
        let mut stats = upload(Dtype::F32, &vec![f32::NAN; shape.stats_bytes() / 4]);
        let (o, d_o_rows) = (upload(p.dtype, &o), upload(p.dtype, &d_o));
        let args = RowStats {
            dtype: p.dtype,
            shape,
            o: &o,
            d_o: &d_o_rows,
            lse: &upload(Dtype::F32, &lse),
            d_lse: None,
            stats: &mut stats,
        };
        backend.row_stats(args).unwrap();
        let [keys, heads, dim] = [p.kv_len, p.kv_heads, p.head_dim].map(|n| n as usize);
        let row_stride = (heads + 1) * dim;
        let kv_layout =
            Layout { offset: dim, batch_stride: (keys + 2) * row_stride, row_stride, head_stride: dim };
        let kv_elements = shape.batch * kv_layout.batch_stride;
        let sum = |elements| upload(Dtype::F32, &vec![BEFORE; elements]);
        let [dq, dk, dv] = [d_o.len(), kv_elements, kv_elements].map(sum);
        Self { d_o, stats, dq, dk, dv, kv_layout, kv_elements, case }
    }

    fn run(&mut self, backend: &WgpuBackend, control: &Control) -> Result<(), Error> {
        let (case, shape) = (&self.case, self.case.shape());
        let p = &case.problem;
        let kv_tokens = &case.kv_blocks[0];
        let (q, q_layout) = case.operand(backend, &case.q, &case.q_tokens, p.q_len, p.q_heads)?;
        let (d_o, d_o_layout) = case.operand(backend, &self.d_o, &case.q_tokens, p.q_len, p.q_heads)?;
        let (k, k_layout) = case.operand(backend, &case.k, kv_tokens, p.kv_len, p.kv_heads)?;
        let (v, v_layout) = case.operand(backend, &case.v, kv_tokens, p.kv_len, p.kv_heads)?;
        let row = 4 * shape.heads;
        let stats_layout =
            Layout { offset: 0, batch_stride: shape.rows * row, row_stride: row, head_stride: 4 };
        let tile = backend.backward_tile_shape(p, shape);
        let args = AttendBackward {
            dtype: p.dtype,
            scale: p.scale,
            softcap: p.softcap,
            q: Operand { buffer: &q, layout: q_layout },
            d_o: Operand { buffer: &d_o, layout: d_o_layout },
            stats: Operand { buffer: &self.stats, layout: stats_layout },
            k: Operand { buffer: &k, layout: k_layout },
            v: Operand { buffer: &v, layout: v_layout },
            kv_head_of: &(0..p.q_heads).map(|head| head / p.group()).collect::<Vec<_>>(),
            work: &BlockWork::layers(p, &case.q_tokens, kv_tokens, tile)[0],
            bias: None,
            shape,
            dq: &mut self.dq,
            dk: &mut self.dk,
            dv: &mut self.dv,
            kv_layout: self.kv_layout,
            d_bias: None,
        };
        block_on(backend.attend_backward(args, control))
    }

    fn check(&mut self, backend: &WgpuBackend, what: &str) {
        self.run(backend, &Control::default()).unwrap();
        let right = self.right().map(|sum| sum.into_iter().map(|[value, _]| value).collect::<Vec<_>>());
        // o is rounded to the storage type before it enters δ.
        let tolerance = match self.case.problem.dtype {
            Dtype::F32 => 1e-5,
            Dtype::F16 => 4e-3,
            Dtype::Bf16 => 3e-2,
        };
        let sums = [("dq", &mut self.dq), ("dk", &mut self.dk), ("dv", &mut self.dv)];
        for ((name, sum), right) in sums.into_iter().zip(&right) {
            let got = loaded(Dtype::F32, &read(backend, sum, right.len() * 4));
            for (at, (got, right)) in got.iter().zip(right).enumerate() {
                let error = (f64::from(*got) - right).abs();
                let is_right = if right.is_nan() { *got == BEFORE } else { error < tolerance };
                assert!(is_right, "{what}: {name}[{at}] = {got}, f64 says {right}");
            }
        }
    }

    /// dq, dk and dv, laid out as the sums, each with the sum of its terms' sizes; NaN where no
    /// visible pair adds anything. The sizes are those of the products in dS too.
    fn right(&self) -> [Vec<[f64; 2]>; 3] {
        self.right_after(BEFORE)
    }

    /// The same of sums that hold `held` before.
    fn right_after(&self, held: f32) -> [Vec<[f64; 2]>; 3] {
        let (case, shape, p) = (&self.case, self.case.shape(), &self.case.problem);
        let (dim, kv_heads) = (shape.dim, p.kv_heads as usize);
        let mut dq = vec![[f64::NAN; 2]; self.d_o.len()];
        let [mut dk, mut dv] = [(); 2].map(|()| vec![[f64::NAN; 2]; self.kv_elements]);
        let add = |[sum, sizes]: &mut [f64; 2], value: f64, size: f64| {
            let before = if sum.is_nan() { [f64::from(held), 0.0] } else { [*sum, *sizes] };
            [*sum, *sizes] = [before[0] + value, before[1] + size];
        };
        for at in 0..shape.batch * shape.rows * shape.heads {
            let (head, row) = (at % shape.heads, at / shape.heads % shape.rows);
            let batch = at / shape.heads / shape.rows;
            let (o, lse) = naive::row(p, [&case.q, &case.k, &case.v], batch, row, head);
            if lse == f64::NEG_INFINITY {
                continue;
            }
            let of_row = |tensor: &[f32]| -> Vec<f64> {
                tensor[at * dim..][..dim].iter().map(|x| f64::from(*x)).collect()
            };
            let (q, d_o) = (of_row(&case.q), of_row(&self.d_o));
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let sizes = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
            let (delta, of_delta) = (dot(&o, &d_o), sizes(&o, &d_o));
            let kv_head = head / p.group() as usize;
            for span in &*p.mask.visible(batch, row as u32, p.kv_len) {
                for key in span.lo as usize..span.hi as usize {
                    let from = ((batch * p.kv_len as usize + key) * kv_heads + kv_head) * dim;
                    let of_key = |tensor: &[f32]| -> Vec<f64> {
                        tensor[from..][..dim].iter().map(|x| f64::from(*x)).collect()
                    };
                    let (k, v) = (of_key(&case.k), of_key(&case.v));
                    let scale = f64::from(p.scale);
                    let weight = (scale * dot(&q, &k) - lse).exp();
                    let d_score = weight * (dot(&d_o, &v) - delta) * scale;
                    let size = weight * (sizes(&d_o, &v) + of_delta) * scale;
                    let into = self.kv_layout.offset
                        + batch * self.kv_layout.batch_stride
                        + key * self.kv_layout.row_stride
                        + kv_head * self.kv_layout.head_stride;
                    for d in 0..dim {
                        add(&mut dq[at * dim + d], d_score * k[d], size * k[d].abs());
                        add(&mut dk[into + d], d_score * q[d], size * q[d].abs());
                        add(&mut dv[into + d], weight * d_o[d], weight * d_o[d].abs());
                    }
                }
            }
        }
        [dq, dk, dv]
    }
}

pub(crate) fn every_gradient_of_strided_tensors_equals_f64(backend: &WgpuBackend) {
    for (mask, shape, dtype) in [
        ("causal", [2, 70, 6, 2, 32], Dtype::F32),
        ("window:20,4", [1, 101, 3, 3, 32], Dtype::F16),
        ("documents:0,31,90", [3, 90, 4, 1, 24], Dtype::Bf16),
        // Passes of 8 units: a whole one and one of 3, of 7, of 1.
        ("causal", [1, 45, 2, 1, 88], Dtype::F16),
        ("causal", [1, 45, 2, 1, 120], Dtype::Bf16),
        ("causal", [1, 45, 2, 1, 72], Dtype::Bf16),
    ] {
        if head_dims(&[shape[4]]).is_empty() {
            continue;
        }
        let mut backward = Backward::new(backend, Case::new(shape, dtype, mask));
        backward.check(backend, &format!("{mask} in {dtype}"));
    }
}

/// Training in f16 scales the loss, so that gradients of the output are of any size that f16 has,
/// and dS of more: 1e4 · 32. They also change from row to row and the values from key to key, up
/// and down.
pub(crate) fn gradients_of_any_size_equal_f64(backend: &WgpuBackend, dim: u32) {
    let rows = 101;
    let ends = |rises: bool, at: usize| {
        let part = at as f32 / rows as f32;
        if rises { part } else { 1.0 - part }
    };
    for (what, from, to, rises) in [
        ("1e4", 1e4, 1e4, false),
        ("1e-6, below the normal numbers", 1e-6, 1e-6, true),
        ("1e-6 to 1e4", 1e-6, 1e4, true),
        ("1e4 to 1e-6", 1e-6, 1e4, false),
    ] {
        let (from, to): (f32, f32) = (from, to);
        let size = |at| from * (to / from).powf(ends(rises, at));
        let mut case = Case::new([1, rows as u32, 2, 1, dim], Dtype::F16, "causal");
        let rounded = |data: &mut Vec<f32>| *data = loaded(Dtype::F16, &stored(Dtype::F16, data));
        for (at, v) in case.v.iter_mut().enumerate() {
            *v *= 32.0 * (1.0f32 / 4096.0).powf(ends(!rises, at / dim as usize));
        }
        rounded(&mut case.v);
        let mut backward = Backward::of(backend, case, |d_o| {
            for (at, x) in d_o.iter_mut().enumerate() {
                *x *= size(at / (2 * dim as usize));
            }
            d_o.copy_from_slice(&loaded(Dtype::F16, &stored(Dtype::F16, d_o)));
        });
        // So that small gradients are not lost in what is there before.
        for sum in [&mut backward.dq, &mut backward.dk, &mut backward.dv] {
            backend.clear(sum).unwrap();
        }
        backward.run(backend, &Control::default()).unwrap();
        let right = backward.right_after(0.0);
        let sums = [("dq", &mut backward.dq), ("dk", &mut backward.dk), ("dv", &mut backward.dv)];
        for ((name, sum), right) in sums.into_iter().zip(&right) {
            let got = loaded(Dtype::F32, &read(backend, sum, right.len() * 4));
            for (at, (got, [right, size])) in got.iter().zip(right).enumerate() {
                // o, which δ is of, is rounded to f16, and on matrix units P and dS are: each by 2^-11 of
                // itself. Sums in f32 are not exact either.
                let error = (f64::from(*got) - right).abs();
                let tolerance = size * (1.0 / 1024.0 + 1e-5);
                assert!(
                    right.is_nan() || error <= tolerance,
                    "{what}: {name}[{at}] = {got}, f64 says {right}, within {tolerance}"
                );
            }
        }
    }
}

/// Rows that see no key, and rows whose visible logits are all −∞, with NaN in the gradient of
/// their output.
fn every_gradient_without_keys_is_zero_whatever_the_output_has(backend: &WgpuBackend) {
    for mask in ["full", "causal", "slices:0..40x0..70,60..100x3..90"] {
        let mut case = Case::new([1, 100, 4, 2, 32], Dtype::F32, mask);
        let dim = 32;
        case.k.chunks_mut(dim).for_each(|key| key[7] = 1.0);
        let dead = [(3, 0), (40, 1), (41, 1), (77, 3), (99, 2)].map(|(row, head)| row * 4 + head);
        for row_head in dead {
            case.q[row_head * dim + 7] = f32::NEG_INFINITY;
        }
        let sees_none =
            (0..100 * 4).filter(|row_head| mask.starts_with("slices") && (40..60).contains(&(row_head / 4)));
        let dead: Vec<usize> = dead.into_iter().chain(sees_none).collect();
        let mut backward = Backward::with(backend, case, &|row_head| dead.contains(&row_head));
        backward.check(backend, mask);
    }
}

/// A non-finite element changes the gradients of the pairs whose row or key it is in, and no bit of
/// any other. One in q, k or v reaches the statistics of the rows that see it, and so all keys of
/// these rows.
pub(crate) fn nan_reaches_exactly_the_gradients_of_the_pairs_that_have_it(backend: &WgpuBackend) {
    let rows = 75;
    // The third: in a last pass of fewer than half of the units.
    for (mask, dtype, dim, poisoned) in [
        ("causal", Dtype::F32, 40, 13),
        ("window:20,4", Dtype::F16, 40, 13),
        ("window:20,4", Dtype::F16, 88, 77),
        ("causal", Dtype::Bf16, 24, 13),
    ] {
        if head_dims(&[dim as u32]).is_empty() {
            continue;
        }
        let clean = || Case::new([1, rows, 1, 1, dim as u32], dtype, mask);
        let read_all = |mut backward: Backward| {
            backward.run(backend, &Control::default()).unwrap();
            let [q_bytes, kv_bytes] = [backward.d_o.len(), backward.kv_elements].map(|elements| elements * 4);
            let kv = backward.kv_layout;
            let [dk, dv] = [&mut backward.dk, &mut backward.dv].map(|sum| {
                let all = loaded(Dtype::F32, &read(backend, sum, kv_bytes));
                let of_key = |key: usize| all[kv.offset + key * kv.row_stride..][..dim].to_vec();
                (0..rows as usize).flat_map(of_key).collect::<Vec<_>>()
            });
            [loaded(Dtype::F32, &read(backend, &mut backward.dq, q_bytes)), dk, dv]
        };
        let right = read_all(Backward::new(backend, clean()));
        for (tensor, at) in [("q", 0), ("q", 40), ("k", 0), ("k", 33), ("v", 31), ("d_o", 40), ("d_o", 74)] {
            for poison in [f32::NAN, f32::INFINITY] {
                let mut case = clean();
                let element = at * dim + poisoned;
                match tensor {
                    "q" => case.q[element] = poison,
                    "k" => case.k[element] = poison,
                    "v" => case.v[element] = poison,
                    _ => {}
                }
                let sees =
                    |row: usize, key: usize| case.problem.mask.visible(0, row as u32, rows).sees(key as u32);
                let all = 0..rows as usize;
                let bad_rows: Vec<usize> = all
                    .clone()
                    .filter(|row| if "kv".contains(tensor) { sees(*row, at) } else { *row == at })
                    .collect();
                let bad_keys: Vec<usize> =
                    all.filter(|key| bad_rows.iter().any(|row| sees(*row, *key))).collect();
                let is_bad = |sum: usize, at: usize, element: usize| match sum {
                    0 => bad_rows.contains(&at),
                    1 => bad_keys.contains(&at),
                    _ if tensor == "v" => false,
                    _ => bad_keys.contains(&at) && (tensor != "d_o" || element == poisoned),
                };
                // An infinite logit gives NaN, or for one of −∞ a weight of 0: no rule says where.
                let infinite = poison.is_infinite() && matches!(tensor, "q" | "k");
                let of_d_o = (tensor == "d_o").then_some((element, poison));
                let got = read_all(Backward::poisoned(backend, case, of_d_o));
                for (sum, (got, right)) in got.iter().zip(&right).enumerate() {
                    for (index, (got, right)) in got.iter().zip(right).enumerate() {
                        let what =
                            format!("{mask}, {dtype}, {poison} in {tensor} {at}: {index} of sum {sum}");
                        if !is_bad(sum, index / dim, index % dim) {
                            assert_eq!(got.to_bits(), right.to_bits(), "{what}: {got}");
                        } else if !infinite {
                            assert!(!got.is_finite(), "{what}: {got}");
                        }
                    }
                }
            }
        }
    }
}

fn a_long_backward_pass_can_be_cancelled(backend: &WgpuBackend) {
    let case = Case::new([1, 900, 2, 2, 32], Dtype::F32, "full");
    let mut backward = Backward::new(backend, case);
    let control = Control::default();
    backward.run(backend, &control).unwrap();
    assert!(control.pieces_done() > 1, "{} pieces", control.pieces_done());
    let risen = Control::new(Arc::new(AtomicBool::new(true)));
    assert_eq!(backward.run(backend, &risen), Err(Error::Cancelled));
    assert_eq!(risen.pieces_done(), 1);
    block_on(backend.wait()).unwrap();
}
