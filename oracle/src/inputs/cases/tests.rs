//! The list covers all features, and its inputs show each feature.

use std::collections::BTreeSet;

use super::*;
use crate::oracle::{Dtype, Oracle, OracleTerm, Row, Values};
use crate::tolerance::{Comparison, Context, Limit, compare_rows, discriminates, naive_f32_rows};

/// The rows of `problem`. It may be the problem of the case without a feature.
fn oracle_rows<E: Element>(case: &Case, problem: &OracleProblem, inputs: &Inputs<E>) -> Vec<Row> {
    oracle(case, problem, inputs).all_rows()
}

fn oracle<'a, E: Element>(case: &Case, problem: &'a OracleProblem, inputs: &'a Inputs<E>) -> Oracle<'a> {
    let oracle = Oracle::new(problem, E::values(&inputs.q), E::values(&inputs.k), E::values(&inputs.v))
        .expect("a case fits");
    match inputs.oracle_bias(case) {
        Some(bias) => oracle.with_bias(bias).expect("a case fits"),
        None => oracle,
    }
}

fn compared(problem: &OracleProblem, actual: &[Row], expected: &[Row]) -> Comparison {
    compare_rows(problem, Dtype::F32, actual, expected, &Context::default())
}

#[test]
fn names_and_seeds_are_distinct_and_every_problem_is_well_formed() {
    let cases = cases();
    let names: BTreeSet<_> = cases.iter().map(|case| case.name).collect();
    let seeds: BTreeSet<_> = cases.iter().map(|case| case.seed).collect();
    assert_eq!((names.len(), seeds.len()), (cases.len(), cases.len()));
    for case in cases {
        assert_eq!(case.problem.check(), Ok(()), "{}", case.name);
        for poison in &case.poison {
            assert!(
                !poison.value.is_finite() && matches!(poison.tensor, TensorId::K | TensorId::V),
                "{}",
                case.name
            );
        }
    }
}

#[test]
fn the_list_covers_the_sizes_it_promises() {
    let all = |of: fn(&OracleProblem) -> usize| {
        cases().iter().map(|case| of(&case.problem)).collect::<BTreeSet<_>>()
    };
    for (what, found, promised) in [
        ("head dims", all(|p| p.head_dim), vec![8, 16, 32, 64, 72, 80, 96, 128, 256]),
        ("group sizes", all(|p| p.q_heads / p.kv_heads), vec![1, 2, 4, 8]),
        ("key heads", all(|p| p.kv_heads), vec![1, 2]),
        ("batches", all(|p| p.batch), vec![1, 2, 3]),
        ("query rows", all(|p| p.q_len), vec![1, 7, 31, 33, 65, 130]),
        ("key rows", all(|p| p.kv_len), vec![1, 7, 31, 33, 65, 130]),
    ] {
        assert!(promised.iter().all(|size| found.contains(size)), "{what}: {found:?}");
    }
}

#[test]
fn naive_f32_passes_every_clean_case() {
    for case in cases() {
        let inputs = case.clean_inputs::<f32>();
        let naive = naive_f32_rows(&oracle(&case, &case.problem, &inputs), &case.problem.row_ids());
        let comparison = compared(&case.problem, &naive, &oracle_rows(&case, &case.problem, &inputs));
        if let Err(failure) = comparison.within(&Limit::dense(Dtype::F32, &comparison)) {
            panic!("{}: {failure}", case.name);
        }
    }
}

/// Every way to remove one feature from a problem.
fn without_one_feature(problem: &OracleProblem) -> Vec<OracleProblem> {
    let mut changed = Vec::new();
    for index in 0..problem.mask.terms.len() {
        let mut without = problem.clone();
        without.mask.terms.remove(index);
        changed.push(without);
        // The fault of a mask that another batch entry gets.
        let mut swapped = problem.clone();
        if let OracleTerm::Entries(masks) = &mut swapped.mask.terms[index] {
            masks.rotate_left(1);
            changed.push(swapped);
        }
    }
    if problem.q_offset != 0 {
        changed.push(OracleProblem { q_offset: 0, ..problem.clone() });
    }
    if problem.softcap.is_some() {
        changed.push(OracleProblem { softcap: None, ..problem.clone() });
    }
    if !problem.sinks.is_empty() {
        changed.push(OracleProblem { sinks: Vec::new(), ..problem.clone() });
        // The fault of a sink that counts once for each of two blocks of keys.
        let twice = problem.sinks.iter().map(|sink| sink + std::f64::consts::LN_2).collect();
        changed.push(OracleProblem { sinks: twice, ..problem.clone() });
    }
    changed
}

/// The inputs with the rows of another batch entry, and with those of another head, in the
/// attention bias tensor.
fn with_other_rows<E: Element>(case: &Case, inputs: &Inputs<E>) -> Vec<(&'static str, Inputs<E>)> {
    let Some(bias) = case.bias else { return Vec::new() };
    let head = case.bias_queries(bias) * case.problem.kv_len;
    let swapped = |elements: usize, step: usize| {
        let mut inputs = inputs.clone();
        match inputs.bias.as_mut().expect("the case has them") {
            BiasInputs::Visible(all) => all.chunks_mut(elements).for_each(|part| part.rotate_left(step)),
            BiasInputs::Bias(all) => all.chunks_mut(elements).for_each(|part| part.rotate_left(step)),
        }
        inputs
    };
    let mut found = Vec::new();
    if bias.batch > 1 {
        found.push(("another entry's rows", swapped(bias.batch * bias.heads * head, bias.heads * head)));
    }
    if bias.heads > 1 {
        found.push(("another head's rows", swapped(bias.heads * head, head)));
    }
    found
}

#[test]
fn every_feature_of_every_case_shows_in_every_dtype() {
    fn check<E: Element>(case: &Case, blind: &mut Vec<String>) {
        let inputs = case.clean_inputs::<E>();
        let right = oracle_rows(case, &case.problem, &inputs);
        let naive = naive_f32_rows(&oracle(case, &case.problem, &inputs), &case.problem.row_ids());
        let with = compared(&case.problem, &naive, &right).max_abs_error;
        if case.bias.is_some() {
            let inputs = Inputs { bias: None, ..inputs.clone() };
            let rows = oracle_rows(case, &case.problem, &inputs);
            if let Err(indistinct) =
                discriminates(with, compared(&case.problem, &rows, &right).max_abs_error, E::DTYPE)
            {
                blind.push(format!("{} without a bias in {}: {indistinct}", case.name, E::DTYPE));
            }
        }
        for (what, inputs) in with_other_rows(case, &inputs) {
            let rows = oracle_rows(case, &case.problem, &inputs);
            let without = compared(&case.problem, &rows, &right).max_abs_error;
            if let Err(indistinct) = discriminates(with, without, E::DTYPE) {
                blind.push(format!("{} with {what} in {}: {indistinct}", case.name, E::DTYPE));
            }
        }
        for changed in without_one_feature(&case.problem) {
            let without =
                compared(&case.problem, &oracle_rows(case, &changed, &inputs), &right).max_abs_error;
            if let Err(indistinct) = discriminates(with, without, E::DTYPE) {
                blind.push(format!("{} as {} in {}: {indistinct}", case.name, changed, E::DTYPE));
            }
        }
    }
    let mut blind = Vec::new();
    // With one token, causality hides nothing.
    for case in cases().iter().filter(|case| case.problem.kv_len > 1) {
        check::<f32>(case, &mut blind);
        check::<half::f16>(case, &mut blind);
        check::<half::bf16>(case, &mut blind);
    }
    assert!(blind.is_empty(), "{}", blind.join("\n"));
}

#[test]
fn poison_changes_the_rows_that_see_it_and_no_others() {
    let mut kept = 0;
    for case in cases().iter().filter(|case| !case.poison.is_empty()) {
        let clean = oracle_rows(case, &case.problem, &case.clean_inputs::<f32>());
        let poisoned = oracle_rows(case, &case.problem, &case.inputs::<f32>());
        for (clean, poisoned) in clean.iter().zip(&poisoned) {
            assert!(clean.o.iter().all(|o| o.is_finite()), "{}", case.name);
            if case.sees_poison(clean.id) {
                assert!(poisoned.o.iter().any(|o| !o.is_finite()), "{}: {:?}", case.name, clean.id);
            } else {
                assert_eq!(clean, poisoned, "{}", case.name);
                kept += 1;
            }
        }
    }
    assert!(kept > 500, "most rows see no poison: {kept}");
}

#[test]
fn poison_survives_the_half_types() {
    let case = cases().into_iter().find(|case| !case.poison.is_empty()).expect("there are poisoned cases");
    let inputs = case.inputs::<half::bf16>();
    let nan = (0..inputs.k.len()).filter(|&index| Values::Bf16(&inputs.k).get(index).is_nan()).count();
    assert_eq!(nan, case.poison.len() / 2);
}
