//! Refusals of what ranks share: meshes, strategies, placements and shares.

use std::ops::Range;

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::simulate::{Candidate, Capacity, PlanQuery, Shares, fewest_bytes};
use kyklos::{
    Attention, AttentionProblem, Dtype, Error, Execution, Mask, Mesh, Placement, PlacementKind, PlanError,
    Results, Session, Split, Strategy, TokenRuns, plan_forward, plan_placed, plan_rows,
};
use kyklos_transport::{Rank, in_process_group};

use super::{of_calls, of_program, problem, tensor};
use crate::support::transcript_holds;

const COMMANDS: &[&str] = &[
    "ATTEND --mesh 2",
    "ATTEND --mesh 0x4",
    "ATTEND --mesh 100000x100000",
    "ATTEND --mesh 32x64",
    "ATTEND --ranks 3 --mesh 2x2",
    "ATTEND --ranks 0",
    "ATTEND --ranks 1000000",
    "plan --explain --shape 1,64,8,2,64 --ranks 5000 --hardware DIR/hw",
    "plan --shape 1,64,8,2,64 --ranks 2000",
    "plan --shape 1,64,8,2,64 --rank 1",
    "attend --shape 1,65536,8,2,64 --grad --verify",
    "ATTEND --grad --grad-bias",
    "attend --shape 1,64,3,3,64 --mesh 4x1",
    "ATTEND --mesh 2x2 --strategy ring",
    "ATTEND --ranks 2 --strategy dense",
    "ATTEND --mesh 2x1 --strategy bidirectional",
    "ATTEND --strategy spiral",
    "ATTEND --placement diagonal",
    "ATTEND --ranks 2 --split 1",
    "ATTEND --ranks 2 --split 0,0",
    "ATTEND --ranks 2 --split 1,x",
    "ATTEND --ranks 2 --split 1,nan",
    "ATTEND --ranks 2 --split work:1",
    "ATTEND --ranks 2 --split work:1,x",
    "plan --shape 1,64,8,2,64 --ranks 2 --split auto",
    "ATTEND --ranks 2 --tokens 30,30",
    "ATTEND --ranks 2 --tokens 32,32 --split 1,1",
    "ATTEND --ranks 2 --q-tokens 32,32",
    "ATTEND --ranks 2 --kv-tokens 32,32",
    "attend --input DIR/cross --ranks 2 --tokens 4,4",
    "attend --input DIR/cross --ranks 2 --q-tokens 4,4",
    "ATTEND --ranks 2 --q-tokens 32,32 --kv-tokens 32,32 --tokens 32,32",
    "ATTEND --ranks 2 --q-tokens 32,32 --kv-tokens 32,32 --split 1,1",
    "ATTEND --ranks 2 --q-tokens 64 --kv-tokens 32,32",
    "ATTEND --ranks 2 --q-tokens 30,30 --kv-tokens 32,32",
    "ATTEND --ranks 2 --q-tokens 32,32 --kv-tokens 32,33",
    "ATTEND --ranks 2 --q-tokens 32,32 --kv-tokens 32,32 --replicated 0..8",
    "ATTEND --mesh 2x1 --wire f16",
    "ATTEND --mesh 1x2 --wire f16 --strategy pass-q",
    "ATTEND --mesh 2x1 --wire int8",
    "ATTEND --mesh 1x2 --wire int8 --strategy pass-q",
    "ATTEND --mesh 1x2 --wire bf16",
    "ATTEND --mesh 1x2 --wire f16 --dtype bf16",
    "ATTEND --replicated 0-9",
    "ATTEND --replicated 0..65",
    "ATTEND --fixed-order --mesh 1x2 --wire f16",
    "ATTEND --fixed-order --mesh 1x2 --strategy pass-q",
    "ATTEND --fixed-order --replicated 3..9",
    "ATTEND --fixed-order --mesh 1x2",
];

#[test]
fn sharing() {
    let calls = [of_placements(), of_plans(), of_shares()];
    let of_sessions = of_calls([
        ("Session::share, rank 1 with 9 tokens and rank 0 with 8", of_sharing(9, false)),
        ("Session::share on a new session of rank 1, after a call on an earlier one", of_sharing(8, true)),
    ]);
    let calls = of_calls(calls.into_iter().flatten());
    transcript_holds("sharing", &(of_program(COMMANDS) + &calls + &of_sessions));
}

/// The placement of one rank with these tokens.
fn explicit(total: u32, replicated: Range<u32>, tokens: Range<u32>) -> Result<Placement, PlanError> {
    let lists = vec![TokenRuns::contiguous(tokens)];
    Placement::explicit(mesh(1), total, replicated, lists)
}

/// A ring.
fn mesh(ranks: u32) -> Mesh {
    Mesh::new(1, ranks).unwrap()
}

fn of_placements() -> Vec<(&'static str, PlanError)> {
    let separate = Split::Separate { queries: Box::new(Split::Even), keys: Box::new(Split::Even) };
    let zigzag = |split| Placement::new(PlacementKind::Zigzag, mesh(1), 8, &split).unwrap_err();
    let place = Placement::new(PlacementKind::Contiguous, mesh(2), 8, &Split::Even).unwrap();
    vec![
        ("Placement::new with Split::Work", zigzag(Split::Work(vec![1.0]))),
        ("Placement::new with Split::Separate", zigzag(separate)),
        (
            "Placement::explicit with 2 lists for one rank",
            Placement::explicit(mesh(1), 8, 0..0, vec![TokenRuns::default(); 2]).unwrap_err(),
        ),
        ("Placement::explicit, tokens 0..9 of 8 replicated", explicit(8, 0..9, 0..0).unwrap_err()),
        ("Placement::explicit with token 8 of 8", explicit(8, 0..0, 0..9).unwrap_err()),
        ("Placement::explicit with a replicated token in a list", explicit(8, 0..2, 1..8).unwrap_err()),
        (
            "Placement::explicit with two owners of token 3",
            Placement::explicit(mesh(2), 8, 0..0, [0..4, 3..8].map(TokenRuns::contiguous).to_vec())
                .unwrap_err(),
        ),
        ("Placement::explicit without an owner of token 7", explicit(8, 0..0, 0..7).unwrap_err()),
        (
            "Placement::on_mesh with 2 ranks for the list of one",
            explicit(8, 0..0, 0..8).unwrap().on_mesh(mesh(2)).unwrap_err(),
        ),
        ("Placement::with_spare with one number for two ranks", place.with_spare(vec![1]).unwrap_err()),
    ]
}

fn of_plans() -> Vec<(&'static str, PlanError)> {
    let whole = explicit(8, 0..0, 0..8).unwrap();
    let rows = plan_rows(&problem(), TokenRuns::contiguous(2..4)).unwrap();
    let placed = |mesh, q: &Placement, kv: &Placement| {
        plan_placed(&problem(), mesh, q.clone(), kv.clone(), Strategy::Unified).unwrap_err()
    };
    let ring = |problem: &AttentionProblem| {
        plan_forward(problem, mesh(2), PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap_err()
    };
    let nobody = PlanQuery {
        ranks: 0,
        mesh: None,
        strategy: None,
        placement: None,
        split: Split::Even,
        gradients: false,
    };
    vec![
        ("plan_placed with placements on another mesh", placed(mesh(2), &whole, &whole)),
        (
            "plan_placed with a placement of 7 queries of 8",
            placed(mesh(1), &explicit(7, 0..0, 0..7).unwrap(), &whole),
        ),
        (
            "plan_placed with keys that only the placement replicates",
            placed(mesh(1), &whole, &explicit(8, 0..2, 2..8).unwrap()),
        ),
        ("plan_placed with the queries of plan_rows", placed(mesh(1), &rows.q_placement, &whole)),
        (
            "plan_forward for queries on every rank, with strategy ring",
            ring(&problem().with_same_queries(true).unwrap()),
        ),
        (
            "plan_forward with results for rank 2 of 2",
            ring(&problem().with_results(Results::One(Rank(2))).unwrap()),
        ),
        ("simulate::fewest_bytes for 0 ranks", fewest_bytes(&problem(), &nobody).unwrap_err()),
    ]
}

fn of_shares() -> Vec<(&'static str, PlanError)> {
    let ring = Candidate { strategy: Strategy::Ring, mesh: mesh(2), placement: PlacementKind::Contiguous };
    let capacity = |pairs_per_s, memory_bytes| Capacity { pairs_per_s, step_ns: 0, memory_bytes };
    let level = |capacities: &[Capacity]| Shares::level(&problem(), ring, capacities, None);
    let shares = level(&[capacity(1, None), capacity(2, None)]).unwrap();
    vec![
        ("Shares::level with three capacities for two ranks", level(&[capacity(1, None); 3]).unwrap_err()),
        ("Shares::level where no rank has a speed", level(&[capacity(0, None); 2]).unwrap_err()),
        (
            "Shares::level with 64 bytes of memory on each rank",
            level(&[capacity(1, Some(64)); 2]).unwrap_err(),
        ),
        (
            "Shares::compute_ns with the capacities of three ranks for shares of two",
            shares.compute_ns(&problem(), ring.mesh, &[capacity(1, None); 3]).unwrap_err(),
        ),
    ]
}

/// The error of rank 0 of two, where rank 1 shares `tokens` tokens, maybe with a new session, and
/// rank 0 shares 8.
fn of_sharing(tokens: u32, new_session: bool) -> Error {
    let errors = on_threads(in_process_group(2), |transport| {
        let is_other = transport.rank() == Rank(1);
        let mut session = Session::new(transport.clone(), Device::cpu());
        let x = tensor(4, 2);
        session.attend(&Attention::new(), &x, &x, &x).unwrap();
        if is_other && new_session {
            session = Session::new(transport, Device::cpu());
        }
        let tokens = if is_other { tokens } else { 8 };
        let problem = AttentionProblem::new([1, tokens, 2, 2, 8], Dtype::F32, Mask::full()).unwrap();
        session.share(&problem, &Execution::new()).unwrap_err()
    });
    errors.into_iter().next().unwrap()
}
