//! Token lists that no dealer made: any owner of any query, and of any key, in any order. Every
//! plan over them is proved, and agrees with the oracle when it runs.

use std::ops::Range;

use crate::common::run_set;
use crate::plan_properties::Random;
use crate::random_sets::{mask, masks, sink};
use crate::{amount, cases};
use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::plan::{PlanSet, check, plan_hash};
use kyklos::simulate::{Cluster, predict_placed, simulate};
use kyklos::{
    AttentionProblem, Dtype, Mask, Mesh, Placement, PlacementKind, Results, Split, Strategy, TokenRuns,
    WireFormat, placed_meshes_by_bytes, plan_forward, plan_placed,
};
use kyklos_backend_suite::{Prepared, oracle_dtype};
use kyklos_oracle::inputs::{Case, CaseBias};
use kyklos_oracle::oracle::{OracleMask, OracleProblem, OracleTerm};
use kyklos_oracle::tolerance::{Cause, Failure, discriminates};
use kyklos_transport::{Rank, in_process_group};
use proptest::prelude::*;
use proptest::strategy::Strategy as _;
use proptest::test_runner::TestRunner;

/// A placement of `0..total` with owners and order drawn: single tokens or blocks, on all ranks or
/// on a few.
pub(crate) fn any_placement(
    mesh: Mesh,
    total: u32,
    replicated: Range<u32>,
    chance: &mut Random,
) -> Placement {
    let block = [1, 1, 16, 40][chance.below(4) as usize];
    let few = 1 + chance.below(mesh.size());
    let owners: Vec<u32> = (0..few).map(|_| chance.below(mesh.size())).collect();
    let mut lists = vec![Vec::new(); mesh.size() as usize];
    let mut owner = owners[0];
    for (index, token) in (0..total).filter(|token| !replicated.contains(token)).enumerate() {
        if (index as u32).is_multiple_of(block) {
            owner = owners[chance.below(few) as usize];
        }
        lists[owner as usize].push(token);
    }
    for list in &mut lists {
        match chance.below(4) {
            0 => {}
            1 => list.reverse(),
            _ => (1..list.len()).rev().for_each(|i| list.swap(i, chance.below(i as u32 + 1) as usize)),
        }
    }
    let lists = lists.into_iter().map(TokenRuns::from_positions).collect();
    Placement::explicit(mesh, total, replicated, lists).expect("every token has one owner")
}

/// A mesh that `strategy` takes, of at most nine ranks and at most `heads` pieces.
pub(crate) fn any_mesh(strategy: Strategy, heads: u32, chance: &mut Random) -> Mesh {
    let all = (1..4).flat_map(|u| (1..5).map(move |r| Mesh::new(u, r).expect("a small mesh")));
    let fitting: Vec<Mesh> = all
        .filter(|mesh| mesh.size() <= 9 && mesh.ulysses() <= heads && strategy.accepts(*mesh).is_ok())
        .collect();
    fitting[chance.below(fitting.len() as u32) as usize]
}

/// A call with drawn owners, run and compared with the oracle.
#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    shape: (usize, usize, usize, usize, usize, usize),
    dtype: Dtype,
    terms: Vec<(u8, f64, f64)>,
    /// The masks of batch entries; empty: none but the terms for all.
    entries: Vec<Vec<(u8, f64, f64)>>,
    offset: u64,
    /// As many queries as keys: joint attention.
    joint: bool,
    seed: u64,
}

/// Calls of `batch` entries. If there is more than one, `by_entry` gives each a mask of its own.
pub(crate) fn drawn(batch: Range<usize>, by_entry: bool) -> impl proptest::strategy::Strategy<Value = Drawn> {
    let dim = prop::sample::select(vec![8usize, 24, 64]);
    let entries = prop::collection::vec(masks(), if by_entry { batch.end } else { 0 });
    let shape = (batch, 1usize..150, 1usize..150, 1usize..4, 1usize..4, dim);
    let dtype = prop::sample::select(Dtype::ALL.to_vec());
    (shape, dtype, masks(), entries, 0u64..20, any::<bool>(), any::<u64>()).prop_map(
        |(shape, dtype, terms, entries, offset, joint, seed)| Drawn {
            shape,
            dtype,
            terms,
            entries,
            offset,
            joint,
            seed,
        },
    )
}

pub(crate) fn agrees(strategy: Strategy, drawn: Drawn) -> Result<(), TestCaseError> {
    let Drawn { shape, dtype, terms, entries, offset, joint, seed } = drawn;
    let (batch, q_len, kv_len, kv_heads, group, head_dim) = shape;
    let mut all = mask(&terms, batch, kv_len);
    if !entries.is_empty() {
        let own = entries[..batch].iter().map(|terms| mask(terms, 1, kv_len));
        all = all.and(OracleTerm::Entries(own.collect()));
    }
    let mut chance = Random(seed);
    let (q_len, offset) = if joint { (kv_len, 0) } else { (q_len, offset) };
    // Two pieces of a shard need two heads.
    let q_heads = if kv_heads * group == 1 { 2 } else { kv_heads * group };
    let problem = OracleProblem {
        batch,
        q_len,
        kv_len,
        q_heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        softcap: None,
        mask: all,
        q_offset: offset,
        sinks: if seed % 2 == 0 { vec![] } else { (0..q_heads).map(|head| sink(seed, head)).collect() },
    };
    let bias = (chance.below(3) == 0).then(|| CaseBias {
        additive: chance.below(2) == 0,
        batch: [1, batch][chance.below(2) as usize],
        heads: [1, q_heads][chance.below(2) as usize],
        shared_rows: chance.below(2) == 0,
        stand_in: false,
    });
    let case = Case { name: "drawn owners", seed, problem, poison: Vec::new(), bias };
    let prepared = Prepared::new(case, dtype);
    let mesh = any_mesh(strategy, q_heads as u32, &mut chance);
    let replicated = match chance.below(3) {
        0 => {
            let (a, b) = (chance.below(kv_len as u32 + 1), chance.below(kv_len as u32 + 1));
            a.min(b)..a.max(b)
        }
        _ => 0..0,
    };
    let problem = prepared.problem.clone().with_replicated(replicated).unwrap();
    let results = match chance.below(4) {
        0 => Results::All,
        1 => Results::One(Rank(chance.below(mesh.size()))),
        _ => Results::Owner,
    };
    let problem = problem.with_results(results).unwrap();
    let q = any_placement(mesh, problem.q_len, 0..0, &mut chance);
    let kv = any_placement(mesh, problem.kv_len, problem.replicated.clone(), &mut chance);
    let priced = placed_meshes_by_bytes(&problem, &q, &kv, Some(strategy)).unwrap();
    let who = format!("{strategy} {mesh} {dtype} {}\nq {:?}\nkv {:?}", problem.mask, q.ranks(), kv.ranks());
    let set = plan_placed(&problem, mesh, q, kv, strategy).unwrap();
    let checks = check(&set).map_err(|error| TestCaseError::fail(format!("{who}\n{error}")))?;
    let sent: u64 = checks.iter().map(|check| check.bytes_sent).sum();
    prop_assert!(priced.contains(&(mesh, sent)), "{} {:?}: {} bytes, not {:?}", who, results, sent, priced);
    let (whole, outputs) = run_set(&set, in_process_group(mesh.size()), &prepared.tensors, Device::cpu);
    for (output, planned) in outputs.iter().zip(checks) {
        prop_assert_eq!(output.report.bytes_sent, planned.bytes_sent, "{}", who);
    }
    if results == Results::All {
        prop_assert!(outputs.iter().all(|output| output.o == outputs[0].o && output.lse == outputs[0].lse));
    }
    let dense = {
        let one = Mesh::new(1, 1).unwrap();
        plan_forward(&prepared.problem, one, PlacementKind::Contiguous, &Split::Even, Strategy::Dense)
            .unwrap()
    };
    let alone = run_set(&dense, in_process_group(1), &prepared.tensors, Device::cpu).0;
    let alone = prepared.judge(&alone, "cpu alone");
    // As for plan sets that are dealt: a limit that is large compared with the output proves nothing.
    let vacuous = |failure: &Failure| matches!(failure.cause, Cause::Vacuous(_));
    if let Err(failure) = alone.within(&prepared.dense_limit()) {
        prop_assert!(vacuous(&failure), "{who} alone\n{failure}");
        return Ok(());
    }
    if let Err(failure) = prepared.judge(&whole, "cpu together").within(&prepared.parallel_limit(&alone)) {
        prop_assert!(vacuous(&failure), "{who}\n{failure}");
    }
    Ok(())
}

#[test]
fn any_owners_in_any_order_agree_with_the_oracle_in_every_strategy() {
    for strategy in Strategy::ALL {
        let mut runner = TestRunner::new(cases(6, 60));
        runner
            .run(&drawn(1..3, false), |drawn| agrees(strategy, drawn))
            .unwrap_or_else(|error| panic!("{strategy}: {error}"));
    }
}

/// A causal case of 150 tokens on four ranks, with owners drawn from one seed.
fn control() -> (Prepared, PlanSet) {
    let problem = OracleProblem {
        batch: 1,
        q_len: 150,
        kv_len: 150,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 24,
        scale: 1.0,
        softcap: None,
        mask: OracleMask::causal(),
        q_offset: 0,
        sinks: vec![],
    };
    let case = Case { name: "swapped tokens", seed: 3, problem, poison: Vec::new(), bias: None };
    let prepared = Prepared::new(case, Dtype::F32);
    let (mesh, mut chance) = (Mesh::new(2, 2).unwrap(), Random(11));
    let q = any_placement(mesh, 150, 0..0, &mut chance);
    let kv = any_placement(mesh, 150, 0..0, &mut chance);
    let set = plan_placed(&prepared.problem, mesh, q, kv, Strategy::Unified).unwrap();
    (prepared, set)
}

/// The planted bug: two tokens change places in the list of a rank, but not in its data. The other
/// way round it is the same: the lists are right, and the data of two tokens have changed places.
#[test]
fn a_token_swapped_against_the_data_is_caught() {
    let (prepared, set) = control();
    let run = |tensors: &Tensors| run_set(&set, in_process_group(4), tensors, Device::cpu).0;
    let right = prepared.judge(&run(&prepared.tensors), "no bug");
    let limit = prepared.parallel_limit(&right);
    right.within(&limit).unwrap();
    let swapped = |bytes: &bytes::Bytes, heads: usize| -> bytes::Bytes {
        let row = heads * 24 * 4;
        let mut bytes = bytes.to_vec();
        for at in 0..row {
            bytes.swap(40 * row + at, 90 * row + at);
        }
        bytes.into()
    };
    let Tensors { q, k, v, bias } = prepared.tensors.clone();
    let keys = Tensors { q: q.clone(), k: swapped(&k, 2), v: swapped(&v, 2), bias: bias.clone() };
    let queries = Tensors { q: swapped(&q, 4), k, v, bias };
    for (bug, tensors) in [("two keys swapped", keys), ("two queries swapped", queries)] {
        let wrong = prepared.judge(&run(&tensors), bug);
        assert!(wrong.within(&limit).is_err(), "{bug} passes: {wrong}");
        discriminates(right.max_abs_error, wrong.max_abs_error, oracle_dtype(Dtype::F32))
            .unwrap_or_else(|error| panic!("{bug}: {error}"));
    }
}

#[test]
fn a_swapped_token_is_another_plan() {
    let (_, set) = control();
    let hash = |set: &PlanSet| plan_hash(set, &[]);
    let PlanSet { problem, mesh, q_placement, kv_placement, strategy, .. } = set.clone();
    let made =
        |q: &Placement, kv: &Placement| plan_placed(&problem, mesh, q.clone(), kv.clone(), strategy).unwrap();
    assert_eq!(hash(&set), hash(&made(&q_placement, &kv_placement)));
    let rank = Rank((0..4).max_by_key(|rank| kv_placement.of_rank(Rank(*rank)).len()).unwrap());
    let with_swap = |placement: &Placement| {
        let mut lists = placement.ranks().to_vec();
        let mut tokens: Vec<u32> = lists[rank.0 as usize].iter().collect();
        tokens.swap(0, 1);
        lists[rank.0 as usize] = TokenRuns::from_positions(tokens);
        Placement::explicit(mesh, 150, 0..0, lists).unwrap()
    };
    let (q, kv) =
        (made(&with_swap(&q_placement), &kv_placement), made(&q_placement, &with_swap(&kv_placement)));
    assert!(hash(&set) != hash(&q) && hash(&set) != hash(&kv) && hash(&q) != hash(&kv));
}

#[test]
fn whole_tiles_on_any_rank_in_any_order_give_the_same_bytes_in_a_fixed_order() {
    let problem = OracleProblem {
        batch: 1,
        q_len: 1042,
        kv_len: 1042,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 8,
        scale: 0.3,
        softcap: None,
        mask: OracleMask::causal(),
        q_offset: 0,
        sinks: vec![],
    };
    let case = Case { name: "tiles in any order", seed: 5, problem, poison: Vec::new(), bias: None };
    let prepared = Prepared::new(case, Dtype::F32);
    let fixed = prepared.problem.clone().with_fixed_order(true).unwrap();
    let run =
        |set: &PlanSet| run_set(set, in_process_group(set.mesh.size()), &prepared.tensors, Device::cpu).0;
    let one = Mesh::new(1, 1).unwrap();
    let dense =
        run(&plan_forward(&fixed, one, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap());
    let mut chance = Random(23);
    let strategies =
        [Strategy::Ring, Strategy::Bidirectional, Strategy::Line, Strategy::Gather, Strategy::Relay];
    for strategy in strategies.into_iter().cycle().take(amount(5, 40)) {
        let mesh = any_mesh(strategy, 4, &mut chance);
        // Tiles 0 to 4, of which the last one is short, on shards in any order; the ranks of a shard take
        // turns.
        let mut lists = vec![Vec::new(); mesh.size() as usize];
        let mut tiles: Vec<u32> = (0..5).collect();
        (1..5).rev().for_each(|i| tiles.swap(i, chance.below(i as u32 + 1) as usize));
        for tile in tiles {
            let first = mesh.rank(chance.below(mesh.ring()), 0).0;
            lists[first as usize].extend(tile * 256..(tile * 256 + 256).min(1042));
        }
        let lists: Vec<TokenRuns> = lists.into_iter().map(TokenRuns::from_positions).collect();
        let kv = Placement::explicit(mesh, 1042, 0..0, lists).unwrap();
        let q = any_placement(mesh, 1042, 0..0, &mut chance);
        let whole = run(&plan_placed(&fixed, mesh, q.clone(), kv, strategy).unwrap());
        assert_eq!((whole.o, whole.lse), (dense.o.clone(), dense.lse.clone()), "{strategy} {mesh}");
        // One key off the grid, and nothing runs.
        let off = any_placement(mesh, 1042, 0..0, &mut Random(1));
        if mesh.ring() > 1 {
            let error = plan_placed(&fixed, mesh, q, off, strategy).unwrap_err();
            assert!(error.is_request() && error.to_string().contains("a fixed order"), "{error}");
        }
    }
}

#[test]
fn a_rounded_wire_takes_any_lists() {
    let problem = AttentionProblem::new([1, 200, 4, 2, 16], Dtype::F32, Mask::causal()).unwrap();
    let mut chance = Random(77);
    for wire in [WireFormat::F16, WireFormat::Int8] {
        let problem = problem.clone().with_wire(wire).unwrap();
        for strategy in Strategy::ALL {
            let mesh = any_mesh(strategy, 4, &mut chance);
            let (q, kv) =
                (any_placement(mesh, 200, 0..0, &mut chance), any_placement(mesh, 200, 0..0, &mut chance));
            let sends_keys = mesh.ring() > 1 && !strategy.moves_queries();
            match plan_placed(&problem, mesh, q, kv, strategy) {
                Ok(set) => assert!(sends_keys && check(&set).is_ok(), "{strategy} {mesh}"),
                Err(error) => assert!(!sends_keys && error.is_request(), "{error}"),
            }
        }
    }
}

#[test]
fn given_lists_are_priced_by_a_walk_and_their_bytes_are_those_of_the_plans() {
    let text = r#"
        name = "test"
        between_hosts = "wire"
        [device.d]
        memory = "unified"
        copy_gb_per_s = 100
        [[device.d.attention]]
        dtype = "f32"
        head_dim = 8
        gflop_per_s = 100
        [link.wire]
        gb_per_s = 1
        latency_us = 5
        [[host]]
        name = "h"
        count = 512
        devices = [{ kind = "d" }]
        "#;
    let cluster = Cluster::from_toml(text).unwrap();
    let mut chance = Random(9);
    for strategy in Strategy::ALL {
        let problem = AttentionProblem::new([1, 90, 4, 2, 8], Dtype::F32, Mask::causal()).unwrap();
        let mesh = any_mesh(strategy, 4, &mut chance);
        let (q, kv) =
            (any_placement(mesh, 90, 0..0, &mut chance), any_placement(mesh, 90, 0..0, &mut chance));
        let set = plan_placed(&problem, mesh, q.clone(), kv.clone(), strategy).unwrap();
        let planned: u64 = check(&set).unwrap().iter().map(|check| check.bytes_sent).sum();
        let predicted = predict_placed(&problem, mesh, q.clone(), kv.clone(), strategy, &cluster).unwrap();
        assert_eq!(predicted, simulate(&set, &cluster).unwrap(), "{strategy}");
        assert_eq!(predicted.ranks.iter().map(|rank| rank.bytes_sent).sum::<u64>(), planned, "{strategy}");
        // The same lists on every mesh of as many ranks.
        let priced = placed_meshes_by_bytes(&problem, &q, &kv, Some(strategy)).unwrap();
        assert!(
            priced.iter().any(|(other, bytes)| (*other, *bytes) == (mesh, planned)),
            "{strategy} {priced:?}"
        );
        for (other, bytes) in priced {
            let (q, kv) = (q.on_mesh(other).unwrap(), kv.on_mesh(other).unwrap());
            let set = plan_placed(&problem, other, q, kv, strategy).unwrap();
            let sent: u64 = check(&set).unwrap().iter().map(|check| check.bytes_sent).sum();
            assert_eq!(sent, bytes, "{strategy} {other}");
        }
    }
    // A ring so long that an even one is extrapolated: given lists are not, and beyond a limit they are
    // refused.
    let problem = AttentionProblem::new([1, 1024, 1, 1, 8], Dtype::F32, Mask::full()).unwrap();
    let predicted = |ring: u32| {
        let mesh = Mesh::new(1, ring).unwrap();
        let lists = |_| {
            let lists = (0..ring).map(|r| TokenRuns::from_positions((0..1024).filter(|t| t % ring == r)));
            Placement::explicit(mesh, 1024, 0..0, lists.collect()).unwrap()
        };
        let [q, kv] = [0, 1].map(lists);
        predict_placed(&problem, mesh, q, kv, Strategy::Ring, &cluster)
    };
    assert!(!predicted(160).unwrap().extrapolated);
    assert!(predicted(512).unwrap_err().is_request());
}
