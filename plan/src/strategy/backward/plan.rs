//! The backward plans of all ranks.

use kyklos_rank::Rank;

use super::super::all_to_all::{self, Chunk};
use super::super::build::PlanBuilder;
use super::super::deals::deal;
use super::super::forward::{fits, runs_on, with_plans};
use super::super::streams::Routes;
use super::{Sums, replicated};
use crate::error::{Error, Result};
use crate::mesh::{Mesh, kv_heads_for};
use crate::placement::{Placement, PlacementKind, Split};
use crate::plan::{Buffer, BufferId, Content, Direction, Plan, PlanSet};
use crate::problem::{AttentionProblem, Results};
use crate::strategy_list::Strategy;
use crate::tokens::TokenRuns;
use crate::wire::WireFormat;

/// The plans by which all ranks of `mesh` compute the gradients of q, k and v for `problem`, with
/// tokens dealt by `placement` and `split`. The forward pass may have another strategy and another
/// mesh of the same ranks, as long as each rank has the same tokens.
///
/// ```
/// use kyklos_plan::plan::ProvedPlans;
/// use kyklos_plan::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_backward};
///
/// let problem = AttentionProblem::new([1, 64, 4, 2, 32], Dtype::F32, Mask::causal())?;
/// let mesh = Mesh::new(1, 4)?;
/// let set = plan_backward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Ring)?;
/// assert!(ProvedPlans::new(set)?.checks()[0].bytes_sent > 0);
/// # Ok::<(), kyklos_plan::Error>(())
/// ```
///
/// # Errors
/// [`Error::Request`] when the problem, the mesh, the placement and the strategy do not fit
/// together, and for what has no backward pass: relay, a fixed order, 8-bit keys on the wire.
pub fn plan_backward(
    problem: &AttentionProblem,
    mesh: Mesh,
    placement: PlacementKind,
    split: &Split,
    strategy: Strategy,
) -> Result<PlanSet> {
    runs_on(problem, mesh, strategy)?;
    let (q_placement, kv_placement) = deal(problem, mesh, placement, split)?;
    plan_backward_placed(problem, mesh, q_placement, kv_placement, strategy)
}

/// As [`plan_backward`], with these owners of queries and of keys and values.
///
/// # Errors
/// As [`plan_backward`].
pub fn plan_backward_placed(
    problem: &AttentionProblem,
    mesh: Mesh,
    q_placement: Placement,
    kv_placement: Placement,
    strategy: Strategy,
) -> Result<PlanSet> {
    fits(problem, mesh, &q_placement, &kv_placement, strategy)?;
    has_backward(problem, strategy)?;
    let empty = PlanSet {
        problem: problem.clone(),
        mesh,
        q_placement,
        kv_placement,
        strategy,
        direction: Direction::Backward,
        plans: Vec::new(),
        left_out: TokenRuns::default(),
    };
    Ok(with_plans(empty, plan_rank))
}

/// Refuses what has no backward pass.
fn has_backward(problem: &AttentionProblem, strategy: Strategy) -> Result<()> {
    let refuse = |what: String, remedy: &str| Err(Error::request(format!("a backward pass {what}"), remedy));
    if strategy.facts().backward_round.is_none() {
        return refuse(
            format!("with strategy {strategy}"),
            "use another strategy, as ring or unified; the forward pass may have any strategy",
        );
    }
    if strategy.splits_bias_gradient(problem) {
        return refuse(
            format!("with strategy {strategy} and the gradient of a bias tensor"),
            "use a strategy that sends keys, as ring or unified: then each row of this gradient is complete where its query is",
        );
    }
    if problem.same_queries {
        return refuse("with all queries on every rank".to_owned(), "give each query one owner");
    }
    if problem.results != Results::Owner {
        return refuse(
            "of results on other ranks".to_owned(),
            "let each rank get the rows of its own queries",
        );
    }
    if problem.inference {
        return refuse(
            "of a call after which none was to follow".to_owned(),
            "leave `inference` out of the call",
        );
    }
    if problem.fixed_order {
        return refuse("in a fixed order".to_owned(), "leave the order of sums to the plan");
    }
    if problem.wire == WireFormat::Int8 {
        return refuse("with int8 on the wire".to_owned(), "send keys and values as they are, or in f16");
    }
    Ok(())
}

fn plan_rank(set: &PlanSet, routes: &Routes, rank: Rank) -> Plan {
    let facts = set.strategy.facts();
    let mut builder = PlanBuilder::new(set, rank);
    let (Some(round), Some(own_keys)) = (facts.backward_round, builder.own_key_gradients()) else {
        unreachable!("a backward plan is made only for a strategy that has one")
    };
    let one_piece = set.mesh.ulysses() == 1;
    let all_chunks: Vec<Chunk> = Chunk::all(&builder, !one_piece && facts.chunks_heads).collect();
    if one_piece {
        let inputs = builder.inputs();
        let Sums { dq, d_kv, replicated } = round(&mut builder, routes, inputs);
        builder.round_sum(dq, builder.all_output());
        round_own_keys(&mut builder, d_kv, own_keys);
        let parts: Vec<BufferId> = replicated.into_iter().collect();
        replicated::add_up(&mut builder, &all_chunks, parts, own_keys);
        return builder.finish();
    }
    let (_, u) = set.mesh.coordinates(rank);
    let all_queries = TokenRuns::contiguous(0..set.problem.q_len);
    let shared = shares_heads(set);
    // Where pieces share KV heads, their owner adds up sums.
    let home = shared.then(|| {
        let own = builder.own_keys(own_keys).tokens;
        let Buffer { tokens, heads, .. } = builder.buffer(own_keys).clone();
        builder.declare("sum of own dkv", Content::KeyValueGradSum, tokens.slice(own), heads)
    });
    let mut chunks = all_chunks.iter().copied().peekable();
    let mut going_out = chunks.peek().map(|first| all_to_all::post_tokens_for_heads(&mut builder, *first));
    let mut going_home = None;
    let mut parts = Vec::new();
    while let (Some(chunk), Some(posted)) = (chunks.next(), going_out.take()) {
        let inputs = all_to_all::take_heads(&mut builder, posted);
        going_out = chunks.peek().map(|next| all_to_all::post_tokens_for_heads(&mut builder, *next));
        let Sums { dq, d_kv, replicated } = round(&mut builder, routes, inputs);
        parts.extend(replicated);
        let d_bias = inputs.gradient.and_then(|gradient| gradient.d_bias);
        let dq = rounded(&mut builder, dq, "dq", Content::QueryGrad);
        let d_kv = if shared {
            let q_heads = chunk.q_heads(&builder, u);
            builder.holds(d_kv, all_queries.clone(), q_heads);
            d_kv
        } else {
            rounded(&mut builder, d_kv, "dkv", Content::KeyValueGrad)
        };
        let mine: Vec<BufferId> = [dq, d_kv].into_iter().chain(d_bias).collect();
        let posted = all_to_all::post_heads_for_tokens(&mut builder, chunk, &mine, home);
        if let Some(before) = going_home.replace(posted) {
            all_to_all::take_tokens(&mut builder, before);
        }
    }
    if let Some(last) = going_home {
        all_to_all::take_tokens(&mut builder, last);
    }
    if let Some(home) = home {
        round_own_keys(&mut builder, home, own_keys);
    }
    replicated::add_up(&mut builder, &all_chunks, parts, own_keys);
    builder.finish()
}

/// Rounds a complete sum into a buffer of its own.
fn rounded(builder: &mut PlanBuilder<'_>, sum: BufferId, name: &str, content: Content) -> BufferId {
    let Buffer { tokens, heads, .. } = builder.buffer(sum).clone();
    let name = format!("{name} of heads {}..{}", heads.start, heads.end);
    let mine = builder.declare(name, content, tokens, heads);
    builder.round_sum(sum, mine);
    mine
}

/// Rounds the sum of the gradients of the rank's own keys into their rows of `result`, which begins
/// with the keys that every rank holds.
fn round_own_keys(builder: &mut PlanBuilder<'_>, sum: BufferId, result: BufferId) {
    if builder.replicated() == 0 {
        return builder.round_sum(sum, result);
    }
    let mine = rounded(builder, sum, "dkv", Content::KeyValueGrad);
    let rows = builder.own_keys(result);
    builder.unpack(mine, rows);
}

/// Whether query heads of two Ulysses pieces read the same KV head.
fn shares_heads(set: &PlanSet) -> bool {
    let mut heads: Vec<_> =
        set.mesh.q_heads(&set.problem).iter().map(|heads| kv_heads_for(&set.problem, heads)).collect();
    heads.retain(|heads| !heads.is_empty());
    heads.windows(2).any(|pair| pair[0].end > pair[1].start)
}
