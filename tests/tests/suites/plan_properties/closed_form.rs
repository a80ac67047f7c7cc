//! The bytes and messages of a rank from a second, independent closed form. It uses counts, and the
//! mask pair by pair.

use kyklos::plan::PlanSet;
use kyklos::{AttentionProblem, BiasKind, Placement, Strategy, WireFormat};

/// Bytes and messages that `rank` sends, from counts alone: the independent closed form.
pub(crate) fn closed_form(set: &PlanSet, rank: u32) -> (u64, u64) {
    let (problem, ulysses) = (&set.problem, set.mesh.ulysses());
    let first = |u: u32| u * (problem.q_heads / ulysses) + u.min(problem.q_heads % ulysses);
    // The query heads of each rank of a group, in chunks. The heads are grouped by their shared KV
    // head, and the groups are distributed evenly.
    let groups = |u: u32| -> Vec<u32> {
        let mut groups: Vec<u32> = (first(u)..first(u + 1)).map(|head| head / problem.group()).collect();
        groups.dedup();
        groups
    };
    let fewest = (0..ulysses).map(|u| groups(u).len()).min().expect("a group");
    let chunks = match problem.bias.filter(|tensor| !tensor.shared_rows) {
        Some(bias) if bias.heads == 1 => 1,
        _ if set.strategy == Strategy::Chunked => fewest.min(4),
        _ => 1,
    };
    let of_chunk = |chunk: usize, u: u32| -> (u64, u64) {
        let groups = groups(u);
        let dealt = &groups[groups.len() * chunk / chunks..groups.len() * (chunk + 1) / chunks];
        let heads = (first(u)..first(u + 1)).filter(|head| dealt.contains(&(head / problem.group())));
        (heads.count() as u64, dealt.len() as u64)
    };
    let sums = (0..chunks).map(|chunk| {
        let heads: Vec<(u64, u64)> = (0..ulysses).map(|u| of_chunk(chunk, u)).collect();
        closed_form_of_chunk(set, rank, &heads)
    });
    sums.fold((0, 0), |all, chunk| (all.0 + chunk.0, all.1 + chunk.1))
}

/// `heads`: for each rank of a group, the number of its query heads and of the KV heads that they
/// need.
fn closed_form_of_chunk(set: &PlanSet, rank: u32, heads: &[(u64, u64)]) -> (u64, u64) {
    let problem = &set.problem;
    let (ulysses, ring) = (set.mesh.ulysses(), set.mesh.ring());
    let (r, u) = (rank / ulysses, rank % ulysses);
    let q_tokens = |r: u32, u: u32| set.q_placement.ranks()[(r * ulysses + u) as usize].len() as u64;
    let kv_tokens = |r: u32, u: u32| set.kv_placement.ranks()[(r * ulysses + u) as usize].len() as u64;
    let q_heads = |u: u32| heads[u as usize].0;
    let kv_heads = |u: u32| heads[u as usize].1;
    let (batch, element) = (u64::from(problem.batch), problem.dtype.bytes() as u64);
    let row = batch * u64::from(problem.head_dim) * element;

    // For an attention bias tensor: the heads that rank `u` of a group needs, and the bytes of a token
    // of one head. None where all queries share a row, which every rank has.
    let tensor = problem.bias.filter(|tensor| !tensor.shared_rows);
    let bias_row = tensor.map_or(0, |bias| {
        let bits = bias.kind == BiasKind::Mask;
        let row = if bits {
            4 * problem.kv_len.div_ceil(32)
        } else {
            (problem.kv_len * element as u32).div_ceil(4) * 4
        };
        u64::from(bias.batch * row)
    });
    let bias_heads = |u: u32| if tensor.is_some_and(|bias| bias.heads > 1) { q_heads(u) } else { 1 };

    let (mut bytes, mut messages) = (0, 0);
    let mut send = |size: u64| {
        bytes += size;
        messages += u64::from(size > 0);
    };
    for peer in (0..ulysses).filter(|peer| *peer != u) {
        let bias = bias_row * q_tokens(r, u) * bias_heads(peer);
        send(row * (q_tokens(r, u) * q_heads(peer) + 2 * kv_tokens(r, u) * kv_heads(peer)) + bias);
        send(q_tokens(r, peer) * q_heads(u) * (row + 8 * batch));
    }
    // Bytes of the keys and values of `tokens` tokens as one part of a message.
    let kv = |tokens: usize| {
        let (tokens, dim) = (tokens as u64, u64::from(problem.head_dim));
        let one_head = match problem.wire {
            WireFormat::Same => 2 * tokens * dim * element,
            WireFormat::F16 => 2 * tokens * dim * 2,
            // Codes, a scale for each channel of 64 keys, and one for each value.
            WireFormat::Int8 => 2 * tokens * dim + tokens.div_ceil(64) * dim * 4 + tokens * 4,
        };
        batch * kv_heads(u) * one_head
    };
    let queries = |r: u32| shard(&set.q_placement, ulysses, r);
    let keys = |r: u32| shard(&set.kv_placement, ulysses, r);
    let others = || (0..ring).filter(|other| *other != r);
    match set.strategy {
        Strategy::Gather => {
            let readers = others().filter(|other| sees(problem, &queries(*other), &keys(r)));
            readers.for_each(|_| send(kv(keys(r).len())));
        }
        Strategy::PassQ => {
            let state = batch * (4 * u64::from(problem.head_dim) + 8);
            for other in others() {
                if sees(problem, &queries(r), &keys(other)) {
                    send(queries(r).len() as u64 * (row * q_heads(u) + bias_row * bias_heads(u)));
                }
                if sees(problem, &queries(other), &keys(r)) {
                    send(queries(other).len() as u64 * q_heads(u) * state);
                }
            }
        }
        Strategy::Tree => {
            // Whether the queries of `owner` see keys of the ranks from `place` ahead of it, up to the next
            // place with at least as many factors of two.
            let state = batch * (4 * u64::from(problem.head_dim) + 8);
            let wanted = |owner: u32, place: u32| {
                let stride = place & place.wrapping_neg();
                let reached = (place..(place + stride).min(ring)).map(|ahead| (owner + ahead) % ring);
                { reached }.any(|shard| sees(problem, &queries(owner), &keys(shard)))
            };
            for place in 1..ring {
                let above = place - (place & place.wrapping_neg());
                let (here, handed) = ((r + ring - place) % ring, (r + ring - above) % ring);
                if wanted(handed, place) {
                    send(queries(handed).len() as u64 * (row * q_heads(u) + bias_row * bias_heads(u)));
                }
                if wanted(here, place) {
                    send(queries(here).len() as u64 * q_heads(u) * state);
                }
            }
        }
        Strategy::Relay => {
            // The ranks that need the same first and last KV head as this rank. The tokens of a block are
            // distributed over them in turn.
            let first = |u: u32| u * (problem.q_heads / ulysses) + u.min(problem.q_heads % ulysses);
            let ends = |u: u32| [first(u), first(u + 1) - 1].map(|head| head / problem.group());
            let mates: Vec<u32> = (0..ulysses).filter(|other| ends(*other) == ends(u)).collect();
            let place = mates.iter().position(|mate| *mate == u).expect("its own mate");
            for owner in 0..ring {
                let piece = kv((place..keys(owner).len()).step_by(mates.len()).count());
                let ahead = |shard: u32| (shard + ring - owner) % ring;
                let sees = |shard: u32| sees(problem, &queries(shard), &keys(owner));
                if (0..ring).any(|shard| ahead(shard) > ahead(r) && sees(shard)) {
                    send(piece);
                }
                if owner != r && sees(r) {
                    mates.iter().skip(1).for_each(|_| send(piece));
                }
            }
        }
        strategy if parts(strategy) > 1 => {
            // Each part of each shard is a message of its own, and goes as far as the last shard that sees
            // it.
            let parts = parts(strategy);
            for (hop, part) in (0..ring).flat_map(|hop| (0..parts).map(move |part| (hop, part))) {
                let owner = (r + ring - hop) % ring;
                let shard = keys(owner);
                let place = |part: usize| (part * shard.len()).div_ceil(parts);
                let part = &shard[place(part)..place(part + 1)];
                let sees = |hops: u32| sees(problem, &queries((owner + hops) % ring), part);
                if (hop + 1..ring).any(sees) {
                    send(kv(part.len()));
                }
            }
        }
        strategy => {
            // By hop and direction: this rank forwards a block if a later shard in this direction sees it.
            for hop in 0..ring {
                let mut sent = [0; 2];
                for (direction, sent) in sent.iter_mut().enumerate() {
                    let shift = |from: u32, by: u32| match direction {
                        0 => (from + by) % ring,
                        _ => (from + ring * ring - by) % ring,
                    };
                    let owner = (0..ring).find(|owner| shift(*owner, hop) == r).expect("a ring");
                    let shard = keys(owner);
                    let (part, farthest) = match (strategy, direction) {
                        (Strategy::Bidirectional, 0) => (&shard[..], ring / 2),
                        (Strategy::Bidirectional, _) => (&shard[..], (ring - 1) / 2),
                        (Strategy::TwoWay, 0) => (&shard[..shard.len().div_ceil(2)], ring - 1),
                        (Strategy::TwoWay, _) => (&shard[shard.len().div_ceil(2)..], ring - 1),
                        (Strategy::Line, 0) => (&shard[..], ring - 1 - owner),
                        (Strategy::Line, _) => (&shard[..], owner),
                        (_, 0) => (&shard[..], ring - 1),
                        _ => (&[][..], 0),
                    };
                    if (hop + 1..=farthest).any(|hops| sees(problem, &queries(shift(owner, hops)), part)) {
                        *sent = kv(part.len());
                    }
                }
                // With two shards both directions lead to one rank, which gets one message.
                if ring == 2 { send(sent.iter().sum()) } else { sent.into_iter().for_each(&mut send) }
            }
        }
    }
    (bytes, messages)
}

/// The tokens of a shard.
fn shard(placement: &Placement, ulysses: u32, r: u32) -> Vec<u32> {
    let ranks = &placement.ranks()[(r * ulysses) as usize..((r + 1) * ulysses) as usize];
    ranks.iter().flat_map(|tokens| tokens.iter()).collect()
}

/// Whether any of the queries sees any of the keys, pair by pair.
fn sees(problem: &AttentionProblem, queries: &[u32], keys: &[u32]) -> bool {
    (0..problem.batch as usize).any(|batch| {
        queries.iter().any(|query| {
            let spans = problem.mask.visible(batch, query + problem.q_offset, problem.kv_len);
            keys.iter().any(|key| spans.sees(*key))
        })
    })
}

/// Parts of a shard that travel one way round the ring one by one.
pub(super) fn parts(strategy: Strategy) -> usize {
    match strategy {
        Strategy::Pipelined => 4,
        _ => 1,
    }
}
