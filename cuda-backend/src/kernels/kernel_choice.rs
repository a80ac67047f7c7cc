//! Which kernels a call gets. A pure function of the call and the device, so that all of it can be read and tested here.

use kyklos::{Dtype, TileShape};

use crate::{AttendKernel, PACKED_ROWS};

/// What the choice depends on in a call. Keys are not among it: tiles are chosen before it is known which keys come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallShape {
    /// Of q, k and v.
    pub dtype: Dtype,
    /// Elements of a head.
    pub dim: u32,
    /// Query rows.
    pub rows: u32,
    /// The most query heads that share a KV head, 1 to [`PACKED_ROWS`]; see [`crate::head_packs`].
    pub pack: u32,
    /// Whether there is a boolean or additive pair tensor.
    pub pairs: bool,
    /// Whether rows must get the same bytes whatever is computed with them.
    pub fixed_order: bool,
}

/// A way to call attention kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// [`AttendKernel::tiled`] with [`crate::AttendArguments`]: a block for each query tile of a head.
    Tiled,
    /// [`AttendKernel::decode`] with [`crate::DecodeArguments`], the keys of each query tile in
    /// [`crate::decode_parts`], each with a state of its own; then `merge_parts` with [`crate::PartsArguments`].
    Decode,
    /// [`AttendKernel::hopper`] with [`crate::HopperArguments`]: blocks that stay and take one query tile after the other.
    Hopper,
}

impl KernelChoice {
    /// The ways that there are for a call, the one to take first, each with its kernel; none for heads of more than 256
    /// elements. `wgmma`: the device has the kernels for Hopper.
    ///
    /// | way | calls |
    /// |---|---|
    /// | [`KernelChoice::Decode`] | all rows of a pack fit into one tile, not in a fixed order |
    /// | [`KernelChoice::Hopper`] | bf16 and f16, `wgmma`, more rows than half a tile, no pair tensor, not in a fixed order |
    /// | [`KernelChoice::Tiled`] | all |
    pub fn candidates(call: &CallShape, wgmma: bool) -> Vec<(Self, AttendKernel)> {
        let packed = (!call.fixed_order && call.rows.saturating_mul(call.pack) <= PACKED_ROWS)
            .then(|| AttendKernel::decode(call.dtype, call.dim, call.pack));
        let hopper = (!call.fixed_order && wgmma && !call.pairs)
            .then(|| AttendKernel::hopper(call.dtype, call.dim))
            .flatten()
            .filter(|kernel| call.rows > kernel.tile.q_rows / 2);
        let tiles = AttendKernel::tiled(call.dtype, call.dim);
        [(Self::Decode, packed.flatten()), (Self::Hopper, hopper), (Self::Tiled, tiles)]
            .into_iter()
            .filter_map(|(way, kernel)| Some((way, kernel?)))
            .collect()
    }

    /// Whether a work list in tiles of `tile` is for this way. Whoever made it may have known less of the packs, and made
    /// tiles of fewer rows than there is room for.
    pub fn accepts(self, call: &CallShape, kernel: &AttendKernel, tile: TileShape) -> bool {
        let rows = match self {
            Self::Decode => call.rows..=kernel.tile.q_rows,
            Self::Hopper | Self::Tiled => kernel.tile.q_rows..=kernel.tile.q_rows,
        };
        rows.contains(&tile.q_rows) && tile.kv_cols == kernel.tile.kv_cols
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: CallShape =
        CallShape { dtype: Dtype::Bf16, dim: 128, rows: 8192, pack: 4, pairs: false, fixed_order: false };

    #[test]
    fn calls_get_the_kernels_that_the_table_says() {
        let token = CallShape { rows: 1, ..PROMPT };
        for (call, wgmma, ways) in [
            (PROMPT, true, &[KernelChoice::Hopper, KernelChoice::Tiled][..]),
            (PROMPT, false, &[KernelChoice::Tiled]),
            (CallShape { pairs: true, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { fixed_order: true, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { dtype: Dtype::F32, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { dim: 264, ..PROMPT }, true, &[]),
            (CallShape { rows: 64, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { rows: 64, pack: 1, ..PROMPT }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { rows: 65, pack: 1, ..PROMPT }, true, &[KernelChoice::Hopper, KernelChoice::Tiled]),
            (token, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (token, false, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { pairs: true, ..token }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { fixed_order: true, ..token }, true, &[KernelChoice::Tiled]),
            (CallShape { dtype: Dtype::F32, ..token }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { dtype: Dtype::F32, fixed_order: true, ..token }, true, &[KernelChoice::Tiled]),
            (CallShape { rows: 16, ..token }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { rows: 17, ..token }, true, &[KernelChoice::Tiled]),
        ] {
            let all: Vec<_> =
                KernelChoice::candidates(&call, wgmma).into_iter().map(|(way, _)| way).collect();
            assert_eq!(all, ways, "{call:?}, wgmma: {wgmma}");
        }
    }

    /// Tiles are chosen for the largest packs that there may be; the call may have smaller ones, and has to know the way again.
    #[test]
    fn tiles_say_which_way_they_are_for() {
        for dim in [64, 96, 128, 192, 256] {
            for rows in [1, 7, 16, 17, 32, 33, 64, 65, 1000] {
                for wgmma in [false, true] {
                    for (most, pack) in [(1, 1), (4, 4), (4, 2), (8, 1), (64, 64)] {
                        let expected = CallShape { dim, rows, pack: most, ..PROMPT };
                        let call = CallShape { pack, ..expected };
                        let (chosen, kernel) = KernelChoice::candidates(&expected, wgmma).swap_remove(0);
                        let mut ways = KernelChoice::candidates(&call, wgmma).into_iter();
                        let (taken, with) =
                            ways.find(|(way, with)| way.accepts(&call, with, kernel.tile)).unwrap();
                        // Tiles of 64 rows by 32 keys serve two kernels.
                        let either = (chosen, taken) == (KernelChoice::Tiled, KernelChoice::Decode)
                            && with.tile == kernel.tile;
                        assert!(chosen == taken || either, "{call:?}: {chosen:?} and {taken:?}");
                    }
                }
            }
        }
    }
}
