//! The kernels: names, tile shapes, threads and shared memory. `kernels/kernels.cu` instantiates
//! them.

use kyklos::{Dtype, TileShape};

/// Threads per block of all kernels except the attention kernels.
pub const SMALL_THREADS: u32 = 256;

/// Rows of a head per block, in the kernels on running states.
pub const STATE_ROWS: u32 = SMALL_THREADS / 32;

/// Head dims of the tensor-core kernels. Another head dim uses the next larger kernel, padded with
/// zeros in shared memory.
const DIMS: [u32; 5] = [64, 96, 128, 192, 256];

/// Head dims of the decoding kernels. They are bound by memory, and the padding is not read from
/// memory, so few are enough.
const DECODE_DIMS: [u32; 3] = [64, 128, 256];

/// Head dims of the kernels for Hopper, with the keys of their tiles, and consumers of 64 query
/// rows each. TMA pads with zeros.
const HOPPER_DIMS: [(u32, u32, u32); 4] = [(64, 128, 3), (128, 128, 2), (192, 96, 2), (256, 80, 2)];

/// The same of the kernel for calls in which every row sees every key: with more keys in a tile
/// there are fewer tiles, and with a mask more of them would be computed in part.
const HOPPER_WIDE_DIM: (u32, u32, u32) = (128, 176, 2);

/// Rows of a tile of the decoding kernels: query rows times heads of a pack.
pub const PACKED_ROWS: u32 = 64;

/// An attention kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttendKernel {
    /// Its name in the module.
    pub name: String,
    /// The tile shape of its work lists.
    pub tile: TileShape,
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes. A function must be allowed to use more than 48
    /// KiB.
    pub shared_bytes: u32,
}

impl AttendKernel {
    /// The kernel for a storage type and a head dim: one block for each query tile of a head.
    /// `None` above 256.
    pub fn tiled(dtype: Dtype, dim: u32) -> Option<Self> {
        let size = DIMS.into_iter().find(|size| dim <= *size)?;
        if dtype == Dtype::F32 {
            let tile = TileShape { q_rows: 8, kv_cols: 32 };
            return Some(Self { name: "attend_f32".to_owned(), tile, threads: 256, shared_bytes: 0 });
        }
        Some(Self::in_tiles("attend", dtype, size, if size <= 192 { 8 } else { 4 }))
    }

    /// The decoding kernel, whose tiles hold the rows of up to `heads` query heads (1 to
    /// [`PACKED_ROWS`]) of a KV head. `None` above a head dim of 256.
    pub fn decode(dtype: Dtype, dim: u32, heads: u32) -> Option<Self> {
        let size = DECODE_DIMS.into_iter().find(|size| dim <= *size)?;
        let mut kernel = if dtype == Dtype::F32 {
            let tile = TileShape { q_rows: PACKED_ROWS, kv_cols: 32 };
            Self { name: "decode_f32".to_owned(), tile, threads: 256, shared_bytes: 0 }
        } else {
            Self::in_tiles("decode", dtype, size, PACKED_ROWS / 16)
        };
        kernel.tile.q_rows /= heads;
        Some(kernel)
    }

    /// Blocks of the decoding kernel for one query tile of `rows` rows (of all heads of a pack),
    /// whose keys are split into `parts`.
    pub fn tile_blocks(dtype: Dtype, rows: u32, parts: u32) -> u32 {
        // In f32 a warp computes one row of one part, and a block has 8 warps.
        if dtype == Dtype::F32 { (rows * parts).div_ceil(8) } else { parts }
    }

    /// The kernel for Hopper (sm_90a), which takes [`crate::HopperArguments`] and supports neither
    /// mask tensors nor bias tensors. `None` for f32 and above a head dim of 256.
    pub fn hopper(dtype: Dtype, dim: u32) -> Option<Self> {
        let shape = HOPPER_DIMS.into_iter().find(|(size, ..)| dim <= *size)?;
        Self::of_hopper("hopper", dtype, shape)
    }

    /// A kernel like [`Self::hopper`], with larger tiles of keys, for calls without a mask. `None`
    /// for f32 and for head dims that have none.
    pub fn hopper_wide(dtype: Dtype, dim: u32) -> Option<Self> {
        let (size, ..) = HOPPER_DIMS.into_iter().find(|(size, ..)| dim <= *size)?;
        (size == HOPPER_WIDE_DIM.0).then(|| Self::of_hopper("hopper_wide", dtype, HOPPER_WIDE_DIM))?
    }

    /// A kernel of `attend_hopper.h`.
    fn of_hopper(kind: &str, dtype: Dtype, (size, kv_cols, consumers): (u32, u32, u32)) -> Option<Self> {
        let tile = TileShape { q_rows: 64 * consumers, kv_cols };
        let stages = if size == 64 { 4 } else { 2 };
        // Queries; stages of keys and values; for each stage marks: a word for each key and eight others;
        // mbarriers of 8 bytes: two for queries and seven for each stage.
        let tiles = (tile.q_rows + 2 * stages * kv_cols) * size * 2;
        let shared_bytes = tiles + stages * (kv_cols + 8) * 4 + (2 + 7 * stages) * 8;
        let name = format!("{kind}_{dtype}_{size}");
        (dtype != Dtype::F32).then_some(Self { name, tile, threads: 128 * (1 + consumers), shared_bytes })
    }

    /// A tensor-core kernel of `attend.h`, by `mma.sync`.
    fn in_tiles(kind: &str, dtype: Dtype, size: u32, warps: u32) -> Self {
        let tile = TileShape { q_rows: warps * 16, kv_cols: if size <= 128 { 64 } else { 32 } };
        // Queries, and two stages of keys and values.
        let shared_bytes = (tile.q_rows + 4 * tile.kv_cols) * size * 2;
        Self { name: format!("{kind}_{dtype}_{size}"), tile, threads: warps * 32, shared_bytes }
    }
}

/// The kernel that converts between f32 and a 16-bit type. `None` for other pairs.
pub fn convert_kernel(from: Dtype, into: Dtype) -> Option<String> {
    ((from == Dtype::F32) != (into == Dtype::F32)).then(|| format!("convert_{from}_{into}"))
}

/// The kernel that computes outputs in a storage type.
pub fn finalize_kernel(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "finalize_f32",
        Dtype::F16 => "finalize_f16",
        Dtype::Bf16 => "finalize_bf16",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_dim_has_a_kernel_that_fits_every_gpu_from_sm_80_on() {
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
            for dim in (8..=256).step_by(8) {
                let kernel = AttendKernel::tiled(dtype, dim).unwrap();
                assert!(kernel.shared_bytes <= 99 * 1024, "{kernel:?}");
            }
            assert_eq!(AttendKernel::tiled(dtype, 264), None);
        }
        assert_eq!(AttendKernel::tiled(Dtype::F16, 72).unwrap().name, "attend_f16_96");
        assert_eq!(AttendKernel::hopper(Dtype::F16, 72).unwrap().name, "hopper_f16_128");
        assert_eq!(AttendKernel::hopper(Dtype::F32, 64), None);
        for dim in (8..=256).step_by(8) {
            let wide = AttendKernel::hopper_wide(Dtype::Bf16, dim);
            assert_eq!(wide.is_some(), (65..=128).contains(&dim), "{dim}");
            for kernel in AttendKernel::hopper(Dtype::Bf16, dim).into_iter().chain(wide) {
                assert!(kernel.shared_bytes <= 227 * 1024, "{kernel:?}");
            }
        }
        assert_eq!(AttendKernel::decode(Dtype::F32, 264, 1), None);
        assert_eq!(AttendKernel::decode(Dtype::F32, 256, 5).unwrap().tile.q_rows, 12);
        let kernel = AttendKernel::decode(Dtype::Bf16, 200, 5).unwrap();
        assert_eq!((kernel.name.as_str(), kernel.tile.q_rows), ("decode_bf16_256", 12));
        assert!(kernel.shared_bytes <= 99 * 1024, "{kernel:?}");
    }
}
