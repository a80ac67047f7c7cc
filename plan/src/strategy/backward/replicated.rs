//! Gradients of keys that every rank holds: each rank has a sum over its own queries, and gets the
//! sum over all.
//!
//! The keys are cut into one piece for each rank. A rank gets the sums of all ranks for its piece,
//! adds them in rank order, rounds, and sends the result to all. So every rank has equal bytes,
//! after two messages to each other rank.

use std::ops::Range;

use kyklos_rank::Rank;

use super::super::all_to_all::Chunk;
use super::super::build::PlanBuilder;
use crate::lower;
use crate::plan::{BufferId, BufferName, Content, Recv, Send, Step};
use crate::tokens::TokenRuns;

/// Adds up the sums of all ranks, into the first rows of `result`. `parts`: this rank's sums, one
/// for each of `chunks`.
pub(super) fn add_up(
    builder: &mut PlanBuilder<'_>,
    chunks: &[Chunk],
    parts: Vec<BufferId>,
    result: BufferId,
) {
    if builder.replicated() == 0 {
        return;
    }
    let rank = builder.rank;
    let total = collect(builder, chunks, parts);
    let mine = total.map(|total| {
        let tokens = builder.buffer(total).tokens.clone();
        let heads = builder.buffer(total).heads.clone();
        let mine =
            builder.declare("dkv of a piece of the replicated keys", Content::KeyValueGrad, tokens, heads);
        builder.round_sum(total, mine);
        mine
    });
    let (mut sends, mut recvs, mut arriving) = (Vec::new(), Vec::new(), Vec::new());
    for peer in others(builder) {
        sends.extend(mine.map(|mine| Send { to: peer.0, parts: vec![builder.whole(mine)] }));
        let piece = piece(builder, peer);
        if !piece.is_empty() {
            let tokens = builder.set.kv_placement.replicated().slice(piece.clone());
            let (name, heads) = (BufferName::from_rank("dkv", peer), builder.buffer(result).heads.clone());
            let buffer = builder.declare(name, Content::KeyValueGrad, tokens, heads);
            recvs.push(Recv { from: peer.0, parts: vec![buffer] });
            arriving.push((buffer, piece));
        }
    }
    let exchange = builder.exchange(sends, recvs);
    if let Some(mine) = mine {
        let (from, into) = (builder.whole(mine), builder.tokens_of(result, piece(builder, rank)));
        builder.repack(from, into);
    }
    builder.wait(exchange);
    for (buffer, piece) in arriving {
        let into = builder.tokens_of(result, piece);
        builder.unpack(buffer, into);
    }
    if let Some(mine) = mine {
        builder.free(mine);
    }
}

/// The sum of all ranks for this rank's piece, if there are keys in it.
fn collect(builder: &mut PlanBuilder<'_>, chunks: &[Chunk], parts: Vec<BufferId>) -> Option<BufferId> {
    let (set, rank) = (builder.set, builder.rank);
    let keys = |builder: &PlanBuilder<'_>, of: Rank| set.kv_placement.replicated().slice(piece(builder, of));
    let mine = keys(builder, rank);
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    let mut packed = Vec::new();
    // By rank: its sums for this rank's piece.
    let mut sums: Vec<Vec<BufferId>> = vec![Vec::new(); set.mesh.size() as usize];
    for peer in others(builder) {
        if sees(builder, rank, &keys(builder, peer)) {
            let piece = piece(builder, peer);
            let full = parts.iter().filter(|part| builder.buffer(**part).head_count() > 0);
            let slices: Vec<_> = full.map(|part| builder.tokens_of(*part, piece.clone())).collect();
            let name = BufferName::for_rank("dkv", peer);
            let parts: Vec<_> =
                slices.into_iter().map(|slice| builder.sendable(slice, name.clone(), &mut packed)).collect();
            if !parts.is_empty() {
                sends.push(Send { to: peer.0, parts });
            }
        }
        if sees(builder, peer, &mine) {
            let came = expect(builder, chunks, peer, &mine);
            if !came.is_empty() {
                recvs.push(Recv { from: peer.0, parts: came.clone() });
                sums[peer.0 as usize] = came;
            }
        }
    }
    let exchange = builder.exchange(sends, recvs);
    if sees(builder, rank, &mine) {
        let own = piece(builder, rank);
        for part in &parts {
            if builder.buffer(*part).head_count() > 0 {
                let slice = builder.tokens_of(*part, own.clone());
                sums[rank.0 as usize].push(builder.copied(slice, "own dkv of replicated keys"));
            }
        }
    }
    builder.wait(exchange);
    packed.into_iter().chain(parts).for_each(|sent| builder.free(sent));
    if mine.is_empty() {
        return None;
    }
    let name = "sum of a piece of the replicated keys";
    let total = builder.declare(name, Content::KeyValueGradSum, mine, 0..set.problem.kv_heads);
    for sum in sums.into_iter().flatten() {
        let heads = builder.buffer(sum).heads.clone();
        let into = builder.heads_of(total, &heads);
        builder.push(Step::Accumulate { from: sum, into });
        builder.free(sum);
    }
    Some(total)
}

/// The sums that `peer` sends for the keys `mine`.
fn expect(builder: &mut PlanBuilder<'_>, chunks: &[Chunk], peer: Rank, mine: &TokenRuns) -> Vec<BufferId> {
    let (r, u) = builder.set.mesh.coordinates(peer);
    let queries = builder.set.q_placement.of_shard(r);
    let mut came = Vec::new();
    for chunk in chunks {
        let (kv_heads, q_heads) = (chunk.kv_heads(builder, u), chunk.q_heads(builder, u));
        if !kv_heads.is_empty() {
            let name = BufferName::from_rank("dkv", peer);
            let sum = builder.declare(name, Content::KeyValueGradSum, mine.clone(), kv_heads);
            builder.holds(sum, queries.clone(), q_heads);
            came.push(sum);
        }
    }
    came
}

/// Whether a query in the round of `rank` sees any of these keys.
fn sees(builder: &PlanBuilder<'_>, rank: Rank, keys: &TokenRuns) -> bool {
    let (r, _) = builder.set.mesh.coordinates(rank);
    lower::any_visible(&builder.set.problem, &builder.set.q_placement.of_shard(r), keys)
}

/// The part of the replicated keys, by position, that `rank` adds up.
fn piece(builder: &PlanBuilder<'_>, rank: Rank) -> Range<usize> {
    let (count, ranks) = (builder.replicated(), builder.set.mesh.size() as usize);
    let at = |rank: usize| count * rank / ranks;
    at(rank.0 as usize)..at(rank.0 as usize + 1)
}

/// The other ranks, nearest successor first, so that no two ranks send to the same peer at once.
fn others(builder: &PlanBuilder<'_>) -> Vec<Rank> {
    let ranks = builder.set.mesh.size();
    (1..ranks).map(|distance| Rank((builder.rank.0 + distance) % ranks)).collect()
}
