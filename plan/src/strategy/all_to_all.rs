//! The all-to-all of Ulysses: all tokens of some heads for some tokens of all heads, inside one
//! shard's group of U ranks (Jacobs et al. 2023, arXiv 2309.14509).
//! Each rank sends one message to each peer in each direction: q, k, v and the rows of an attention
//! bias tensor together in the first all-to-all, o and lse in the second. A rank gets every KV head
//! that its query heads need and no other, so KV heads are never repeated within a message.

use std::ops::Range;

use kyklos_rank::Rank;

use super::build::{Inputs, OutputGradient, PlanBuilder};
use crate::plan::{BufferId, BufferName, Content, Recv, Send, Slice, Step};
use crate::tokens::TokenRuns;

/// A share of every rank's query heads. It crosses the all-to-all, and is attended, separately.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    index: u32,
    count: u32,
}

impl Chunk {
    /// All heads at once, or at most [`MOST_CHUNKS`] chunks. Every rank fills each chunk with whole
    /// groups of heads that share a KV head, so that no KV head travels twice.
    pub(super) fn all(builder: &PlanBuilder<'_>, chunked: bool) -> impl Iterator<Item = Self> + use<> {
        let groups = (0..builder.set.mesh.ulysses()).map(|u| builder.kv_heads(u).len());
        let fewest = u32::try_from(groups.min().unwrap_or(1)).unwrap_or(MOST_CHUNKS);
        // Rows of queries that all heads share would travel with each chunk.
        let shared = builder.set.problem.query_bias().is_some_and(|bias| bias.heads == 1);
        let count = if chunked && !shared { fewest.min(MOST_CHUNKS) } else { 1 };
        (0..count).map(move |index| Self { index, count })
    }

    /// The chunk's part of the KV heads of Ulysses piece `u`.
    pub(super) fn kv_heads(self, builder: &PlanBuilder<'_>, u: u32) -> Range<u32> {
        let all = builder.kv_heads(u);
        let at = |index: u32| all.start + (all.end - all.start) * index / self.count;
        at(self.index)..at(self.index + 1)
    }

    /// The chunk's part of the query heads of Ulysses piece `u`.
    pub(super) fn q_heads(self, builder: &PlanBuilder<'_>, u: u32) -> Range<u32> {
        let (all, kv, group) = (builder.q_heads(u), self.kv_heads(builder, u), builder.set.problem.group());
        all.start.max(kv.start * group)..all.end.min(kv.end * group)
    }

    fn heads(self, builder: &PlanBuilder<'_>, content: Content, u: u32) -> Range<u32> {
        match content {
            Content::Bias | Content::BiasGradSum if builder.bias_heads(u).len() == 1 => builder.bias_heads(u),
            content if content.is_of_keys() => self.kv_heads(builder, u),
            _ => self.q_heads(builder, u),
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
    /// Where sums of gradients of keys are added.
    home: Option<BufferId>,
}

/// Posts the all-to-all of a chunk from the rank's own tokens with all heads to the shard's tokens
/// with the rank's heads.
pub(super) fn post_tokens_for_heads(builder: &mut PlanBuilder<'_>, chunk: Chunk) -> Posted {
    let (_, u) = builder.set.mesh.coordinates(builder.rank);
    let inputs = exchanged(builder);
    let (mut sends, mut recvs, mut packed, mut arriving) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (peer_u, peer) in peers(builder) {
        let (mut parts, mut came) = (Vec::with_capacity(inputs.len()), Vec::with_capacity(inputs.len()));
        for &(own, content) in &inputs {
            let (theirs, mine) = (chunk.heads(builder, content, peer_u), chunk.heads(builder, content, u));
            let all = builder.heads_of(own, &theirs);
            let slice = Slice { tokens: replicated(builder, content)..all.tokens.end, ..all };
            if !slice.tokens.is_empty() {
                parts.push(builder.sendable(slice, BufferName::for_rank(name(content), peer), &mut packed));
            }
            let tokens = placement(builder, content).of_rank(peer).clone();
            if !tokens.is_empty() {
                let from = BufferName::from_rank(name(content), peer);
                came.push(builder.declare(from, content, tokens, mine));
            }
        }
        if !parts.is_empty() {
            sends.push(Send { to: peer.0, parts });
        }
        if !came.is_empty() {
            arriving.extend(came.iter().map(|buffer| (peer_u, *buffer)));
            recvs.push(Recv { from: peer.0, parts: came });
        }
    }
    let exchange = builder.exchange(sends, recvs);
    Posted { chunk, exchange, packed, arriving, home: None }
}

/// Waits for that all-to-all. Returns the inputs of the round over the shards.
pub(super) fn take_heads(builder: &mut PlanBuilder<'_>, posted: Posted) -> Inputs {
    let (r, u) = builder.set.mesh.coordinates(builder.rank);
    let Posted { chunk, exchange, packed, arriving, .. } = posted;
    let pieces = Pieces::of_shard(builder);
    // The rank's own piece is copied while the other pieces travel.
    let mut whole = Vec::new();
    for (own, content) in exchanged(builder) {
        let mine = chunk.heads(builder, content, u);
        let mut tokens = placement(builder, content).replicated().clone();
        tokens.extend(&placement(builder, content).of_shard(r));
        let label = format!("{} of heads {}..{}", name(content), mine.start, mine.end);
        let shard = builder.declare(label, content, tokens, mine.clone());
        let (from, front) = (builder.heads_of(own, &mine), replicated(builder, content));
        let into = pieces.piece(builder, shard, content, u);
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
        let into = pieces.piece(builder, shard, content, peer_u);
        builder.unpack(buffer, into);
    }
    let [(_, q), (_, kv), ..] = whole[..] else { unreachable!("q and kv are always there") };
    let gradient = shard_of(Content::OutputGrad).zip(shard_of(Content::RowStats));
    let bias = shard_of(Content::Bias);
    let gradient = gradient.map(|(d_o, stats)| {
        let q_heads = chunk.q_heads(builder, u);
        let d_bias = builder.bias_sum(bias, format!("dbias of heads {}..{}", q_heads.start, q_heads.end));
        if let Some(sum) = d_bias {
            builder.holds(sum, TokenRuns::contiguous(0..builder.set.problem.kv_len), q_heads);
        }
        OutputGradient { d_o, stats, d_bias }
    });
    Inputs { q, kv, bias, gradient }
}

/// Posts the all-to-all of a chunk from results of the shard's tokens with the rank's heads,
/// `mine`, to the rank's own tokens with all heads: the output, or gradients. Sums of gradients of
/// keys are added to `home`.
pub(super) fn post_heads_for_tokens(
    builder: &mut PlanBuilder<'_>,
    chunk: Chunk,
    mine: &[BufferId],
    home: Option<BufferId>,
) -> Posted {
    let (_, u) = builder.set.mesh.coordinates(builder.rank);
    let (mut sends, mut recvs, mut packed, mut arriving) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let pieces = Pieces::of_shard(builder);
    let results: Vec<(BufferId, Content)> =
        mine.iter().map(|id| (*id, builder.buffer(*id).content)).collect();
    for (peer_u, peer) in peers(builder) {
        let (mut parts, mut came) = (Vec::with_capacity(results.len()), Vec::with_capacity(results.len()));
        for (result, content) in &results {
            let slice = pieces.piece(builder, *result, *content, peer_u);
            if !slice.tokens.is_empty() {
                let label = BufferName::for_rank(name(*content), peer);
                parts.push(builder.sendable(slice, label, &mut packed));
            }
            let tokens = placement(builder, *content).of_rank(builder.rank).clone();
            if !tokens.is_empty() {
                let theirs = chunk.heads(builder, *content, peer_u);
                let label = BufferName::from_rank(name(*content), peer);
                let buffer = builder.declare(label, *content, tokens, theirs);
                if content.is_sum() {
                    let problem = &builder.set.problem;
                    let met = if content.is_of_keys() { problem.q_len } else { problem.kv_len };
                    let q_heads = chunk.q_heads(builder, peer_u);
                    builder.holds(buffer, TokenRuns::contiguous(0..met), q_heads);
                }
                came.push(buffer);
            }
        }
        if !parts.is_empty() {
            sends.push(Send { to: peer.0, parts });
        }
        if !came.is_empty() {
            arriving.extend(came.iter().map(|buffer| (peer_u, *buffer)));
            recvs.push(Recv { from: peer.0, parts: came });
        }
    }
    let exchange = builder.exchange(sends, recvs);
    for (result, content) in results {
        let own = pieces.piece(builder, result, content, u);
        match home_of(builder, content, home) {
            None => {
                let into = own_result(builder, content, &chunk.heads(builder, content, u));
                builder.repack(own, into);
            }
            Some(home) if !own.tokens.is_empty() => {
                let copy = builder.copied(own, format!("own {}", name(content)));
                add(builder, copy, home);
                builder.free(copy);
            }
            Some(_) => {}
        }
        packed.push(result);
    }
    Posted { chunk, exchange, packed, arriving, home }
}

/// Waits for that all-to-all, and frees the results that were sent.
pub(super) fn take_tokens(builder: &mut PlanBuilder<'_>, posted: Posted) {
    builder.wait(posted.exchange);
    for buffer in posted.packed {
        builder.free(buffer);
    }
    for (_, buffer) in posted.arriving {
        let content = builder.buffer(buffer).content;
        match home_of(builder, content, posted.home) {
            None => {
                let heads = builder.buffer(buffer).heads.clone();
                let into = own_result(builder, content, &heads);
                builder.unpack(buffer, into);
            }
            Some(home) => {
                add(builder, buffer, home);
                builder.free(buffer);
            }
        }
    }
}

/// Where sums of this content are added: of gradients of keys `of_keys`, of a bias the result.
/// `None` where a result is copied.
fn home_of(builder: &PlanBuilder<'_>, content: Content, of_keys: Option<BufferId>) -> Option<BufferId> {
    match content {
        Content::KeyValueGradSum => of_keys,
        Content::BiasGradSum => builder.inputs().gradient.and_then(|own| own.d_bias),
        _ => None,
    }
}

/// Adds a sum of gradients to `home`, which has the same tokens and more heads.
fn add(builder: &mut PlanBuilder<'_>, sum: BufferId, home: BufferId) {
    let heads = builder.buffer(sum).heads.clone();
    let into = builder.heads_of(home, &heads);
    builder.push(Step::Accumulate { from: sum, into });
}

/// Where the rank's own rows of a result belong, in these heads.
fn own_result(builder: &PlanBuilder<'_>, content: Content, heads: &Range<u32>) -> Slice {
    match builder.own_key_gradients().filter(|_| content.is_of_keys()) {
        Some(gradients) => {
            let all = builder.heads_of(gradients, heads);
            Slice { tokens: builder.replicated()..all.tokens.end, ..all }
        }
        None => builder.heads_of(builder.output(), heads),
    }
}

/// The rank's own tensors that cross the all-to-all.
fn exchanged(builder: &PlanBuilder<'_>) -> Vec<(BufferId, Content)> {
    let Inputs { q, kv, bias, gradient } = builder.inputs();
    let mut inputs = vec![(q, Content::Query), (kv, Content::KeyValue)];
    inputs.extend(bias.map(|bias| (bias, Content::Bias)));
    if let Some(OutputGradient { d_o, stats, .. }) = gradient {
        inputs.extend([(d_o, Content::OutputGrad), (stats, Content::RowStats)]);
    }
    inputs
}

/// The other ranks of the group, nearest successor first, so that no two ranks send to the same
/// peer at once.
fn peers(builder: &PlanBuilder<'_>) -> Vec<(u32, Rank)> {
    let mesh = builder.set.mesh;
    let (r, u) = mesh.coordinates(builder.rank);
    (1..mesh.ulysses()).map(|round| (u + round) % mesh.ulysses()).map(|u| (u, mesh.rank(r, u))).collect()
}

/// Where the pieces of a shard begin: the list positions in a buffer that holds the tokens of the
/// whole shard.
struct Pieces {
    /// By Ulysses piece, and the end of the last one.
    queries: Vec<usize>,
    keys: Vec<usize>,
}

impl Pieces {
    /// The tokens of the rank's shard.
    fn of_shard(builder: &PlanBuilder<'_>) -> Self {
        let mesh = builder.set.mesh;
        let (r, _) = mesh.coordinates(builder.rank);
        let starts = |content: Content| {
            let placement = placement(builder, content);
            let mut starts = vec![0];
            for u in 0..mesh.ulysses() {
                starts.push(starts[u as usize] + placement.of_rank(mesh.rank(r, u)).len());
            }
            starts
        };
        Self { queries: starts(Content::Query), keys: starts(Content::KeyValue) }
    }

    /// Ulysses piece `u` of a buffer that holds a whole shard's tokens, with all the buffer's
    /// heads.
    fn piece(&self, builder: &PlanBuilder<'_>, shard: BufferId, content: Content, u: u32) -> Slice {
        let starts = if content.is_of_keys() { &self.keys } else { &self.queries };
        let (first, u) = (replicated(builder, content), u as usize);
        builder.tokens_of(shard, first + starts[u]..first + starts[u + 1])
    }
}

fn placement<'a>(builder: &PlanBuilder<'a>, content: Content) -> &'a crate::placement::Placement {
    if content.is_of_keys() { &builder.set.kv_placement } else { &builder.set.q_placement }
}

/// Number of tokens at the front of such a buffer that every rank holds. They do not cross the
/// all-to-all. Sums of the gradients of such keys are in buffers of their own.
fn replicated(builder: &PlanBuilder<'_>, content: Content) -> usize {
    match content {
        Content::KeyValueGradSum | Content::KeyValueGrad => 0,
        content => placement(builder, content).replicated().len(),
    }
}

fn name(content: Content) -> &'static str {
    match content {
        Content::Query => "q",
        Content::KeyValue | Content::WireKeyValue => "kv",
        Content::State => "state",
        Content::Output => "o",
        Content::Bias => "bias",
        Content::OutputGrad => "do",
        Content::RowStats => "row statistics",
        Content::BiasGradSum => "dbias",
        Content::QueryGradSum | Content::QueryGrad => "dq",
        Content::KeyValueGradSum | Content::KeyValueGrad => "dkv",
    }
}

/// More chunks do not overlap more, and need more messages.
const MOST_CHUNKS: u32 = 4;
