//! Attention block by block, as in a product, with typical bugs of such code. The limits must
//! accept the correct version and refuse each bug. A reference is untested until it has refused a
//! wrong result.

use half::bf16;

use crate::inputs::{Case, cases};
use crate::oracle::{Dtype, Element, Oracle, OracleProblem, OracleTerm, Row};
use crate::tolerance::{
    Cause, Comparison, Context, Expected, Limit, compare, compare_rows, discriminates, naive_f32_rows,
    row_slacks,
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// A query sees one key more than causality allows.
    MaskOffByOne,
    /// A query that sees several keys does not see the last of them.
    OneKeyLess,
    /// A sum under an older maximum is not rescaled to the new maximum.
    MissingRescale,
    /// One block of keys never arrives.
    DroppedBlock,
    /// One block of keys is counted twice.
    RepeatedBlock,
    /// A block uses the values of its neighbour.
    SwappedValues,
    /// Each head reads the key head of the next head.
    WrongKeyHead,
    /// lse is exported as a base-2 logarithm.
    BinaryLse,
    /// o is the sum, not divided by the weight.
    NotNormalised,
}

const FAULTS: [Fault; 9] = [
    Fault::MaskOffByOne,
    Fault::OneKeyLess,
    Fault::MissingRescale,
    Fault::DroppedBlock,
    Fault::RepeatedBlock,
    Fault::SwappedValues,
    Fault::WrongKeyHead,
    Fault::BinaryLse,
    Fault::NotNormalised,
];

const BLOCK: usize = 8;

/// All rows with f32 state over blocks of keys, o rounded to `dtype`.
fn blockwise(oracle: &Oracle<'_>, dtype: Dtype, fault: Option<Fault>) -> Vec<Row> {
    let problem = oracle.problem();
    let [q, k, v] = oracle.tensors();
    let mut vector = vec![0.0; problem.head_dim];
    let mut rows = Vec::new();
    for id in problem.row_ids() {
        let shift = usize::from(fault == Some(Fault::WrongKeyHead));
        let kv_head = (problem.kv_head(id.head) + shift) % problem.kv_heads;
        q.read_vector(id.batch, id.row, id.head, &mut vector);
        let query = vector.clone();
        let (mut m, mut l, mut a) = (f32::NEG_INFINITY, 0.0_f32, vec![0.0_f32; problem.head_dim]);
        let mut blocks: Vec<usize> = (0..problem.kv_len.div_ceil(BLOCK)).collect();
        match fault {
            Some(Fault::DroppedBlock) => drop(blocks.remove(1)),
            Some(Fault::RepeatedBlock) => blocks.push(1),
            _ => {}
        }
        for block in blocks {
            for key in block * BLOCK..((block + 1) * BLOCK).min(problem.kv_len) {
                let extra = fault == Some(Fault::MaskOffByOne) && key == id.row + 1;
                let less = fault == Some(Fault::OneKeyLess) && key == id.row && key > 0;
                if !problem.sees(id.batch, id.row, key) && !extra || less {
                    continue;
                }
                k.read_vector(id.batch, key, kv_head, &mut vector);
                let dot: f32 = query.iter().zip(&vector).map(|(q, k)| (*q as f32) * (*k as f32)).sum();
                let score = dot * problem.scale as f32;
                if score > m {
                    if fault != Some(Fault::MissingRescale) {
                        let factor = (m - score).exp();
                        l *= factor;
                        a.iter_mut().for_each(|a| *a *= factor);
                    }
                    m = score;
                }
                let weight = (score - m).exp();
                l += weight;
                let swapped = fault == Some(Fault::SwappedValues) && key + BLOCK < problem.kv_len;
                v.read_vector(id.batch, if swapped { key + BLOCK } else { key }, kv_head, &mut vector);
                a.iter_mut().zip(&vector).for_each(|(a, v)| *a += weight * *v as f32);
            }
        }
        let divisor = if fault == Some(Fault::NotNormalised) { 1.0 } else { l };
        let o = a.iter().map(|a| f64::from(dtype.round(if l > 0.0 { a / divisor } else { 0.0 }))).collect();
        let lse = if l > 0.0 { f64::from(m + l.ln()) } else { f64::NEG_INFINITY };
        let lse = if fault == Some(Fault::BinaryLse) { lse * std::f64::consts::LOG2_E } else { lse };
        rows.push(Row { id, o, lse });
    }
    rows
}

fn held<'a>(
    problem: &OracleProblem,
    dtype: Dtype,
    actual: &[Row],
    expected: impl Into<Expected<'a>>,
) -> Comparison {
    compare_rows(problem, dtype, actual, expected, &Context::default())
}

fn causal_case() -> Case {
    let wanted = |case: &Case| {
        case.problem.mask.terms == [OracleTerm::Causal]
            && case.problem.kv_heads > 1
            && case.problem.kv_len == 31
    };
    cases().into_iter().find(wanted).expect("a small causal case with several key heads")
}

/// With the scale of the logits multiplied by `factor`.
fn every_fault_is_refused<E: Element>(factor: f64) {
    let case = causal_case();
    let inputs = case.inputs::<E>();
    let problem = &OracleProblem { scale: case.problem.scale * factor, ..case.problem.clone() };
    let oracle =
        Oracle::new(problem, E::values(&inputs.q), E::values(&inputs.k), E::values(&inputs.v)).unwrap();
    let right = oracle.all_rows();
    let slack = row_slacks(&oracle, &problem.row_ids());
    let right = Expected { rows: &right, slack: &slack };
    let naive = held(problem, Dtype::F32, &naive_f32_rows(&oracle, &problem.row_ids()), right);
    let dense_limit = Limit::dense(E::DTYPE, &naive);
    let sound = held(problem, E::DTYPE, &blockwise(&oracle, E::DTYPE, None), right);
    sound.assert_within(&dense_limit);
    let parallel_limit = Limit::parallel(E::DTYPE, &[&sound]);
    sound.assert_within(&parallel_limit);

    // Where each row has one weight of 1, two faults change nothing.
    let no_fault =
        |fault: &Fault| factor > 1e3 && [Fault::RepeatedBlock, Fault::NotNormalised].contains(fault);
    for fault in FAULTS.into_iter().filter(|fault| !no_fault(fault)) {
        let broken = held(problem, E::DTYPE, &blockwise(&oracle, E::DTYPE, Some(fault)), right);
        for limit in [&dense_limit, &parallel_limit] {
            let failure = broken.within(limit).expect_err(&format!("{fault:?} in {}", E::DTYPE));
            assert_eq!(failure.cause, Cause::Exceeded, "{fault:?}");
        }
        if fault == Fault::BinaryLse {
            assert_eq!(broken.max_abs_error, sound.max_abs_error, "only lse shows this one");
            assert!(broken.max_lse_error > 100.0 * parallel_limit.lse_abs(), "{broken}");
        } else if let Err(indistinct) = discriminates(sound.max_abs_error, broken.max_abs_error, E::DTYPE) {
            panic!("{fault:?} in {}, factor {factor}: {indistinct}", E::DTYPE);
        }
    }
}

#[test]
fn every_seeded_fault_is_refused_in_f32() {
    every_fault_is_refused::<f32>(1.0);
    every_fault_is_refused::<f32>(10.0);
    every_fault_is_refused::<f32>(1e6);
}

#[test]
fn every_seeded_fault_is_refused_in_f16() {
    every_fault_is_refused::<half::f16>(1.0);
    every_fault_is_refused::<half::f16>(10.0);
    every_fault_is_refused::<half::f16>(1e6);
}

#[test]
fn every_seeded_fault_is_refused_in_bf16() {
    every_fault_is_refused::<bf16>(1.0);
    every_fault_is_refused::<bf16>(10.0);
    every_fault_is_refused::<bf16>(1e6);
}

#[test]
fn whole_outputs_are_read_in_their_own_layouts() {
    let case = causal_case();
    let inputs = case.inputs::<f32>();
    let problem = &case.problem;
    let oracle =
        Oracle::new(problem, f32::values(&inputs.q), f32::values(&inputs.k), f32::values(&inputs.v)).unwrap();
    let rows = blockwise(&oracle, Dtype::F32, None);
    let mut o = vec![0.0_f32; problem.q_shape().iter().product()];
    let mut lse = vec![0.0_f32; problem.lse_shape().iter().product()];
    for row in &rows {
        lse[problem.lse_index(row.id)] = row.lse as f32;
        for (dim, value) in row.o.iter().enumerate() {
            o[problem.o_index(row.id) + dim] = *value as f32;
        }
    }
    let right = oracle.all_rows();
    let limit = Limit::parallel(Dtype::F32, &[&held(problem, Dtype::F32, &rows, &right)]);
    compare(problem, f32::values(&o), f32::values(&lse), &right, &Context::default()).assert_within(&limit);

    // The same numbers in the other layout, [batch, seq, heads], are wrong.
    let transposed: Vec<f32> = rows.iter().map(|row| row.lse as f32).collect();
    let wrong = compare(problem, f32::values(&o), f32::values(&transposed), &right, &Context::default());
    assert!(wrong.within(&limit).is_err());
}
