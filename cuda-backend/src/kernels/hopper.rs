//! What the kernels for Hopper are given besides [`AttendArguments`].

use bytemuck::{Pod, Zeroable};
use kyklos::Dtype;

use crate::{AttendArguments, TensorArgument};

/// What `cuTensorMapEncodeTiled` is told of a tensor, in 128 bytes, which the emulator takes as they are. A driver makes its
/// own 128 bytes of them, with element strides of 1, no interleaving, and zeros where the tensor has no elements; kernels
/// take them by value, aligned as they are here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct TensorMap {
    /// `globalAddress`: a multiple of 16.
    pub data: u64,
    /// `globalDim`: elements in each dimension, adjacent ones first.
    pub extent: [u64; 5],
    /// `globalStrides`, from the second dimension on: bytes, multiples of 16.
    pub stride: [u64; 4],
    /// `boxDim`: elements that are copied at a time.
    pub box_extent: [u32; 5],
    /// `tensorRank`.
    pub rank: u32,
    /// `tensorDataType`: [`Self::F16`] or [`Self::BF16`].
    pub data_type: u32,
    /// `swizzle`: 3 is over 128 bytes.
    pub swizzle: u32,
    /// 0.
    pub reserved: [u64; 2],
}

impl TensorMap {
    /// The driver's number of f16.
    pub const F16: u32 = 6;
    /// The driver's number of bf16.
    pub const BF16: u32 = 9;

    /// The map of `tensor`, `[batch, rows, heads, dim]` of 16-bit elements, for a kernel that copies `tile_rows` rows of one
    /// head at a time, in boxes of 64 elements each.
    pub fn new(tensor: &TensorArgument, dtype: Dtype, shape: [u32; 4], tile_rows: u32) -> Self {
        let [batch, rows, heads, dim] = shape.map(u64::from);
        let bytes = dtype.bytes() as u64;
        Self {
            data: tensor.data,
            extent: [dim, rows, heads, batch, 0],
            stride: [tensor.row_stride * bytes, tensor.head_stride * bytes, tensor.batch_stride * bytes, 0],
            box_extent: [64, tile_rows, 1, 1, 0],
            rank: 4,
            data_type: if dtype == Dtype::F16 { Self::F16 } else { Self::BF16 },
            swizzle: 3,
            reserved: [0; 2],
        }
    }
}

/// Arguments of the kernels for Hopper. Item n is the query tile of `order[n / heads]` of head n % heads. Grid: any, at best
/// as many blocks as run at a time, one for each multiprocessor; each takes every so many items.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct HopperArguments {
    /// Queries, in tiles of the kernel's rows; see [`TensorMap::new`].
    pub q: TensorMap,
    /// Keys, in tiles of its keys.
    pub k: TensorMap,
    /// Values, likewise.
    pub v: TensorMap,
    /// As of the other kernels, but the tensors, pairs and where the grid begins are not read: there are no pairs.
    pub attend: AttendArguments,
    /// [`crate::DeviceWork::longest_first`].
    pub order: u64,
    /// The first item: a long call is several launches.
    pub first_item: u32,
    /// The item behind the last.
    pub end_item: u32,
    /// 0.
    pub reserved: u64,
}
