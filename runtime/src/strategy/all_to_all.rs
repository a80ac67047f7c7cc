//! The all-to-all of Ulysses: all tokens of some heads for some tokens of all heads, inside one shard's group of U ranks
//! (Jacobs et al. 2023, arXiv 2309.14509).
//! Each rank sends one message to each peer in each direction: q, k, v and the rows of an attention bias tensor
//! together in the first all-to-all, o and lse in the second. A rank gets every KV head that its query heads need and
//! no other, so KV heads are never repeated within a message.

use std::ops::Range;

use kyklos_transport::Rank;

use super::build::{Inputs, PlanBuilder};
use crate::plan::{BufferId, Content, Recv, Send, Slice};

/// A share of every rank's query heads. It crosses the all-to-all, and is attended, separately.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    index: u32,
    count: u32,
}

impl Chunk {
    /// All heads at once, or at most [`MOST_CHUNKS`] chunks. Every rank fills each chunk with whole groups of heads
    /// that share a KV head, so that no KV head travels twice.
    pub(super) fn all(builder: &PlanBuilder<'_>, chunked: bool) -> impl Iterator<Item = Self> + use<> {
        let groups = (0..builder.world.mesh.ulysses()).map(|u| builder.kv_heads(u).len());
        let fewest = u32::try_from(groups.min().unwrap_or(1)).unwrap_or(MOST_CHUNKS);
        // Rows of queries that all heads share would travel with each chunk.
        let shared = builder.world.problem.query_bias().is_some_and(|pairs| pairs.heads == 1);
        let count = if chunked && !shared { fewest.min(MOST_CHUNKS) } else { 1 };
        (0..count).map(move |index| Self { index, count })
    }

    /// The chunk's part of the KV heads of Ulysses piece `u`.
    fn kv_heads(self, builder: &PlanBuilder<'_>, u: u32) -> Range<u32> {
        let all = builder.kv_heads(u);
        let at = |index: u32| all.start + (all.end - all.start) * index / self.count;
        at(self.index)..at(self.index + 1)
    }

    /// The chunk's part of the query heads of Ulysses piece `u`.
    pub(super) fn q_heads(self, builder: &PlanBuilder<'_>, u: u32) -> Range<u32> {
        let (all, kv, group) = (builder.q_heads(u), self.kv_heads(builder, u), builder.world.problem.group());
        all.start.max(kv.start * group)..all.end.min(kv.end * group)
    }

    fn heads(self, builder: &PlanBuilder<'_>, content: Content, u: u32) -> Range<u32> {
        match content {
            Content::KeyValue | Content::WireKeyValue => self.kv_heads(builder, u),
            Content::Query | Content::State | Content::Output => self.q_heads(builder, u),
            Content::Bias if builder.bias_heads(u).len() > 1 => self.q_heads(builder, u),
            Content::Bias => builder.bias_heads(u),
        }
    }
}

/// The posted messages of an all-to-all.
pub(super) struct Posted {
    chunk: Chunk,
    exchange: Option<u32>,
    /// Copies that are sent.
    packed: Vec<BufferId>,
    /// The sending rank's position in the group, and the buffer that it fills.
    arriving: Vec<(u32, BufferId)>,
}

/// Posts the all-to-all of a chunk from the rank's own tokens with all heads to the shard's tokens with the rank's heads.
pub(super) fn post_tokens_for_heads(builder: &mut PlanBuilder<'_>, chunk: Chunk) -> Posted {
    let (_, u) = builder.world.mesh.coordinates(builder.rank);
    let inputs = exchanged(builder);
    let (mut sends, mut recvs, mut packed, mut arriving) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (peer_u, peer) in peers(builder) {
        let mut parts = Vec::new();
        let mut came = Vec::new();
        for &(own, content) in &inputs {
            let (theirs, mine) = (chunk.heads(builder, content, peer_u), chunk.heads(builder, content, u));
            let all = builder.heads_of(own, &theirs);
            let slice = Slice { tokens: replicated(builder, content)..all.tokens.end, ..all };
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
    Posted { chunk, exchange, packed, arriving }
}

/// Waits for that all-to-all. Returns the inputs of the round over the shards.
pub(super) fn take_heads(builder: &mut PlanBuilder<'_>, posted: Posted) -> Inputs {
    let (r, u) = builder.world.mesh.coordinates(builder.rank);
    let Posted { chunk, exchange, packed, arriving } = posted;
    // The rank's own piece is copied while the other pieces travel.
    let mut whole = Vec::new();
    for (own, content) in exchanged(builder) {
        let mine = chunk.heads(builder, content, u);
        let mut tokens = placement(builder, content).replicated().clone();
        tokens.extend(&placement(builder, content).of_shard(r));
        let label = format!("{} of heads {}..{}", name(content), mine.start, mine.end);
        let shard = builder.declare(label, content, tokens, mine.clone());
        let (from, front) = (builder.heads_of(own, &mine), replicated(builder, content));
        let into = piece(builder, shard, content, u);
        builder.repack(Slice { tokens: 0..front, ..from.clone() }, builder.tokens_of(shard, 0..front));
        builder.repack(Slice { tokens: front..from.tokens.end, ..from }, into);
        whole.push((content, shard));
    }
    let shard_of = |content| whole.iter().find(|(of, _)| *of == content).map(|(_, shard)| *shard);
    builder.wait(exchange);
    for buffer in packed {
        builder.free(buffer);
    }
    for (peer_u, buffer) in arriving {
        let content = builder.buffer(buffer).content;
        let shard = shard_of(content).expect("peers send the contents that this rank has");
        let into = piece(builder, shard, content, peer_u);
        builder.unpack(buffer, into);
    }
    let [(_, q), (_, kv), ..] = whole[..] else { unreachable!("q and kv are always there") };
    Inputs { q, kv, pairs: shard_of(Content::Bias) }
}

/// Posts the all-to-all of a chunk from the output of the shard's tokens with the rank's heads, `mine`, to the rank's own tokens
/// with all heads.
pub(super) fn post_heads_for_tokens(builder: &mut PlanBuilder<'_>, chunk: Chunk, mine: BufferId) -> Posted {
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
            let theirs = chunk.q_heads(builder, peer_u);
            let buffer =
                builder.declare(format!("o from rank {peer}"), Content::Output, own_tokens.clone(), theirs);
            recvs.push(Recv { from: peer.0, parts: vec![buffer] });
            arriving.push((peer_u, buffer));
        }
    }
    let exchange = builder.exchange(sends, recvs);
    let into = builder.heads_of(output, &chunk.q_heads(builder, u));
    builder.repack(piece(builder, mine, Content::Output, u), into);
    packed.push(mine);
    Posted { chunk, exchange, packed, arriving }
}

/// Waits for that all-to-all, and frees the output that was sent.
pub(super) fn take_tokens(builder: &mut PlanBuilder<'_>, posted: Posted) {
    builder.wait(posted.exchange);
    for buffer in posted.packed {
        builder.free(buffer);
    }
    for (_, buffer) in posted.arriving {
        let into = builder.heads_of(builder.output(), &builder.buffer(buffer).heads.clone());
        builder.unpack(buffer, into);
    }
}

/// The rank's own tensors that cross the all-to-all.
fn exchanged(builder: &PlanBuilder<'_>) -> Vec<(BufferId, Content)> {
    let Inputs { q, kv, pairs } = builder.inputs();
    let mut inputs = vec![(q, Content::Query), (kv, Content::KeyValue)];
    inputs.extend(pairs.map(|pairs| (pairs, Content::Bias)));
    inputs
}

/// The other ranks of the group, nearest successor first, so that no two ranks send to the same peer at once.
fn peers(builder: &PlanBuilder<'_>) -> Vec<(u32, Rank)> {
    let mesh = builder.world.mesh;
    let (r, u) = mesh.coordinates(builder.rank);
    (1..mesh.ulysses()).map(|round| (u + round) % mesh.ulysses()).map(|u| (u, mesh.rank(r, u))).collect()
}

/// The list positions of Ulysses piece `u` in a buffer that holds a whole shard's tokens, with all the buffer's heads.
fn piece(builder: &PlanBuilder<'_>, shard: BufferId, content: Content, u: u32) -> Slice {
    let mesh = builder.world.mesh;
    let (r, _) = mesh.coordinates(builder.rank);
    let count = |u: u32| placement(builder, content).of_rank(mesh.rank(r, u)).len();
    let start = replicated(builder, content) + (0..u).map(count).sum::<usize>();
    builder.tokens_of(shard, start..start + count(u))
}

fn placement<'a>(builder: &PlanBuilder<'a>, content: Content) -> &'a crate::Placement {
    match content {
        Content::KeyValue | Content::WireKeyValue => &builder.world.kv_placement,
        Content::Query | Content::State | Content::Output | Content::Bias => &builder.world.q_placement,
    }
}

/// Number of tokens at the front of such a buffer that every rank holds. They are not sent.
fn replicated(builder: &PlanBuilder<'_>, content: Content) -> usize {
    placement(builder, content).replicated().len()
}

fn name(content: Content) -> &'static str {
    match content {
        Content::Query => "q",
        Content::KeyValue | Content::WireKeyValue => "kv",
        Content::State => "state",
        Content::Output => "o",
        Content::Bias => "pairs",
    }
}

/// More chunks do not overlap more, and need more messages.
const MOST_CHUNKS: u32 = 4;
