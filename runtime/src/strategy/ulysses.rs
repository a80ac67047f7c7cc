//! The Ulysses trade: all tokens of some heads for some tokens of all heads, inside one shard's group of U ranks
//! (Jacobs et al. 2023, arXiv 2309.14509).
//!
//! One message to each peer and direction: q, k, v and the rows of a pair tensor together on the way in, o and lse on the way back. A rank
//! gets every KV head that its query heads need and no other, so KV heads are never repeated within a message.

use kyklos_transport::Rank;

use super::build::{Inputs, PlanBuilder};
use crate::plan::{BufferId, Content, Recv, Send};

/// From the rank's own tokens with all heads to the shard's tokens with the rank's heads.
pub(super) fn trade_tokens_for_heads(builder: &mut PlanBuilder<'_>) -> Inputs {
    let (r, u) = builder.world.mesh.coordinates(builder.rank);
    let Inputs { q, kv, pairs } = builder.inputs();
    let mut inputs = vec![(q, Content::Query), (kv, Content::KeyValue)];
    inputs.extend(pairs.map(|pairs| (pairs, Content::Pairs)));
    let (mut sends, mut recvs, mut packed, mut arriving) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (peer_u, peer) in peers(builder) {
        let mut parts = Vec::new();
        let mut came = Vec::new();
        for &(own, content) in &inputs {
            let (theirs, mine) = (heads(builder, content, peer_u), heads(builder, content, u));
            let slice = builder.heads_of(own, &theirs);
            if !slice.tokens.is_empty() {
                parts.push(builder.sendable(
                    slice,
                    &format!("{} for rank {peer}", name(content)),
                    &mut packed,
                ));
            }
            let tokens = placement(builder, content).of_rank(peer).clone();
            if !tokens.is_empty() {
                let from = format!("{} from rank {peer}", name(content));
                came.push(builder.declare(from, content, tokens, mine));
            }
        }
        if !parts.is_empty() {
            sends.push(Send { to: peer.0, parts });
        }
        if !came.is_empty() {
            recvs.push(Recv { from: peer.0, parts: came.clone() });
            arriving.extend(came.into_iter().map(|buffer| (peer_u, buffer)));
        }
    }
    let exchange = builder.exchange(sends, recvs);

    // The piece that stays is copied while the others travel.
    let mut whole = Vec::new();
    for (own, content) in inputs {
        let (tokens, mine) = (placement(builder, content).of_shard(r), heads(builder, content, u));
        let label = format!("{} of heads {}..{}", name(content), mine.start, mine.end);
        let shard = builder.declare(label, content, tokens, mine.clone());
        let into = piece(builder, shard, content, u);
        builder.repack(builder.heads_of(own, &mine), into);
        whole.push((content, shard));
    }
    let shard_of = |content| whole.iter().find(|(of, _)| *of == content).map(|(_, shard)| *shard);
    builder.wait(exchange);
    for buffer in packed {
        builder.free(buffer);
    }
    for (peer_u, buffer) in arriving {
        let content = builder.buffer(buffer).content;
        let shard = shard_of(content).expect("what peers send is of the kinds that this rank has");
        let into = piece(builder, shard, content, peer_u);
        builder.unpack(buffer, into);
    }
    let [(_, q), (_, kv), ..] = whole[..] else { unreachable!("q and kv are always there") };
    Inputs { q, kv, pairs: shard_of(Content::Pairs) }
}

/// From the output of the shard's tokens with the rank's heads to the rank's own tokens with all heads. Ends `mine`.
pub(super) fn trade_heads_for_tokens(builder: &mut PlanBuilder<'_>, mine: BufferId) {
    let (_, u) = builder.world.mesh.coordinates(builder.rank);
    let (output, own_tokens) = (builder.output(), builder.buffer(builder.output()).tokens.clone());
    let (mut sends, mut recvs, mut packed, mut arriving) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (peer_u, peer) in peers(builder) {
        let slice = piece(builder, mine, Content::Output, peer_u);
        if !slice.tokens.is_empty() {
            let part = builder.sendable(slice, &format!("o for rank {peer}"), &mut packed);
            sends.push(Send { to: peer.0, parts: vec![part] });
        }
        if !own_tokens.is_empty() {
            let theirs = builder.q_heads(peer_u);
            let buffer =
                builder.declare(format!("o from rank {peer}"), Content::Output, own_tokens.clone(), theirs);
            recvs.push(Recv { from: peer.0, parts: vec![buffer] });
            arriving.push(buffer);
        }
    }
    let exchange = builder.exchange(sends, recvs);
    let into = builder.heads_of(output, &builder.q_heads(u));
    builder.repack(piece(builder, mine, Content::Output, u), into);
    builder.wait(exchange);
    for buffer in packed {
        builder.free(buffer);
    }
    builder.free(mine);
    for buffer in arriving {
        let into = builder.heads_of(output, &builder.buffer(buffer).heads.clone());
        builder.unpack(buffer, into);
    }
}

/// The other ranks of the group, nearest successor first, so that no two ranks send to the same peer at once.
fn peers(builder: &PlanBuilder<'_>) -> Vec<(u32, Rank)> {
    let mesh = builder.world.mesh;
    let (r, u) = mesh.coordinates(builder.rank);
    (1..mesh.ulysses()).map(|round| (u + round) % mesh.ulysses()).map(|u| (u, mesh.rank(r, u))).collect()
}

/// The list positions of Ulysses piece `u` in a buffer that holds a whole shard's tokens, with all the buffer's heads.
fn piece(builder: &PlanBuilder<'_>, shard: BufferId, content: Content, u: u32) -> crate::plan::Slice {
    let mesh = builder.world.mesh;
    let (r, _) = mesh.coordinates(builder.rank);
    let count = |u: u32| placement(builder, content).of_rank(mesh.rank(r, u)).len();
    let start = (0..u).map(count).sum();
    builder.tokens_of(shard, start..start + count(u))
}

fn placement<'a>(builder: &PlanBuilder<'a>, content: Content) -> &'a crate::Placement {
    match content {
        Content::KeyValue | Content::WireKeyValue => &builder.world.kv_placement,
        Content::Query | Content::State | Content::Output | Content::Pairs => &builder.world.q_placement,
    }
}

fn heads(builder: &PlanBuilder<'_>, content: Content, u: u32) -> std::ops::Range<u32> {
    match content {
        Content::KeyValue | Content::WireKeyValue => builder.kv_heads(u),
        Content::Query | Content::State | Content::Output => builder.q_heads(u),
        Content::Pairs => builder.pair_heads(u),
    }
}

fn name(content: Content) -> &'static str {
    match content {
        Content::Query => "q",
        Content::KeyValue | Content::WireKeyValue => "kv",
        Content::State => "state",
        Content::Output => "o",
        Content::Pairs => "pairs",
    }
}
