//! WGSL attention kernels. Their texts are templates, in the folder `wgsl/`: one file for each
//! kernel, which says what it computes and what its bindings hold. This crate has the catalogue,
//! the parameters, and the numbers of each variant. No GPU API: a backend compiles the text, fills
//! the bindings and dispatches.
//!
//! # Contract
//!
//! - A [`Kernel`] is a value; [`Kernel::source`] is its text, [`Kernel::bindings`] and
//!   [`Kernel::uniform`] are its interface, [`Kernel::workgroup_size`] and
//!   [`Kernel::workgroup_bytes`] its demands. The same value gives the same text.
//! - All kernels stay within WebGPU's default limits and need no feature, except if
//!   [`Kernel::needs_subgroups`] is true.
//! - For few query rows there are other kernels: [`Kernel::Decode`] splits the keys over
//!   workgroups. Each workgroup takes all rows that share a KV head, and [`Kernel::MergeParts`]
//!   merges their partial states into the running state.
//! - Gradients: [`Kernel::AttendBackward`], [`Kernel::RowStats`], [`Kernel::Accumulate`]; what they
//!   read is described in [`BackwardParams`] and in `wgsl/backward/portable.wgsl`.
//! - The kernels for software drivers ([`Kernel::reads_textures`]) read k and v, in backward
//!   kernels what they loop over, from read-only storage textures: x = KV head · units of a head +
//!   unit, y = (batch entry − `batch_first`) · `k_batch` (or `v_batch`) + key − `key_begin`.
//! - Storage is f32, f16 or bf16, 16-bit elements packed in u32 words; all arithmetic is f32.
//! - Kernels know no masks: they read an interval of key positions for each query row, a position
//!   for each key, and a list of runs of tiles. The layout of both is described in
//!   `wgsl/attend/portable.wgsl`.
//! - Kernels check nothing: extents must be above zero, indices in bounds.

#![forbid(unsafe_code)]

mod attend;
mod backward;
mod bias;
mod decode;
mod kernel;
mod source;
mod storage;
mod templates;
mod uniforms;
mod variant;

pub use backward::params::{BackwardParams, RowStatsParams};
pub use backward::variant::{BackwardKernel, BackwardVariant, Sums};
pub use bias::BiasInput;
pub use kernel::{Access, Binding, EMPTY_M, ENTRY_POINT, Kernel, MAX_HEAD_DIM};
pub use source::Dialect;
pub use storage::{Scales, Storage};
pub use uniforms::{
    AttendParams, CodesParams, ConvertParams, DecodeParams, Field, FinalizeParams, MergeParams,
    MergePartsParams, RepackParams, ResetParams, Uniform,
};
pub use variant::{
    AttendKernel, AttendVariant, DecodeKernel, DecodeVariant, Matrices, Tile, UnknownVariant, Vendor,
};
