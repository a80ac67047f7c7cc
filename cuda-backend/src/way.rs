//! Which kernels a call gets. A pure function of the call and the device, so that all of it can be read and tested here.

use kyklos::Dtype;

use crate::{AttendKernel, HeadPack, PACKED_ROWS, decode_parts};

/// What the choice depends on in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallShape {
    /// Of q, k and v.
    pub dtype: Dtype,
    /// Elements of a head.
    pub dim: u32,
    /// Batch entries.
    pub batch: u32,
    /// Query rows.
    pub rows: u32,
    /// Keys.
    pub keys: u32,
    /// Whether there is a boolean or additive pair tensor.
    pub pairs: bool,
}

/// What it depends on in a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
}

/// A way to call attention kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// [`AttendKernel::of`] with [`crate::AttendArguments`]: a block for each query tile of a head.
    Tiles,
    /// [`AttendKernel::decode`] with [`crate::DecodeArguments`], the keys of each query tile in so many parts, each with a
    /// state of its own; then `merge_parts` with [`crate::PartsArguments`].
    Parts(u32),
    /// [`AttendKernel::hopper`] with [`crate::HopperArguments`]: blocks that stay and take one query tile after the other.
    Hopper,
}

impl Way {
    /// The way for a call whose heads lie in `packs` ([`crate::head_packs`]), or none for heads of more than 256 elements.
    ///
    /// | call | way |
    /// |---|---|
    /// | f32 | [`Way::Tiles`] |
    /// | all rows of a pack fit into one tile, and packs hold several heads or there are keys for several parts | [`Way::Parts`] |
    /// | compute capability 9.0, more rows than half a tile, no pair tensor | [`Way::Hopper`] |
    /// | all others | [`Way::Tiles`] |
    pub fn of(call: &CallShape, packs: &[HeadPack], gpu: Gpu) -> Option<Self> {
        let most = packs.iter().map(|pack| pack.count).max().unwrap_or(1);
        AttendKernel::of(call.dtype, call.dim)?;
        if call.rows.saturating_mul(most) <= PACKED_ROWS
            && let Some(kernel) = AttendKernel::decode(call.dtype, call.dim, most)
        {
            let blocks = packs.len() as u64 * u64::from(call.batch);
            let parts = decode_parts(blocks, call.keys.div_ceil(kernel.tile.kv_cols), gpu.multiprocessors);
            if parts > 1 || most > 1 {
                return Some(Self::Parts(parts));
            }
        }
        let on_hopper = gpu.capability == (9, 0)
            && !call.pairs
            && AttendKernel::hopper(call.dtype, call.dim)
                .is_some_and(|kernel| call.rows > kernel.tile.q_rows / 2);
        Some(if on_hopper { Self::Hopper } else { Self::Tiles })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head_packs;

    #[test]
    fn calls_get_the_kernels_that_the_table_says() {
        let prompt =
            CallShape { dtype: Dtype::Bf16, dim: 128, batch: 1, rows: 8192, keys: 8192, pairs: false };
        let token = CallShape { rows: 1, keys: 131_072, ..prompt };
        let grouped: Vec<u32> = (0..32).map(|head| head / 4).collect();
        let single: Vec<u32> = (0..32).collect();
        let [h100, ada] = [(9, 0), (8, 9)].map(|capability| Gpu { capability, multiprocessors: 132 });
        for (call, kv_head_of, gpu, way) in [
            (prompt, &grouped, h100, Some(Way::Hopper)),
            (prompt, &grouped, ada, Some(Way::Tiles)),
            // What is newer does not run code for 9.0.
            (prompt, &grouped, Gpu { capability: (10, 0), ..h100 }, Some(Way::Tiles)),
            (CallShape { pairs: true, ..prompt }, &grouped, h100, Some(Way::Tiles)),
            (CallShape { dtype: Dtype::F32, ..prompt }, &grouped, h100, Some(Way::Tiles)),
            (CallShape { dim: 264, ..prompt }, &grouped, h100, None),
            (CallShape { rows: 64, ..prompt }, &grouped, h100, Some(Way::Tiles)),
            (token, &grouped, h100, Some(Way::Parts(33))),
            (token, &grouped, ada, Some(Way::Parts(33))),
            (token, &single, h100, Some(Way::Parts(8))),
            (CallShape { pairs: true, ..token }, &grouped, h100, Some(Way::Parts(33))),
            (CallShape { dtype: Dtype::F32, ..token }, &grouped, h100, Some(Way::Tiles)),
            (CallShape { rows: 16, ..token }, &grouped, h100, Some(Way::Parts(33))),
            (CallShape { rows: 17, ..token }, &grouped, h100, Some(Way::Tiles)),
            // Too much work for parts: packed all the same, where heads share keys.
            (CallShape { batch: 64, ..token }, &grouped, h100, Some(Way::Parts(1))),
            (CallShape { batch: 64, ..token }, &single, h100, Some(Way::Tiles)),
        ] {
            assert_eq!(Way::of(&call, &head_packs(kv_head_of), gpu), way, "{call:?} on {gpu:?}");
        }
    }
}
