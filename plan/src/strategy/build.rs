//! Builds one rank's plan step by step; has functions for the patterns that strategies share.

use std::collections::BTreeMap;
use std::ops::Range;

use kyklos_rank::Rank;

use crate::lower;
use crate::mesh::kv_heads_for;
use crate::plan::{
    Buffer, BufferId, BufferName, Content, Direction, GradientBuffers, Plan, PlanSet, Recv, Send, Slice, Step,
};
use crate::problem::Results;
use crate::tokens::TokenRuns;

/// The buffers that a rank's attention reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs {
    pub(super) q: BufferId,
    pub(super) kv: BufferId,
    pub(super) bias: Option<BufferId>,
    /// In a backward pass: of the output rows of the queries.
    pub(super) gradient: Option<OutputGradient>,
}

/// The gradient of output rows, and their statistics; and the sum of the gradient of their rows of
/// the bias, if it is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutputGradient {
    pub(super) d_o: BufferId,
    pub(super) stats: BufferId,
    pub(super) d_bias: Option<BufferId>,
}

pub(super) struct PlanBuilder<'a> {
    pub(super) set: &'a PlanSet,
    pub(super) rank: Rank,
    plan: Plan,
    /// Output rows of the rank's own queries: the plan's output, unless these rows are for other
    /// ranks.
    output: BufferId,
    exchanges: u32,
    /// In a fixed order: merged states that wait for their neighbour, by height in the tree and
    /// number at this height.
    pub(super) waiting: BTreeMap<(u32, u32), BufferId>,
}

impl<'a> PlanBuilder<'a> {
    /// A plan with the rank's inputs and its output declared, and no steps.
    pub(super) fn new(set: &'a PlanSet, rank: Rank) -> Self {
        let problem = &set.problem;
        let q_tokens = set.q_placement.held_by(rank);
        let kv_tokens = set.kv_placement.held_by(rank);
        // A hop needs one buffer and four steps; a peer of the all-to-alls needs five buffers and ten
        // steps, more in a backward plan.
        let (hops, peers) = (set.mesh.ring() as usize, set.mesh.ulysses() as usize - 1);
        let plan = Plan {
            rank: rank.0,
            buffers: Vec::with_capacity(8 + hops + 8 * peers),
            q: BufferId(0),
            kv: BufferId(1),
            output: BufferId(2),
            gradients: None,
            bias: None,
            steps: Vec::with_capacity(8 + 4 * hops + 10 * peers),
        };
        let mut builder =
            Self { set, rank, plan, output: BufferId(2), exchanges: 0, waiting: BTreeMap::new() };
        builder.declare("q", Content::Query, q_tokens.clone(), 0..problem.q_heads);
        builder.declare("kv", Content::KeyValue, kv_tokens, 0..problem.kv_heads);
        builder.plan.buffers[builder.plan.kv.0].spare = set.kv_placement.spare(rank);
        let backward = set.direction == Direction::Backward;
        let (name, content) = if backward { ("dq", Content::QueryGrad) } else { ("o", Content::Output) };
        builder.declare(name, content, set.output_tokens(rank), 0..problem.q_heads);
        if problem.results != Results::Owner {
            builder.output =
                builder.declare("o of own queries", Content::Output, q_tokens.clone(), 0..problem.q_heads);
        }
        builder.plan.bias =
            problem.query_bias().map(|bias| builder.declare("bias", Content::Bias, q_tokens, 0..bias.heads));
        if backward {
            builder.declare_gradients();
        }
        builder
    }

    /// Declares the further buffers of a backward plan.
    fn declare_gradients(&mut self) {
        let Buffer { tokens: q, heads: q_heads, .. } = self.buffer(self.plan.q).clone();
        let Buffer { tokens: kv, heads: kv_heads, .. } = self.buffer(self.plan.kv).clone();
        self.plan.gradients = Some(GradientBuffers {
            d_o: self.declare("do", Content::OutputGrad, q.clone(), q_heads.clone()),
            stats: self.declare("row statistics", Content::RowStats, q, q_heads),
            d_kv: self.declare("dkv", Content::KeyValueGrad, kv, kv_heads),
            d_bias: self.bias_sum(self.plan.bias, "dbias"),
        });
    }

    pub(super) fn inputs(&self) -> Inputs {
        let gradient = self.plan.gradients.map(|own| {
            let GradientBuffers { d_o, stats, d_bias, .. } = own;
            OutputGradient { d_o, stats, d_bias }
        });
        Inputs { q: self.plan.q, kv: self.plan.kv, bias: self.plan.bias, gradient }
    }

    /// Gradients of the rank's own keys, in a backward plan.
    pub(super) fn own_key_gradients(&self) -> Option<BufferId> {
        self.plan.gradients.map(|own| own.d_kv)
    }

    /// Output rows of the rank's own queries.
    pub(super) fn output(&self) -> BufferId {
        self.output
    }

    /// All output rows that the rank gets.
    pub(super) fn all_output(&self) -> BufferId {
        self.plan.output
    }

    pub(super) fn buffer(&self, id: BufferId) -> &Buffer {
        self.plan.buffer(id)
    }

    /// Query heads of Ulysses piece `u`.
    pub(super) fn q_heads(&self, u: u32) -> Range<u32> {
        self.set.mesh.q_heads_of(&self.set.problem, u)
    }

    /// KV heads that the query heads of Ulysses piece `u` need.
    pub(super) fn kv_heads(&self, u: u32) -> Range<u32> {
        kv_heads_for(&self.set.problem, &self.q_heads(u))
    }

    /// Heads of the attention bias tensor that the query heads of Ulysses piece `u` need.
    pub(super) fn bias_heads(&self, u: u32) -> Range<u32> {
        match self.set.problem.query_bias() {
            Some(bias) if bias.heads > 1 => self.q_heads(u),
            _ => 0..1,
        }
    }

    pub(super) fn declare(
        &mut self,
        name: impl Into<BufferName>,
        content: Content,
        tokens: TokenRuns,
        heads: Range<u32>,
    ) -> BufferId {
        self.plan.buffers.push(Buffer {
            name: name.into(),
            content,
            tokens,
            heads,
            spare: 0,
            met: TokenRuns::default(),
            met_heads: 0..0,
        });
        BufferId(self.plan.buffers.len() - 1)
    }

    /// A running state of the queries in `q` that stays on this rank.
    pub(super) fn state(&mut self, q: BufferId) -> BufferId {
        let Buffer { tokens, heads, .. } = self.buffer(q).clone();
        self.declare("state", Content::State, tokens, heads)
    }

    /// A running state of the queries in `q` over the keys `met`, to be sent or received.
    pub(super) fn travelling_state(&mut self, q: BufferId, met: TokenRuns) -> BufferId {
        let Buffer { name, tokens, heads, .. } = self.buffer(q).clone();
        let state = self.declare(format!("state of {name} over {met}"), Content::State, tokens, heads);
        self.holds(state, met, 0..0);
        state
    }

    /// Declares what a running state or a sum of gradients has met when it is sent.
    pub(super) fn holds(&mut self, sum: BufferId, met: TokenRuns, met_heads: Range<u32>) {
        let buffer = &mut self.plan.buffers[sum.0];
        (buffer.met, buffer.met_heads) = (met, met_heads);
    }

    /// Queries of shard `shard` (and what travels with them), for the heads of `own`. They are to
    /// be received and attended with this rank's keys.
    pub(super) fn visitor(&mut self, shard: u32, own: Inputs) -> Inputs {
        let tokens = self.set.q_placement.of_shard(shard);
        let mut arriving = |id: BufferId, name: &'static str| {
            let Buffer { content, heads, .. } = self.buffer(id).clone();
            self.declare(BufferName::of_shard(name, shard), content, tokens.clone(), heads)
        };
        Inputs {
            q: arriving(own.q, "q"),
            kv: own.kv,
            bias: own.bias.map(|bias| arriving(bias, "bias")),
            gradient: own.gradient.map(|OutputGradient { d_o, stats, .. }| OutputGradient {
                d_o: arriving(d_o, "do"),
                stats: arriving(stats, "row statistics"),
                d_bias: None,
            }),
        }
    }

    /// Whether any query of the shard `q_shard` sees any key of the shard `kv_shard`.
    pub(super) fn sees(&self, q_shard: u32, kv_shard: u32) -> bool {
        let set = self.set;
        let (q, kv) = (set.q_placement.of_shard(q_shard), set.kv_placement.of_shard(kv_shard));
        lower::any_visible(&set.problem, &q, &kv)
    }

    pub(super) fn whole(&self, buffer: BufferId) -> Slice {
        self.plan.whole(buffer)
    }

    /// The number of tokens at the front of the rank's keys, before and after an all-to-all, that
    /// every rank holds and none sends.
    pub(super) fn replicated(&self) -> usize {
        self.set.kv_placement.replicated().len()
    }

    /// The keys in `kv` (of the rank or of its shard) without the keys that every rank holds.
    pub(super) fn own_keys(&self, kv: BufferId) -> Slice {
        self.tokens_of(kv, self.replicated()..self.buffer(kv).tokens.len())
    }

    /// All tokens of the heads `heads` (global) of `buffer`.
    pub(super) fn heads_of(&self, buffer: BufferId, heads: &Range<u32>) -> Slice {
        let first = self.buffer(buffer).heads.start;
        Slice { heads: heads.start - first..heads.end - first, ..self.plan.whole(buffer) }
    }

    /// All heads of the tokens at the list positions `tokens` of `buffer`.
    pub(super) fn tokens_of(&self, buffer: BufferId, tokens: Range<usize>) -> Slice {
        Slice { tokens, ..self.plan.whole(buffer) }
    }

    pub(super) fn repack(&mut self, from: Slice, into: Slice) {
        if !from.tokens.is_empty() {
            self.plan.steps.push(Step::Repack { from, into });
        }
    }

    /// A slice that can be sent: `slice` itself if it is contiguous in memory, otherwise a packed
    /// copy, which is added to `packed`.
    pub(super) fn sendable(
        &mut self,
        slice: Slice,
        name: impl Into<BufferName>,
        packed: &mut Vec<BufferId>,
    ) -> Slice {
        if self.plan.is_one_piece(&self.set.problem, &slice) {
            return slice;
        }
        let copy = self.copied(slice, name);
        packed.push(copy);
        self.whole(copy)
    }

    /// A copy of `slice`.
    pub(super) fn copied(&mut self, slice: Slice, name: impl Into<BufferName>) -> BufferId {
        let (tokens, heads) = (self.plan.slice_tokens(&slice), self.plan.slice_heads(&slice));
        let content = self.buffer(slice.buffer).content;
        let copy = self.declare(name, content, tokens, heads);
        if content.is_sum() {
            let Buffer { met, met_heads, .. } = self.buffer(slice.buffer).clone();
            self.holds(copy, met, met_heads);
        }
        let whole = self.whole(copy);
        self.repack(slice, whole);
        copy
    }

    /// Copies a received buffer into `into`, and frees it.
    pub(super) fn unpack(&mut self, received: BufferId, into: Slice) {
        let whole = self.plan.whole(received);
        self.repack(whole, into);
        self.free(received);
    }

    /// `slice` of keys and values, contiguous in memory and in wire format. New buffers for this
    /// are added to `made`.
    pub(super) fn for_the_wire(&mut self, slice: Slice, made: &mut Vec<BufferId>) -> Slice {
        let mut packed = Vec::new();
        let piece = self.sendable(slice, "kv for the round", &mut packed);
        if !self.converts() {
            made.append(&mut packed);
            return piece;
        }
        let (tokens, heads) = (self.plan.slice_tokens(&piece), self.plan.slice_heads(&piece));
        let wire = self.declare("kv for the wire", Content::WireKeyValue, tokens, heads);
        self.plan.steps.push(Step::Convert { from: piece, into: wire });
        packed.into_iter().for_each(|copy| self.free(copy));
        made.push(wire);
        self.plan.whole(wire)
    }

    /// Keys and values of shard `owner` in wire format, to be received.
    pub(super) fn arrival(&mut self, owner: u32, tokens: TokenRuns, heads: Range<u32>) -> BufferId {
        let content = if self.converts() { Content::WireKeyValue } else { Content::KeyValue };
        self.declare(BufferName::of_shard("kv", owner), content, tokens, heads)
    }

    /// The keys and values in `kv` in the storage type; frees `kv` if the result is another buffer.
    pub(super) fn stored(&mut self, kv: BufferId) -> BufferId {
        if !self.converts() {
            return kv;
        }
        let back = self.converted_back(kv);
        self.free(kv);
        back
    }

    /// The keys and values in `kv` in the storage type, as another buffer.
    pub(super) fn converted_back(&mut self, kv: BufferId) -> BufferId {
        let Buffer { name, tokens, heads, .. } = self.buffer(kv).clone();
        let back = self.declare(format!("{name}, converted"), Content::KeyValue, tokens, heads);
        let from = self.plan.whole(kv);
        self.plan.steps.push(Step::Convert { from, into: back });
        back
    }

    fn converts(&self) -> bool {
        self.set.problem.wire.rounds()
    }

    /// Posts an exchange and returns its id. All ranks count ids alike, also if nothing is sent: an
    /// exchange without messages uses an id but no step.
    pub(super) fn exchange(&mut self, sends: Vec<Send>, recvs: Vec<Recv>) -> Option<u32> {
        let id = self.exchanges;
        self.exchanges += 1;
        if sends.is_empty() && recvs.is_empty() {
            return None;
        }
        self.plan.steps.push(Step::Exchange { id, sends, recvs });
        Some(id)
    }

    pub(super) fn wait(&mut self, id: Option<u32>) {
        if let Some(id) = id {
            self.plan.steps.push(Step::Wait { id });
        }
    }

    /// One step for all keys in `kv`, if a query sees any of them. Returns whether there is a step.
    pub(super) fn attend_some(&mut self, Inputs { q, bias, .. }: Inputs, kv: Slice, state: BufferId) -> bool {
        let (queries, keys) = (&self.buffer(q).tokens, self.plan.slice_tokens(&kv));
        let seen = lower::any_visible(&self.set.problem, queries, &keys);
        if seen {
            let (q, bias) = (self.plan.whole(q), bias.map(|bias| Box::new(self.plan.whole(bias))));
            self.plan.steps.push(Step::Attend { q, kv, state, bias });
        }
        seen
    }

    pub(super) fn merge(&mut self, from: BufferId, into: BufferId) {
        self.plan.steps.push(Step::Merge { from, into });
    }

    /// The step that turns a running state into output; frees the state.
    pub(super) fn finalize_state(&mut self, state: BufferId, into: BufferId) {
        self.plan.steps.push(Step::Finalize { state, into });
        self.free(state);
    }

    /// Frees a buffer. The rank's inputs and output belong to the caller and are not freed.
    pub(super) fn free(&mut self, buffer: BufferId) {
        if !self.plan.is_own(buffer) {
            self.plan.steps.push(Step::Free { buffer });
        }
    }

    /// Frees queries, their rows of the attention bias tensor, and the gradient of their output
    /// rows.
    pub(super) fn end_queries(&mut self, inputs: Inputs) {
        inputs.of_queries().for_each(|buffer| self.free(buffer));
    }

    /// Adds a step.
    pub(super) fn push(&mut self, step: Step) {
        self.plan.steps.push(step);
    }

    pub(super) fn finish(self) -> Plan {
        self.plan
    }
}
