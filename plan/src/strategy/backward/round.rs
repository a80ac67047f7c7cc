//! The round over the shards: keys come, sums of their gradients go home.

use super::super::build::{Inputs, PlanBuilder};
use super::super::streams::{Part, Routes, Visitor, travel};
use super::Sums;
use crate::lower;
use crate::plan::{Buffer, BufferId, BufferName, Content, Recv, Send, Slice, Step};
use crate::tokens::TokenRuns;

/// The round of strategies whose keys go from neighbour to neighbour. Frees all inputs.
pub(in super::super) fn streams_round(
    builder: &mut PlanBuilder<'_>,
    routes: &Routes,
    inputs: Inputs,
) -> Sums {
    let mut visitor = AlongStreams { routes, gradients: Gradients::new(builder, inputs) };
    travel(builder, routes, inputs.kv, &mut visitor);
    visitor.gradients.end(builder)
}

/// The sums of a rank, and those on their way.
pub(in super::super) struct Gradients {
    inputs: Inputs,
    sums: Sums,
    shard: u32,
    /// Sums of the blocks of the present distance: the owner of the keys, and the sum.
    fresh: Vec<(u32, BufferId)>,
    under_way: Option<UnderWay>,
}

/// Sums that travel.
struct UnderWay {
    exchange: Option<u32>,
    leaving: Vec<BufferId>,
    /// Sums for this rank's keys, and the positions of these keys.
    arriving: Vec<(BufferId, Slice)>,
}

impl Gradients {
    pub(in super::super) fn new(builder: &mut PlanBuilder<'_>, inputs: Inputs) -> Self {
        let (shard, _) = builder.set.mesh.coordinates(builder.rank);
        Self { inputs, sums: builder.sums(inputs), shard, fresh: Vec::new(), under_way: None }
    }

    /// The shard of this rank.
    pub(in super::super) fn shard(&self) -> u32 {
        self.shard
    }

    /// Gradients of the queries against the rank's own keys, and against those that every rank
    /// holds.
    pub(in super::super) fn own(&mut self, builder: &mut PlanBuilder<'_>) {
        builder.attend_own_backward(self.inputs, self.sums);
    }

    /// Gradients of the queries against keys of shard `owner`, which have arrived in `kv`.
    pub(in super::super) fn arrived(&mut self, builder: &mut PlanBuilder<'_>, owner: u32, kv: BufferId) {
        let Buffer { tokens, heads, content, .. } = builder.buffer(kv).clone();
        let Buffer { tokens: q, heads: q_heads, .. } = builder.buffer(self.inputs.q).clone();
        if !lower::any_visible(&builder.set.problem, &q, &tokens) {
            return;
        }
        let sum =
            builder.declare(BufferName::of_shard("dkv", owner), Content::KeyValueGradSum, tokens, heads);
        builder.holds(sum, q, q_heads);
        let whole = builder.whole(sum);
        let back = (content == Content::WireKeyValue).then(|| builder.converted_back(kv));
        let keys = builder.whole(back.unwrap_or(kv));
        builder.attend_backward(self.inputs, keys, self.sums.dq, whole);
        if let Some(back) = back {
            builder.free(back);
        }
        self.fresh.push((owner, sum));
    }

    /// Adds the sums of the distance before, and posts those of this distance. `readers`: the
    /// shards that have used keys of this rank at this distance, with the part of the shard.
    pub(in super::super) fn post(&mut self, builder: &mut PlanBuilder<'_>, readers: &[(u32, Part)]) {
        self.collect(builder);
        let mesh = builder.set.mesh;
        let (_, u) = mesh.coordinates(builder.rank);
        let fresh = std::mem::take(&mut self.fresh);
        let mut sends: Vec<Send> = Vec::new();
        for (owner, sum) in &fresh {
            let (to, part) = (mesh.rank(*owner, u).0, builder.whole(*sum));
            match sends.iter_mut().find(|send| send.to == to) {
                Some(send) => send.parts.push(part),
                None => sends.push(Send { to, parts: vec![part] }),
            }
        }
        let mut recvs: Vec<Recv> = Vec::new();
        let mut arriving = Vec::new();
        for (reader, part) in readers {
            let Some((buffer, slice)) = self.expect(builder, *reader, *part) else { continue };
            let from = mesh.rank(*reader, u).0;
            match recvs.iter_mut().find(|recv| recv.from == from) {
                Some(recv) => recv.parts.push(buffer),
                None => recvs.push(Recv { from, parts: vec![buffer] }),
            }
            arriving.push((buffer, slice));
        }
        let exchange = builder.exchange(sends, recvs);
        let leaving = fresh.into_iter().map(|(_, sum)| sum).collect();
        self.under_way = Some(UnderWay { exchange, leaving, arriving });
    }

    /// The sum that shard `reader` sends for a part of this rank's keys, if its queries see any of
    /// them.
    fn expect(&self, builder: &mut PlanBuilder<'_>, reader: u32, part: Part) -> Option<(BufferId, Slice)> {
        let Buffer { tokens, heads, .. } = builder.buffer(self.sums.d_kv).clone();
        let range = part.of(tokens.len());
        let keys: TokenRuns = tokens.slice(range.clone());
        let queries = builder.set.q_placement.of_shard(reader);
        if !lower::any_visible(&builder.set.problem, &queries, &keys) {
            return None;
        }
        let buffer =
            builder.declare(BufferName::from_shard("dkv", reader), Content::KeyValueGradSum, keys, heads);
        let q_heads = builder.buffer(self.inputs.q).heads.clone();
        builder.holds(buffer, queries, q_heads);
        Some((buffer, builder.tokens_of(self.sums.d_kv, range)))
    }

    /// Adds the sums that are under way.
    fn collect(&mut self, builder: &mut PlanBuilder<'_>) {
        let Some(UnderWay { exchange, leaving, arriving }) = self.under_way.take() else { return };
        builder.wait(exchange);
        leaving.into_iter().for_each(|sum| builder.free(sum));
        for (from, into) in arriving {
            builder.push(Step::Accumulate { from, into });
            builder.free(from);
        }
    }

    /// The complete sums. Frees the queries.
    pub(in super::super) fn end(mut self, builder: &mut PlanBuilder<'_>) -> Sums {
        self.collect(builder);
        builder.end_queries(self.inputs);
        self.sums
    }
}

struct AlongStreams<'r> {
    routes: &'r Routes,
    gradients: Gradients,
}

impl Visitor for AlongStreams<'_> {
    fn own(&mut self, builder: &mut PlanBuilder<'_>) {
        self.gradients.own(builder);
    }

    fn arrived(&mut self, builder: &mut PlanBuilder<'_>, stream: usize, distance: u32, kv: BufferId) {
        let owner = self.routes.owner(stream, self.gradients.shard, distance);
        self.gradients.arrived(builder, owner.expect("a block arrives only if its owner sends it"), kv);
    }

    fn used(&mut self, builder: &mut PlanBuilder<'_>, distance: u32) {
        if distance == 0 {
            return;
        }
        let shard = self.gradients.shard;
        let readers = (0..self.routes.len()).filter_map(|stream| {
            let reader = self.routes.reader(stream, shard, distance)?;
            Some((reader, self.routes.part(stream)))
        });
        self.gradients.post(builder, &readers.collect::<Vec<_>>());
    }
}
