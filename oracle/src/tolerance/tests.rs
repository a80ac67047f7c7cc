//! The rule on artificial errors, and the real error of naive f32.

use super::*;
use crate::inputs::{TensorId, fill};
use crate::oracle::{Oracle, OracleMask, OracleProblem, OracleTerm, Row, RowId, Values};

fn problem(kv_len: usize) -> OracleProblem {
    OracleProblem {
        batch: 1,
        q_len: 2,
        kv_len,
        q_heads: 1,
        kv_heads: 1,
        head_dim: 8,
        scale: 8.0_f64.sqrt().recip(),
        softcap: None,
        mask: OracleMask::full(),
        q_offset: 0,
        sinks: Vec::new(),
    }
}

fn made(problem: &OracleProblem) -> [Vec<f32>; 3] {
    [(TensorId::Q, problem.q_shape()), (TensorId::K, problem.kv_shape()), (TensorId::V, problem.kv_shape())]
        .map(|(tensor, shape)| {
            let mut values = vec![0.0; shape.iter().product()];
            fill(1, tensor, 0..values.len() as u64, &mut values);
            values
        })
}

fn rows_of(problem: &OracleProblem) -> (Vec<Row>, Vec<Row>) {
    let [q, k, v] = made(problem);
    let oracle = Oracle::new(problem, Values::F32(&q), Values::F32(&k), Values::F32(&v)).unwrap();
    (oracle.all_rows(), naive_f32_rows(&oracle, &problem.row_ids()))
}

fn compared(problem: &OracleProblem, actual: &[Row], expected: &[Row]) -> Comparison {
    let context = Context {
        case: "made up".into(),
        seed: 1,
        backend: "naive".into(),
        rerun: "cargo test -p kyklos-tests --lib tolerance".into(),
    };
    compare_rows(problem, Dtype::F32, actual, expected, &context)
}

#[test]
fn naive_f32_is_close_and_within_the_limit_it_sets() {
    let problem = problem(64);
    let (right, naive) = rows_of(&problem);
    let comparison = compared(&problem, &naive, &right);
    assert!(comparison.max_abs_error > 0.0 && comparison.max_abs_error < 1e-6, "{comparison}");
    comparison.assert_within(&Limit::dense(Dtype::F32, &comparison));
    comparison.assert_within(&Limit::parallel(Dtype::F32, &[&comparison]));
}

#[test]
fn the_limit_is_twice_the_worst_device_plus_a() {
    let problem = problem(64);
    let (right, naive) = rows_of(&problem);
    let mut worse = naive.clone();
    worse[1].o[3] = right[1].o[3] + 3e-5;
    let (good, bad) = (compared(&problem, &naive, &right), compared(&problem, &worse, &right));
    let limit = Limit::parallel(Dtype::F32, &[&good, &bad]);
    assert!((limit.o_abs() - (2.0 * 3e-5 + 1e-6)).abs() < 1e-12, "{limit}");
    assert_eq!(Limit::parallel(Dtype::Bf16, &[&good]).o_abs(), 2.0 * good.max_abs_error + 2e-3);
    let dense = Limit::dense(Dtype::F16, &good);
    assert_eq!(dense.o_abs(), 2.0 * good.max_abs_error + good.max_abs_o / 2048.0 + 2e-3);
    assert!(dense.lse_abs() < 1e-5, "lse is f32 whatever o is: {dense}");
}

#[test]
fn a_failure_prints_what_is_needed_to_debug_it() {
    let problem = problem(64);
    let (right, naive) = rows_of(&problem);
    let limit = Limit::dense(Dtype::F32, &compared(&problem, &naive, &right));
    let mut wrong = naive;
    wrong[1].o[3] = right[1].o[3] + 1e-3;
    let comparison = compared(&problem, &wrong, &right);
    let worst = comparison.worst.unwrap();
    assert_eq!((worst.at, worst.dim), (RowId { batch: 0, row: 1, head: 0 }, Some(3)));
    assert_eq!((worst.actual, worst.expected), (wrong[1].o[3], right[1].o[3]));
    let failure = comparison.within(&limit).unwrap_err();
    assert_eq!(failure.cause, Cause::Exceeded);
    let text = failure.to_string();
    for part in [
        "the answer is wrong",
        "row 1, head 0, dim 3",
        &format!("got {:?}, expected {:?}", worst.actual, worst.expected),
        &format!("({} ulp)", worst.ulps.unwrap()),
        "kv 64 x 1 heads, dim 8",
        "case: made up, seed 1, backend: naive",
        "rerun: cargo test -p kyklos-tests --lib tolerance",
    ] {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
}

#[test]
fn rows_that_see_only_their_sink_are_exact_and_no_signal() {
    // All rows, and one of two rows.
    for left in [-1, 0] {
        let hidden = if left < 0 {
            OracleMask::full().and(OracleTerm::Valid(vec![0]))
        } else {
            OracleMask::full().and(OracleTerm::Window { left: 0, right: -1 })
        };
        let problem = OracleProblem { kv_len: 1, mask: hidden, sinks: vec![1.5], ..problem(1) };
        let (right, naive) = rows_of(&problem);
        assert_eq!((right[1].lse, right[1].o[0]), (1.5, 0.0), "row 1 sees its sink only");
        let comparison = compared(&problem, &naive, &right);
        comparison.assert_within(&Limit::parallel(Dtype::F32, &[&comparison]));
        let mut leaky = naive.clone();
        leaky[1].o[3] = 1e-9;
        let leaky = compared(&problem, &leaky, &right);
        assert!(leaky.max_abs_error.is_infinite(), "{leaky}");
    }
}

#[test]
fn nan_infinity_and_touched_empty_rows_are_infinitely_wrong() {
    let mask = OracleMask::full().and(OracleTerm::Window { left: 0, right: -1 });
    let problem = OracleProblem { kv_len: 1, mask, ..problem(1) };
    let (right, naive) = rows_of(&problem);
    assert_eq!(right[1].lse, f64::NEG_INFINITY, "row 1 sees nothing");
    let limit = Limit::dense(Dtype::F32, &compared(&problem, &naive, &right));
    compared(&problem, &naive, &right).assert_within(&limit);

    let broken = |change: fn(&mut Vec<Row>)| {
        let mut rows = naive.clone();
        change(&mut rows);
        let comparison = compared(&problem, &rows, &right);
        assert_eq!(comparison.mismatched_nonfinite, 1, "{comparison}");
        assert!(comparison.max_abs_error.max(comparison.max_lse_error).is_infinite(), "{comparison}");
        assert_eq!(comparison.within(&limit).unwrap_err().cause, Cause::Exceeded);
    };
    broken(|rows| rows[0].o[0] = f64::NAN);
    broken(|rows| rows[0].o[0] = f64::INFINITY);
    broken(|rows| rows[0].lse = f64::NEG_INFINITY);
    broken(|rows| rows[1].lse = -1e30);
    broken(|rows| rows[1].lse = f64::NAN);
    broken(|rows| rows[1].o[7] = 1e-30);
}

#[test]
fn nan_equals_nan_and_minus_infinity_equals_itself() {
    let problem = problem(64);
    let (mut right, mut actual) = rows_of(&problem);
    (right[0].o[0], actual[0].o[0]) = (f64::NAN, f64::NAN);
    (right[1].o[1], actual[1].o[1]) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
    let comparison = compared(&problem, &actual, &right);
    assert_eq!(comparison.mismatched_nonfinite, 0);
    assert_eq!(comparison.finite_values, 14);
    comparison.assert_within(&Limit::dense(Dtype::F32, &comparison));
}

#[test]
fn a_limit_that_garbage_would_pass_is_refused() {
    let problem = problem(64);
    let (right, naive) = rows_of(&problem);
    let good = compared(&problem, &naive, &right);
    let zeros: Vec<Row> = right.iter().map(|row| Row { o: vec![0.0; 8], ..row.clone() }).collect();
    let garbage = Limit::parallel(Dtype::F32, &[&compared(&problem, &zeros, &right)]);
    assert!(matches!(good.within(&garbage).unwrap_err().cause, Cause::Vacuous(Vacuous::Output { .. })));

    let mut nan = naive.clone();
    nan[0].o[0] = f64::NAN;
    let infinite = Limit::parallel(Dtype::F32, &[&compared(&problem, &nan, &right)]);
    assert!(matches!(good.within(&infinite).unwrap_err().cause, Cause::Vacuous(_)));

    let mut lse = naive;
    lse[0].lse += 0.1;
    let loose = Limit::parallel(Dtype::F32, &[&compared(&problem, &lse, &right)]);
    assert!(matches!(good.within(&loose).unwrap_err().cause, Cause::Vacuous(Vacuous::Lse { .. })));
}

#[test]
fn negative_controls_must_exceed_the_tolerance_by_the_factor() {
    assert!(discriminates(0.0, 1.01e-4, Dtype::F32).is_ok());
    assert!(discriminates(0.0, 0.99e-4, Dtype::F32).is_err());
    assert!(discriminates(1e-6, 2e-4, Dtype::F32).is_err(), "the measured error counts");
    assert!(discriminates(0.0, 0.021, Dtype::Bf16).is_ok());
    assert!(discriminates(0.0, 0.019, Dtype::F16).is_err());
    assert_eq!(discriminates(0.0, f64::INFINITY, Dtype::F32), Ok(f64::INFINITY));
    assert!(discriminates(f64::INFINITY, f64::INFINITY, Dtype::F32).is_err());
    assert!(discriminates(0.0, f64::NAN, Dtype::F32).is_err());
}

/// As [`naive_f32_rows`] without mask and softcap, but with sums of `block` keys.
fn f32_rows_in_blocks(problem: &OracleProblem, [q, k, v]: &[Vec<f32>; 3], block: usize) -> Vec<Row> {
    let dim = problem.head_dim;
    let attend = |id: RowId| {
        let query = &q[problem.o_index(id)..][..dim];
        let scores: Vec<f32> = k
            .chunks(dim)
            .map(|key| query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>() * problem.scale as f32)
            .collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut sum, mut o) = (0.0, vec![0.0; dim]);
        for (scores, values) in scores.chunks(block).zip(v.chunks(block * dim)) {
            let (mut tile_sum, mut tile_o) = (0.0_f32, vec![0.0_f32; dim]);
            for (score, value) in scores.iter().zip(values.chunks(dim)) {
                let weight = (score - max).exp();
                tile_sum += weight;
                tile_o.iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
            }
            sum += tile_sum;
            o.iter_mut().zip(tile_o).for_each(|(o, tile)| *o += tile);
        }
        Row { id, o: o.iter().map(|o| f64::from(o / sum)).collect(), lse: f64::from(max + sum.ln()) }
    };
    problem.row_ids().into_iter().map(attend).collect()
}

/// The measurement behind the module's remarks on a flat relative limit of 1e-6.
#[test]
fn one_accumulator_outgrows_a_millionth_and_blocks_do_not() {
    let relative = |kv_len| {
        let problem = problem(kv_len);
        let (right, naive) = rows_of(&problem);
        let [one, tiles] = [kv_len, 64].map(|block| f32_rows_in_blocks(&problem, &made(&problem), block));
        [one, naive, tiles].map(|rows| compared(&problem, &rows, &right).relative_error)
    };
    let errors = [64, 1024, 16_384, 131_072].map(relative);
    println!("relative error of f32 in [one sum, blocks, tiles of 64] at 64, 1k, 16k, 128k keys: {errors:?}");
    assert!(errors[0][0] < 1e-6, "{errors:?}");
    assert!(errors[3][0] > 4e-6, "{errors:?}");
    assert!(errors[3][1] < 2.5e-6 && errors[3][2] < 1e-6, "{errors:?}");
}

/// Values of one sign: the rounding of a long sum has a sign too.
#[test]
fn blocks_bound_the_error_of_values_of_one_sign() {
    let problem = OracleProblem { q_len: 1, ..problem(1 << 18) };
    let [q, k, mut v] = made(&problem);
    v.iter_mut().for_each(|v| *v = 1.0 + 0.1 * *v);
    let oracle = Oracle::new(&problem, Values::F32(&q), Values::F32(&k), Values::F32(&v)).unwrap();
    let (right, naive) = (oracle.all_rows(), naive_f32_rows(&oracle, &problem.row_ids()));
    let one = f32_rows_in_blocks(&problem, &[q, k, v], problem.kv_len);
    let [one, naive] = [one, naive].map(|rows| compared(&problem, &rows, &right).max_abs_error);
    println!("error at 256k keys: one sum {one:e}, blocks {naive:e}");
    assert!(naive < 2e-6 && one > 5.0 * naive, "{one} {naive}");
}

/// The gradients of rows with one weight of 1 are 0, and what cancels is not.
#[test]
fn a_gradient_of_zero_is_held_to_what_cancels_in_it() {
    let compared =
        |actual: &[f32]| GradientComparison::new("dq", Values::F32(actual), &[0.0; 4], 8.0, &[0.0; 4]);
    let limit = GradientLimit::dense(Dtype::F32, &compared(&[0.0; 4]));
    assert!(compared(&[1e-5; 4]).within(&limit).is_ok());
    assert!(compared(&[1e-4; 4]).within(&limit).is_err());
    assert!(compared(&[f32::NAN; 4]).within(&limit).is_err());
}

#[test]
fn extreme_scores_outgrow_a_millionth_at_any_length() {
    let problem = OracleProblem { q_len: 65, head_dim: 256, scale: 30.0 / 16.0, ..problem(64) };
    let (right, naive) = rows_of(&problem);
    let comparison = compared(&problem, &naive, &right);
    println!("relative error of naive f32 at 30 times the scores: {}", comparison.relative_error);
    assert!(comparison.relative_error > 1e-6, "{comparison}");
}

#[test]
fn rounding_to_bf16_alone_takes_most_of_a_flat_limit() {
    let (mut error, mut signal) = (0.0, 0.0);
    for index in 0..100_000 {
        let number = crate::inputs::normal(2, TensorId::V, index);
        error += f64::from(Dtype::Bf16.round(number) - number).powi(2);
        signal += f64::from(number).powi(2);
    }
    let relative = (error / signal).sqrt();
    println!("relative norm of rounding to bf16: {relative}");
    assert!((1.4e-3..1.8e-3).contains(&relative), "{relative}");
}
