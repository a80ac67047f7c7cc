//! The plan set of a forward pass.

use kyklos_rank::Rank;

use super::all_to_all::{self, Chunk};
use super::build::PlanBuilder;
use super::deals::deal;
use super::price::Traffic;
use super::streams::Routes;
use super::{order, results};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::parallel::for_each_rank;
use crate::placement::{Placement, PlacementKind, Split};
use crate::plan::{Content, Direction, Plan, PlanSet};
use crate::problem::{AttentionProblem, Results};
use crate::strategy_list::Strategy;
use crate::tokens::TokenRuns;

/// The plans of all ranks of `mesh` for `problem`, with tokens dealt by `placement` and `split`:
/// [`deal`] and [`plan_placed`].
///
/// # Errors
/// [`Error::Request`] when the problem, the mesh, the placement and the strategy do not fit
/// together.
pub fn plan(
    problem: &AttentionProblem,
    mesh: Mesh,
    placement: PlacementKind,
    split: &Split,
    strategy: Strategy,
) -> Result<PlanSet> {
    runs_on(problem, mesh, strategy)?;
    let (q_placement, kv_placement) = deal(problem, mesh, placement, split)?;
    plan_placed(problem, mesh, q_placement, kv_placement, strategy)
}

/// The plans of all ranks of `mesh` for `problem`, with these owners of its queries and of its keys
/// and values: of a dealer, or [explicit](Placement::explicit). The two need not be alike.
///
/// # Errors
/// [`Error::Request`] when the problem, the mesh, the placements and the strategy do not fit
/// together.
pub fn plan_placed(
    problem: &AttentionProblem,
    mesh: Mesh,
    q_placement: Placement,
    kv_placement: Placement,
    strategy: Strategy,
) -> Result<PlanSet> {
    fits(problem, mesh, &q_placement, &kv_placement, strategy)?;
    let empty = PlanSet {
        problem: problem.clone(),
        mesh,
        q_placement,
        kv_placement,
        strategy,
        direction: Direction::Forward,
        plans: Vec::new(),
        left_out: TokenRuns::default(),
    };
    Ok(with_plans(empty, plan_rank))
}

/// The plans of all ranks.
pub(super) fn with_plans(mut set: PlanSet, plan_rank: fn(&PlanSet, &Routes, Rank) -> Plan) -> PlanSet {
    let streams = set.strategy.facts().streams;
    let routes = Routes::new(streams, &set.problem, &set.q_placement, &set.kv_placement);
    set.plans = for_each_rank(set.mesh.size(), |rank| plan_rank(&set, &routes, Rank(rank)));
    set
}

/// Refuses a mesh or a wire format that the problem or the strategy cannot have, whatever the
/// owners.
pub(super) fn runs_on(problem: &AttentionProblem, mesh: Mesh, strategy: Strategy) -> Result<()> {
    strategy.accepts(mesh)?;
    mesh.fits(problem)?;
    takes_same_queries(problem, mesh, strategy)?;
    if let Results::One(rank) = problem.results
        && rank.0 >= mesh.size()
    {
        return Err(Error::request(
            format!("results for rank {rank}, on mesh {mesh} of {} ranks", mesh.size()),
            "name a rank of the mesh",
        ));
    }
    if problem.wire.rounds() && (mesh.ring() == 1 || strategy.moves_queries()) {
        let other = if mesh.ring() == 1 { "a mesh with a ring" } else { "a strategy that sends keys" };
        return Err(Error::request(
            format!("{} on the wire with strategy {strategy} on mesh {mesh}", problem.wire),
            format!(
                "this strategy sends no keys or values between shards: send tensors as they are, or use {other}"
            ),
        ));
    }
    Ok(())
}

/// Refuses a strategy that sends queries or keys although every rank holds all queries.
fn takes_same_queries(problem: &AttentionProblem, mesh: Mesh, strategy: Strategy) -> Result<()> {
    if !problem.same_queries || mesh.size() == 1 || (strategy.facts().same_queries && mesh.ulysses() == 1) {
        return Ok(());
    }
    Err(Error::request(
        format!("all queries on every rank, with strategy {strategy} on mesh {mesh}"),
        "use strategy pass-q on a mesh 1xR, where only running states travel",
    ))
}

/// Refuses placements that are not of this problem on this mesh, or that the strategy cannot have.
pub(super) fn fits(
    problem: &AttentionProblem,
    mesh: Mesh,
    q: &Placement,
    kv: &Placement,
    strategy: Strategy,
) -> Result<()> {
    runs_on(problem, mesh, strategy)?;
    let same_queries = if problem.same_queries { 0..problem.q_len } else { 0..0 };
    for (what, placement, total, replicated) in [
        ("queries", q, problem.q_len, same_queries),
        ("keys", kv, problem.kv_len, problem.replicated.clone()),
    ] {
        let replicated = &TokenRuns::contiguous(replicated);
        if placement.mesh() != mesh {
            return Err(Error::request(
                format!("{what} placed on the mesh {}, for plans on the mesh {mesh}", placement.mesh()),
                "place queries and keys on the mesh of the plans (Placement::on_mesh)",
            ));
        }
        if placement.total() != total {
            return Err(Error::request(
                format!("a placement of {} {what}, the problem has {total}", placement.total()),
                "place the tokens of the problem",
            ));
        }
        if placement.replicated() != replicated {
            return Err(Error::request(
                format!(
                    "{what} on every rank: {} in the placement, {replicated} in the problem",
                    placement.replicated()
                ),
                "let both name the same replicated keys, and all queries (Placement::everywhere) or none",
            ));
        }
        if !placement.is_complete() {
            return Err(Error::request(
                format!("a placement that lacks the owners of some of {total} {what}"),
                "use a placement of all tokens, not that of a few rows",
            ));
        }
    }
    order::fits(problem, mesh, strategy, kv)
}

/// The owners of queries and keys by a dealer, if plans can be made from them.
pub(crate) fn dealt(
    problem: &AttentionProblem,
    mesh: Mesh,
    kind: PlacementKind,
    split: &Split,
    strategy: Strategy,
) -> Result<(Placement, Placement)> {
    runs_on(problem, mesh, strategy)?;
    let (q, kv) = deal(problem, mesh, kind, split)?;
    fits(problem, mesh, &q, &kv, strategy)?;
    Ok((q, kv))
}

/// One rank that attends from the queries `rows` only, to all keys: the single-device run for
/// comparison with a parallel one. The other queries are [left out](PlanSet::left_out).
///
/// # Errors
/// [`Error::Request`] when a row does not exist.
pub fn plan_rows(problem: &AttentionProblem, rows: TokenRuns) -> Result<PlanSet> {
    if let Some(row) = rows.iter().find(|row| *row >= problem.q_len) {
        return Err(Error::request(
            format!("row {row} of {} queries", problem.q_len),
            "name rows that exist",
        ));
    }
    let mut others = vec![true; problem.q_len as usize];
    rows.iter().for_each(|row| others[row as usize] = false);
    let others = (0..problem.q_len).filter(|row| others[*row as usize]);
    let mesh = Mesh::new(1, 1)?;
    let mut set = PlanSet {
        problem: problem.clone().with_replicated(0..0)?,
        mesh,
        q_placement: Placement::some(problem.q_len, rows)?,
        kv_placement: Placement::new(PlacementKind::Contiguous, mesh, problem.kv_len, &Split::Even)?,
        strategy: Strategy::Dense,
        direction: Direction::Forward,
        plans: Vec::new(),
        left_out: TokenRuns::from_positions(others),
    };
    set.plans.push(plan_rank(&set, &Routes::default(), Rank(0)));
    Ok(set)
}

/// All meshes of `ranks` ranks that `problem` fits, in order of the bytes that they send, the
/// smallest number first. Among equals, the larger Ulysses extent first. Makes no plans.
///
/// # Errors
/// The refusal of the first mesh, if all are refused.
pub fn meshes_by_bytes(
    problem: &AttentionProblem,
    ranks: u32,
    placement: PlacementKind,
    split: &Split,
    strategy: Option<Strategy>,
) -> Result<Vec<(Mesh, u64)>> {
    by_bytes(problem, ranks, strategy, |mesh, strategy| dealt(problem, mesh, placement, split, strategy))
}

/// As [`meshes_by_bytes`], for the given owners of queries and keys: each rank has the same tokens
/// on every mesh.
///
/// # Errors
/// As [`meshes_by_bytes`].
pub fn placed_meshes_by_bytes(
    problem: &AttentionProblem,
    q_placement: &Placement,
    kv_placement: &Placement,
    strategy: Option<Strategy>,
) -> Result<Vec<(Mesh, u64)>> {
    by_bytes(problem, q_placement.mesh().size(), strategy, |mesh, strategy| {
        let (q, kv) = (q_placement.on_mesh(mesh)?, kv_placement.on_mesh(mesh)?);
        fits(problem, mesh, &q, &kv, strategy)?;
        Ok((q, kv))
    })
}

fn by_bytes(
    problem: &AttentionProblem,
    ranks: u32,
    strategy: Option<Strategy>,
    place: impl Fn(Mesh, Strategy) -> Result<(Placement, Placement)>,
) -> Result<Vec<(Mesh, u64)>> {
    let strategy = strategy.unwrap_or(Strategy::Unified);
    let mut priced = Vec::new();
    let mut refusal = None;
    for ulysses in (1..=ranks).rev().filter(|u| ranks.is_multiple_of(*u)) {
        let mesh = Mesh::new(ulysses, ranks / ulysses)?;
        match place(mesh, strategy) {
            Ok((q, kv)) => priced.push((mesh, bytes_sent(problem, &q, &kv, strategy))),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    priced.sort_by_key(|(_, bytes)| *bytes);
    match refusal {
        Some(error) if priced.is_empty() => Err(error),
        _ => Ok(priced),
    }
}

/// Plan payload that all ranks send together, in bytes: the sum over the plans for these
/// placements.
pub(crate) fn bytes_sent(
    problem: &AttentionProblem,
    q: &Placement,
    kv: &Placement,
    strategy: Strategy,
) -> u64 {
    let facts = strategy.facts();
    let traffic = Traffic { problem, q, kv };
    let routes = Routes::new(facts.streams, problem, q, kv);
    let bytes =
        traffic.all_to_all_bytes() + (facts.round_bytes)(&traffic, &routes) + results::bytes(&traffic);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn plan_rank(set: &PlanSet, routes: &Routes, rank: Rank) -> Plan {
    let facts = set.strategy.facts();
    let mut builder = PlanBuilder::new(set, rank);
    if set.mesh.ulysses() == 1 {
        let inputs = builder.inputs();
        let state = (facts.attend_round)(&mut builder, routes, inputs);
        builder.finalize(state, builder.output());
        results::send(&mut builder);
        return builder.finish();
    }
    let (_, u) = set.mesh.coordinates(rank);
    let mut chunks = Chunk::all(&builder, facts.chunks_heads).peekable();
    let mut going_out = chunks.peek().map(|first| all_to_all::post_tokens_for_heads(&mut builder, *first));
    let mut going_home = None;
    while let (Some(chunk), Some(posted)) = (chunks.next(), going_out.take()) {
        let inputs = all_to_all::take_heads(&mut builder, posted);
        going_out = chunks.peek().map(|next| all_to_all::post_tokens_for_heads(&mut builder, *next));
        let tokens = builder.buffer(inputs.q).tokens.clone();
        let state = (facts.attend_round)(&mut builder, routes, inputs);
        let heads = chunk.q_heads(&builder, u);
        let name = format!("o of heads {}..{}", heads.start, heads.end);
        let mine = builder.declare(name, Content::Output, tokens, heads);
        builder.finalize(state, mine);
        let posted = all_to_all::post_heads_for_tokens(&mut builder, chunk, &[mine], None);
        if let Some(before) = going_home.replace(posted) {
            all_to_all::take_tokens(&mut builder, before);
        }
    }
    if let Some(last) = going_home {
        all_to_all::take_tokens(&mut builder, last);
    }
    results::send(&mut builder);
    builder.finish()
}
