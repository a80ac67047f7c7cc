//! The oracle against answers calculated by hand and against closed forms.

use half::f16;

use super::*;

/// Batch 1, one head, vectors of length `head_dim`, scale 1, no mask.
fn plain(q_len: usize, kv_len: usize, head_dim: usize) -> OracleProblem {
    OracleProblem {
        batch: 1,
        q_len,
        kv_len,
        q_heads: 1,
        kv_heads: 1,
        head_dim,
        scale: 1.0,
        softcap: None,
        mask: OracleMask::full(),
        q_offset: 0,
        sinks: Vec::new(),
    }
}

fn oracle<'a>(problem: &'a OracleProblem, q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Oracle<'a> {
    Oracle::new(problem, Values::F32(q), Values::F32(k), Values::F32(v)).expect("the test's shapes fit")
}

#[track_caller]
fn assert_close(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= 1e-14 * expected.abs().max(1.0), "{actual} is not {expected}");
}

#[test]
fn two_keys_by_hand() {
    // Scores ln 1 and ln 3 after the scale: weights 1/4 and 3/4, sum 4.
    let problem = OracleProblem { scale: 3.0_f64.ln() / 2.0, ..plain(1, 2, 1) };
    let (o, lse) = oracle(&problem, &[2.0], &[0.0, 1.0], &[8.0, 4.0]).row(0, 0, 0);
    assert_close(o[0], 5.0);
    assert_close(lse, 4.0_f64.ln());
}

#[test]
fn equal_keys_give_the_mean_of_the_values_and_ln_n_plus_the_score() {
    let problem = plain(1, 5, 2);
    let v = [1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0, 5.0, -5.0];
    let (o, lse) = oracle(&problem, &[0.5, 2.0], &[1.0, 0.25].repeat(5), &v).row(0, 0, 0);
    assert_close(o[0], 3.0);
    assert_close(o[1], -3.0);
    assert_close(lse, 5.0_f64.ln() + 1.0);
}

#[test]
fn one_visible_key_gives_its_value_and_its_score() {
    let problem = OracleProblem {
        mask: OracleMask::full().and(OracleTerm::Window { left: 0, right: 0 }),
        ..plain(3, 3, 1)
    };
    let oracle = oracle(&problem, &[2.0, 3.0, 4.0], &[5.0, 6.0, 7.0], &[0.1, 0.2, 0.3]);
    for (row, (value, score)) in [(0.1_f32, 10.0), (0.2, 18.0), (0.3, 28.0)].into_iter().enumerate() {
        assert_eq!(oracle.row(0, row, 0), (vec![f64::from(value)], score));
    }
}

#[test]
fn causal_row_zero_is_the_first_value_and_an_offset_shows_more() {
    let (q, k, v) = ([0.0; 2], [1.0; 4], [1.0, 2.0, 3.0, 4.0]);
    let mut problem = OracleProblem { mask: OracleMask::causal(), ..plain(2, 4, 1) };
    assert_eq!(oracle(&problem, &q, &k, &v).row(0, 0, 0), (vec![1.0], 0.0));
    assert_close(oracle(&problem, &q, &k, &v).row(0, 1, 0).0[0], 1.5);
    problem.q_offset = 2;
    assert_close(oracle(&problem, &q, &k, &v).row(0, 0, 0).0[0], 2.0);
    assert_close(oracle(&problem, &q, &k, &v).row(0, 1, 0).1, 4.0_f64.ln());
}

#[test]
fn a_row_without_keys_is_zero_and_minus_infinity() {
    let mask = OracleMask::full().and(OracleTerm::Valid(vec![0]));
    let problem = OracleProblem { mask, ..plain(1, 2, 2) };
    let answer = oracle(&problem, &[1.0; 2], &[f32::NAN; 4], &[f32::INFINITY; 4]).row(0, 0, 0);
    assert_eq!(answer, (vec![0.0, 0.0], f64::NEG_INFINITY));
    let none = plain(1, 0, 2);
    assert_eq!(oracle(&none, &[1.0; 2], &[], &[]).row(0, 0, 0), (vec![0.0, 0.0], f64::NEG_INFINITY));
}

#[test]
fn softcap_bends_the_scaled_score_before_the_mask() {
    let mask = OracleMask::full().and(OracleTerm::Valid(vec![1]));
    let problem = OracleProblem { scale: 0.5, softcap: Some(2.0), mask, ..plain(1, 2, 1) };
    let (o, lse) = oracle(&problem, &[3.0], &[4.0, 100.0], &[7.0, 9.0]).row(0, 0, 0);
    assert_eq!(o, [7.0]);
    assert_close(lse, 2.0 * 3.0_f64.tanh());
}

#[test]
fn grouped_heads_read_their_own_key_head_and_batches_do_not_mix() {
    // Each value encodes its batch entry and head: 10 · batch + kv head. All weights are equal, so the
    // mean is the value.
    let problem = OracleProblem { batch: 2, q_heads: 4, kv_heads: 2, ..plain(2, 3, 1) };
    let v = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 10.0, 11.0, 10.0, 11.0, 10.0, 11.0];
    let rows = oracle(&problem, &[0.0; 16], &[0.0; 12], &v).all_rows();
    assert_eq!(rows.len(), 16);
    for row in rows {
        let expected = 10.0 * row.id.batch as f64 + (row.id.head / 2) as f64;
        assert_close(row.o[0], expected);
    }
}

#[test]
fn hidden_values_do_not_reach_a_row_and_visible_ones_do() {
    let mut problem = OracleProblem { mask: OracleMask::causal(), ..plain(3, 3, 1) };
    let (q, k, v) = ([1.0; 3], [1.0, 1.0, f32::NAN], [1.0, 3.0, f32::INFINITY]);
    let rows = oracle(&problem, &q, &k, &v).all_rows();
    assert_close(rows[1].o[0], 2.0);
    assert!(rows[2].o[0].is_nan() && rows[2].lse.is_nan());

    problem.mask = OracleMask::full();
    let minus = oracle(&problem, &q, &[1.0, 1.0, f32::NEG_INFINITY], &[1.0, 3.0, 50.0]).row(0, 0, 0);
    assert_close(minus.0[0], 2.0);
    assert!(oracle(&problem, &q, &[1.0, 1.0, f32::INFINITY], &[1.0; 3]).row(0, 0, 0).1.is_nan());
    let all = oracle(&problem, &q, &[f32::NEG_INFINITY; 3], &[1.0; 3]).row(0, 0, 0);
    assert!(all.0[0].is_nan() && all.1.is_nan());
}

#[test]
fn adding_a_constant_to_all_scores_moves_only_the_lse() {
    // The second component of q·k is the same for all keys.
    let problem = plain(1, 3, 2);
    let v = [1.0, 0.0, 2.0, 0.0, 4.0, 0.0];
    let near = oracle(&problem, &[1.0, 1.0], &[0.5, 0.0, -1.0, 0.0, 2.0, 0.0], &v).row(0, 0, 0);
    let far = oracle(&problem, &[1.0, 1.0], &[0.5, 512.0, -1.0, 512.0, 2.0, 512.0], &v).row(0, 0, 0);
    assert_close(far.0[0], near.0[0]);
    assert_close(far.1, near.1 + 512.0);
}

#[test]
fn chosen_rows_and_indices_agree_with_all_rows() {
    let problem = OracleProblem { batch: 2, q_heads: 2, kv_heads: 1, ..plain(3, 2, 2) };
    let q: Vec<f16> = (0..24).map(|n| f16::from_f32(n as f32 / 7.0)).collect();
    let kv: Vec<f16> = (0..8).map(|n| f16::from_f32(1.0 - n as f32 / 3.0)).collect();
    let oracle = Oracle::new(&problem, Values::F16(&q), Values::F16(&kv), Values::F16(&kv)).unwrap();
    let all = oracle.all_rows();
    for (index, row) in all.iter().enumerate() {
        assert_eq!(problem.o_index(row.id), index * 2);
        assert_eq!(oracle.rows(&[row.id])[0], *row);
    }
    let mut lse_indices: Vec<_> = all.iter().map(|row| problem.lse_index(row.id)).collect();
    lse_indices.sort_unstable();
    assert_eq!(lse_indices, (0..12).collect::<Vec<_>>());
    assert_eq!(problem.lse_index(RowId { batch: 0, row: 2, head: 1 }), 5);
}

#[test]
fn invalid_problems_are_refused_with_both_sides_named() {
    let refuse = |problem: &OracleProblem| {
        Oracle::new(problem, Values::F32(&[0.0]), Values::F32(&[0.0]), Values::F32(&[0.0])).unwrap_err()
    };
    let heads = refuse(&OracleProblem { q_heads: 3, kv_heads: 2, ..plain(1, 1, 1) });
    assert_eq!(heads.to_string(), "3 query heads are no multiple of 2 key/value heads");
    let length = refuse(&plain(2, 1, 1));
    assert_eq!(length.to_string(), "a tensor of shape [1, 2, 1, 1] has 2 elements, 1 were given");
    assert!(matches!(
        refuse(&OracleProblem { softcap: Some(0.0), ..plain(1, 1, 1) }),
        OracleError::Score { .. }
    ));
}
