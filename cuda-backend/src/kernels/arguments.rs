//! Arguments of the kernels, passed by value: the structs of `kernels/arguments.h`, field by field.
//! Addresses are of device memory.

use bytemuck::{Pod, Zeroable};

/// A strided tensor `[batch, rows, heads, ·]` in device memory.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TensorArgument {
    /// Address of element (0, 0, 0).
    pub data: u64,
    /// Distance between batch entries. This and the other strides count elements; for a mask tensor
    /// 32-bit words, in `repack` bytes.
    pub batch_stride: u64,
    /// Distance between rows.
    pub row_stride: u64,
    /// Distance between heads.
    pub head_stride: u64,
}

/// Arguments of the attention kernels. Grid: (query tiles, heads, batch entries).
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct AttendArguments {
    /// Queries. Addresses and strides of q, k and v are whole multiples of 16 bytes.
    pub q: TensorArgument,
    /// Keys.
    pub k: TensorArgument,
    /// Values.
    pub v: TensorArgument,
    /// The mask tensor or bias tensor, if there is one.
    pub bias: TensorArgument,
    /// f32 `[batch, rows, heads, dim]`.
    pub a: u64,
    /// f32 `[batch, heads, rows, 2]`.
    pub ml: u64,
    /// [`crate::DeviceWork::spans`].
    pub spans: u64,
    /// [`crate::DeviceWork::positions`].
    pub positions: u64,
    /// [`crate::DeviceWork::starts`].
    pub starts: u64,
    /// [`crate::DeviceWork::runs`].
    pub runs: u64,
    /// u32 `[heads]`: the KV head of each query head.
    pub kv_head_of: u64,
    /// Query rows.
    pub rows: u32,
    /// Keys.
    pub keys: u32,
    /// Query heads of the state.
    pub heads: u32,
    /// Elements of a head.
    pub dim: u32,
    /// Mask classes: 1 if all batch entries have the same mask, else one for each.
    pub classes: u32,
    /// Query tiles of a class.
    pub q_tiles: u32,
    /// The first query tile of the grid: a long call is several launches.
    pub first_tile: u32,
    /// The first head of the grid.
    pub first_head: u32,
    /// The first batch entry of the grid.
    pub first_batch: u32,
    /// 0: neither mask tensor nor bias tensor, 1: a mask tensor, 2: a bias tensor.
    pub bias_kind: u32,
    /// See [`logits`].
    pub scale: f32,
    /// See [`logits`].
    pub cap: f32,
    /// 1: the state is not read, because it was not initialised. Every row of the grid is written,
    /// also one that sees no key.
    pub fresh: u32,
    /// 0.
    pub reserved: u32,
}

/// Consecutive query heads that share a KV head and a tile of a decoding kernel; see
/// [`crate::head_packs`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HeadPack {
    /// The first query head.
    pub first: u32,
    /// Number of query heads.
    pub count: u32,
}

/// Arguments of the decoding kernels. Grid: (query tiles · `tile_blocks`, packs, batch entries).
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeArguments {
    /// As for the attention kernels, except: `a` and `ml` are `parts` states, one behind the other,
    /// which are written and not read; `first_head` is 0.
    pub attend: AttendArguments,
    /// [`HeadPack`]s.
    pub packs: u64,
    /// Parts into which the keys of each query tile are split; see [`crate::KernelChoice`].
    pub parts: u32,
    /// Batch entries of the state.
    pub batch: u32,
    /// Query rows of a tile.
    pub tile_rows: u32,
    /// [`AttendKernel::tile_blocks`](crate::AttendKernel::tile_blocks).
    pub tile_blocks: u32,
}

/// Arguments of the kernels of the backward pass. Grid: (tiles of query rows or of keys, query
/// heads or KV heads, batch entries).
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct BackwardArguments {
    /// As for the attention kernels, except: `starts` and `runs` are those of a
    /// [`crate::BackwardList`], `q_tiles` and `first_tile` count on its side, `a` and `ml` are
    /// 0.
    pub attend: AttendArguments,
    /// Gradient of the output, shaped and aligned as q.
    pub d_o: TensorArgument,
    /// f32 `[batch, rows, heads, 4]`: log-sum-exp, e^−rest, δ, and the rest.
    pub stats: TensorArgument,
    /// The strides of `dk` and `dv`, f32 `[batch, keys, KV heads, dim]`. `data` is 0.
    pub d_kv: TensorArgument,
    /// The strides of `d_bias`, f32 `[batch, rows, heads, positions]`: 0 where elements are shared.
    /// `data` is 0.
    pub bias_sum: TensorArgument,
    /// The first element of the gradient of the bias, or 0.
    pub d_bias: u64,
    /// f32 `[batch, rows, heads, dim]`.
    pub dq: u64,
    /// The first element of dk.
    pub dk: u64,
    /// The first element of dv.
    pub dv: u64,
    /// u32 `[KV heads + 1]`: the first query head that reads each KV head.
    pub readers: u64,
    /// Factor on q·k.
    pub scale: f32,
    /// 0.
    pub reserved: u32,
}

/// Arguments of `row_stats_…`: one warp for each row of a head, [`crate::STATE_ROWS`] per block.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RowStatsArguments {
    /// Output of the forward pass, `[rows, dim]`.
    pub o: u64,
    /// Gradient of the output.
    pub d_o: u64,
    /// f32 `[rows, 2]`: the log-sum-exp is the sum of two numbers.
    pub lse: u64,
    /// f32 `[rows]`, or 0 where the gradient of the log-sum-exp is 0.
    pub d_lse: u64,
    /// f32 `[rows, 4]`.
    pub stats: u64,
    /// Rows of all heads and batch entries.
    pub rows: u64,
    /// Elements of a head.
    pub dim: u32,
    /// 0.
    pub reserved: u32,
}

/// Arguments of `clear_words`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ClearArguments {
    /// 32-bit words to fill with 0.
    pub words: u64,
    /// How many.
    pub count: u64,
}

/// Arguments of `reset_state`, `merge_states` and `finalize_…`: one warp for each row of a head.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct StateArguments {
    /// f32 `[batch, rows, heads, dim]`.
    pub a: u64,
    /// f32 `[batch, heads, rows, 2]`.
    pub ml: u64,
    /// Merge: the other state's `a`.
    pub from_a: u64,
    /// Merge: the other state's `ml`.
    pub from_ml: u64,
    /// Finalize: f32 `[heads]`, or 0 for no sinks.
    pub sinks: u64,
    /// Finalize: `[batch, rows, heads, dim]`.
    pub o: u64,
    /// Finalize: f32 `[batch, rows, heads, 2]`.
    pub lse: u64,
    /// Batch entries.
    pub batch: u32,
    /// Query rows.
    pub rows: u32,
    /// Query heads.
    pub heads: u32,
    /// Elements of a head.
    pub dim: u32,
}

/// Arguments of `merge_parts`: merges states that are one behind the other into one state, in their
/// order. Grid as above.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct PartsArguments {
    /// As for `merge_states`; `from_a` and `from_ml` are those of the first part.
    pub state: StateArguments,
    /// Number of parts.
    pub parts: u32,
    /// 1: the state is not read, and every row is written.
    pub fresh: u32,
}

/// Arguments of `repack` and `accumulate`; offsets and strides in bytes, all multiples of 4.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RepackArguments {
    /// Source.
    pub from: TensorArgument,
    /// Destination.
    pub into: TensorArgument,
    /// Batch entries.
    pub batch: u32,
    /// Rows.
    pub rows: u32,
    /// Heads.
    pub heads: u32,
    /// Contiguous bytes of one head of one row.
    pub row_bytes: u32,
}

/// Arguments of `convert_…`: eight elements for each thread.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ConvertArguments {
    /// Source elements. Both addresses are multiples of 16.
    pub from: u64,
    /// Destination elements.
    pub into: u64,
    /// Number of elements divided by 8.
    pub eights: u64,
    /// A word that becomes 1 where a finite element is beyond the range of f16, or 0.
    pub overflow: u64,
}

/// Arguments of `to_codes_…` and `from_codes_…`. Grid:
/// ([`CodesKernel::blocks`](crate::CodesKernel)).
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct CodesArguments {
    /// Elements `[batch, tokens, heads, dim]`. This address and those of codes and scales are
    /// multiples of 16.
    pub data: u64,
    /// 8-bit codes, as many as elements.
    pub codes: u64,
    /// f32: per row `[batch, tokens, heads]`, per channel `[batch, ⌈tokens / 64⌉, heads, dim]`.
    pub scales: u64,
    /// Batch entries.
    pub batch: u32,
    /// Tokens.
    pub tokens: u32,
    /// Heads.
    pub heads: u32,
    /// Elements of a head, a multiple of 8.
    pub dim: u32,
    /// [`CodesKernel::lanes`](crate::CodesKernel).
    pub lanes: u32,
    /// 0.
    pub reserved: u32,
}

/// `scale` and `cap` of [`AttendArguments`]: logits are `scale · q·k`, or with a softcap `cap ·
/// tanh(scale · q·k)`.
pub fn logits(scale: f32, softcap: Option<f32>) -> (f32, f32) {
    softcap.map_or((scale, 0.0), |cap| (scale / cap, cap))
}
