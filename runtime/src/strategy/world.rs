//! The plans of all ranks of a world.

use kyklos_transport::Rank;

use super::all_to_all::{self, Chunk};
use super::build::PlanBuilder;
use super::facts::StrategyFacts;
use super::price::Traffic;
use super::streams::Routes;
use super::{balance, deals, order};
use crate::plan::{Content, LostTokens, Plan, World};
use crate::{
    AttentionProblem, Error, Mesh, Placement, PlacementKind, Remedy, Result, Split, Strategy, TokenRuns,
};

/// The plans of all ranks of `mesh` for `problem`.
///
/// # Errors
/// [`Error::Request`] when the problem, the mesh, the placement and the strategy do not fit together.
pub fn plan(
    problem: &AttentionProblem,
    mesh: Mesh,
    placement: PlacementKind,
    split: &Split,
    strategy: Strategy,
) -> Result<World> {
    let (q_placement, kv_placement) = placements(problem, mesh, placement, split, strategy)?;
    let mut world = World {
        problem: problem.clone(),
        mesh,
        q_placement,
        kv_placement,
        strategy,
        plans: Vec::with_capacity(mesh.world() as usize),
        lost: LostTokens::default(),
    };
    let routes = Routes::new(strategy.facts().streams, problem, &world.q_placement, &world.kv_placement);
    for rank in 0..mesh.world() {
        world.plans.push(plan_rank(&world, &routes, Rank(rank)));
    }
    Ok(world)
}

/// The owners of queries and the owners of keys, if problem, mesh, placement, split and strategy fit together.
fn placements(
    problem: &AttentionProblem,
    mesh: Mesh,
    kind: PlacementKind,
    split: &Split,
    strategy: Strategy,
) -> Result<(Placement, Placement)> {
    strategy.accepts(mesh)?;
    mesh.fits(problem)?;
    if problem.wire.rounds() && (mesh.ring() == 1 || strategy.moves_queries()) {
        let other = if mesh.ring() == 1 { "a mesh with a ring" } else { "a strategy that sends keys" };
        return Err(Error::request(
            format!("{} on the wire with strategy {strategy} on mesh {mesh}", problem.wire),
            format!(
                "this strategy sends no keys or values between shards: send tensors as they are, or use {other}"
            ),
        ));
    }
    let same_tokens = problem.q_len == problem.kv_len && problem.replicated.is_empty();
    if matches!(split, Split::Tokens(_)) && problem.q_len != problem.kv_len {
        return Err(Error::request(
            format!("exact token counts for {} queries and {} keys", problem.q_len, problem.kv_len),
            Remedy::UseWeights,
        ));
    }
    let (q_split, kv_split) = match split {
        Split::Work(weights) => {
            let tokens = Split::Tokens(balance::tokens(problem, mesh, kind, weights)?);
            // If the keys do not belong to the same tokens as the queries, their placement does not change the work of
            // any rank.
            (tokens.clone(), if same_tokens { tokens } else { Split::Weights(weights.clone()) })
        }
        // Replicated keys are not dealt; the others are, in the proportions of the queries.
        Split::Tokens(tokens) if !same_tokens => {
            let weights = tokens.iter().map(|count| f64::from(*count)).collect();
            (split.clone(), if problem.q_len == 0 { Split::Even } else { Split::Weights(weights) })
        }
        split => (split.clone(), split.clone()),
    };
    let q_placement = Placement::deal(&deals::queries(problem), kind, mesh, &q_split)?;
    let kv_placement = Placement::deal(&deals::keys(problem), kind, mesh, &kv_split)?;
    order::fits(problem, mesh, strategy, &kv_placement)?;
    Ok((q_placement, kv_placement))
}

/// One rank that attends from the queries `rows` only, to all keys: the single-device run for comparison with a
/// parallel one. The other queries count as lost.
///
/// # Errors
/// [`Error::Request`] when a row does not exist.
pub fn plan_rows(problem: &AttentionProblem, rows: TokenRuns) -> Result<World> {
    if let Some(row) = rows.iter().find(|row| *row >= problem.q_len) {
        return Err(Error::request(
            format!("row {row} of {} queries", problem.q_len),
            "name rows that exist",
        ));
    }
    let mut others = vec![true; problem.q_len as usize];
    rows.iter().for_each(|row| others[row as usize] = false);
    let others = (0..problem.q_len).filter(|row| others[*row as usize]);
    let lost = LostTokens { queries: TokenRuns::from_positions(others), keys: TokenRuns::default() };
    let mesh = Mesh::new(1, 1)?;
    let mut world = World {
        problem: problem.clone().with_replicated(0..0)?,
        mesh,
        q_placement: Placement::some(rows)?,
        kv_placement: Placement::new(PlacementKind::Contiguous, mesh, problem.kv_len, &Split::Even)?,
        strategy: Strategy::Dense,
        plans: Vec::new(),
        lost,
    };
    world.plans.push(plan_rank(&world, &Routes::default(), Rank(0)));
    Ok(world)
}

/// All meshes of `ranks` ranks that `problem` fits, in order of the bytes that they send, the smallest number first.
/// Among equals, the larger Ulysses extent first. Makes no plans.
pub fn meshes_by_bytes(
    problem: &AttentionProblem,
    ranks: u32,
    placement: PlacementKind,
    split: &Split,
    strategy: Option<Strategy>,
) -> Result<Vec<(Mesh, u64)>> {
    let mut priced = Vec::new();
    let mut refusal = None;
    for ulysses in (1..=ranks).rev().filter(|u| ranks.is_multiple_of(*u)) {
        let mesh = Mesh::new(ulysses, ranks / ulysses)?;
        let strategy = strategy.unwrap_or(Strategy::Unified);
        match placements(problem, mesh, placement, split, strategy) {
            Ok((q, kv)) => priced.push((mesh, bytes_sent(strategy.facts(), problem, &q, &kv))),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    priced.sort_by_key(|(_, bytes)| *bytes);
    match refusal {
        Some(error) if priced.is_empty() => Err(error),
        _ => Ok(priced),
    }
}

/// Plan payload that all ranks send together, in bytes: the sum over the plans for these placements.
fn bytes_sent(facts: &StrategyFacts, problem: &AttentionProblem, q: &Placement, kv: &Placement) -> u64 {
    let traffic = Traffic { problem, q, kv };
    let routes = Routes::new(facts.streams, problem, q, kv);
    let bytes = traffic.all_to_all_bytes() + (facts.round_bytes)(&traffic, &routes);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn plan_rank(world: &World, routes: &Routes, rank: Rank) -> Plan {
    let facts = world.strategy.facts();
    let mut builder = PlanBuilder::new(world, rank);
    if world.mesh.ulysses() == 1 {
        let inputs = builder.inputs();
        let state = (facts.attend_round)(&mut builder, routes, inputs);
        builder.finalize(state, builder.output());
        return builder.finish();
    }
    let (_, u) = world.mesh.coordinates(rank);
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
        let posted = all_to_all::post_heads_for_tokens(&mut builder, chunk, mine);
        if let Some(before) = going_home.replace(posted) {
            all_to_all::take_tokens(&mut builder, before);
        }
    }
    if let Some(last) = going_home {
        all_to_all::take_tokens(&mut builder, last);
    }
    builder.finish()
}
