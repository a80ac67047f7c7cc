//! The kernels for running states, and for copies between layouts.

use kyklos::backend::EMPTY_M;
use kyklos_cuda::{RepackArguments, RowStatsArguments, STATE_ROWS, StateArguments, TensorArgument};
use kyklos_oracle::oracle::Dtype;

use crate::job::{Job, Timing, numbers};
use crate::program::{Program, emulator};

/// `[batch, rows, heads, dim]`: with warps behind the last row, and a head dim that is no multiple
/// of 32.
const SHAPE: [usize; 4] = [2, 3, 3, 40];

fn arguments(a: u64, ml: u64) -> StateArguments {
    let [batch, rows, heads, dim] = SHAPE.map(|n| u32::try_from(n).unwrap());
    StateArguments { a, ml, batch, rows, heads, dim, ..StateArguments::default() }
}

fn grid() -> [usize; 3] {
    let [batch, rows, heads, _] = SHAPE;
    [(batch * rows * heads).div_ceil(STATE_ROWS as usize), 1, 1]
}

/// A state in which row n saw a key unless `n % 3 == empty`.
fn state(empty: usize, shift: f32) -> (Vec<f32>, Vec<f32>) {
    let [batch, rows, heads, dim] = SHAPE;
    let mut a = vec![0.0; batch * rows * heads * dim];
    let mut ml = vec![0.0; batch * rows * heads * 2];
    for n in 0..batch * rows * heads {
        let (batch, row, head) = (n / heads / rows, n / heads % rows, n % heads);
        let at = ((batch * heads + head) * rows + row) * 2;
        let seen = n % 3 != empty;
        ml[at] = if seen { shift + n as f32 / 7.0 } else { EMPTY_M };
        ml[at + 1] = if seen { 1.0 + n as f32 / 5.0 } else { 0.0 };
        for d in 0..dim {
            a[n * dim + d] = if seen { (n * dim + d) as f32 / 11.0 - shift } else { 0.0 };
        }
    }
    (a, ml)
}

#[test]
fn a_reset_state_is_empty() {
    let [batch, rows, heads, dim] = SHAPE;
    let mut job = Job::default();
    let (a, ml) = (job.poisoned(batch * rows * heads * dim * 4), job.poisoned(batch * rows * heads * 8));
    job.launch("reset_state", grid(), 0, &arguments(a.address, ml.address));
    job.bring(a);
    job.bring(ml);
    let (results, _) = job.run(emulator(), Timing::Eager, 1).unwrap();
    assert!(numbers::<f32>(&results[0]).iter().all(|a| a.to_bits() == 0));
    assert!(numbers::<[f32; 2]>(&results[1]).iter().all(|ml| *ml == [EMPTY_M, 0.0]));
}

#[test]
fn a_merge_adds_weights_and_keeps_rows_that_only_one_side_saw() {
    let [batch, rows, heads, dim] = SHAPE;
    let ((a, ml), (from_a, from_ml)) = (state(0, 0.5), state(1, -1.25));
    for timing in Timing::ALL {
        let mut job = Job::default();
        let into = [job.upload(&a), job.upload(&ml)];
        let from = [job.upload(&from_a), job.upload(&from_ml)];
        let arguments = StateArguments {
            from_a: from[0].address,
            from_ml: from[1].address,
            ..arguments(into[0].address, into[1].address)
        };
        job.launch("merge_states", grid(), 0, &arguments);
        job.bring(into[0]);
        job.bring(into[1]);
        let (results, _) = job.run(emulator(), timing, 1).unwrap();
        let (merged_a, merged_ml) = (numbers::<f32>(&results[0]), numbers::<f32>(&results[1]));
        for n in 0..batch * rows * heads {
            let at = ((n / heads / rows * heads + n % heads) * rows + n / heads % rows) * 2;
            let elements = n * dim..(n + 1) * dim;
            let (got_a, got_ml) = (&merged_a[elements.clone()], &merged_ml[at..at + 2]);
            match n % 3 {
                0 => assert_eq!((got_a, got_ml), (&from_a[elements], &from_ml[at..at + 2])),
                1 => assert_eq!((got_a, got_ml), (&a[elements], &ml[at..at + 2])),
                _ => {
                    let m = f64::from(ml[at]).max(f64::from(from_ml[at]));
                    let weight = |ml: &[f32]| (f64::from(ml[at]) - m).exp();
                    let both = |ours: f32, theirs: f32| {
                        f64::from(ours) * weight(&ml) + f64::from(theirs) * weight(&from_ml)
                    };
                    let some_roundings = 8.0 * Dtype::F32.unit_roundoff();
                    let near = |got: f32, right: f64| {
                        (f64::from(got) - right).abs() <= some_roundings * right.abs().max(1.0)
                    };
                    assert!(near(got_ml[0], m) && near(got_ml[1], both(ml[at + 1], from_ml[at + 1])));
                    for (got, index) in got_a.iter().zip(elements) {
                        assert!(near(*got, both(a[index], from_a[index])), "{got} at {index}");
                    }
                }
            }
        }
    }
}

#[test]
fn f32_results_are_the_sums_divided_by_l_to_the_last_bit() {
    let [batch, rows, heads, dim] = SHAPE;
    let (_, mut ml) = state(3, 0.5);
    let mut a = vec![0.0; batch * rows * heads * dim];
    let value = |n: usize| (n as f32 - 100.0) / 64.0;
    for n in 0..batch * rows * heads {
        let at = ((n / heads / rows * heads + n % heads) * rows + n / heads % rows) * 2;
        ml[at + 1] = 1.0 + 2.0 * n as f32;
        // Exact in f32, as is the quotient. Times 1 / l, a part of them is off by a bit.
        (n * dim..(n + 1) * dim).for_each(|element| a[element] = value(element) * ml[at + 1]);
    }
    let mut job = Job::default();
    let [a, ml] = [job.upload(&a), job.upload(&ml)];
    let (o, lse) = (job.poisoned(batch * rows * heads * dim * 4), job.poisoned(batch * rows * heads * 8));
    let arguments = StateArguments { o: o.address, lse: lse.address, ..arguments(a.address, ml.address) };
    job.launch("finalize_f32", grid(), 0, &arguments);
    job.bring(o);
    let (results, _) = job.run(emulator(), Timing::Eager, 1).unwrap();
    let wanted: Vec<f32> = (0..batch * rows * heads * dim).map(value).collect();
    assert_eq!(numbers::<f32>(&results[0]), wanted);
}

#[test]
fn a_log_sum_exp_far_from_0_keeps_the_logarithm_of_l() {
    pairs_are_exact(emulator(), Timing::Eager).unwrap();
}

/// Each log-sum-exp is the sum of the nearest f32 and its rest; that of a row that saw no key, or
/// of one that is not finite, has no rest.
pub(crate) fn pairs_are_exact(program: &Program, timing: Timing) -> Result<(), String> {
    let ml =
        [[-1e20_f32, 7.0], [-1e4, 3.0], [5e8, 1.0], [EMPTY_M, 0.0], [f32::INFINITY, 2.0], [1.0, f32::NAN]];
    let mut job = Job::default();
    let lse = job.poisoned(ml.len() * 8);
    let arguments = StateArguments {
        a: job.upload(&[1.0_f32; 6 * 8]).address,
        ml: job.upload(&ml).address,
        o: job.poisoned(ml.len() * 8 * 4).address,
        lse: lse.address,
        batch: 1,
        rows: 6,
        heads: 1,
        dim: 8,
        ..StateArguments::default()
    };
    job.launch("finalize_f32", [1, 1, 1], 0, &arguments);
    job.bring(lse);
    let (results, _) = job.run(program, timing, 1)?;
    for ([m, l], [first, rest]) in ml.into_iter().zip(numbers::<[f32; 2]>(&results[0])) {
        let of_l = f64::from(l).ln();
        let right = if l == 0.0 {
            (first, rest) == (f32::NEG_INFINITY, 0.0)
        } else if !m.is_finite() || l.is_nan() {
            !first.is_finite() && rest == 0.0
        } else {
            let nearest = (f64::from(m) + of_l) as f32;
            let found = f64::from(first) - f64::from(m) + f64::from(rest);
            first == nearest && (found - of_l).abs() <= 1e-6
        };
        if !right {
            return Err(format!("m {m}, l {l}: {first} + {rest}"));
        }
    }
    Ok(())
}

#[test]
fn accumulate_adds_the_given_rows_and_writes_nothing_else() {
    adds_rows(emulator(), Timing::Late).unwrap();
}

/// Adds heads 1 and 2 of rows 1 to 3 of [2, 5, 4] heads of 6 numbers to the first of [2, 3, 2].
pub(crate) fn adds_rows(program: &Program, timing: Timing) -> Result<(), String> {
    let from: Vec<f32> = (0..2 * 5 * 4 * 6_u16).map(|n| f32::from(n) * 0.25).collect();
    let mut expected: Vec<f32> = (0..2 * 3 * 2 * 6 + 1_u16).map(|n| 7.0 - f32::from(n)).collect();
    let mut job = Job::default();
    let (source, target) = (job.upload(&from), job.upload(&expected));
    let strides = |data: u64, [batch, row, head]: [u64; 3]| TensorArgument {
        data,
        batch_stride: batch * 4,
        row_stride: row * 4,
        head_stride: head * 4,
    };
    let arguments = RepackArguments {
        from: strides(source.address + (24 + 6) * 4, [120, 24, 6]),
        into: strides(target.address, [36, 12, 6]),
        batch: 2,
        rows: 3,
        heads: 2,
        row_bytes: 24,
    };
    job.launch("accumulate", [1, 1, 1], 0, &arguments);
    job.bring(target);
    let (results, _) = job.run(program, timing, 1)?;
    for (n, into) in expected.iter_mut().take(72).enumerate() {
        let [batch, row, head, number] = [n / 36, n / 12 % 3, n / 6 % 2, n % 6];
        *into += from[batch * 120 + (row + 1) * 24 + (head + 1) * 6 + number];
    }
    if numbers::<f32>(&results[0]) == expected { Ok(()) } else { Err("other sums".to_owned()) }
}

#[test]
fn repack_copies_the_given_rows_and_writes_nothing_else() {
    // From [2, 5, 4] heads of 6 words: heads 1..4 of rows 2..5, into a layout with more heads.
    let (batch, rows, heads, words) = (2, 3, 3, 6);
    let from: Vec<u32> = (0..2 * 5 * 4 * 6).collect();
    for blocks in [1, 3] {
        let mut job = Job::default();
        let (source, target) =
            (job.upload(&from), job.upload(&vec![u32::MAX; 1 + batch * heads * rows * words + 1]));
        let stride = |n: usize| n as u64 * 4;
        let arguments = RepackArguments {
            from: TensorArgument {
                data: source.address + stride(2 * 24 + 6),
                batch_stride: stride(120),
                row_stride: stride(24),
                head_stride: stride(6),
            },
            into: TensorArgument {
                data: target.address + 4,
                batch_stride: stride(heads * rows * words),
                row_stride: stride(words),
                head_stride: stride(rows * words),
            },
            batch: 2,
            rows: 3,
            heads: 3,
            row_bytes: 24,
        };
        job.launch("repack", [blocks, 1, 1], 0, &arguments);
        job.bring(target);
        let (results, _) = job.run(emulator(), Timing::Late, 1).unwrap();
        let expected = (0..batch).flat_map(|b| {
            (1..4).flat_map(move |h| {
                (2..5).flat_map(move |r| (0..6).map(move |w| ((b * 5 + r) * 4 + h) * 6 + w))
            })
        });
        let expected: Vec<u32> = std::iter::once(u32::MAX)
            .chain(expected.map(|n| u32::try_from(n).unwrap()))
            .chain([u32::MAX])
            .collect();
        assert_eq!(numbers::<u32>(&results[0]), expected);
    }
}

#[test]
fn a_row_that_saw_no_key_has_statistics_of_its_own() {
    stats_are_exact(emulator(), Timing::Eager).unwrap();
}

/// The statistics of three rows, of which one saw no key and has a gradient that is NaN.
pub(crate) fn stats_are_exact(program: &Program, timing: Timing) -> Result<(), String> {
    let (o, d_o): (Vec<f32>, Vec<f32>) =
        (0..3 * 40_u8).map(|n| (f32::from(n % 5), f32::from(n / 40))).unzip();
    let d_o: Vec<f32> = d_o.iter().map(|d_o| if *d_o == 1.0 { f32::NAN } else { *d_o }).collect();
    let mut job = Job::default();
    let stats = job.poisoned(3 * 16);
    let arguments = RowStatsArguments {
        o: job.upload(&o).address,
        d_o: job.upload(&d_o).address,
        lse: job.upload(&[[3.0_f32, 0.125], [f32::NEG_INFINITY, 0.0], [-2.0, -0.25]]).address,
        d_lse: job.upload(&[0.5_f32, 1.0, 0.25]).address,
        stats: stats.address,
        rows: 3,
        dim: 40,
        reserved: 0,
    };
    job.launch("row_stats_f32", [1, 1, 1], 0, &arguments);
    job.bring(stats);
    let (results, _) = job.run(program, timing, 1)?;
    // The elements of o of a row sum to 80.
    let right = [
        [3.0, (-0.125_f32).exp(), -0.5, 0.125],
        [-EMPTY_M, 1.0, 0.0, 0.0],
        [-2.0, 0.25_f32.exp(), 159.75, -0.25],
    ];
    let found = numbers::<[f32; 4]>(&results[0]);
    let equal = |(found, right): (&[f32; 4], &[f32; 4])| {
        let exact = |at: usize| found[at] == right[at];
        exact(0) && exact(2) && exact(3) && (found[1] / right[1] - 1.0).abs() < 1e-6
    };
    let all = found.len() == right.len() && found.iter().zip(&right).all(equal);
    if all { Ok(()) } else { Err(format!("{found:?}, not {right:?}")) }
}
