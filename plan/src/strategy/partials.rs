//! What a rank makes for queries over its keys, where queries travel: running states, or in a
//! backward pass sums of their gradients. Both go back to the owner of the queries. Gradients of
//! keys stay with the keys.

use super::backward::Sums;
use super::build::{Inputs, OutputGradient, PlanBuilder};
use crate::plan::{Buffer, BufferId, Content, Slice, Step};
use crate::tokens::TokenRuns;

impl Inputs {
    /// The queries, their rows of the attention bias tensor, and the gradient of their output rows:
    /// what travels with them.
    pub(super) fn of_queries(self) -> impl Iterator<Item = BufferId> {
        let gradient = self.gradient.into_iter().flat_map(|OutputGradient { d_o, stats, .. }| [d_o, stats]);
        std::iter::once(self.q).chain(self.bias).chain(gradient)
    }
}

/// What a rank makes for queries.
#[derive(Clone, Copy, Debug)]
pub(super) enum Partials {
    /// A running state of the rank's own queries.
    States(BufferId),
    /// Sums of gradients of the rank's own queries and keys.
    Gradients(Sums),
}

impl Partials {
    /// The result of the rank's own queries.
    pub(super) fn own(self) -> BufferId {
        match self {
            Self::States(state) => state,
            Self::Gradients(sums) => sums.dq,
        }
    }

    /// Uses the rank's own queries, and all keys that it holds.
    pub(super) fn attend_own(self, builder: &mut PlanBuilder<'_>, inputs: Inputs) {
        match self {
            Self::States(state) => builder.attend(inputs, state),
            Self::Gradients(sums) => builder.attend_own_backward(inputs, sums),
        }
    }

    /// A result of the queries in `q` over the keys `met`, to be sent or received.
    pub(super) fn travelling(self, builder: &mut PlanBuilder<'_>, q: BufferId, met: TokenRuns) -> BufferId {
        match self {
            Self::States(_) => builder.travelling_state(q, met),
            Self::Gradients(_) => {
                let Buffer { name, tokens, heads, .. } = builder.buffer(q).clone();
                let sum =
                    builder.declare(format!("d{name} over {met}"), Content::QueryGradSum, tokens, heads);
                builder.holds(sum, met, 0..0);
                sum
            }
        }
    }

    /// Uses queries that visit this rank. A query meets the keys that every rank holds only on its
    /// own rank.
    pub(super) fn attend_visitor(self, builder: &mut PlanBuilder<'_>, visitor: Inputs, result: BufferId) {
        let keys: Slice = builder.own_keys(visitor.kv);
        match self {
            Self::States(_) => builder.attend_some(visitor, keys, result),
            Self::Gradients(sums) => {
                let d_kv = builder.whole(sums.d_kv);
                builder.attend_backward(visitor, keys, result, d_kv)
            }
        };
    }

    /// Adds a result that has come back to another one of the same queries.
    pub(super) fn add(self, builder: &mut PlanBuilder<'_>, from: BufferId, into: BufferId) {
        match self {
            Self::States(_) => builder.merge(from, into),
            Self::Gradients(_) => {
                let into = builder.whole(into);
                builder.push(Step::Accumulate { from, into });
            }
        }
    }
}
