//! The arguments of the operations of a backend: places of tensors in buffers, running states,
//! blocks of attention.

use kyklos_plan::{BiasKind, BlockWork, Dtype};

/// A tensor `[batch, rows, heads, dim]` inside a buffer; the elements of one head of one row are
/// adjacent.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, Buffer> {
    /// The buffer that holds it.
    pub buffer: &'a Buffer,
    /// Offset and strides, in elements of its storage type.
    pub layout: Layout,
}

/// Offset and strides of a `[batch, rows, heads, ·]` tensor, in elements of its storage type; in
/// [`Backend::repack`](super::Backend::repack) in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Where (0, 0, 0) starts.
    pub offset: usize,
    /// Distance between batch entries.
    pub batch_stride: usize,
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between heads.
    pub head_stride: usize,
}

/// A dense tensor `[batch, tokens, heads, dim]` in one of the forms that
/// [`Backend::convert`](super::Backend::convert) converts.
#[derive(Clone, Copy, Debug)]
pub enum Elements<Buffer> {
    /// In a storage type.
    Stored {
        /// The buffer that holds the elements.
        buffer: Buffer,
        /// Index of the tensor's first element in the buffer; a multiple of 8.
        first: usize,
        /// Storage type of the elements.
        dtype: Dtype,
    },
    /// 8-bit codes with scales, see [`WireFormat::Int8`](crate::WireFormat::Int8). The tensor
    /// starts at the beginning of both buffers.
    Coded {
        /// 8-bit codes in two's complement, `[batch, tokens, heads, dim]`.
        codes: Buffer,
        /// Scales, f32; the shape depends on `of`.
        scales: Buffer,
        /// Which elements share a scale.
        of: Scales,
    },
}

impl<Buffer> Elements<Buffer> {
    /// The same elements in buffers of another type.
    pub fn map<To>(self, convert: impl Fn(Buffer) -> To) -> Elements<To> {
        match self {
            Self::Stored { buffer, first, dtype } => {
                Elements::Stored { buffer: convert(buffer), first, dtype }
            }
            Self::Coded { codes, scales, of } => {
                Elements::Coded { codes: convert(codes), scales: convert(scales), of }
            }
        }
    }
}

/// Which elements share a scale in [`Elements::Coded`], and the shape of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// [`TOKENS_PER_SCALE`](crate::TOKENS_PER_SCALE) consecutive tokens of a channel: `[batch,
    /// ⌈tokens / 64⌉, heads, dim]`.
    Channels,
    /// The elements of one head of one token: `[batch, tokens, heads]`.
    Rows,
}

/// Extents of a copy by [`Backend::repack`](super::Backend::repack).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Bytes of one head of one row, which are adjacent; a multiple of 4.
    pub row_bytes: usize,
}

/// A dense running state that is read.
#[derive(Debug)]
pub struct State<'a, Buffer> {
    /// f32 `[batch, rows, heads, dim]`.
    pub a: &'a Buffer,
    /// f32 `[batch, heads, rows, 2]`.
    pub ml: &'a Buffer,
    /// Extents of the state.
    pub shape: StateShape,
}

/// A dense running state that is changed.
#[derive(Debug)]
pub struct StateMut<'a, Buffer> {
    /// f32 `[batch, rows, heads, dim]`.
    pub a: &'a mut Buffer,
    /// f32 `[batch, heads, rows, 2]`.
    pub ml: &'a mut Buffer,
    /// Extents of the state.
    pub shape: StateShape,
}

/// Extents of a running state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Batch entries.
    pub batch: usize,
    /// Query rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl StateShape {
    /// Bytes of `a`.
    pub fn a_bytes(self) -> usize {
        self.batch * self.rows * self.heads * self.dim * 4
    }

    /// Bytes of `ml`.
    pub fn ml_bytes(self) -> usize {
        self.batch * self.rows * self.heads * 2 * 4
    }

    /// Bytes of the log-sum-exp that [`Backend::finalize`](super::Backend::finalize) writes.
    pub fn lse_bytes(self) -> usize {
        self.batch * self.rows * self.heads * 2 * 4
    }

    /// Bytes of [`RowStats::stats`](super::RowStats::stats).
    pub fn stats_bytes(self) -> usize {
        self.batch * self.rows * self.heads * 4 * 4
    }
}

/// The arguments of [`Backend::attend`](super::Backend::attend): one block of queries against one
/// block of keys.
#[derive(Debug)]
pub struct Attend<'a, Buffer> {
    /// Storage type of q, k and v.
    pub dtype: Dtype,
    /// Factor on q·k.
    pub scale: f32,
    /// `Some(c)`: logits become `c · tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// `[batch, q rows, q heads, dim]`.
    pub q: Operand<'a, Buffer>,
    /// `[batch, kv rows, kv heads, dim]`.
    pub k: Operand<'a, Buffer>,
    /// `[batch, kv rows, kv heads, dim]`.
    pub v: Operand<'a, Buffer>,
    /// For each query head of `q`, the head of `k` and `v` that it attends to.
    pub kv_head_of: &'a [u32],
    /// The mask between these queries and keys, in this backend's tiles. Rows:
    /// `work.classes[..].rows`; keys: `work.kv_positions`.
    pub work: &'a BlockWork,
    /// A tensor over (query, key position) pairs, which hides keys or is added to logits.
    pub bias: Option<BiasInput<'a, Buffer>>,
    /// Whether the bytes of a row must not depend on the other rows of the call or on the mesh. If
    /// so, the choice of the kernel and the division of the keys must not depend on the number
    /// of rows.
    pub fixed_order: bool,
    /// Whether no backward pass follows. If one does, a logit must be the same sum of products, in
    /// the same order, as in [`Backend::attend_backward`](super::Backend::attend_backward): of
    /// a row whose largest logit is 10⁶ two orders differ by as much as the weights do.
    pub inference: bool,
    /// The running state of the rows and heads of `q`.
    pub state: StateMut<'a, Buffer>,
}

/// Errors of a device's kernels beyond those of f32 arithmetic: of kernels that are not Kyklos'
/// own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accuracy {
    /// Largest error of a log-sum-exp. States of several blocks are merged by these numbers, so it
    /// is a relative error of weights too.
    pub log_sum_exp: f64,
    /// Largest error of the output of a block before it is merged, relative to the largest element.
    pub of_blocks: f64,
    /// Largest error of the gradients of a block before they are added, relative to the largest
    /// element.
    pub of_gradients: f64,
}

impl Accuracy {
    /// Sums, weights and states in f32: the kernels of Kyklos.
    pub const F32: Self = Self { log_sum_exp: 0.0, of_blocks: 0.0, of_gradients: 0.0 };
}

/// Where [`Backend::attend_and_finalize`](super::Backend::attend_and_finalize) writes its results,
/// and the sinks that enter them: the arguments of [`Backend::finalize`](super::Backend::finalize).
#[derive(Debug)]
pub struct Results<'a, Buffer> {
    /// One for each head of the state, or none.
    pub sinks: &'a [f32],
    /// `[batch, rows, heads, dim]` of the storage type of the call.
    pub o: &'a mut Buffer,
    /// f32 `[batch, rows, heads, 2]`.
    pub lse: &'a mut Buffer,
}

/// Rows of a [`BiasTensor`](crate::BiasTensor): `[batch, q rows, q heads, key positions]`. Columns
/// are global key positions, not indices into a block of keys.
#[derive(Clone, Copy, Debug)]
pub struct BiasInput<'a, Buffer> {
    /// Whether it hides keys or is added to logits.
    pub kind: BiasKind,
    /// The buffer that holds it.
    pub buffer: &'a Buffer,
    /// Offset and strides, in 32-bit words of [`BiasKind::Mask`], in elements of
    /// [`BiasKind::Additive`]. A stride of 0 means that all batch entries, all heads or all
    /// rows share the same elements.
    pub layout: Layout,
}
