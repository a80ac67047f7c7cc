//! What kernels are given, by value: the structs of `kernels/arguments.h`, field by field.

use bytemuck::{Pod, Zeroable};

/// A strided tensor `[batch, rows, heads, ·]` in device memory.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TensorArgument {
    /// Address of element (0, 0, 0).
    pub data: u64,
    /// Distance between batch entries, in elements; in 32-bit words of a boolean pair tensor, in bytes in `repack`.
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
    /// The pair tensor, if there is one.
    pub pairs: TensorArgument,
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
    /// u32 `[heads]`: for each query head the head of k and v.
    pub kv_head_of: u64,
    /// Query rows.
    pub rows: u32,
    /// Keys.
    pub keys: u32,
    /// Query heads of the state.
    pub heads: u32,
    /// Elements of a head.
    pub dim: u32,
    /// Mask classes: 1, or one for each batch entry.
    pub classes: u32,
    /// Query tiles of a class.
    pub q_tiles: u32,
    /// The query tile at which the grid begins: a long call is several launches.
    pub first_tile: u32,
    /// The head at which the grid begins.
    pub first_head: u32,
    /// The batch entry at which the grid begins.
    pub first_batch: u32,
    /// 0: no pair tensor, 1: a boolean one, 2: a bias.
    pub pair_kind: u32,
    /// See [`logits`].
    pub scale: f32,
    /// See [`logits`].
    pub cap: f32,
}

/// Query heads that share a KV head and lie side by side in a tile of a decoding kernel; see [`crate::head_packs`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HeadPack {
    /// The first of them.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// Arguments of the decoding kernels. Grid: (query tiles · `tile_blocks`, packs, batch entries).
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeArguments {
    /// As of the attention kernels, but `a` and `ml` are `parts` states, one behind the other, which are written and not
    /// read, and `first_head` is 0.
    pub attend: AttendArguments,
    /// [`HeadPack`]s.
    pub packs: u64,
    /// Parts into which the keys of each query tile are cut; see [`crate::KernelChoice`].
    pub parts: u32,
    /// Batch entries of the state.
    pub batch: u32,
    /// Query rows of a tile.
    pub tile_rows: u32,
    /// [`AttendKernel::tile_blocks`](crate::AttendKernel::tile_blocks).
    pub tile_blocks: u32,
}

/// Arguments of `reset_state`, `merge_states` and `finalize_…`: a warp for each row of a head.
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
    /// Finalize: f32 `[heads]`, or 0.
    pub sinks: u64,
    /// Finalize: `[batch, rows, heads, dim]`.
    pub o: u64,
    /// Finalize: f32 `[batch, rows, heads]`.
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

/// Arguments of `merge_parts`: states one behind the other go into one, in their order. Grid as above.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct PartsArguments {
    /// As of `merge_states`; `from_a` and `from_ml` are the first part's.
    pub state: StateArguments,
    /// How many there are.
    pub parts: u32,
    /// 0.
    pub reserved: u32,
}

/// Arguments of `repack`; offsets and strides in bytes, all multiples of 4.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RepackArguments {
    /// Where rows come from.
    pub from: TensorArgument,
    /// Where they go.
    pub into: TensorArgument,
    /// Batch entries.
    pub batch: u32,
    /// Rows.
    pub rows: u32,
    /// Heads.
    pub heads: u32,
    /// Adjacent bytes of one head of one row.
    pub row_bytes: u32,
}

/// Arguments of `convert_…`: eight elements for each thread.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ConvertArguments {
    /// Where elements come from. Both addresses are multiples of 16.
    pub from: u64,
    /// Where they go.
    pub into: u64,
    /// Eighths of the elements.
    pub eights: u64,
}

/// Arguments of `to_codes_…` and `from_codes_…`. Grid: ([`CodesKernel::blocks`](crate::CodesKernel)).
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct CodesArguments {
    /// Elements `[batch, tokens, heads, dim]`. This address and those of codes and scales are multiples of 16.
    pub data: u64,
    /// As many codes.
    pub codes: u64,
    /// f32: over rows `[batch, tokens, heads]`, over channels `[batch, ⌈tokens / 64⌉, heads, dim]`.
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

/// `scale` and `cap` of [`AttendArguments`]: kernels compute base-2 logits, `scale · q·k` or `cap · tanh(scale · q·k)`.
pub fn logits(scale: f32, softcap: Option<f32>) -> (f32, f32) {
    let log2_e = std::f64::consts::LOG2_E;
    #[expect(clippy::cast_possible_truncation, reason = "rounded once, on purpose")]
    match softcap {
        None => ((f64::from(scale) * log2_e) as f32, 0.0),
        Some(cap) => (scale / cap, (f64::from(cap) * log2_e) as f32),
    }
}
