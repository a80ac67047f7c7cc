//! Backward passes. [`partials`](super::partials) has that of strategies that send queries; this
//! one is of those that send keys.
//!
//! Keys travel as in the forward pass. A rank adds the gradients of its own keys to a sum that
//! stays with it. For every block of other keys it makes a fresh f32 sum, and sends it straight to
//! the owner of the keys, who adds it. So with a full mask a rank sends R − 1 sums; none of its own
//! gradients travels. The sums of one distance are posted after their computation, and waited for
//! one distance later, so that they travel under work.
//!
//! The queries, the gradient of the output and the row statistics stay where they are, or cross the
//! all-to-all with the queries. The output does not travel.
//!
//! Of keys that every rank holds, each rank has a sum over its own queries; after the round the
//! ranks add these up.

mod plan;
mod replicated;
mod round;

pub use self::plan::{plan_backward, plan_backward_placed};
pub(super) use self::round::{Gradients, streams_round};
use super::build::{Inputs, OutputGradient, PlanBuilder};
use crate::lower;
use crate::plan::{Buffer, BufferId, BufferName, Content, GradientStep, Slice, Step};

/// The sums of gradients that a rank has after its round: of the queries and of the keys of its
/// inputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    pub(super) dq: BufferId,
    /// Of the keys that this rank, or its shard, owns: over all queries.
    pub(super) d_kv: BufferId,
    /// Of the keys that every rank holds, if there are any: over the queries of the inputs.
    pub(super) replicated: Option<BufferId>,
}

impl PlanBuilder<'_> {
    /// Sums for the queries and keys of `inputs`.
    pub(super) fn sums(&mut self, inputs: Inputs) -> Sums {
        let Buffer { tokens: queries, heads: q_heads, .. } = self.buffer(inputs.q).clone();
        let Buffer { tokens: keys, heads: kv_heads, .. } = self.buffer(inputs.kv).clone();
        let front = self.replicated();
        let own = keys.slice(front..keys.len());
        let dq = self.declare("sum of dq", Content::QueryGradSum, queries.clone(), q_heads.clone());
        let d_kv = self.declare("sum of dkv", Content::KeyValueGradSum, own, kv_heads.clone());
        let replicated = (front > 0).then(|| {
            let name = "sum of dkv of replicated keys";
            let sum = self.declare(name, Content::KeyValueGradSum, keys.slice(0..front), kv_heads);
            self.holds(sum, queries, q_heads);
            sum
        });
        Sums { dq, d_kv, replicated }
    }

    /// One step for all keys in `kv`, if a query sees any of them. Returns whether there is a step.
    pub(super) fn attend_backward(&mut self, inputs: Inputs, kv: Slice, dq: BufferId, d_kv: Slice) -> bool {
        let Inputs { q, bias, gradient, .. } = inputs;
        let Some(OutputGradient { d_o, stats, d_bias }) = gradient else { return false };
        let keys = self.buffer(kv.buffer).tokens.slice(kv.tokens.clone());
        let seen = lower::any_visible(&self.set.problem, &self.buffer(q).tokens, &keys);
        if seen {
            let [q, d_o, stats] = [q, d_o, stats].map(|id| self.whole(id));
            let [bias, d_bias] = [bias, d_bias].map(|rows| rows.map(|rows| self.whole(rows)));
            let step = GradientStep { q, d_o, stats, kv, dq, d_kv, bias, d_bias };
            self.push(Step::AttendBackward(Box::new(step)));
        }
        seen
    }

    /// A sum for the gradient of the rows of the bias in `bias`, if the problem asks for it.
    pub(super) fn bias_sum(
        &mut self,
        bias: Option<BufferId>,
        name: impl Into<BufferName>,
    ) -> Option<BufferId> {
        let bias = bias.filter(|_| self.set.problem.bias_gradient)?;
        let Buffer { tokens, heads, .. } = self.buffer(bias).clone();
        Some(self.declare(name, Content::BiasGradSum, tokens, heads))
    }

    /// Gradients of the queries against the rank's own keys, and against those that every rank
    /// holds.
    pub(super) fn attend_own_backward(&mut self, inputs: Inputs, sums: Sums) {
        let Sums { dq, d_kv, replicated } = sums;
        let (own, sum) = (self.own_keys(inputs.kv), self.whole(d_kv));
        self.attend_backward(inputs, own, dq, sum);
        if let Some(replicated) = replicated {
            let keys = self.tokens_of(inputs.kv, 0..self.replicated());
            let sum = self.whole(replicated);
            self.attend_backward(inputs, keys, dq, sum);
        }
    }

    /// Rounds a complete sum to the storage type, into the whole of `into`, and frees it.
    pub(super) fn round_sum(&mut self, sum: BufferId, into: BufferId) {
        let from = self.whole(sum);
        if !from.tokens.is_empty() && !from.heads.is_empty() {
            self.push(Step::Convert { from, into });
        }
        self.free(sum);
    }
}
