//! The data types of a plan.

use std::ops::Range;

use kyklos_rank::Rank;

use super::{BufferName, Content};
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::problem::{AttentionProblem, Results};
use crate::strategy_list::Strategy;
use crate::tokens::TokenRuns;

/// The plans of all ranks, and the inputs from which they were made.
#[derive(Clone, Debug)]
pub struct PlanSet {
    /// The attention call.
    pub problem: AttentionProblem,
    /// How the ranks are arranged.
    pub mesh: Mesh,
    /// The owners of the queries, which are the owners of their output rows too.
    pub q_placement: Placement,
    /// The owners of keys and values.
    pub kv_placement: Placement,
    /// The strategy that made the plans.
    pub strategy: Strategy,
    /// What the plans compute.
    pub direction: Direction,
    /// One plan for each rank, in rank order.
    pub plans: Vec<Plan>,
    /// Queries that no rank attends from: none, except in the plans of
    /// [`plan_rows`](crate::plan_rows).
    pub left_out: TokenRuns,
}

/// What plans compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// The output, from q, k and v.
    #[default]
    Forward,
    /// The gradients of q, k and v, from these, the output and its gradient.
    Backward,
}

impl Direction {
    pub(crate) fn is_forward(&self) -> bool {
        *self == Self::Forward
    }
}

/// The steps of one rank, and the buffers that they work on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Plan {
    /// The rank that runs these steps.
    pub rank: u32,
    /// Every buffer that the steps name.
    pub buffers: Vec<Buffer>,
    /// The rank's own queries: borrowed, never written.
    pub q: BufferId,
    /// The rank's own keys and values: borrowed, never written.
    pub kv: BufferId,
    /// The output rows that the rank gets ([`PlanSet::output_tokens`]): written once. In a backward
    /// plan the gradient of q.
    pub output: BufferId,
    /// Further buffers of a backward plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradients: Option<GradientBuffers>,
    /// The rank's own rows of the problem's attention bias tensor: borrowed, never written. None
    /// where all queries share its rows ([`shared_rows`](crate::BiasTensor::shared_rows)): each
    /// rank then holds the whole tensor, and no step names it.
    pub bias: Option<BufferId>,
    /// The steps, in issue order.
    pub steps: Vec<Step>,
}

/// Buffers that only a backward plan has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GradientBuffers {
    /// Gradient of the rank's own output rows: borrowed, never written.
    pub d_o: BufferId,
    /// Statistics of these rows, made from the finished output before the first step: borrowed,
    /// never written.
    pub stats: BufferId,
    /// Gradients of the rank's own keys and values: written once.
    pub d_kv: BufferId,
    /// Gradient of the rank's own rows of the attention bias tensor, where the problem asks for it:
    /// a sum, complete at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub d_bias: Option<BufferId>,
}

/// Index into [`Plan::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(transparent)]
pub struct BufferId(pub usize);

/// The content of a buffer, from its first write until it is freed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Buffer {
    /// Display name.
    pub name: BufferName,
    /// Tensor kind.
    pub content: Content,
    /// Global tokens, in the order of the rows.
    pub tokens: TokenRuns,
    /// Global heads: KV heads for [`Content::KeyValue`] and [`Content::WireKeyValue`], heads of the
    /// attention bias tensor for [`Content::Bias`] and [`Content::BiasGradSum`], query heads
    /// otherwise.
    pub heads: Range<u32>,
    /// Rows of each batch entry, behind the tokens, that hold nothing. Only a rank's own keys and
    /// values have them, in a cache with room for more tokens.
    #[serde(skip_serializing_if = "is_zero")]
    pub spare: u32,
    /// For a running state that is sent or received: the keys that it has met by then. For a sum of
    /// gradients that is sent or received: of keys, the queries whose gradients it holds by
    /// then; of queries or of a bias, the keys. Otherwise none.
    pub met: TokenRuns,
    /// For such a sum of gradients of keys or of a bias: the query heads whose gradients it holds.
    #[serde(skip_serializing_if = "Range::is_empty")]
    pub met_heads: Range<u32>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the serialiser passes a reference")]
fn is_zero(spare: &u32) -> bool {
    *spare == 0
}

/// A range of a buffer's tokens (by list position) × a range of its heads (counted from its first).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Slice {
    /// The buffer.
    pub buffer: BufferId,
    /// List positions in the buffer's tokens.
    pub tokens: Range<usize>,
    /// Heads, counted from the buffer's first.
    pub heads: Range<u32>,
}

/// One message to a peer.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Send {
    /// The receiving rank.
    pub to: u32,
    /// Slices, each of them contiguous in memory.
    pub parts: Vec<Slice>,
}

/// One message from a peer.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Recv {
    /// The sending rank.
    pub from: u32,
    /// Buffers that the message fills, one for each part.
    pub parts: Vec<BufferId>,
}

/// One step of a rank. Steps are issued in order; only [`Step::Wait`] waits.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Copies one slice to another with the same tokens and heads. Used to pack a message, to
    /// unpack a message, and to copy the piece that stays on the rank.
    Repack {
        /// The source.
        from: Slice,
        /// The destination.
        into: Slice,
    },
    /// Posts messages as one group: a ring hop, or an all-to-all. Never waits.
    Exchange {
        /// The number of the exchange: the same on all its ranks, and in the [`Step::Wait`] that
        /// ends it.
        id: u32,
        /// At most one to each peer.
        sends: Vec<Send>,
        /// At most one from each peer.
        recvs: Vec<Recv>,
    },
    /// Ends an exchange: after it, sent buffers may be freed and received buffers may be read.
    Wait {
        /// The number of the exchange.
        id: u32,
    },
    /// Attention of a slice of queries against a slice of keys and values, into a running state.
    Attend {
        /// Queries: the tokens and heads of `state`.
        q: Slice,
        /// Keys and values of the KV heads that the queries need.
        kv: Slice,
        /// Running state; the first step that names it finds it empty.
        state: BufferId,
        /// The queries' rows of the attention bias tensor, where the plan has one: of the queries'
        /// heads, or of its only one.
        bias: Option<Box<Slice>>,
    },
    /// Gradients of a slice of queries against a slice of keys and values, added to sums.
    AttendBackward(Box<GradientStep>),
    /// Adds one sum of gradients to another of the same tokens and heads.
    Accumulate {
        /// The sum that is read.
        from: BufferId,
        /// Where it is added; the first step that names the buffer finds 0.
        into: Slice,
    },
    /// Converts keys and values to their wire format, or back; or rounds a complete sum of
    /// gradients to the storage type.
    Convert {
        /// The source: contiguous in each of its tensors.
        from: Slice,
        /// The whole destination: the same tokens and heads in the other format.
        into: BufferId,
    },
    /// Merges one running state into another of the same tokens and heads, over other keys.
    Merge {
        /// The state that is read; it is not used again.
        from: BufferId,
        /// The state that is updated.
        into: BufferId,
    },
    /// Turns a running state into output.
    Finalize {
        /// The state that is read; it is not used again.
        state: BufferId,
        /// Output of the same tokens and heads.
        into: BufferId,
    },
    /// Frees a buffer.
    Free {
        /// The buffer.
        buffer: BufferId,
    },
}

/// What a [`Step::AttendBackward`] reads and adds to. It stands apart: a plan has up to millions of
/// steps, which are all as large as the largest kind.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GradientStep {
    /// Queries, and the gradient and the statistics of their output rows: slices of the same tokens
    /// and heads.
    pub q: Slice,
    /// See `q`.
    pub d_o: Slice,
    /// See `q`.
    pub stats: Slice,
    /// Keys and values of the KV heads that the queries need.
    pub kv: Slice,
    /// Sum of the gradients of the queries; the first step that names it finds 0.
    pub dq: BufferId,
    /// Sums of the gradients of the keys and values: of the same tokens and heads as `kv`. The
    /// first step that names their buffer finds 0.
    pub d_kv: Slice,
    /// As in [`Step::Attend`].
    pub bias: Option<Slice>,
    /// Sum of the gradient of `bias`, of the same tokens and heads, where the problem asks for it.
    /// The first step that names its buffer finds 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub d_bias: Option<Slice>,
}

impl Plan {
    /// The buffer that `id` names.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0]
    }

    /// The whole of a buffer.
    pub fn whole(&self, id: BufferId) -> Slice {
        let buffer = self.buffer(id);
        Slice { buffer: id, tokens: 0..buffer.tokens.len(), heads: 0..buffer.head_count() }
    }

    /// Whether the buffer is the caller's: an input, or the output.
    pub(crate) fn is_own(&self, id: BufferId) -> bool {
        [self.q, self.kv].contains(&id)
            || self.bias == Some(id)
            || self.gradients.is_some_and(|own| [own.d_o, own.stats].contains(&id))
            || self.is_result(id)
    }

    /// Whether the buffer is a result: the output, or a gradient.
    pub(crate) fn is_result(&self, id: BufferId) -> bool {
        self.results().any(|result| result == id)
    }

    /// The buffers of the results, in order: the output; or the gradients of q, of k and v, and of
    /// the bias.
    pub fn results(&self) -> impl Iterator<Item = BufferId> + use<> {
        let gradients = self.gradients.map(|own| [Some(own.d_kv), own.d_bias]);
        std::iter::once(self.output).chain(gradients.into_iter().flatten().flatten())
    }

    /// The global tokens of a slice.
    pub fn slice_tokens(&self, slice: &Slice) -> TokenRuns {
        self.buffer(slice.buffer).tokens.slice(slice.tokens.clone())
    }

    /// The global heads of a slice.
    pub fn slice_heads(&self, slice: &Slice) -> Range<u32> {
        let first = self.buffer(slice.buffer).heads.start;
        first + slice.heads.start..first + slice.heads.end
    }

    /// Bytes of a slice, all its tensors together.
    pub fn slice_bytes(&self, problem: &AttentionProblem, slice: &Slice) -> u64 {
        let content = self.buffer(slice.buffer).content;
        content.bytes(problem, slice.tokens.len(), slice.heads.end - slice.heads.start)
    }

    /// Whether each tensor of the slice is contiguous in memory.
    pub(crate) fn is_one_piece(&self, problem: &AttentionProblem, slice: &Slice) -> bool {
        let buffer = self.buffer(slice.buffer);
        let all_tokens = slice.tokens == (0..buffer.rows());
        let all_heads = slice.heads == (0..buffer.head_count());
        let apart = buffer.content.batch(problem) == 1 && !buffer.content.shares_rows(problem);
        slice.tokens.is_empty() || (all_heads && (all_tokens || apart))
    }

    /// Plan payload that this rank sends, in bytes and in messages (design section 8.10).
    pub fn volume(&self, problem: &AttentionProblem) -> (u64, u64) {
        let sends = self.steps.iter().flat_map(|step| match step {
            Step::Exchange { sends, .. } => sends.as_slice(),
            _ => &[],
        });
        sends.fold((0, 0), |(bytes, messages), send| {
            (bytes + send.parts.iter().map(|part| self.slice_bytes(problem, part)).sum::<u64>(), messages + 1)
        })
    }
}

impl Buffer {
    /// Number of heads.
    pub fn head_count(&self) -> u32 {
        self.heads.end - self.heads.start
    }

    /// Rows of each batch entry: one for each token, and the spare ones.
    pub fn rows(&self) -> usize {
        self.tokens.len() + self.spare as usize
    }

    /// Bytes, all tensors together.
    pub fn bytes(&self, problem: &AttentionProblem) -> u64 {
        self.content.bytes(problem, self.rows(), self.head_count())
    }
}

impl PlanSet {
    /// The queries whose output rows `rank` gets, in the order of the rows
    /// ([`Results`](crate::Results)).
    pub fn output_tokens(&self, rank: Rank) -> TokenRuns {
        match self.problem.results {
            Results::Owner => self.q_placement.held_by(rank),
            results => {
                let mut tokens = TokenRuns::default();
                if results.gathered_on(rank) {
                    self.q_placement.ranks().iter().for_each(|own| tokens.extend(own));
                }
                tokens
            }
        }
    }

    /// The plan of `rank`.
    pub fn plan(&self, rank: Rank) -> &Plan {
        &self.plans[rank.0 as usize]
    }
}
