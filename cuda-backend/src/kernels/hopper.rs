//! Arguments of the kernels for Hopper.

use bytemuck::{Pod, Zeroable};
use kyklos::Dtype;

use crate::{AttendArguments, BackwardArguments, TensorArgument};

/// A tensor as TMA copies it: the arguments of `cuTensorMapEncodeTiled`, in 128 bytes. The driver
/// encodes them in 128 bytes of its own format, with element strides of 1, no interleaving, and
/// zeros for elements outside of the tensor. Kernels take the encoded map by value, with this
/// alignment, which CUtensorMap has since CUDA 13. The emulator takes it as it is here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(128))]
pub struct TensorMap {
    /// `globalAddress`: a multiple of 16.
    pub data: u64,
    /// `globalDim`: elements in each dimension, the contiguous one first.
    pub extent: [u64; 5],
    /// `globalStrides`: bytes between elements of the second and later dimensions; multiples of 16.
    pub stride: [u64; 4],
    /// `boxDim`: elements of one copy in each dimension.
    pub box_extent: [u32; 5],
    /// `tensorRank`.
    pub rank: u32,
    /// `tensorDataType`: [`Self::F16`] or [`Self::BF16`].
    pub data_type: u32,
    /// `swizzle`: 3 stands for 128 bytes.
    pub swizzle: u32,
    /// 0.
    pub reserved: [u64; 2],
}

impl TensorMap {
    /// The driver's number for f16.
    pub const F16: u32 = 6;
    /// The driver's number for bf16.
    pub const BF16: u32 = 9;

    /// The map of `tensor`, of `shape` `[batch, rows, heads, dim]` and 16-bit elements, for copies
    /// of `tile_rows` rows of one head by 64 elements.
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

/// The item, relative to the first one of the launch, that block `block` of `blocks` computes in a
/// round; none if that is behind the last one. Every second round is given out in reverse: items
/// are sorted by their length, and the first block would get the longest one of each round.
pub fn item_of_round(round: u32, block: u32, blocks: u32) -> u32 {
    round * blocks + if round % 2 == 1 { blocks - 1 - block } else { block }
}

/// Arguments of the kernels for Hopper. Item n is query tile `order[n / heads]` of head n % heads.
/// Grid: any; best is one block for each multiprocessor. A block computes the items of
/// [`item_of_round`].
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct HopperArguments {
    /// Queries, in tiles of the kernel's rows; see [`TensorMap::new`].
    pub q: TensorMap,
    /// Keys, in tiles of its keys.
    pub k: TensorMap,
    /// Values, likewise.
    pub v: TensorMap,
    /// As for the other kernels. `q`, `k`, `v`, `bias`, `bias_kind` and the beginning of the grid
    /// are not used: these kernels support neither mask tensors nor bias tensors.
    pub attend: AttendArguments,
    /// [`crate::DeviceWork::longest_first`].
    pub order: u64,
    /// The first item of this launch: a long call is several launches.
    pub first_item: u32,
    /// One past the last item of this launch.
    pub end_item: u32,
    /// Where the results of the rows of a fresh state go, as in [`crate::StateArguments`]; 0: the
    /// rows are merged into the state instead.
    pub o: u64,
    /// See `o`.
    pub lse: u64,
    /// See `o`.
    pub sinks: u64,
    /// 0.
    pub reserved: [u64; 13],
}

/// Arguments of the kernels of the backward pass for Hopper, [`crate::BackwardKernel::hopper`].
/// Grid as for the others.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct HopperBackwardArguments {
    /// Queries, in tiles of 64 rows; see [`TensorMap::new`].
    pub q: TensorMap,
    /// Keys, likewise.
    pub k: TensorMap,
    /// Values, likewise.
    pub v: TensorMap,
    /// Gradient of the output, likewise.
    pub d_o: TensorMap,
    /// As for the other kernels. `q`, `k`, `v`, `bias`, `d_o`, `bias_sum` and `d_bias` are not
    /// used: these kernels support neither mask tensors nor bias tensors.
    pub backward: BackwardArguments,
    /// 0.
    pub reserved: [u64; 12],
}
