//! The kinds of tensors that buffers hold, and their shapes.

use crate::bias::BiasTensor;
use crate::dtype::Dtype;
use crate::problem::AttentionProblem;
use crate::wire::{TOKENS_PER_SCALE, WireFormat};

/// The kind of tensors in a buffer, and their shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// q: `[batch, tokens, heads, dim]`.
    Query,
    /// k, then v: two tensors `[batch, tokens, heads, dim]`.
    KeyValue,
    /// k, then v, in their wire format, where that is not the storage type. In
    /// [`WireFormat::Int8`]: codes of k, then of v, one byte each; scales of k, f32
    /// `[batch, ⌈tokens / 64⌉, heads, dim]`; scales of v, f32 `[batch, tokens, heads]`.
    WireKeyValue,
    /// Running state: `a` `[batch, tokens, heads, dim]` and `ml` `[batch, heads, tokens, 2]`, f32.
    State,
    /// o `[batch, tokens, heads, dim]`, then lse f32 `[batch, tokens, heads, 2]`: two numbers,
    /// whose sum it is.
    Output,
    /// Rows of queries in the attention bias tensor: `[its batch, query tokens, its heads, keys]`.
    Bias,
    /// Gradient of the output, shaped as q.
    OutputGrad,
    /// What gradients need to know of each row, f32 `[batch, tokens, heads, 4]`
    /// (`kyklos::backend::RowStats`).
    RowStats,
    /// Sum of a gradient of q, f32, shaped as q.
    QueryGradSum,
    /// Sums of the gradients of k, then of v, f32, shaped as k and v.
    KeyValueGradSum,
    /// Sum of the gradient of rows of queries in the attention bias tensor, f32: `[its batch, query
    /// tokens, its heads, keys]`.
    BiasGradSum,
    /// Gradient of q, complete and in the storage type.
    QueryGrad,
    /// Gradients of k, then of v, complete and in the storage type.
    KeyValueGrad,
}

/// One tensor of a buffer: rows of `row_bytes` adjacent bytes, `[batch, ⌈tokens / shared_by⌉,
/// heads]` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRows {
    /// Bytes of a row: of a token and head, or of several tokens and a head.
    pub row_bytes: usize,
    /// Consecutive tokens of the buffer's list that share a row.
    pub shared_by: usize,
}

impl TensorRows {
    const fn of_rows(row_bytes: usize) -> Self {
        Self { row_bytes, shared_by: 1 }
    }

    /// Bytes of one batch entry of `tokens` tokens and `heads` heads.
    pub fn bytes(self, tokens: usize, heads: usize) -> usize {
        tokens.div_ceil(self.shared_by) * heads * self.row_bytes
    }
}

impl Content {
    /// Whether its tokens and heads are those of keys.
    pub(crate) fn is_of_keys(self) -> bool {
        match self {
            Self::KeyValue | Self::WireKeyValue | Self::KeyValueGradSum | Self::KeyValueGrad => true,
            Self::Query
            | Self::State
            | Self::Output
            | Self::Bias
            | Self::OutputGrad
            | Self::RowStats
            | Self::QueryGradSum
            | Self::BiasGradSum
            | Self::QueryGrad => false,
        }
    }

    /// Whether it is a sum of gradients, which starts at 0 and to which steps add.
    pub fn is_sum(self) -> bool {
        matches!(self, Self::QueryGradSum | Self::KeyValueGradSum | Self::BiasGradSum)
    }

    /// Storage type of the elements of a stored tensor of q, k, v or their gradients.
    pub fn stored_dtype(self, problem: &AttentionProblem) -> Dtype {
        if self.is_sum() { Dtype::F32 } else { problem.dtype }
    }

    /// Batch entries of a buffer's tensors.
    pub fn batch(self, problem: &AttentionProblem) -> u32 {
        match (self, problem.query_bias()) {
            (Self::Bias | Self::BiasGradSum, Some(bias)) => bias.batch,
            _ => problem.batch,
        }
    }

    /// The tensors of a buffer with this content, in order. A state's `ml` is not token-major, and
    /// is never sliced.
    pub fn tensors(self, problem: &AttentionProblem) -> impl Iterator<Item = TensorRows> + use<> {
        let dim = problem.head_dim as usize;
        let stored = Some(TensorRows::of_rows(dim * problem.dtype.bytes()));
        let rows = |row_bytes| Some(TensorRows::of_rows(row_bytes));
        // Every step of a proof asks for this, so it allocates nothing.
        let tensors = match (self, problem.wire) {
            (Self::Query, _) => [stored, None, None, None],
            (Self::KeyValue, _) | (Self::WireKeyValue, WireFormat::Same) => [stored, stored, None, None],
            (Self::WireKeyValue, WireFormat::F16) => [rows(dim * 2), rows(dim * 2), None, None],
            (Self::WireKeyValue, WireFormat::Int8) => {
                let scales = TensorRows { row_bytes: dim * 4, shared_by: TOKENS_PER_SCALE };
                [rows(dim), rows(dim), Some(scales), rows(4)]
            }
            (Self::State, _) => [rows(dim * 4), rows(8), None, None],
            (Self::OutputGrad | Self::QueryGrad, _) => [stored, None, None, None],
            (Self::KeyValueGrad, _) => [stored, stored, None, None],
            (Self::RowStats, _) => [rows(16), None, None, None],
            (Self::QueryGradSum, _) => [rows(dim * 4), None, None, None],
            (Self::KeyValueGradSum, _) => [rows(dim * 4), rows(dim * 4), None, None],
            (Self::BiasGradSum, _) => [rows(problem.kv_len as usize * 4), None, None, None],
            (Self::Output, _) => [stored, rows(8), None, None],
            (Self::Bias, _) => {
                let row_bytes = |bias: BiasTensor| bias.row_bytes(problem.dtype, problem.kv_len);
                [rows(problem.query_bias().map_or(0, row_bytes)), None, None, None]
            }
        };
        tensors.into_iter().flatten()
    }

    /// Whether tokens share rows of a tensor, so that a part of a token list is not contiguous in
    /// memory.
    pub(crate) fn shares_rows(self, problem: &AttentionProblem) -> bool {
        self.tensors(problem).any(|tensor| tensor.shared_by > 1)
    }

    /// Bytes of `tokens` tokens and `heads` heads, all batch entries and tensors together.
    pub(crate) fn bytes(self, problem: &AttentionProblem, tokens: usize, heads: u32) -> u64 {
        let one_head: u64 = self.tensors(problem).map(|tensor| tensor.bytes(tokens, 1) as u64).sum();
        u64::from(self.batch(problem)) * u64::from(heads) * one_head
    }
}
