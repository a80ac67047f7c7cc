//! The bounds hold for f32 arithmetic in several orders, and leave most rows a proof.

use super::*;
use crate::inputs::{TensorId, fill, normal};
use crate::oracle::{OracleMask, OracleProblem, Row};
use crate::tolerance::{
    Cause, Comparison, Context, Expected, GradientComparison, GradientLimit, Limit, NaiveGradients, Vacuous,
    compare_rows, naive_f32_gradients, naive_f32_rows,
};

const DIM: usize = 32;

fn problem(scale: f64) -> OracleProblem {
    OracleProblem {
        batch: 1,
        q_len: 64,
        kv_len: 64,
        q_heads: 2,
        kv_heads: 1,
        head_dim: DIM,
        scale: f64::from((scale / (DIM as f64).sqrt()) as f32),
        softcap: None,
        mask: OracleMask::full(),
        q_offset: 0,
        sinks: Vec::new(),
    }
}

/// q, k, v and the gradient of the output.
fn made(problem: &OracleProblem, seed: u64) -> [Vec<f32>; 4] {
    let (q, kv) = (problem.q_shape(), problem.kv_shape());
    [(TensorId::Q, q), (TensorId::K, kv), (TensorId::V, kv), (TensorId::OutputGradient, q)].map(
        |(tensor, shape)| {
            let mut values = vec![0.0; shape.iter().product()];
            fill(seed, tensor, 0..values.len() as u64, &mut values);
            values
        },
    )
}

fn oracle<'a>(problem: &'a OracleProblem, [q, k, v, _]: &'a [Vec<f32>; 4]) -> Oracle<'a> {
    Oracle::new(problem, Values::F32(q), Values::F32(k), Values::F32(v)).unwrap()
}

fn compared(problem: &OracleProblem, actual: &[Row], right: Expected<'_>) -> Comparison {
    compare_rows(problem, Dtype::F32, actual, right, &Context::default())
}

/// Sums of `lanes` partial sums.
fn f32_product(a: &[f32], b: &[f32], lanes: usize) -> f32 {
    let mut sums = vec![0.0_f32; lanes];
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        sums[index % lanes] += a * b;
    }
    sums.iter().sum()
}

#[test]
fn a_logit_is_off_by_less_than_its_bound_in_any_order() {
    let mut largest = 0.0_f64;
    for draw in 0..40_000_u64 {
        let dim = [8, 32, 64, 128][draw as usize % 4];
        // Every fourth pair is nearly parallel: products of one sign.
        let vector = |seed, tensor| -> Vec<f32> {
            (0..dim).map(|index| normal(seed, tensor, draw * 128 + index)).collect()
        };
        let (a, mut b) = (vector(1, TensorId::Q), vector(1, TensorId::K));
        if draw % 16 > 11 {
            b.iter_mut().zip(&a).for_each(|(b, a)| *b = *b * 0.1 + a);
        }
        let wide = |narrow: &[f32]| -> Vec<f64> { narrow.iter().copied().map(f64::from).collect() };
        let scale = 0.37_f32;
        let (right, off) = product(&wide(&a), &wide(&b), f64::from(scale));
        for lanes in [1, 4, 8] {
            let error = (f64::from(f32_product(&a, &b, lanes) * scale) - right).abs();
            largest = largest.max(error / off);
        }
    }
    println!("largest error of a logit in bounds: {largest}");
    assert!((0.2..1.0).contains(&largest), "{largest}");
}

#[test]
fn naive_f32_is_within_the_slack_of_large_logits() {
    for (scale, most_unproved) in [(10.0, 0), (100.0, 0), (1e3, 0), (1e4, 2), (1e5, 4), (1e6, 4)] {
        let mut unproved = 0;
        for seed in 0..6 {
            let problem = problem(scale);
            let tensors = made(&problem, seed);
            let oracle = oracle(&problem, &tensors);
            let (ids, rows) = (problem.row_ids(), oracle.all_rows());
            let slack = row_slacks(&oracle, &ids);
            let right = Expected { rows: &rows, slack: &slack };
            let naive = compared(&problem, &naive_f32_rows(&oracle, &ids), right);
            // What is left are the roundings of weights and sums.
            assert!(naive.max_abs_error < 1.5e-6, "scale {scale}, seed {seed}: {naive}");
            assert!(
                naive.max_lse_error <= 1e-6 + U * naive.max_abs_lse,
                "scale {scale}, seed {seed}: {naive}"
            );
            unproved += naive.unproved;
        }
        println!("scale {scale}: {unproved} of 768 rows prove nothing");
        assert!(unproved <= most_unproved, "scale {scale}: {unproved}");
    }
}

#[test]
fn naive_f32_gradients_are_within_the_slack_of_large_logits() {
    for scale in [1.0, 10.0, 100.0, 1e3, 1e4, 1e6] {
        let problem = problem(scale);
        let tensors = made(&problem, 7);
        let oracle = oracle(&problem, &tensors);
        let d_o = Values::F32(&tensors[3]);
        let right = oracle.gradients(d_o, None).unwrap();
        let NaiveGradients { gradients, scales, slack } =
            naive_f32_gradients(&oracle, Dtype::F32, d_o, None).unwrap();
        let all = [
            ("dq", &gradients.dq, &right.dq, scales[0], &slack.dq),
            ("dk", &gradients.dk, &right.dk, scales[1], &slack.dk),
            ("dv", &gradients.dv, &right.dv, scales[2], &slack.dv),
        ];
        for (name, naive, right, scale_of, slack) in all {
            let read = |index: usize| naive[index];
            let values = Values::Read { dtype: Dtype::F32, len: naive.len(), read: &read };
            let comparison = GradientComparison::new(name, values, right, scale_of, slack);
            assert!(comparison.max_abs_error < 2e-6 * scale_of.max(1.0), "scale {scale}: {comparison}");
            assert!(comparison.unproved * 50 <= comparison.values, "scale {scale}: {comparison:?}");
            // Another row's gradient is wrong. From some size of logits on, dQ and dK of all rows are 0.
            if name != "dv" && scale > 1e3 {
                continue;
            }
            let moved = |index: usize| naive[(index + DIM) % naive.len()];
            let values = Values::Read { dtype: Dtype::F32, len: naive.len(), read: &moved };
            let wrong = GradientComparison::new(name, values, right, scale_of, slack);
            let limit = GradientLimit::dense(Dtype::F32, &comparison);
            assert!(wrong.max_abs_error > 20.0 * limit.abs(), "scale {scale}: {wrong}\n{limit}");
        }
    }
}

#[test]
fn logits_of_order_one_have_next_to_no_slack() {
    let problem = problem(1.0);
    let tensors = made(&problem, 1);
    let slack = row_slacks(&oracle(&problem, &tensors), &problem.row_ids());
    let most = slack.iter().flat_map(|row| &row.o).fold(0.0_f64, |most, slack| most.max(*slack));
    println!("largest slack: {most:e}");
    assert!(most < 3e-6, "{most:e}");
}

/// Two keys whose logits are `first` and `second`, of values 1 and -1.
fn slack_of_two(first: f32, second: f32) -> RowSlack {
    let problem = OracleProblem { q_len: 1, kv_len: 2, q_heads: 1, head_dim: 1, scale: 1.0, ..problem(1.0) };
    let (k, v) = ([first, second], [1.0, -1.0]);
    let oracle = Oracle::new(&problem, Values::F32(&[1.0]), Values::F32(&k), Values::F32(&v)).unwrap();
    row_slacks(&oracle, &problem.row_ids()).remove(0)
}

#[test]
fn ties_have_all_the_slack_and_a_single_weight_has_none() {
    assert!(slack_of_two(1e8, 1e8).o[0] >= 1.0);
    assert!(slack_of_two(1e30, 1e30).o[0] >= 1.0);
    assert!(slack_of_two(1e8, 1e8 - 8.0).o[0] >= 1.0);
    assert!(slack_of_two(1e8, 1e8 - 1e4).o[0] < 1e-12);
    assert_eq!(slack_of_two(1e30, -1e30).o[0], 0.0);
    assert!(slack_of_two(1.0, 1.0).o[0] < 2e-6);
    assert_eq!(slack_of_two(f32::NAN, 1.0).o, [0.0]);
    assert_eq!(slack_of_two(f32::INFINITY, 1.0).o, [0.0]);
}

#[test]
fn a_comparison_of_nothing_but_ties_is_refused() {
    let problem = OracleProblem { q_len: 1, kv_len: 2, q_heads: 1, head_dim: 1, scale: 1.0, ..problem(1.0) };
    let (k, v) = ([1e8, 1e8], [1.0, -0.5]);
    let oracle = Oracle::new(&problem, Values::F32(&[1.0]), Values::F32(&k), Values::F32(&v)).unwrap();
    let (rows, slack) = (oracle.all_rows(), row_slacks(&oracle, &problem.row_ids()));
    let comparison = compared(&problem, &rows, Expected { rows: &rows, slack: &slack });
    let failure = comparison.within(&Limit::dense(Dtype::F32, &comparison)).unwrap_err();
    assert_eq!(failure.cause, Cause::Vacuous(Vacuous::Ties { rows: 1 }));
}

#[test]
fn a_few_ties_loosen_no_limit_of_other_rows() {
    let problem = problem(1e7);
    let mut tensors = made(&problem, 3);
    // For row 0, the first two keys are its query, and tie.
    let query: Vec<f32> = tensors[0][..DIM].to_vec();
    tensors[1][..DIM].copy_from_slice(&query);
    tensors[1][DIM..2 * DIM].copy_from_slice(&query);
    let oracle = oracle(&problem, &tensors);
    let (ids, rows) = (problem.row_ids(), oracle.all_rows());
    let slack = row_slacks(&oracle, &ids);
    let right = Expected { rows: &rows, slack: &slack };
    let naive = naive_f32_rows(&oracle, &ids);
    let comparison = compared(&problem, &naive, right);
    let limit = Limit::dense(Dtype::F32, &comparison);
    comparison.assert_within(&limit);
    assert!(comparison.unproved > 0 && comparison.unproved < rows.len() / 4, "{comparison}");
    assert!(limit.o_abs() < 5e-6, "{limit}");
    let mut wrong = naive.clone();
    let proved = (0..rows.len()).find(|row| slack[*row].o.iter().all(|slack| *slack < 1e-6)).unwrap();
    wrong[proved].o[0] += 1e-3;
    assert_eq!(compared(&problem, &wrong, right).within(&limit).unwrap_err().cause, Cause::Exceeded);
    let mut infinite = naive;
    infinite[0].o[0] = f64::INFINITY;
    assert!(compared(&problem, &infinite, right).within(&limit).is_err(), "a row of ties too");
}
