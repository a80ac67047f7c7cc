//! Gradients of a ring of three ranks, as a product computes them, with typical bugs of such code.
//! The limits must accept the correct version and refuse each bug.

use half::{bf16, f16};

use crate::inputs::{TensorId, fill, normal};
use crate::oracle::{
    BiasValues, Dtype, Element, Gradients, Oracle, OracleBias, OracleProblem, RowId, Values,
};
use crate::tolerance::{GradientComparison, GradientLimit, NaiveGradients, naive_f32_gradients};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Every hop attends to the keys of the first hop.
    StaleKeys,
    /// P is computed with the log-sum-exp of the block, not of all keys.
    BlockLse,
    /// The log-sum-exp lacks the sink.
    LseWithoutSink,
    /// δ is 0.
    NoDelta,
    /// δ is made from the output of the block.
    BlockDelta,
    /// The gradient of the log-sum-exp is dropped.
    NoLseGradient,
    /// The slope of the softcap is missing.
    NoSlope,
    /// The scale is missing in dQ and dK.
    NoScale,
    /// Only the first query head of a group adds to dK and dV.
    OneHeadOfGroup,
    /// Each head reads the next key/value head.
    WrongKeyHead,
    /// The contribution of one rank to the gradients of another is lost.
    LostContribution,
    /// A rank adds its own block twice.
    OwnBlockTwice,
    /// Contributions go to the owner's neighbour.
    WrongHome,
    /// All heads use the bias of head 0.
    BiasOfOneHead,
    /// The sinks of only one rank's rows are counted.
    SinksOfOneRank,
}

const FAULTS: [Fault; 15] = [
    Fault::StaleKeys,
    Fault::BlockLse,
    Fault::LseWithoutSink,
    Fault::NoDelta,
    Fault::BlockDelta,
    Fault::NoLseGradient,
    Fault::NoSlope,
    Fault::NoScale,
    Fault::OneHeadOfGroup,
    Fault::WrongKeyHead,
    Fault::LostContribution,
    Fault::OwnBlockTwice,
    Fault::WrongHome,
    Fault::BiasOfOneHead,
    Fault::SinksOfOneRank,
];

const RANKS: usize = 3;
const SHARD: usize = 32;
const SEED: u64 = 11;

fn problem() -> OracleProblem {
    OracleProblem {
        batch: 1,
        q_len: RANKS * SHARD,
        kv_len: RANKS * SHARD,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        scale: 0.25,
        // Scores reach several times the cap.
        softcap: Some(0.7),
        mask: "full".parse().unwrap(),
        q_offset: 0,
        // Of the size of the log-sum-exps.
        sinks: vec![4.0, 5.0, 3.5, 4.5],
    }
}

/// One pair of a row and a key.
struct Pair {
    x: f32,
    slope: f32,
    grad_dot_v: f32,
}

/// The gradients by blocks of keys, sums in f32, rounded to `dtype` at the end.
fn ring(oracle: &Oracle<'_>, dtype: Dtype, [d_o, d_lse]: [Values<'_>; 2], fault: Option<Fault>) -> Gradients {
    let problem = oracle.problem();
    let (dim, group) = (problem.head_dim, problem.q_heads / problem.kv_heads);
    let [q, k, v] = oracle.tensors().map(|tensor| tensor.values());
    let vector = |values: Values<'_>, at: usize| -> Vec<f32> {
        let mut wide = vec![0.0; dim];
        values.read_into(at, &mut wide);
        wide.iter().map(|value| *value as f32).collect()
    };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let is = |of: Fault| fault == Some(of);
    let kv_at = |key: usize, head: usize| (key * problem.kv_heads + head) * dim;
    let mut dq = vec![0.0_f32; problem.q_shape().iter().product()];
    let mut dk = vec![0.0_f32; problem.kv_shape().iter().product()];
    let mut dv = dk.clone();
    let mut d_sinks = vec![0.0_f32; problem.q_heads];

    for id in problem.row_ids() {
        let RowId { row, head, .. } = id;
        let rank = row / SHARD;
        let kv_head = (problem.kv_head(head) + usize::from(is(Fault::WrongKeyHead))) % problem.kv_heads;
        let row_at = problem.o_index(id);
        let (query, grad) = (vector(q, row_at), vector(d_o, row_at));
        let pair = |key: usize| {
            let bias_of = RowId { head: if is(Fault::BiasOfOneHead) { 0 } else { head }, ..id };
            let term = oracle.term(bias_of, key).expect("the mask is full") as f32;
            let cap = problem.softcap.expect("there is a softcap") as f32;
            let c = (dot(&query, &vector(k, kv_at(key, kv_head))) * problem.scale as f32 / cap).tanh();
            let slope = if is(Fault::NoSlope) { 1.0 } else { 1.0 - c * c };
            Pair { x: cap * c + term, slope, grad_dot_v: dot(&grad, &vector(v, kv_at(key, kv_head))) }
        };
        let sum_exp = |keys: std::ops::Range<usize>| keys.map(|key| pair(key).x.exp()).sum::<f32>();
        let sink = problem.sinks[head] as f32;
        let with_sink = if is(Fault::LseWithoutSink) { 0.0 } else { sink.exp() };
        let lse = (sum_exp(0..problem.kv_len) + with_sink).ln();
        let (o, _) = oracle.row(0, row, head);
        let o: Vec<f32> = o.iter().map(|o| dtype.round(*o as f32)).collect();
        let d_lse = if is(Fault::NoLseGradient) { 0.0 } else { d_lse.get(problem.lse_index(id)) as f32 };
        let delta = if is(Fault::NoDelta) { 0.0 } else { dot(&grad, &o) - d_lse };
        if !is(Fault::SinksOfOneRank) || rank == 0 {
            d_sinks[head] -= (sink - lse).exp() * delta;
        }
        for hop in 0..RANKS {
            let owner = (rank + RANKS - hop) % RANKS;
            let keys = owner * SHARD..(owner + 1) * SHARD;
            let lse = if is(Fault::BlockLse) { sum_exp(keys.clone()).ln() } else { lse };
            let delta = if is(Fault::BlockDelta) {
                keys.clone().map(&pair).map(|pair| (pair.x - lse).exp() * pair.grad_dot_v).sum()
            } else {
                delta
            };
            let times = match fault {
                Some(Fault::LostContribution) if (rank, owner) == (2, 1) => 0.0,
                Some(Fault::OwnBlockTwice) if hop == 0 => 2.0,
                _ => 1.0,
            };
            for key in keys {
                let read = if is(Fault::StaleKeys) { rank * SHARD + key % SHARD } else { key };
                let home = match fault {
                    Some(Fault::WrongHome) if hop > 0 => (key + SHARD) % problem.kv_len,
                    _ => key,
                };
                let Pair { x, slope, grad_dot_v } = pair(read);
                let p = (x - lse).exp();
                let scale = if is(Fault::NoScale) { 1.0 } else { problem.scale as f32 };
                let ds = p * (grad_dot_v - delta) * slope * scale;
                let (ks, at) = (vector(k, kv_at(read, kv_head)), kv_at(home, kv_head));
                let adds = !is(Fault::OneHeadOfGroup) || head % group == 0;
                for d in 0..dim {
                    dq[row_at + d] += ds * ks[d];
                    if adds {
                        dk[at + d] += times * ds * query[d];
                        dv[at + d] += times * p * grad[d];
                    }
                }
            }
        }
    }
    let stored = |values: Vec<f32>| values.into_iter().map(|value| f64::from(dtype.round(value))).collect();
    let d_sinks = d_sinks.into_iter().map(f64::from).collect();
    Gradients { dq: stored(dq), dk: stored(dk), dv: stored(dv), d_sinks, d_bias: Vec::new() }
}

/// dQ, dK, dV and dSinks.
fn compare(actual: &Gradients, right: &Gradients, plain: &NaiveGradients) -> Vec<GradientComparison> {
    let NaiveGradients { scales, slack, .. } = plain;
    let compared = |name, actual: &[f64], right: &[f64], scale, slack: &[f64]| {
        let read = |index: usize| actual[index];
        let values = Values::Read { dtype: Dtype::F32, len: actual.len(), read: &read };
        GradientComparison::new(name, values, right, scale, slack)
    };
    vec![
        compared("dq", &actual.dq, &right.dq, scales[0], &slack.dq),
        compared("dk", &actual.dk, &right.dk, scales[1], &slack.dk),
        compared("dv", &actual.dv, &right.dv, scales[2], &slack.dv),
        compared("d_sinks", &actual.d_sinks, &right.d_sinks, scales[3], &slack.d_sinks),
    ]
}

fn every_fault_is_refused<E: Element>() {
    let problem = problem();
    let made = |tensor, shape: [usize; 4]| {
        let mut values = vec![E::from_f32(0.0); shape.iter().product()];
        fill(SEED, tensor, 0..values.len() as u64, &mut values);
        values
    };
    let (q, k) = (made(TensorId::Q, problem.q_shape()), made(TensorId::K, problem.kv_shape()));
    let (v, d_o) = (made(TensorId::V, problem.kv_shape()), made(TensorId::OutputGradient, problem.q_shape()));
    let d_lse: Vec<f32> = (0..problem.q_len * problem.q_heads)
        .map(|index| normal(SEED + 1, TensorId::OutputGradient, index as u64))
        .collect();
    let bias = made(TensorId::Bias, [1, problem.q_heads, problem.q_len, problem.kv_len]);
    let bias = OracleBias {
        values: BiasValues::Bias(E::values(&bias)),
        batch: 1,
        heads: problem.q_heads,
        queries: problem.q_len,
    };
    let oracle = Oracle::new(&problem, E::values(&q), E::values(&k), E::values(&v)).unwrap();
    let oracle = oracle.with_bias(bias).unwrap();
    let given = [E::values(&d_o), Values::F32(&d_lse)];
    let right = oracle.gradients(given[0], Some(given[1])).unwrap();
    let naive = naive_f32_gradients(&oracle, E::DTYPE, given[0], Some(given[1])).unwrap();
    let dense: Vec<_> = compare(&naive.gradients, &right, &naive)
        .iter()
        .map(|naive| GradientLimit::dense(E::DTYPE, naive))
        .collect();
    let sound = compare(&ring(&oracle, E::DTYPE, given, None), &right, &naive);
    let parallel: Vec<_> = sound.iter().map(|sound| GradientLimit::parallel(E::DTYPE, sound)).collect();
    for limits in [&dense, &parallel] {
        for (gradient, limit) in sound.iter().zip(limits) {
            gradient.within(limit).unwrap_or_else(|fault| panic!("sound, {}: {fault}", E::DTYPE));
        }
    }
    for fault in FAULTS {
        let broken = compare(&ring(&oracle, E::DTYPE, given, Some(fault)), &right, &naive);
        for limits in [&dense, &parallel] {
            let refused = broken.iter().zip(limits).any(|(gradient, limit)| {
                gradient.within(limit).is_err() && gradient.max_abs_error > 5.0 * limit.abs()
            });
            assert!(refused, "{fault:?} in {}: {broken:?}", E::DTYPE);
        }
    }
}

#[test]
fn every_seeded_gradient_fault_is_refused_in_f32() {
    every_fault_is_refused::<f32>();
}

#[test]
fn every_seeded_gradient_fault_is_refused_in_f16() {
    every_fault_is_refused::<f16>();
}

#[test]
fn every_seeded_gradient_fault_is_refused_in_bf16() {
    every_fault_is_refused::<bf16>();
}
