//! Random problems on random plan sets, run on the CPU backend and compared with the oracle.

use crate::common::run_set;
use kyklos::backend::Device;
use kyklos::{Dtype, Mesh, PlacementKind, Split, Strategy, plan_forward};
use kyklos_backend_suite::Prepared;
use kyklos_oracle::inputs::{Case, CaseBias, Poison, TensorId, normal};
use kyklos_oracle::oracle::{OracleMask, OracleProblem, OracleSlice, OracleTerm};
use kyklos_oracle::tolerance::{Cause, Failure};
use kyklos_transport::in_process_group;
use proptest::prelude::*;

/// One or two terms of a mask, whose numbers are drawn as fractions of the sequence.
pub(crate) fn masks() -> impl proptest::strategy::Strategy<Value = Vec<(u8, f64, f64)>> {
    prop::collection::vec((0u8..7, 0.0..1.0, 0.0..1.0), 0..3)
}

pub(crate) fn mask(terms: &[(u8, f64, f64)], batch: usize, seq: usize) -> OracleMask {
    let at = |fraction: f64| (fraction * (seq + 1) as f64) as u64;
    terms.iter().fold(OracleMask::full(), |mask, (kind, a, b)| {
        mask.and(match kind {
            0 => OracleTerm::Causal,
            1 => OracleTerm::Window { left: at(*a) as i64, right: at(*b) as i64 - 1 },
            2 => OracleTerm::Documents(vec![0, at(*a).min(seq as u64), seq as u64]),
            3 => OracleTerm::Valid(vec![at(*a)]),
            4 => {
                // Two columns with a gap, and a diagonal piece that may touch either.
                let (a, b, seq) = (at(*a).min(seq as u64), at(*b).min(seq as u64), seq as u64);
                let slice = |q, k, causal, inverse| OracleSlice { q, k, causal, inverse };
                OracleTerm::Slices(vec![
                    slice(0..200, 0..a.min(b) / 2, false, false),
                    slice(0..200, a.max(b)..seq, false, a > b),
                    slice(a..a + b, a / 2..(a + b).min(seq).max(a / 2), true, b > a),
                ])
            }
            5 => {
                // Another kind for each entry, of those above that have no list.
                let of = |entry: usize| ((*a * 5.0) as u8 + entry as u8) % 5;
                let terms = |entry| [(of(entry), if entry % 2 == 0 { *a } else { *b }, *b)];
                OracleTerm::Entries((0..batch).map(|entry| self::mask(&terms(entry), 1, seq)).collect())
            }
            _ => OracleTerm::Valid(
                (0..batch).map(|entry| if entry % 2 == 0 { at(*a) } else { at(*b) }).collect(),
            ),
        })
    })
}

pub(crate) fn sink(seed: u64, head: usize) -> f64 {
    f64::from(normal(seed, TensorId::Sinks, head as u64)) + 2.0
}

/// A case of `[batch, queries, keys, KV heads, query heads of each, head dim]`, with sinks and an
/// attention bias tensor as `seed` draws them.
pub(crate) fn case(
    [batch, q_len, kv_len, kv_heads, group, head_dim]: [usize; 6],
    terms: &[(u8, f64, f64)],
    q_offset: u64,
    seed: u64,
) -> Case {
    let q_heads = kv_heads * group;
    let problem = OracleProblem {
        batch,
        q_len,
        kv_len,
        q_heads,
        kv_heads,
        head_dim,
        scale: [1.0, 1.0, 1e-30, 1e-3, 1e5, 1e30][(seed / 13 % 6) as usize] / (head_dim as f64).sqrt(),
        softcap: None,
        mask: mask(terms, batch, kv_len),
        q_offset,
        sinks: if seed.is_multiple_of(2) {
            vec![]
        } else {
            (0..q_heads).map(|head| sink(seed, head)).collect()
        },
    };
    let bias = seed.is_multiple_of(3).then_some(CaseBias {
        additive: seed.is_multiple_of(2),
        batch: if seed.is_multiple_of(5) { 1 } else { batch },
        heads: if seed % 7 < 4 { 1 } else { q_heads },
        shared_rows: seed % 4 < 2,
        stand_in: (seed / 7).is_multiple_of(3),
    });
    Case { name: "a random problem", seed, problem, poison: Vec::new(), bias }
}

/// In some cases an element that only the rows that see its key may read.
fn poison(problem: &OracleProblem, seed: u64) -> Vec<Poison> {
    let drawn = |divisor: u64, extent: usize| (seed / divisor % extent as u64) as usize;
    let poison = Poison {
        tensor: [TensorId::K, TensorId::V][drawn(19, 2)],
        batch: drawn(23, problem.batch),
        token: drawn(29, problem.kv_len),
        kv_head: drawn(31, problem.kv_heads),
        dim: drawn(37, problem.head_dim),
        value: [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][drawn(41, 3)],
    };
    if seed % 17 < 5 { vec![poison] } else { Vec::new() }
}

proptest! {
    #![proptest_config(crate::cases(30, 150))]

    #[test]
    fn every_random_world_agrees_with_the_oracle(
        (batch, q_len, seq, kv_heads, group, dim) in (1usize..3, 1usize..150, 1usize..150, 1usize..4, 1usize..4, prop::sample::select(vec![8usize, 24, 64])),
        (ulysses, ring) in (1u32..4, 1u32..4),
        (kind, dtype) in (prop::sample::select(PlacementKind::ALL.to_vec()), prop::sample::select(Dtype::ALL.to_vec())),
        terms in masks(),
        (offset, weights, seed) in (0u64..20, prop::collection::vec(0u8..4, 9), any::<u64>()),
    ) {
        let mut case = case([batch, q_len, seq, kv_heads, group, dim], &terms, offset, seed);
        case.poison = poison(&case.problem, seed);
        let prepared = Prepared::new(case, dtype);
        let mesh = Mesh::new(ulysses.min((kv_heads * group) as u32), ring).unwrap();
        let mut weights: Vec<f64> = weights[..mesh.size() as usize].iter().map(|weight| f64::from(*weight)).collect();
        weights[0] += 1.0;
        let run = |mesh: Mesh, split: Split| {
            // Dense, ring and Ulysses equal unified on their meshes.
            let known = &Strategy::ALL[3..];
            let drawn = known[(seed / 11 % known.len() as u64) as usize];
            let round = if drawn.accepts(mesh).is_ok() { drawn } else { Strategy::Unified };
            let text = (seed / 77 % (seq as u64 + 1)) as u32;
            let replicated = if seed % 4 == 1 { text / 2..text } else { 0..0 };
            let problem = prepared.problem.clone().with_replicated(replicated).unwrap();
            let set = plan_forward(&problem, mesh, kind, &split, round).unwrap();
            run_set(&set, in_process_group(mesh.size()), &prepared.tensors, Device::cpu).0
        };
        let alone = prepared.judge(&run(Mesh::new(1, 1).unwrap(), Split::Even), "cpu alone");
        let together = prepared.judge(&run(mesh, Split::Weights(weights)), "cpu together");
        // A few rows over many keys have a small output. A limit that is large compared with the output proves nothing.
        // The curated cases check such rows.
        let vacuous = |failure: &Failure| matches!(failure.cause, Cause::Vacuous(_));
        let who = format!("{mesh} {kind} {dtype} {}", prepared.problem.mask);
        if let Err(failure) = alone.within(&prepared.dense_limit()) {
            prop_assert!(vacuous(&failure), "{who} alone\n{failure}");
            return Ok(());
        }
        if let Err(failure) = together.within(&prepared.parallel_limit(&alone)) {
            prop_assert!(vacuous(&failure), "{who}\n{failure}");
        }
    }
}
