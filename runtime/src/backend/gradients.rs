//! The arguments of the operations of the backward pass.

use super::{BiasInput, Layout, Operand, StateShape};
use kyklos_plan::{BlockWork, Dtype};

/// The arguments of [`Backend::row_stats`](super::Backend::row_stats): dense tensors of the same
/// rows and heads.
#[derive(Debug)]
pub struct RowStats<'a, Buffer> {
    /// Storage type of o and d_o.
    pub dtype: Dtype,
    /// Extents of all tensors.
    pub shape: StateShape,
    /// Output of the forward pass, `[batch, rows, heads, dim]`.
    pub o: &'a Buffer,
    /// Gradient of the output, shaped as `o`.
    pub d_o: &'a Buffer,
    /// Log-sum-exp of the forward pass, f32 `[batch, rows, heads, 2]`.
    pub lse: &'a Buffer,
    /// Gradient of the log-sum-exp, f32 `[batch, rows, heads]`; `None` where it is 0.
    pub d_lse: Option<&'a Buffer>,
    /// f32 `[batch, rows, heads, 4]`, overwritten: the statistics of each row.
    pub stats: &'a mut Buffer,
}

/// The arguments of [`Backend::attend_backward`](super::Backend::attend_backward): one block of
/// queries against one block of keys.
#[derive(Debug)]
pub struct AttendBackward<'a, Buffer> {
    /// Storage type of q, k, v and d_o.
    pub dtype: Dtype,
    /// Factor on q·k.
    pub scale: f32,
    /// `Some(c)`: logits become `c · tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// `[batch, q rows, q heads, dim]`.
    pub q: Operand<'a, Buffer>,
    /// Gradient of the output, shaped as `q`.
    pub d_o: Operand<'a, Buffer>,
    /// f32 `[batch, q rows, q heads, 4]`, see [`RowStats::stats`].
    pub stats: Operand<'a, Buffer>,
    /// `[batch, kv rows, kv heads, dim]`.
    pub k: Operand<'a, Buffer>,
    /// `[batch, kv rows, kv heads, dim]`.
    pub v: Operand<'a, Buffer>,
    /// For each query head of `q`, the head of `k` and `v` that it attends to. It ascends.
    pub kv_head_of: &'a [u32],
    /// The mask between these queries and keys, in the tiles of
    /// [`Backend::backward_tile_shape`](super::Backend::backward_tile_shape).
    pub work: &'a BlockWork,
    /// The attention bias tensor, as in [`Attend::bias`](super::Attend::bias).
    pub bias: Option<BiasInput<'a, Buffer>>,
    /// Extents of q.
    pub shape: StateShape,
    /// Sum of the gradient of q: dense f32 `[batch, q rows, q heads, dim]`.
    pub dq: &'a mut Buffer,
    /// Sums of the gradients of k and of v: f32 `[batch, kv rows, kv heads, dim]`, both with the
    /// layout `kv_layout`.
    pub dk: &'a mut Buffer,
    /// See `dk`.
    pub dv: &'a mut Buffer,
    /// Place of the rows and heads of `k` in `dk`, and of those of `v` in `dv`.
    pub kv_layout: Layout,
    /// The gradient of an additive bias in `bias`; only for backends with
    /// [`Backend::supports_bias_gradient`](super::Backend::supports_bias_gradient).
    pub d_bias: Option<BiasGradient<'a, Buffer>>,
}

/// The sum of the gradient of [`AttendBackward::bias`].
#[derive(Debug)]
pub struct BiasGradient<'a, Buffer> {
    /// Dense f32; a row has an element for each key position, without padding.
    pub buffer: &'a mut Buffer,
    /// Place of the rows of `q`, in elements. Strides are 0 where those of `bias` are.
    pub layout: Layout,
    /// Key positions: the elements of a row.
    pub columns: usize,
}
