//! Which kernel a call gets: a pure function of the call and the device.

use kyklos::{Dtype, TileShape};

use crate::{AttendKernel, BackwardKernel, PACKED_ROWS};

/// The properties of a call that decide the choice. The keys do not: the tile shape is chosen
/// before they are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallShape {
    /// Storage type of q, k and v.
    pub dtype: Dtype,
    /// Elements of a head.
    pub dim: u32,
    /// Query rows.
    pub rows: u32,
    /// The largest number of query heads that share a KV head, 1 to [`PACKED_ROWS`]; see
    /// [`crate::head_packs`].
    pub pack: u32,
    /// Whether there is a mask tensor or a bias tensor.
    pub bias: bool,
    /// Whether every row sees every key. Only the order of the choices depends on it.
    pub full: bool,
    /// Whether the result of a row must have the same bytes for every partition of the work.
    pub fixed_order: bool,
}

/// A family of attention kernels, with its arguments and its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// [`AttendKernel::tiled`] with [`crate::AttendArguments`]: one block for each query tile of a head.
    Tiled,
    /// [`AttendKernel::decode`] with [`crate::DecodeArguments`]: the keys of each query tile are split into
    /// [`crate::decode_parts`], each with a state of its own. Then `merge_parts` with
    /// [`crate::PartsArguments`].
    Decode,
    /// [`AttendKernel::hopper`] or [`AttendKernel::hopper_wide`] with [`crate::HopperArguments`]: persistent blocks that compute one
    /// query tile after the other.
    Hopper,
}

impl KernelChoice {
    /// The choices for a call with their kernels, the preferred one first; none for heads of more
    /// than 256 elements. `wgmma`: the device has the kernels for Hopper.
    ///
    /// | choice | calls |
    /// |---|---|
    /// | [`KernelChoice::Decode`] | all rows of a pack fit into one tile, no fixed order |
    /// | [`KernelChoice::Hopper`] | bf16 and f16, `wgmma`, more rows than half a tile, no mask or bias tensor, no fixed order; the wide kernel first if every row sees every key |
    /// | [`KernelChoice::Tiled`] | all |
    pub fn candidates(call: &CallShape, wgmma: bool) -> Vec<(Self, AttendKernel)> {
        let packed = (!call.fixed_order && call.rows.saturating_mul(call.pack) <= PACKED_ROWS)
            .then(|| AttendKernel::decode(call.dtype, call.dim, call.pack));
        let mut hopper =
            [AttendKernel::hopper(call.dtype, call.dim), AttendKernel::hopper_wide(call.dtype, call.dim)];
        if call.full {
            hopper.reverse();
        }
        let fits = |kernel: &AttendKernel| {
            !call.fixed_order && wgmma && !call.bias && call.rows > kernel.tile.q_rows / 2
        };
        let [first, second] = hopper.map(|kernel| (Self::Hopper, kernel.filter(fits)));
        let tiles = AttendKernel::tiled(call.dtype, call.dim);
        [(Self::Decode, packed.flatten()), first, second, (Self::Tiled, tiles)]
            .into_iter()
            .filter_map(|(choice, kernel)| Some((choice, kernel?)))
            .collect()
    }

    /// Whether this kernel can compute a work list in tiles of `tile`. A tile shape that was chosen
    /// for larger packs than those of the call has fewer rows than the kernel has room for.
    pub fn accepts(self, call: &CallShape, kernel: &AttendKernel, tile: TileShape) -> bool {
        let rows = match self {
            Self::Decode => call.rows..=kernel.tile.q_rows,
            Self::Hopper | Self::Tiled => kernel.tile.q_rows..=kernel.tile.q_rows,
        };
        rows.contains(&tile.q_rows) && tile.kv_cols == kernel.tile.kv_cols
    }
}

/// The properties of a backward call that decide which kernels it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardShape {
    /// Storage type of q, k and v.
    pub dtype: Dtype,
    /// Elements of a head.
    pub dim: u32,
    /// Query rows.
    pub rows: usize,
    /// Keys.
    pub keys: usize,
    /// Whether there is a mask tensor or a bias tensor.
    pub bias: bool,
}

impl BackwardKernel {
    /// The kernels of dQ, and of dK and dV, for a call. `wgmma`: the device has the kernels for
    /// Hopper. They get bf16 and f16 with head dims up to 128, without mask or bias tensor,
    /// where a block has more rows, or keys, than half of what it has room for. `None`
    /// above a head dim of 256.
    pub fn for_call(call: &BackwardShape, wgmma: bool) -> Option<[Self; 2]> {
        let older = Self::both(call.dtype, call.dim)?;
        Some(older.map(|older| {
            let fixed = if older.by_keys() { call.keys } else { call.rows };
            Self::hopper(older.makes, call.dtype, call.dim)
                .filter(|kernel| wgmma && !call.bias && fixed > kernel.fixed as usize / 2)
                .unwrap_or(older)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackwardSums;

    const PROMPT: CallShape = CallShape {
        dtype: Dtype::Bf16,
        dim: 128,
        rows: 8192,
        pack: 4,
        bias: false,
        full: false,
        fixed_order: false,
    };

    #[test]
    fn calls_get_the_kernels_of_the_table() {
        let token = CallShape { rows: 1, ..PROMPT };
        for (call, wgmma, choices) in [
            (PROMPT, true, &[KernelChoice::Hopper, KernelChoice::Hopper, KernelChoice::Tiled][..]),
            (CallShape { dim: 64, ..PROMPT }, true, &[KernelChoice::Hopper, KernelChoice::Tiled]),
            (PROMPT, false, &[KernelChoice::Tiled]),
            (CallShape { bias: true, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { fixed_order: true, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { dtype: Dtype::F32, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { dim: 264, ..PROMPT }, true, &[]),
            (CallShape { rows: 64, ..PROMPT }, true, &[KernelChoice::Tiled]),
            (CallShape { rows: 64, pack: 1, ..PROMPT }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (
                CallShape { rows: 65, pack: 1, ..PROMPT },
                true,
                &[KernelChoice::Hopper, KernelChoice::Hopper, KernelChoice::Tiled],
            ),
            (token, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (token, false, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { bias: true, ..token }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { fixed_order: true, ..token }, true, &[KernelChoice::Tiled]),
            (CallShape { dtype: Dtype::F32, ..token }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { dtype: Dtype::F32, fixed_order: true, ..token }, true, &[KernelChoice::Tiled]),
            (CallShape { rows: 16, ..token }, true, &[KernelChoice::Decode, KernelChoice::Tiled]),
            (CallShape { rows: 17, ..token }, true, &[KernelChoice::Tiled]),
        ] {
            let all: Vec<_> =
                KernelChoice::candidates(&call, wgmma).into_iter().map(|(choice, _)| choice).collect();
            assert_eq!(all, choices, "{call:?}, wgmma: {wgmma}");
        }
    }

    /// The tile shape is chosen for the largest possible packs. The call may have smaller ones, and
    /// has to choose the same kernel.
    #[test]
    fn a_tile_shape_determines_the_kernel_it_was_chosen_for() {
        for dim in [64, 96, 128, 192, 256] {
            for rows in [1, 7, 16, 17, 32, 33, 64, 65, 1000] {
                for (wgmma, full) in [(false, false), (true, false), (true, true)] {
                    for (most, pack) in [(1, 1), (4, 4), (4, 2), (8, 1), (64, 64)] {
                        let expected = CallShape { dim, rows, pack: most, full, ..PROMPT };
                        let call = CallShape { pack, full: false, ..expected };
                        let (chosen, kernel) = KernelChoice::candidates(&expected, wgmma).swap_remove(0);
                        let mut choices = KernelChoice::candidates(&call, wgmma).into_iter();
                        let (taken, with) =
                            choices.find(|(choice, with)| choice.accepts(&call, with, kernel.tile)).unwrap();
                        // Tiles of 64 rows by 32 keys serve two kernels.
                        let either = (chosen, taken) == (KernelChoice::Tiled, KernelChoice::Decode)
                            && with.tile == kernel.tile;
                        assert!(chosen == taken || either, "{call:?}: {chosen:?} and {taken:?}");
                        assert!(kernel.name == with.name || either, "{call:?}: {kernel:?} and {with:?}");
                        let wide = full && chosen == KernelChoice::Hopper && (65..=128).contains(&dim);
                        assert_eq!(kernel.name.contains("wide"), wide, "{expected:?}: {kernel:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn backward_calls_get_the_kernels_of_their_device() {
        let call = BackwardShape { dtype: Dtype::Bf16, dim: 128, rows: 65, keys: 65, bias: false };
        for (call, wgmma, hopper) in [
            (call, true, [true, true]),
            (call, false, [false, false]),
            (BackwardShape { dim: 8, ..call }, true, [true, true]),
            (BackwardShape { dim: 136, ..call }, true, [false, false]),
            (BackwardShape { bias: true, ..call }, true, [false, false]),
            (BackwardShape { dtype: Dtype::F32, ..call }, true, [false, false]),
            (BackwardShape { rows: 64, ..call }, true, [false, true]),
            (BackwardShape { keys: 64, ..call }, true, [true, false]),
        ] {
            let kernels = BackwardKernel::for_call(&call, wgmma).unwrap();
            assert_eq!(kernels.clone().map(|kernel| kernel.wgmma), hopper, "{call:?}, wgmma: {wgmma}");
            assert_eq!(kernels.map(|kernel| kernel.makes), [BackwardSums::Queries, BackwardSums::Keys]);
        }
        assert_eq!(BackwardKernel::for_call(&BackwardShape { dim: 264, ..call }, true), None);
        for makes in [BackwardSums::Queries, BackwardSums::Keys] {
            let kernel = BackwardKernel::hopper(makes, Dtype::F16, 72).unwrap();
            assert!(kernel.name.ends_with("_f16_128") && kernel.shared_bytes <= 227 * 1024, "{kernel:?}");
        }
    }
}
