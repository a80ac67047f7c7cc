//! Sums in a fixed order over every strategy and mask, on the CPU backend. The shared suite runs
//! one of these cases on every backend.

use kyklos::backend::Device;
use kyklos::plan::{Slice, Step};
use kyklos::{
    AttentionProblem, Dtype, Mask, Mesh, PlacementKind, PlanError, Remedy, Split, Strategy, plan_forward,
};
use kyklos_backend_suite::fixed_order::{Shared, UNEVEN, case, fixed};
use kyklos_backend_suite::{Prepared, dense_set, run_alone, run_together};
use kyklos_oracle::inputs::{Case, CaseBias};
use kyklos_oracle::oracle::{OracleMask, OracleSlice, OracleTerm};

/// Even shards of 1024 tokens.
const EVEN: &[Shared] = &[
    ((1, 2), &[], PlacementKind::Zigzag, Strategy::Ring),
    ((2, 2), &[], PlacementKind::Zigzag, Strategy::TwoWay),
    ((4, 1), &[], PlacementKind::Contiguous, Strategy::Ulysses),
    ((1, 4), &[], PlacementKind::Contiguous, Strategy::Line),
    ((2, 2), &[], PlacementKind::Contiguous, Strategy::Unified),
    // Tiles that are far apart in the sequence arrive at one rank in the same message.
    ((1, 3), &[0, 512, 512], PlacementKind::Zigzag, Strategy::Bidirectional),
    // Shards of two tiles: half a shard is a tile.
    ((4, 2), &[], PlacementKind::Contiguous, Strategy::Relay),
];

/// Shards of 1024 tokens, whose quarters are tiles.
const QUARTERS: &[Shared] = &[
    ((2, 2), &[], PlacementKind::Zigzag, Strategy::Pipelined),
    ((1, 2), &[], PlacementKind::Contiguous, Strategy::Pipelined),
];

/// A shard of one tile cannot be divided in halves. The other shard has three tiles and a partial
/// one, in pieces that do not end at tiles.
const PIECES: &[Shared] =
    &[((4, 2), &[256, 0, 0, 0, 300, 300, 132, 100], PlacementKind::Contiguous, Strategy::Relay)];

fn check(case: Case, sets: &[Shared]) {
    // The order of sums does not depend on the dtype: one case in f16 is enough.
    let dtypes = if case.name == "causal" { &[Dtype::F32, Dtype::F16][..] } else { &[Dtype::F32] };
    for dtype in dtypes {
        let prepared = Prepared::new(case.clone(), *dtype);
        pollster::block_on(fixed(&Device::cpu(), &prepared, sets, "cpu"));
    }
}

fn masks(tokens: u64) -> [(&'static str, OracleMask); 6] {
    let slice = |q, k, causal| OracleSlice { q, k, causal, inverse: false };
    let slices = OracleTerm::Slices(vec![
        slice(0..500, 0..200, false),
        slice(100..900, 300..800, true),
        slice(600..1024, 0..130, false),
        slice(1000..tokens, 800..1000, false),
    ]);
    [
        ("full", OracleMask::full()),
        ("causal", OracleMask::causal()),
        ("a narrow window", OracleMask::full().and(OracleTerm::Window { left: 300, right: 40 })),
        ("documents", OracleMask::causal().and(OracleTerm::Documents(vec![0, 130, 257, tokens]))),
        ("slices", OracleMask::full().and(slices.clone())),
        (MASKS_OF_ENTRIES, {
            let documents = OracleTerm::Documents(vec![0, 130, 257, tokens]);
            let entries = [slices, OracleTerm::Causal, documents].map(|term| OracleMask::full().and(term));
            OracleMask::full().and(OracleTerm::Entries(entries.to_vec()))
        }),
    ]
}

const MASKS_OF_ENTRIES: &str = "masks of entries";

fn batch_of(name: &str) -> usize {
    if name == MASKS_OF_ENTRIES { 3 } else { 1 }
}

#[test]
fn every_strategy_has_a_case_here_unless_its_queries_travel() {
    let cases = [EVEN, QUARTERS, PIECES, &UNEVEN].concat();
    for strategy in Strategy::ALL {
        let moves_keys = strategy != Strategy::Dense && !strategy.moves_queries();
        let is_listed = cases.iter().any(|(.., listed)| *listed == strategy);
        assert_eq!(moves_keys, is_listed, "{strategy}");
    }
}

#[test]
fn uneven_shards_give_the_same_bytes() {
    for (name, mask) in masks(1088) {
        let sets = [&UNEVEN, PIECES].concat();
        check(case(name, 1088, mask, |case| case.problem.batch = batch_of(name)), &sets);
    }
}

#[test]
fn every_strategy_that_moves_keys_gives_the_same_bytes() {
    for (name, mask) in masks(1024) {
        check(case(name, 1024, mask, |case| case.problem.batch = batch_of(name)), EVEN);
    }
    check(case("twice as many tokens", 2048, OracleMask::causal(), |_| {}), QUARTERS);
}

#[test]
fn options_keep_the_same_bytes() {
    let softcap = case("softcap and sinks", 1024, OracleMask::causal(), |case| {
        case.problem.softcap = Some(3.0);
        case.problem.sinks = vec![0.5, -1.0, 2.0, 30.0];
    });
    check(softcap, EVEN);
    for (additive, shared_rows) in [(false, false), (true, false), (false, true), (true, true)] {
        let bias = case("an attention bias tensor", 1024, OracleMask::causal(), |case| {
            case.bias = Some(CaseBias { additive, batch: 1, heads: 1, shared_rows, stand_in: false });
        });
        check(bias, EVEN);
    }
    // Few queries, late in the sequence: the backend must not choose kernels for few queries.
    let few = case("few queries", 1024, OracleMask::causal(), |case| {
        case.problem.q_len = 6;
        case.problem.q_offset = 1018;
    });
    check(few, &EVEN[2..5]);
}

/// Negative control: without a fixed order the sums differ.
#[test]
fn without_a_fixed_order_bytes_differ() {
    let prepared = Prepared::new(case("full", 1024, OracleMask::full(), |_| {}), Dtype::F32);
    let backend = Device::cpu();
    let ring = |fixed| {
        let problem = prepared.problem.clone().with_fixed_order(fixed).unwrap();
        let mesh = Mesh::new(1, 4).unwrap();
        plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap()
    };
    let alone = pollster::block_on(run_alone(&backend, &dense_set(&prepared.problem), &prepared));
    let together = pollster::block_on(run_together(&backend, &ring(false), &prepared));
    assert!(alone.o != together.o);

    // The bytes also change if two tiles swap their places in the tree.
    let in_order = prepared.problem.clone().with_fixed_order(true).unwrap();
    let mut set = dense_set(&in_order);
    let order = pollster::block_on(run_alone(&backend, &set, &prepared));
    let mut tiles: Vec<&mut Slice> = set.plans[0]
        .steps
        .iter_mut()
        .filter_map(|step| match step {
            Step::Attend { kv, .. } => Some(kv),
            _ => None,
        })
        .collect();
    assert_eq!(tiles.len(), 4);
    let (first, last) = tiles.split_at_mut(2);
    std::mem::swap(first[1], last[0]);
    let turned = pollster::block_on(run_alone(&backend, &set, &prepared));
    assert!(order.o != turned.o);
}

#[test]
fn shards_off_the_grid_are_refused_with_what_would_fit() {
    let problem = |tokens| {
        let problem = AttentionProblem::new([1, tokens, 8, 2, 64], Dtype::F32, Mask::causal()).unwrap();
        problem.with_fixed_order(true).unwrap()
    };
    let plan = |tokens, (u, r), kind, split: &Split, strategy| {
        plan_forward(&problem(tokens), Mesh::new(u, r).unwrap(), kind, split, strategy)
    };
    use PlacementKind::{Contiguous, Striped, Zigzag};
    for (tokens, mesh, kind, strategy) in [
        (4096, (1, 3), Contiguous, Strategy::Ring),
        (4096, (1, 3), Zigzag, Strategy::Ring),
        (4000, (1, 3), Contiguous, Strategy::Line),
        (8192, (2, 3), Zigzag, Strategy::Unified),
        (8192, (1, 5), Contiguous, Strategy::TwoWay),
        (8192, (1, 5), Zigzag, Strategy::Pipelined),
        (75_600, (5, 8), Contiguous, Strategy::Unified),
    ] {
        let refused = plan(tokens, mesh, kind, &Split::Even, strategy).unwrap_err();
        assert!(refused.is_request(), "{refused}");
        // The token counts that the message proposes are valid.
        let text = refused.to_string();
        let PlanError::Request { remedy: Remedy::UseTokens(counts), .. } = refused else {
            panic!("no counts in: {text}");
        };
        let split = Split::Tokens(counts);
        plan(tokens, mesh, kind, &split, strategy).unwrap_or_else(|error| panic!("{text}\nbut {error}"));
    }
    for (tokens, kind, strategy, remedy) in [
        (4096, Striped, Strategy::Ring, "contiguous placement"),
        (4000, Zigzag, Strategy::Ring, "contiguous placement"),
        (4000, Contiguous, Strategy::TwoWay, "another strategy"),
        (4608, Zigzag, Strategy::Pipelined, "another strategy"),
        (4608, Contiguous, Strategy::Pipelined, "another strategy"),
        (4096, Contiguous, Strategy::PassQ, "sends keys"),
        (300, Contiguous, Strategy::Ring, "fewer shards"),
    ] {
        let refused = plan(tokens, (1, 2), kind, &Split::Even, strategy).unwrap_err().to_string();
        assert!(refused.contains(remedy), "{refused}");
    }
}
