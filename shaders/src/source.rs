//! The text of each kernel, and the numbers that depend on it: threads and memory of a workgroup,
//! tiles.

use crate::kernel::{Kernel, MAX_HEAD_DIM};
use crate::variant::{AttendKernel, AttendVariant, DecodeKernel, DecodeVariant, Tile};
use crate::{
    BackwardKernel, BackwardVariant, BiasInput, Storage, Sums, attend, backward, codes, convert, decode,
    finish, repack,
};

/// The compiler that reads the text: compilers disagree about how a text announces its use of
/// subgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// wgpu's compiler, which rejects `enable subgroups;`.
    Naga,
    /// The browsers' compiler in Dawn, which requires it.
    Tint,
}

impl Kernel {
    /// The WGSL text; the same kernel gives the same text.
    ///
    /// # Panics
    /// On a head dim that is not a multiple of 8 up to [`MAX_HEAD_DIM`], more slots than
    /// [`DecodeVariant::most_slots`] allows, or a matrix variant that would read a bias.
    pub fn source(&self, dialect: Dialect) -> String {
        match *self {
            Self::Attend(kernel) => {
                assert_head_dim(kernel.head_dim);
                let text = match kernel.variant {
                    AttendVariant::Portable { rows_per_thread } => {
                        attend::portable::source(kernel, rows_per_thread)
                    }
                    AttendVariant::SubgroupBroadcast { subgroup_size, rows_per_lane } => {
                        attend::subgroup::source(kernel, subgroup_size, rows_per_lane)
                    }
                    AttendVariant::Cooperative { size, subgroup_size, subgroups } => {
                        assert!(!kernel.bias.any(), "the matrix variant reads no bias");
                        attend::cooperative::source(kernel, size, subgroup_size, subgroups)
                    }
                };
                self.announced(dialect, text)
            }
            Self::Decode(kernel) => {
                assert_head_dim(kernel.head_dim);
                let most = kernel.variant.most_slots(kernel.head_dim);
                assert!((1..=most).contains(&kernel.slots), "{} slots, at most {most}", kernel.slots);
                let text = match kernel.variant {
                    DecodeVariant::Portable => decode::portable(kernel),
                    DecodeVariant::Lanes { subgroup_size } => decode::lanes(kernel, subgroup_size),
                };
                self.announced(dialect, text)
            }
            Self::MergeParts { head_dim } => {
                assert_head_dim(head_dim);
                decode::merge_parts(head_dim)
            }
            Self::Merge { head_dim } => {
                assert_head_dim(head_dim);
                finish::merge(head_dim)
            }
            Self::Finalize { storage, head_dim, sinks } => {
                assert_head_dim(head_dim);
                finish::finalize(storage, head_dim, sinks)
            }
            Self::Repack { words } => repack::source(words),
            Self::Accumulate { words } => repack::accumulate(words),
            Self::AttendBackward(kernel) => {
                assert_head_dim(kernel.head_dim);
                let of_keys = kernel.variant.of_keys(kernel.head_dim, kernel.bias);
                let made = match kernel.sums {
                    Sums::Queries => true,
                    Sums::Bias | Sums::SharedBias => kernel.bias == BiasInput::Bias,
                    sums => of_keys.contains(&sums),
                };
                assert!(made, "{:?} is not made", kernel.sums);
                let text = match kernel.variant {
                    BackwardVariant::Portable => backward::portable::source(kernel),
                    BackwardVariant::Lanes { subgroup_size } => {
                        backward::lanes::source(kernel, subgroup_size)
                    }
                };
                self.announced(dialect, text)
            }
            Self::RowStats { storage, head_dim, d_lse } => {
                assert_head_dim(head_dim);
                backward::stats::source(storage, head_dim, d_lse)
            }
            Self::Convert { from, into, reports } => {
                assert!((from == Storage::F32) != (into == Storage::F32), "one side is f32");
                assert!(!reports || into == Storage::F16, "the range of bf16 is that of f32");
                convert::source(from, into, reports)
            }
            Self::ToCodes { storage, scales } => codes::to_codes(storage, scales),
            Self::FromCodes { storage, scales } => codes::from_codes(storage, scales),
            Self::ResetState => finish::reset_state(),
        }
    }

    /// `text`, after the directive that enables subgroups where `dialect` needs it.
    fn announced(&self, dialect: Dialect, text: String) -> String {
        if self.needs_subgroups() && dialect == Dialect::Tint {
            format!("enable subgroups;\n\n{text}")
        } else {
            text
        }
    }

    /// Threads of a workgroup; workgroups are one-dimensional.
    pub const fn workgroup_size(&self) -> u32 {
        match self {
            Self::Attend(AttendKernel {
                variant: AttendVariant::SubgroupBroadcast { subgroup_size, .. },
                ..
            }) => *subgroup_size,
            Self::Attend(AttendKernel {
                variant: AttendVariant::Cooperative { subgroup_size, subgroups, .. },
                ..
            }) => *subgroup_size * *subgroups,
            Self::Attend(_) => attend::portable::THREADS,
            Self::Decode(kernel) => match kernel.variant {
                DecodeVariant::Portable => decode::THREADS,
                DecodeVariant::Lanes { subgroup_size } => subgroup_size,
            },
            Self::AttendBackward(BackwardKernel { variant, .. }) => match variant {
                BackwardVariant::Portable => backward::portable::THREADS,
                BackwardVariant::Lanes { subgroup_size } => *subgroup_size,
            },
            Self::MergeParts { .. }
            | Self::Merge { .. }
            | Self::Finalize { .. }
            | Self::RowStats { .. }
            | Self::Repack { .. }
            | Self::Accumulate { .. }
            | Self::Convert { .. }
            | Self::ToCodes { .. }
            | Self::FromCodes { .. }
            | Self::ResetState => 64,
        }
    }

    /// Bytes of workgroup memory.
    pub const fn workgroup_bytes(&self) -> u32 {
        match self {
            Self::Attend(AttendKernel {
                variant: AttendVariant::Portable { rows_per_thread },
                head_dim,
                ..
            }) => attend::portable::workgroup_bytes(*head_dim, *rows_per_thread),
            Self::Attend(AttendKernel {
                variant: AttendVariant::Cooperative { size, subgroups, .. },
                head_dim,
                ..
            }) => attend::cooperative::workgroup_bytes(*head_dim, *size, *subgroups),
            Self::Attend(AttendKernel {
                variant: AttendVariant::SubgroupBroadcast { .. },
                bias: BiasInput::Visible,
                ..
            }) => attend::subgroup::VISIBLE_BYTES,
            Self::Decode(kernel @ DecodeKernel { variant: DecodeVariant::Portable, .. }) => {
                decode::portable_bytes(kernel)
            }
            Self::AttendBackward(kernel @ BackwardKernel { variant: BackwardVariant::Portable, .. }) => {
                backward::portable::workgroup_bytes(kernel)
            }
            Self::RowStats { .. } => 4 * self.workgroup_size(),
            _ => 0,
        }
    }

    /// Rows of a workgroup of [`Self::MergeParts`], [`Self::Merge`], [`Self::Finalize`],
    /// [`Self::RowStats`], [`Self::Repack`], [`Self::Accumulate`], [`Self::Convert`],
    /// [`Self::ToCodes`], [`Self::FromCodes`] or [`Self::ResetState`]. A row here is the work of
    /// one thread, or of one group of threads: one (batch, row, head) triple, or one unit to
    /// copy.
    pub const fn rows_per_workgroup(&self) -> u32 {
        match self {
            Self::Attend(_) | Self::Decode(_) | Self::AttendBackward(_) => 1,
            Self::MergeParts { .. } | Self::Merge { .. } | Self::Finalize { .. } | Self::RowStats { .. } => {
                self.workgroup_size() / finish::THREADS_PER_ROW
            }
            Self::Repack { .. }
            | Self::Accumulate { .. }
            | Self::Convert { .. }
            | Self::ToCodes { .. }
            | Self::FromCodes { .. }
            | Self::ResetState => self.workgroup_size(),
        }
    }
}

impl AttendKernel {
    /// The tiles of this kernel.
    pub const fn tile(&self) -> Tile {
        match self.variant {
            AttendVariant::Portable { rows_per_thread } => {
                Tile { q_rows: attend::portable::q_rows(rows_per_thread), kv_cols: attend::portable::KV_COLS }
            }
            AttendVariant::SubgroupBroadcast { subgroup_size, rows_per_lane } => {
                Tile { q_rows: subgroup_size * rows_per_lane, kv_cols: attend::subgroup::KV_COLS }
            }
            AttendVariant::Cooperative { size, subgroups, .. } => {
                Tile { q_rows: size * subgroups, kv_cols: attend::cooperative::kv_cols(self.head_dim) }
            }
        }
    }
}

impl DecodeVariant {
    /// Largest number of query rows, counted over all heads of a workgroup, for which this variant
    /// exists; 0 if heads are too large for it.
    pub const fn most_slots(self, head_dim: u32) -> u32 {
        match self {
            Self::Portable => decode::portable_slots(head_dim),
            Self::Lanes { .. } => decode::lanes_slots(head_dim),
        }
    }

    /// Keys that a workgroup takes in one iteration: splits are multiples of it.
    pub const fn keys_at_once(self) -> u32 {
        match self {
            Self::Portable => decode::THREADS,
            Self::Lanes { subgroup_size } => subgroup_size,
        }
    }
}

fn assert_head_dim(head_dim: u32) {
    assert!(
        head_dim > 0 && head_dim.is_multiple_of(8) && head_dim <= MAX_HEAD_DIM,
        "head dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    );
}
