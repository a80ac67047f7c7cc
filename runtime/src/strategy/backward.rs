//! Backward passes of strategies that send keys.
//!
//! Keys travel as in the forward pass. A rank adds the gradients of its own keys to a sum that stays with it. For every block
//! of other keys it makes a fresh f32 sum, and sends it straight to the owner of the keys, who adds it. So with a full mask a
//! rank sends R − 1 sums; none of its own gradients travels. The sums of one distance are posted after their computation, and
//! waited for one distance later, so that they travel under work.
//!
//! The queries, the gradient of the output and the row statistics stay where they are, or cross the all-to-all with the
//! queries. The output does not travel.

mod plan;
mod round;

pub use self::plan::{plan_backward, plan_backward_placed};
pub(super) use self::round::{Gradients, streams_round};
use super::build::{Inputs, OutputGradient, PlanBuilder};
use crate::lower;
use crate::plan::{BufferId, Content, Slice, Step};

/// The sums of gradients that a rank has after its round: of the queries and of the keys of its inputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    pub(super) dq: BufferId,
    pub(super) d_kv: BufferId,
}

impl PlanBuilder<'_> {
    /// Sums for the queries and keys of `inputs`.
    fn sums(&mut self, inputs: Inputs) -> Sums {
        let mut sum = |of: BufferId, name: &str, content| {
            let (tokens, heads) = (self.buffer(of).tokens.clone(), self.buffer(of).heads.clone());
            self.declare(name.to_owned(), content, tokens, heads)
        };
        Sums {
            dq: sum(inputs.q, "sum of dq", Content::QueryGradSum),
            d_kv: sum(inputs.kv, "sum of dkv", Content::KeyValueGradSum),
        }
    }

    /// One step for all keys in `kv`, if a query sees any of them. Returns whether there is a step.
    fn attend_backward(&mut self, inputs: Inputs, kv: BufferId, dq: BufferId, d_kv: Slice) -> bool {
        let Inputs { q, pairs, gradient, .. } = inputs;
        let Some(OutputGradient { d_o, stats }) = gradient else { return false };
        let seen = lower::any_visible(&self.world.problem, &self.buffer(q).tokens, &self.buffer(kv).tokens);
        if seen {
            let [q, d_o, stats, kv] = [q, d_o, stats, kv].map(|id| self.whole(id));
            let bias = pairs.map(|pairs| self.whole(pairs));
            self.push(Step::AttendBackward { q, d_o, stats, kv, dq, d_kv, bias });
        }
        seen
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
