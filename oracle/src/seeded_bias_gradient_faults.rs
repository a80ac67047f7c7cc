//! The gradient of a bias that all batch entries and query heads share, as a kernel computes it,
//! with typical bugs of such code. The limit must accept the correct version and refuse each bug.

use half::{bf16, f16};

use crate::inputs::{TensorId, fill};
use crate::oracle::{BiasValues, Element, Oracle, OracleBias, OracleProblem, Values};
use crate::tolerance::{GradientComparison, GradientLimit, naive_f32_gradients};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// A query head replaces what the one before has added.
    LastHead,
    /// The same of batch entries.
    LastEntry,
    /// The last query head adds nothing.
    LostHead,
    /// The slope of the softcap counts, as in dS.
    Slope,
    /// The scale counts, as in dQ.
    Scale,
    /// δ is 0.
    NoDelta,
    /// A tile of keys adds to the next one.
    NextTile,
}

const FAULTS: [Fault; 7] = [
    Fault::LastHead,
    Fault::LastEntry,
    Fault::LostHead,
    Fault::Slope,
    Fault::Scale,
    Fault::NoDelta,
    Fault::NextTile,
];

const TOKENS: usize = 48;
const TILE: usize = 16;

fn problem() -> OracleProblem {
    OracleProblem {
        batch: 2,
        q_len: TOKENS,
        kv_len: TOKENS,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        scale: 0.25,
        // Scores reach several times the cap.
        softcap: Some(0.7),
        mask: "causal".parse().unwrap(),
        q_offset: 0,
        sinks: Vec::new(),
    }
}

/// `[row][key]`, sums in f32 in the order of batch entries and heads.
fn d_bias(oracle: &Oracle<'_>, d_o: Values<'_>, fault: Option<Fault>) -> Vec<f32> {
    let problem = oracle.problem();
    let dim = problem.head_dim;
    let [q, k, v] = oracle.tensors().map(|tensor| tensor.values());
    let vector = |values: Values<'_>, at: usize| -> Vec<f32> {
        let mut wide = vec![0.0; dim];
        values.read_into(at, &mut wide);
        wide.iter().map(|value| *value as f32).collect()
    };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let is = |of: Fault| fault == Some(of);
    let cap = problem.softcap.expect("there is a softcap") as f32;
    let mut sums = vec![0.0_f32; TOKENS * TOKENS];
    for id in problem.row_ids() {
        if is(Fault::LostHead) && id.head + 1 == problem.q_heads {
            continue;
        }
        let at = problem.o_index(id);
        let (query, grad) = (vector(q, at), vector(d_o, at));
        let (o, lse) = oracle.row(id.batch, id.row, id.head);
        let o: Vec<f32> = o.iter().map(|o| *o as f32).collect();
        let delta = if is(Fault::NoDelta) { 0.0 } else { dot(&grad, &o) };
        for key in 0..TOKENS {
            let Some(term) = oracle.term(id, key) else { continue };
            let of_key =
                ((id.batch * TOKENS + key) * problem.kv_heads + problem.kv_head(id.head)) * problem.head_dim;
            let c = (dot(&query, &vector(k, of_key)) * problem.scale as f32 / cap).tanh();
            let p = (cap * c + term as f32 - lse as f32).exp();
            let slope = if is(Fault::Slope) { 1.0 - c * c } else { 1.0 };
            let scale = if is(Fault::Scale) { problem.scale as f32 } else { 1.0 };
            let into = if is(Fault::NextTile) { (key + TILE) % TOKENS } else { key };
            let sum = &mut sums[id.row * TOKENS + into];
            let replaces = match fault {
                Some(Fault::LastHead) => true,
                Some(Fault::LastEntry) => id.head == 0,
                _ => false,
            };
            let before = if replaces { 0.0 } else { *sum };
            *sum = before + p * (dot(&grad, &vector(v, of_key)) - delta) * slope * scale;
        }
    }
    sums
}

fn every_fault_is_refused<E: Element>() {
    let problem = problem();
    let made = |tensor, shape: [usize; 4]| {
        let mut values = vec![E::from_f32(0.0); shape.iter().product()];
        fill(12, tensor, 0..values.len() as u64, &mut values);
        values
    };
    let (q, k) = (made(TensorId::Q, problem.q_shape()), made(TensorId::K, problem.kv_shape()));
    let (v, d_o) = (made(TensorId::V, problem.kv_shape()), made(TensorId::OutputGradient, problem.q_shape()));
    let bias = made(TensorId::Bias, [1, 1, TOKENS, TOKENS]);
    let bias =
        OracleBias { values: BiasValues::Bias(E::values(&bias)), batch: 1, heads: 1, queries: problem.q_len };
    let oracle = Oracle::new(&problem, E::values(&q), E::values(&k), E::values(&v)).unwrap();
    let oracle = oracle.with_bias(bias).unwrap();
    let d_o = E::values(&d_o);
    let right = oracle.gradients(d_o, None).unwrap();
    let naive = naive_f32_gradients(&oracle, E::DTYPE, d_o, None).unwrap();
    let compare = |found: &(dyn Fn(usize) -> f64 + Sync)| {
        let values = Values::Read { dtype: crate::oracle::Dtype::F32, len: right.d_bias.len(), read: found };
        GradientComparison::new("d_bias", values, &right.d_bias, naive.scales[4], &naive.slack.d_bias)
    };
    let limit = GradientLimit::dense(E::DTYPE, &compare(&|index| naive.gradients.d_bias[index]));
    let judged = |fault| {
        let found = d_bias(&oracle, d_o, fault);
        compare(&|index| f64::from(found[index]))
    };
    judged(None).within(&limit).unwrap_or_else(|fault| panic!("sound, {}: {fault}", E::DTYPE));
    for fault in FAULTS {
        let broken = judged(Some(fault));
        let refused = broken.within(&limit).is_err() && broken.max_abs_error > 5.0 * limit.abs();
        assert!(refused, "{fault:?} in {}: {broken:?}", E::DTYPE);
    }
}

#[test]
fn every_seeded_fault_of_the_gradient_of_a_bias_is_refused() {
    every_fault_is_refused::<f32>();
    every_fault_is_refused::<f16>();
    every_fault_is_refused::<bf16>();
}
