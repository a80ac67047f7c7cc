//! What a mesh sends, from counts of tokens and heads alone: a mesh is chosen before any plan is made.

use super::Strategy;
use super::relay::piece;
use super::streams::Routes;
use super::tree::seen_from;
use crate::mesh::kv_heads_for;
use crate::plan::Content;
use crate::{AttentionProblem, Placement, lower};

/// Plan payload that all ranks send together, in bytes: what the plans over these placements add up to.
pub(super) fn bytes_sent(
    strategy: Strategy,
    problem: &AttentionProblem,
    q: &Placement,
    kv: &Placement,
) -> u64 {
    let mesh = q.mesh();
    let heads = mesh.q_heads(problem);
    let kv_heads: Vec<u128> = heads.iter().map(|heads| kv_heads_for(problem, heads).len() as u128).collect();
    let all_kv_heads: u128 = kv_heads.iter().sum();
    let batch = u128::from(problem.batch);
    let row = batch * u128::from(problem.head_dim) * problem.dtype.bytes() as u128;
    let lse = batch * 4;

    // The trades: the tokens of each piece, for the heads of all other pieces, there and back.
    let mut bytes = 0;
    for (u, (heads, kv_heads)) in (0..).zip(heads.iter().zip(&kv_heads)) {
        let of_piece = |placement: &Placement| -> u128 {
            (0..mesh.ring()).map(|r| placement.of_rank(mesh.rank(r, u)).len() as u128).sum()
        };
        let foreign = u128::from(problem.q_heads) - heads.len() as u128;
        bytes += of_piece(q) * foreign * (row + row + lse);
        bytes += of_piece(kv) * (all_kv_heads - kv_heads) * 2 * row;
        if let Some(pairs) = problem.pairs {
            let row = u128::from(pairs.batch) * pairs.row_bytes(problem.dtype, problem.kv_len) as u128;
            let copies = if pairs.heads > 1 { foreign } else { u128::from(mesh.ulysses()) - 1 };
            bytes += of_piece(q) * copies * row;
        }
    }
    // The round.
    let pair_rows = problem.pairs.map_or(0, |pairs| {
        let heads = if pairs.heads > 1 { problem.q_heads } else { mesh.ulysses() };
        u128::from(heads * pairs.batch) * pairs.row_bytes(problem.dtype, problem.kv_len) as u128
    });
    let sent = |tokens: usize| u128::from(Content::WireKeyValue.bytes(problem, tokens, 1)) * all_kv_heads;
    bytes += match strategy {
        Strategy::Gather => visits(problem, q, kv).map(|(_, owner)| sent(kv.of_shard(owner).len())).sum(),
        Strategy::Relay => relayed(problem, q, kv),
        Strategy::PassQ | Strategy::Tree => {
            let tokens: u128 = if strategy == Strategy::PassQ {
                visits(problem, q, kv).map(|(guest, _)| q.of_shard(guest).len() as u128).sum()
            } else {
                handed_on(problem, q, kv).map(|owner| q.of_shard(owner).len() as u128).sum()
            };
            let state = batch * (u128::from(problem.head_dim) * 4 + 8);
            tokens * (u128::from(problem.q_heads) * (row + state) + pair_rows)
        }
        _ => {
            let routes = Routes::new(strategy, problem, q, kv);
            routes.parts_sent(kv).map(|(hops, tokens)| u128::from(hops) * sent(tokens)).sum()
        }
    };
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Bytes of keys and values that cross between shards in pieces, and inside the shards that see them.
fn relayed(problem: &AttentionProblem, q: &Placement, kv: &Placement) -> u128 {
    let mesh = q.mesh();
    let (heads, routes) = (mesh.q_heads(problem), Routes::new(Strategy::Relay, problem, q, kv));
    let mut bytes = 0;
    for group in mesh.kv_groups(problem) {
        let kv_heads = kv_heads_for(problem, &heads[group.start as usize]);
        let kv_heads = kv_heads.end - kv_heads.start;
        let sent = |owner: u32| -> u128 {
            let tokens = kv.of_shard(owner).len();
            let pieces = (0..group.len()).map(|index| piece(tokens, index, group.len()).len());
            pieces.map(|tokens| u128::from(Content::WireKeyValue.bytes(problem, tokens, kv_heads))).sum()
        };
        bytes += (0..mesh.ring()).map(|owner| u128::from(routes.reach(owner)) * sent(owner)).sum::<u128>();
        let passed_on = visits(problem, q, kv).map(|(_, owner)| sent(owner)).sum::<u128>();
        bytes += passed_on * (group.len() as u128 - 1);
    }
    bytes
}

/// The owner of the queries of each edge of each tree that they go along.
fn handed_on(problem: &AttentionProblem, q: &Placement, kv: &Placement) -> impl Iterator<Item = u32> {
    let ring = q.mesh().ring();
    let edges = (0..ring).flat_map(move |owner| (1..ring).map(move |position| (owner, position)));
    let sees = |owner, shard| lower::any_visible(problem, &q.of_shard(owner), &kv.of_shard(shard));
    edges
        .filter(move |(owner, position)| seen_from(ring, *owner, *position, sees).next().is_some())
        .map(|(owner, _)| owner)
}

/// Two shards, the first of which sees keys of the second.
fn visits(problem: &AttentionProblem, q: &Placement, kv: &Placement) -> impl Iterator<Item = (u32, u32)> {
    let ring = q.mesh().ring();
    let pairs = (0..ring).flat_map(move |guest| (0..ring).map(move |owner| (guest, owner)));
    pairs.filter(|(guest, owner)| {
        guest != owner && lower::any_visible(problem, &q.of_shard(*guest), &kv.of_shard(*owner))
    })
}
