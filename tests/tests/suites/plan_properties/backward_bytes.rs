//! The closed form of the bytes of backward plans.

use super::closed_form::parts;
use kyklos::plan::PlanSet;
use kyklos::{Strategy, WireFormat};

/// Bytes that all ranks send, from counts and the mask pair by pair: keys go to every rank that
/// sees any of them (a chain of neighbours passes on what a later one sees), one f32 sum for each
/// such rank and block comes back. The all-to-all carries q, dO, statistics, bias rows, k and v
/// out, and dQ, dK, dV and f32 sums of the bias home. Of keys that every rank holds, each rank adds
/// up one piece of f32 sums, from each rank that sees it, and sends the result to all.
pub(super) fn closed_form(set: &PlanSet) -> u64 {
    let (problem, mesh) = (&set.problem, set.mesh);
    let (ulysses, ring) = (mesh.ulysses(), mesh.ring());
    let (batch, dim) = (u64::from(problem.batch), u64::from(problem.head_dim));
    let element = problem.dtype.bytes() as u64;
    let first = |u: u32| u * (problem.q_heads / ulysses) + u.min(problem.q_heads % ulysses);
    let kv_of = |u: u32| -> Vec<u32> {
        let mut heads: Vec<u32> = (first(u)..first(u + 1)).map(|head| head / problem.group()).collect();
        heads.dedup();
        heads
    };
    let all_kv: u64 = (0..ulysses).map(|u| kv_of(u).len() as u64).sum();
    let shared = all_kv > u64::from(problem.kv_heads);
    let shard = |of: &kyklos::Placement, r: u32| of.of_shard(r);
    let sees = |reader: u32, keys: &kyklos::TokenRuns| {
        shard(&set.q_placement, reader).iter().any(|query| {
            (0..problem.batch as usize).any(|entry| {
                let visible = problem.mask.visible(entry, problem.q_position(query), problem.kv_len);
                keys.iter().any(|key| visible.sees(key))
            })
        })
    };
    let kv_bytes = |tokens: u64| {
        let element = if problem.wire == WireFormat::F16 { 2 } else { element };
        2 * batch * dim * element * tokens * all_kv
    };
    let sum_bytes = |tokens: u64| 2 * batch * dim * 4 * tokens * all_kv;
    let query_owners = if set.strategy.moves_queries() { ring } else { 0 };
    let mut bytes = 0;
    for owner in 0..query_owners {
        let reads: Vec<bool> =
            (0..ring).map(|hops| sees(owner, &shard(&set.kv_placement, (owner + hops) % ring))).collect();
        // Of a tree, the edge to each place carries what any place from there to the next one with as many
        // factors of two sees.
        let edge = |place: u32| match set.strategy {
            Strategy::Tree => place..(place + (place & place.wrapping_neg())).min(ring),
            _ => place..place + 1,
        };
        let edges = (1..ring).filter(|place| edge(*place).any(|hops| reads[hops as usize])).count() as u64;
        let queries = shard(&set.q_placement, owner).len() as u64;
        // q, dO and the statistics go out, an f32 sum comes back; rows of a bias go along.
        let row = batch * (2 * dim * element + 16 + 4 * dim) * u64::from(problem.q_heads);
        let bias = problem.bias.filter(|bias| !bias.shared_rows).map_or(0, |bias| {
            let heads = if bias.heads > 1 { problem.q_heads } else { ulysses };
            let row = bias.row_bytes(problem.dtype, problem.kv_len) as u64;
            row * u64::from(bias.batch) * u64::from(heads)
        });
        bytes += edges * queries * (row + bias);
    }
    for owner in query_owners..ring {
        let all = shard(&set.kv_placement, owner);
        let at = |part: usize, parts: usize| (part * all.len()).div_ceil(parts);
        let parts: Vec<_> = match set.strategy {
            Strategy::TwoWay => vec![(0..at(1, 2), true), (at(1, 2)..all.len(), false)],
            strategy => {
                let parts = parts(strategy);
                (0..parts).map(|part| (at(part, parts)..at(part + 1, parts), true)).collect()
            }
        };
        for (range, forwards) in parts {
            let keys = all.slice(range.clone());
            let tokens = range.len() as u64;
            if tokens == 0 {
                continue;
            }
            let at = |hops: u32| if forwards { (owner + hops) % ring } else { (owner + ring - hops) % ring };
            let readers: Vec<u32> = (1..ring).filter(|hops| sees(at(*hops), &keys)).collect();
            bytes += sum_bytes(tokens) * readers.len() as u64;
            let back = |hops: &u32| ring - hops;
            let farthest = |hops: Vec<u32>| hops.into_iter().max().unwrap_or(0);
            let hops = match set.strategy {
                Strategy::Gather => readers.len() as u32,
                Strategy::Bidirectional => {
                    let (ahead, behind) = ((ring - 1).div_ceil(2), (ring - 1) / 2);
                    farthest(readers.iter().copied().filter(|hops| *hops <= ahead).collect())
                        + farthest(readers.iter().map(back).filter(|hops| *hops <= behind).collect())
                }
                Strategy::Line => {
                    farthest(readers.iter().copied().filter(|hops| owner + hops < ring).collect())
                        + farthest(readers.iter().map(back).filter(|hops| *hops <= owner).collect())
                }
                _ => farthest(readers),
            };
            bytes += kv_bytes(tokens) * u64::from(hops);
        }
    }
    let replicated: Vec<u32> = problem.replicated.clone().collect();
    let ranks = mesh.size();
    for piece in 0..ranks {
        let at = |rank: u32| replicated.len() * rank as usize / ranks as usize;
        let keys = &replicated[at(piece)..at(piece + 1)];
        let row = 2 * batch * dim * keys.len() as u64;
        bytes += row * u64::from(problem.kv_heads) * element * u64::from(ranks - 1);
        let others = (0..ranks).filter(|rank| *rank != piece);
        for (r, u) in others.map(|rank| (rank / ulysses, rank % ulysses)) {
            if sees(r, &kyklos::TokenRuns::from_positions(keys.iter().copied())) {
                bytes += row * kv_of(u).len() as u64 * 4;
            }
        }
    }
    for u in 0..ulysses {
        let tokens = |of: &kyklos::Placement| -> u64 {
            (0..ring).map(|r| of.of_rank(mesh.rank(r, u)).len() as u64).sum()
        };
        let (q, kv) = (tokens(&set.q_placement), tokens(&set.kv_placement));
        let foreign = u64::from(problem.q_heads) - u64::from(first(u + 1) - first(u));
        let foreign_kv = all_kv - kv_of(u).len() as u64;
        // q, dO and dQ; the statistics.
        bytes += q * foreign * batch * (3 * dim * element + 16);
        bytes += kv * foreign_kv * batch * 2 * dim * (element + if shared { 4 } else { element });
        if let Some(bias) = problem.bias.filter(|bias| !bias.shared_rows) {
            let row = bias.row_bytes(problem.dtype, problem.kv_len) as u64 * u64::from(bias.batch);
            let rows = q * if bias.heads > 1 { foreign } else { u64::from(ulysses) - 1 };
            bytes += rows * row;
            if problem.bias_gradient {
                bytes += rows * u64::from(bias.batch * problem.kv_len) * 4;
            }
        }
    }
    bytes
}
