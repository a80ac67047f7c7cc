//! Strategies: pure functions from a problem, a mesh and placements to the plan of every rank.
//!
//! A plan has up to three phases: an all-to-all that trades tokens for heads inside the Ulysses group
//! ([`ulysses`]), the round over the shards, and the all-to-all back. A mesh with U = 1 has only the round, one with
//! R = 1 only the trade, and one rank has neither. In the round keys go from neighbour to neighbour ([`streams`], and in pieces [`relay`]) or
//! straight to everybody ([`gather`]), or queries go to the keys, straight ([`pass_q`]) or along trees ([`tree`]).

mod balance;
mod build;
mod gather;
mod order;
mod pass_q;
mod price;
mod relay;
mod repair;
mod streams;
mod tree;
mod ulysses;

use std::fmt;
use std::str::FromStr;

use kyklos_transport::Rank;

use crate::plan::{BufferId, Content, Lost, Plan, World};
use crate::{
    AttentionProblem, Deal, Error, Mesh, Placement, PlacementKind, Remedy, Result, Split, TokenRuns,
};
use build::{Inputs, PlanBuilder};
pub use order::TILE_KEYS;
pub use repair::{can_repair, repair};
use streams::Routes;
use ulysses::Chunk;

/// How the work is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// One rank does everything.
    Dense,
    /// Keys and values go round, queries stay.
    Ring,
    /// Tokens are traded for heads, each rank attends to the whole sequence for some of the heads, and back.
    Ulysses,
    /// Ulysses inside, ring outside. Takes any mesh.
    Unified,
    /// As unified, with heads traded in chunks: the next chunk travels while this one is attended to.
    Chunked,
    /// As unified, with keys and values going both ways, each half as far.
    Bidirectional,
    /// As unified, with one half of every shard's keys and values going each way.
    #[serde(rename = "two-way")]
    TwoWay,
    /// As unified, with keys and values going both ways to the ends of the line: no link joins the last shard to the first.
    Line,
    /// As unified, with keys and values sent straight to every shard that sees them.
    Gather,
    /// As unified, with queries sent to the keys, and what they found sent back.
    #[serde(rename = "pass-q")]
    PassQ,
    /// As pass-q, with queries handed on along a tree, and what they found merged on the way back.
    Tree,
    /// As unified, with KV heads that several ranks of a shard need sent between shards once, in pieces.
    Relay,
}

impl Strategy {
    /// All of them, for tests and help texts.
    pub const ALL: [Self; 12] = [
        Self::Dense,
        Self::Ring,
        Self::Ulysses,
        Self::Unified,
        Self::Chunked,
        Self::Bidirectional,
        Self::TwoWay,
        Self::Line,
        Self::Gather,
        Self::PassQ,
        Self::Tree,
        Self::Relay,
    ];

    /// What a mesh says by itself: 1x1 dense, 1xR ring, Ux1 ulysses, else unified.
    pub fn of_mesh(mesh: Mesh) -> Self {
        match (mesh.ulysses(), mesh.ring()) {
            (1, 1) => Self::Dense,
            (1, _) => Self::Ring,
            (_, 1) => Self::Ulysses,
            _ => Self::Unified,
        }
    }

    /// Refuses a mesh that contradicts this strategy.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub fn accepts(self, mesh: Mesh) -> Result<()> {
        let fits = match self {
            Self::Dense => mesh.world() == 1,
            Self::Ring => mesh.ulysses() == 1,
            Self::Ulysses => mesh.ring() == 1,
            Self::Unified => true,
            Self::Chunked => mesh.ulysses() > 1,
            Self::Relay => mesh.ulysses() > 1 && mesh.ring() > 1,
            Self::Bidirectional | Self::TwoWay | Self::Line | Self::Gather | Self::PassQ | Self::Tree => {
                mesh.ring() > 1
            }
        };
        if fits {
            return Ok(());
        }
        Err(Error::request(
            format!("strategy {self} does not run on mesh {mesh}"),
            "dense is 1x1, ring 1xR, ulysses Ux1; unified takes any mesh, chunked one with U of at least 2, relay one with both of at least 2, the others one with R of at least 2",
        ))
    }

    /// Whether this is unified by another name for `problem` on `mesh`.
    pub(crate) fn is_unified(self, problem: &AttentionProblem, mesh: Mesh) -> bool {
        let alone = || mesh.kv_groups(problem).iter().all(|group| group.len() == 1);
        self == Self::Relay && mesh.fits(problem).is_ok() && alone()
    }

    /// Whether queries travel between shards, and keys stay.
    pub(crate) fn moves_queries(self) -> bool {
        matches!(self, Self::PassQ | Self::Tree)
    }

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Ring => "ring",
            Self::Ulysses => "ulysses",
            Self::Unified => "unified",
            Self::Chunked => "chunked",
            Self::Bidirectional => "bidirectional",
            Self::TwoWay => "two-way",
            Self::Line => "line",
            Self::Gather => "gather",
            Self::PassQ => "pass-q",
            Self::Tree => "tree",
            Self::Relay => "relay",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == text).ok_or_else(|| {
            Error::request(
                format!("strategy `{text}` is not known"),
                "use dense, ring, ulysses, unified, chunked, bidirectional, two-way, line, gather, pass-q, tree, relay or auto",
            )
        })
    }
}

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
        lost: Lost::default(),
    };
    let routes = Routes::new(strategy, problem, &world.q_placement, &world.kv_placement);
    for rank in 0..mesh.world() {
        world.plans.push(plan_rank(&world, &routes, Rank(rank)));
    }
    Ok(world)
}

/// Who holds which queries, and who which keys, if all fits together.
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
            format!("no keys go round shards there: send tensors as they are, or use {other}"),
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
            // Where keys are not the queries' own tokens, how they lie changes no rank's work.
            (tokens.clone(), if same_tokens { tokens } else { Split::Weights(weights.clone()) })
        }
        // Keys that all ranks hold are not dealt: the others, in the proportions of the queries.
        Split::Tokens(tokens) if !same_tokens => {
            let weights = tokens.iter().map(|count| f64::from(*count)).collect();
            (split.clone(), if problem.q_len == 0 { Split::Even } else { Split::Weights(weights) })
        }
        split => (split.clone(), split.clone()),
    };
    let q_placement = Placement::deal(&queries(problem), kind, mesh, &q_split)?;
    let kv_placement = Placement::deal(&keys(problem), kind, mesh, &kv_split)?;
    order::fits(problem, mesh, strategy, &kv_placement)?;
    Ok((q_placement, kv_placement))
}

/// What a placement deals of the queries.
fn queries(problem: &AttentionProblem) -> Deal {
    let boundaries = problem.mask.document_boundaries().iter();
    let documents = boundaries.map(|position| position.saturating_sub(problem.q_offset)).collect();
    Deal { total: problem.q_len, documents, ..Deal::default() }
}

/// What a placement deals of the keys.
fn keys(problem: &AttentionProblem) -> Deal {
    let documents = problem.mask.document_boundaries().to_vec();
    Deal { total: problem.kv_len, replicated: problem.replicated.clone(), documents }
}

/// One rank that attends from the queries `rows` only, to all keys: the single-device run that a parallel one is
/// held against. Not for [`crate::plan::check`], which wants every query to have an owner.
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
    let mesh = Mesh::new(1, 1)?;
    let mut world = World {
        problem: problem.clone().with_replicated(0..0)?,
        mesh,
        q_placement: Placement::some(rows)?,
        kv_placement: Placement::new(PlacementKind::Contiguous, mesh, problem.kv_len, &Split::Even)?,
        strategy: Strategy::Dense,
        plans: Vec::new(),
        lost: Lost::default(),
    };
    world.plans.push(plan_rank(&world, &Routes::default(), Rank(0)));
    Ok(world)
}

/// All meshes of `ranks` ranks that `problem` fits, the one that sends fewest bytes first; the more Ulysses the
/// earlier among equals. Makes no plans.
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
            Ok((q, kv)) => priced.push((mesh, price::bytes_sent(strategy, problem, &q, &kv))),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    priced.sort_by_key(|(_, bytes)| *bytes);
    match refusal {
        Some(error) if priced.is_empty() => Err(error),
        _ => Ok(priced),
    }
}

fn plan_rank(world: &World, routes: &Routes, rank: Rank) -> Plan {
    let mut builder = PlanBuilder::new(world, rank);
    if world.mesh.ulysses() == 1 {
        let inputs = builder.inputs();
        let state = round(&mut builder, routes, inputs);
        builder.finalize(state, builder.output());
        return builder.finish();
    }
    let (_, u) = world.mesh.coordinates(rank);
    let mut chunks = Chunk::all(&builder, world.strategy == Strategy::Chunked).peekable();
    let mut going_out = chunks.peek().map(|first| ulysses::post_tokens_for_heads(&mut builder, *first));
    let mut going_home = None;
    while let (Some(chunk), Some(posted)) = (chunks.next(), going_out.take()) {
        let inputs = ulysses::take_heads(&mut builder, posted);
        going_out = chunks.peek().map(|next| ulysses::post_tokens_for_heads(&mut builder, *next));
        let tokens = builder.buffer(inputs.q).tokens.clone();
        let state = round(&mut builder, routes, inputs);
        let heads = chunk.q_heads(&builder, u);
        let name = format!("o of heads {}..{}", heads.start, heads.end);
        let mine = builder.declare(name, Content::Output, tokens, heads);
        builder.finalize(state, mine);
        let posted = ulysses::post_heads_for_tokens(&mut builder, chunk, mine);
        if let Some(before) = going_home.replace(posted) {
            ulysses::take_tokens(&mut builder, before);
        }
    }
    if let Some(last) = going_home {
        ulysses::take_tokens(&mut builder, last);
    }
    builder.finish()
}

/// The round over the shards.
fn round(builder: &mut PlanBuilder<'_>, routes: &Routes, inputs: Inputs) -> BufferId {
    match builder.world.strategy {
        Strategy::Gather => gather::attend_all(builder, inputs),
        Strategy::PassQ => pass_q::attend_everywhere(builder, inputs),
        Strategy::Tree => tree::attend_everywhere(builder, inputs),
        Strategy::Relay => relay::attend_round(builder, routes, inputs),
        _ => streams::attend_round(builder, routes, inputs),
    }
}
