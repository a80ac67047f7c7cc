//! Merge, finalize, repack, copies, and what gradients have beside their kernels: row statistics
//! and additions.

use bytes::Bytes;
use kyklos::Dtype;
use kyklos::backend::wgpu::{WgpuBackend, WgpuBuffer};
use kyklos::backend::{Backend, EMPTY_M, Extent, Layout, RowStats, State, StateMut, StateShape};
use pollster::block_on;

use crate::Test;
use crate::naive::{Random, loaded, stored};

pub(crate) const ALL: &[(&str, Test)] = &[
    ("merge_equals_f64_and_keeps_empty_states", merge_equals_f64_and_keeps_empty_states),
    ("finalize_divides_and_marks_empty_rows", finalize_divides_and_marks_empty_rows),
    ("repack_moves_every_byte_and_no_other", repack_moves_every_byte_and_no_other),
    ("a_download_holds_what_was_there_at_the_call", a_download_holds_what_was_there_at_the_call),
    ("accumulate_adds_to_its_rows_and_to_no_others", accumulate_adds_to_its_rows_and_to_no_others),
];

const SHAPE: StateShape = StateShape { batch: 2, rows: 5, heads: 3, dim: 24 };

fn upload(backend: &WgpuBackend, data: &[f32]) -> WgpuBuffer {
    let bytes = Bytes::from(stored(Dtype::F32, data));
    backend.upload("test data", bytes).unwrap()
}

fn read(backend: &WgpuBackend, buffer: &mut WgpuBuffer, elements: usize) -> Vec<f32> {
    let bytes = block_on(backend.download(buffer, 0..4 * elements)).unwrap();
    loaded(Dtype::F32, &bytes)
}

/// A state in which all rows have seen keys, except row 3 of every head if `empty`.
fn state(seed: u64, empty: bool) -> (Vec<f32>, Vec<f32>) {
    let mut random = Random(seed);
    let mut a = random.tensor(Dtype::F32, SHAPE.a_bytes() / 4);
    let mut ml: Vec<f32> = (0..SHAPE.ml_bytes() / 8)
        .flat_map(|_| [8.0 * random.normal(), 1.0 + random.normal().abs()])
        .collect();
    for b in 0..SHAPE.batch {
        for h in 0..SHAPE.heads {
            if empty {
                let (at_a, at_ml) = at(b, 3, h);
                a[at_a..at_a + SHAPE.dim].fill(0.0);
                ml[at_ml..at_ml + 2].copy_from_slice(&[EMPTY_M, 0.0]);
            }
        }
    }
    (a, ml)
}

/// The positions of a row's elements in `a` and in `ml`.
fn at(b: usize, r: usize, h: usize) -> (usize, usize) {
    (((b * SHAPE.rows + r) * SHAPE.heads + h) * SHAPE.dim, 2 * ((b * SHAPE.heads + h) * SHAPE.rows + r))
}

fn merge_equals_f64_and_keeps_empty_states(backend: &WgpuBackend) {
    for (first_empty, second_empty) in [(false, false), (false, true), (true, false), (true, true)] {
        let (a1, ml1) = state(1, first_empty);
        let (a2, ml2) = state(2, second_empty);
        let (mut a, mut ml) = (upload(backend, &a1), upload(backend, &ml1));
        let (from_a, from_ml) = (upload(backend, &a2), upload(backend, &ml2));
        let mut into = StateMut { a: &mut a, ml: &mut ml, shape: SHAPE };
        let from = State { a: &from_a, ml: &from_ml, shape: SHAPE };
        backend.merge(&mut into, &from).unwrap();
        let a = read(backend, &mut a, a1.len());
        let ml = read(backend, &mut ml, ml1.len());
        for b in 0..SHAPE.batch {
            for r in 0..SHAPE.rows {
                for h in 0..SHAPE.heads {
                    let (at_a, at_ml) = at(b, r, h);
                    let (m1, l1) = (f64::from(ml1[at_ml]), f64::from(ml1[at_ml + 1]));
                    let (m2, l2) = (f64::from(ml2[at_ml]), f64::from(ml2[at_ml + 1]));
                    let m = m1.max(m2);
                    let (w1, w2) = ((m1 - m).exp(), (m2 - m).exp());
                    assert_eq!(f64::from(ml[at_ml]), m);
                    assert!((f64::from(ml[at_ml + 1]) - (l1 * w1 + l2 * w2)).abs() < 1e-5);
                    for d in 0..SHAPE.dim {
                        let want = f64::from(a1[at_a + d]) * w1 + f64::from(a2[at_a + d]) * w2;
                        assert!((f64::from(a[at_a + d]) - want).abs() < 1e-5, "{b} {r} {h} {d}");
                    }
                    if second_empty && r == 3 {
                        assert_eq!(a[at_a..at_a + SHAPE.dim], a1[at_a..at_a + SHAPE.dim]);
                        assert_eq!(ml[at_ml..at_ml + 2], ml1[at_ml..at_ml + 2]);
                    }
                }
            }
        }
    }
}

fn finalize_divides_and_marks_empty_rows(backend: &WgpuBackend) {
    let (mut a, mut ml) = state(5, true);
    // Overflow, NaN and a subnormal of f16, in rows that have seen keys.
    a[0] = 1e9;
    a[1] = f32::NAN;
    a[2] = 3e-7;
    ml[1] = 1.0;
    let (a_buffer, ml_buffer) = (upload(backend, &a), upload(backend, &ml));
    for dtype in Dtype::ALL {
        let elements = a.len();
        let mut o = backend.upload("o", Bytes::from(vec![0xff; elements * dtype.bytes()])).unwrap();
        let mut lse = upload(backend, &vec![f32::NAN; ml.len()]);
        let from = State { a: &a_buffer, ml: &ml_buffer, shape: SHAPE };
        backend.finalize(&from, &[], dtype, &mut o, &mut lse).unwrap();
        let bytes = block_on(backend.download(&mut o, 0..elements * dtype.bytes())).unwrap();
        let o = loaded(dtype, &bytes);
        let lse: Vec<f32> = read(backend, &mut lse, ml.len()).into_iter().step_by(2).collect();
        for b in 0..SHAPE.batch {
            for r in 0..SHAPE.rows {
                for h in 0..SHAPE.heads {
                    let (at_a, at_ml) = at(b, r, h);
                    let at_lse = (b * SHAPE.rows + r) * SHAPE.heads + h;
                    let got = &o[at_a..at_a + SHAPE.dim];
                    if r == 3 {
                        assert!(got.iter().all(|x| *x == 0.0));
                        assert_eq!(lse[at_lse], f32::NEG_INFINITY);
                        continue;
                    }
                    let want_lse = f64::from(ml[at_ml]) + f64::from(ml[at_ml + 1]).ln();
                    assert!((f64::from(lse[at_lse]) - want_lse).abs() < 2e-6 * want_lse.abs().max(1.0));
                    for (got, a) in got.iter().zip(&a[at_a..]) {
                        let exact = f64::from(*a) / f64::from(ml[at_ml + 1]);
                        let want = loaded(dtype, &stored(dtype, &[exact as f32]))[0];
                        let ulp = match dtype {
                            Dtype::F32 => 3e-7,
                            Dtype::F16 => 1e-3,
                            Dtype::Bf16 => 8e-3,
                        };
                        let near = (got - want).abs() <= ulp * want.abs() + 1e-7;
                        assert!(near || got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()));
                    }
                }
            }
        }
    }
}

fn repack_moves_every_byte_and_no_other(backend: &WgpuBackend) {
    // (row_bytes, gap): rows of whole vectors, of single words, and one dense piece.
    for (row_bytes, gap) in [(48, 16), (12, 4), (16, 0)] {
        let extent = Extent { batch: 2, rows: 7, heads: 3, row_bytes };
        let spread = |offset: usize, gap: usize| Layout {
            offset,
            head_stride: row_bytes + gap,
            row_stride: 3 * (row_bytes + gap) + gap,
            batch_stride: 7 * (3 * (row_bytes + gap) + gap) + 2 * gap,
        };
        let (from, into) = (spread(gap, gap), spread(2 * gap, 2 * gap));
        let from_bytes: Vec<u8> =
            (0..from.offset + 2 * from.batch_stride).map(|i| (i * 7 + 3) as u8).collect();
        let into_len = into.offset + 2 * into.batch_stride;
        let source = backend.upload("source", Bytes::from(from_bytes.clone())).unwrap();
        let mut target = backend.upload("target", Bytes::from(vec![0xee; into_len])).unwrap();
        backend.repack((&source, from), (&mut target, into), extent).unwrap();
        let got = block_on(backend.download(&mut target, 0..into_len)).unwrap();
        let mut want = vec![0xee; into_len];
        for b in 0..2 {
            for r in 0..7 {
                for h in 0..3 {
                    let place = |layout: Layout| {
                        layout.offset
                            + b * layout.batch_stride
                            + r * layout.row_stride
                            + h * layout.head_stride
                    };
                    want[place(into)..][..row_bytes].copy_from_slice(&from_bytes[place(from)..][..row_bytes]);
                }
            }
        }
        assert_eq!(got, want, "rows of {row_bytes} bytes, gaps of {gap}");
    }
}

fn a_download_holds_what_was_there_at_the_call(backend: &WgpuBackend) {
    let mut buffer = upload(backend, &[1.0, 2.0, 3.0]);
    let before = backend.download(&mut buffer, 0..12);
    backend.write(&mut buffer, 4, &5f32.to_le_bytes()).unwrap();
    let after = backend.download(&mut buffer, 0..12);
    let middle = backend.download(&mut buffer, 6..9);
    assert_eq!(loaded(Dtype::F32, &block_on(before).unwrap()), [1.0, 2.0, 3.0]);
    assert_eq!(loaded(Dtype::F32, &block_on(after).unwrap()), [1.0, 5.0, 3.0]);
    assert_eq!(block_on(middle).unwrap()[..], [0xa0, 0x40, 0x00]);
}

fn accumulate_adds_to_its_rows_and_to_no_others(backend: &WgpuBackend) {
    // The first has rows of whole 16-byte units, the second has not.
    for (row, gap) in [(8, 4), (6, 1)] {
        let extent = Extent { batch: 2, rows: 5, heads: 3, row_bytes: row * 4 };
        let layout = |offset: usize, gap: usize| {
            let head_stride = (row + gap) * 4;
            let row_stride = 3 * head_stride + gap * 4;
            Layout { offset: offset * 4, batch_stride: 6 * row_stride, row_stride, head_stride }
        };
        let (from, into) = (layout(gap, 0), layout(2 * gap, gap));
        let mut random = Random(3);
        let [source, before] = [(); 2].map(|()| random.tensor(Dtype::F32, 600));
        let upload = |data: &[f32]| backend.upload("rows", Bytes::from(stored(Dtype::F32, data))).unwrap();
        let mut target = upload(&before);
        backend.accumulate((&upload(&source), from), (&mut target, into), extent).unwrap();
        let mut right = before;
        for b in 0..2 {
            for r in 0..5 {
                for h in 0..3 {
                    let at = |l: &Layout| {
                        (l.offset + b * l.batch_stride + r * l.row_stride + h * l.head_stride) / 4
                    };
                    for i in 0..row {
                        right[at(&into) + i] += source[at(&from) + i];
                    }
                }
            }
        }
        assert_eq!(read(backend, &mut target, 600), right);
        backend.clear(&mut target).unwrap();
        assert_eq!(read(backend, &mut target, 600), vec![0.0; 600]);
    }
}

/// Row statistics of more rows than one binding holds: parts of every tensor are bound.
pub(crate) fn row_statistics_beyond_one_binding_equal_f64(small: &WgpuBackend) {
    let shape = StateShape { batch: 1, rows: 20_003, heads: 1, dim: 8 };
    let mut random = Random(5);
    let [o, d_o] = [(); 2].map(|()| random.tensor(Dtype::F32, shape.rows * shape.dim));
    let [mut lse, d_lse] = [(); 2].map(|()| random.tensor(Dtype::F32, shape.rows));
    lse[19_999] = f32::NEG_INFINITY;
    let upload = |data: &[f32]| small.upload("rows", Bytes::from(stored(Dtype::F32, data))).unwrap();
    for with_d_lse in [false, true] {
        let mut stats = upload(&vec![f32::NAN; 4 * shape.rows]);
        let of_lse = upload(&d_lse);
        let args = RowStats {
            dtype: Dtype::F32,
            shape,
            o: &upload(&o),
            d_o: &upload(&d_o),
            lse: &upload(&lse.iter().zip(&d_lse).flat_map(|(lse, rest)| [*lse, *rest]).collect::<Vec<_>>()),
            d_lse: with_d_lse.then_some(&of_lse),
            stats: &mut stats,
        };
        small.row_stats(args).unwrap();
        let stats = read(small, &mut stats, 4 * shape.rows);
        for (row, found) in stats.chunks(4).enumerate() {
            let products = o[row * shape.dim..][..shape.dim].iter().zip(&d_o[row * shape.dim..]);
            let of_d_lse = if with_d_lse { f64::from(d_lse[row]) } else { 0.0 };
            let (mut delta, mut size) = (-of_d_lse, of_d_lse.abs());
            for product in products.map(|(a, b)| f64::from(*a) * f64::from(*b)) {
                delta += product;
                size += product.abs();
            }
            if lse[row] == f32::NEG_INFINITY {
                assert_eq!(found, [-EMPTY_M, 1.0, 0.0, 0.0], "row {row}");
            } else {
                assert_eq!((found[0], found[3]), (lse[row], d_lse[row]), "row {row}");
                let factor = (-f64::from(d_lse[row])).exp();
                assert!(
                    (f64::from(found[1]) / factor - 1.0).abs() < 1e-6,
                    "row {row}: {} and {factor}",
                    found[1]
                );
                // Each product meets fewer than 16 roundings of 2^-24.
                assert!(
                    (f64::from(found[2]) - delta).abs() < 1e-6 * size,
                    "row {row}: {} and {delta}",
                    found[2]
                );
            }
        }
    }
}
