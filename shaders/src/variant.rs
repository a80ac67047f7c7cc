//! How attention is computed, for many query rows and for few.

use crate::{Pairs, Storage, attend, decode};

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttendVariant {
    /// Tiles in workgroup memory; runs within WebGPU's default limits and needs no feature.
    Portable,
    /// One subgroup is one workgroup, query rows lie in its lanes, keys and values are broadcast from lane to lane.
    /// Made for drivers that compute on the host's cores; needs subgroups of exactly this size.
    SubgroupBroadcast {
        /// Lanes of a subgroup.
        subgroup_size: u32,
        /// Query rows that one lane carries in registers.
        rows_per_lane: u32,
    },
    /// Products on matrix units, f16 times f16 summed in f32; needs the native extensions for that, subgroups of
    /// exactly this size, f16 storage, and a head dim that is a multiple of the matrices' size.
    Cooperative {
        /// Rows and columns of a matrix: 8 or 16.
        size: u32,
        /// Lanes of a subgroup: a multiple of `size`, at most its square.
        subgroup_size: u32,
        /// Subgroups of a workgroup.
        subgroups: u32,
    },
}

impl AttendVariant {
    /// Sizes for which the broadcast variant is made.
    pub const SUBGROUP_SIZES: [u32; 3] = [4, 8, 16];

    /// The broadcast variant with as many rows in a lane as pay off for heads of `head_dim` elements.
    pub const fn subgroup_broadcast(subgroup_size: u32, head_dim: u32) -> Self {
        // Unrolled statements grow with rows × dim; beyond some hundred, compile time and spills take over.
        let rows_per_lane = match head_dim {
            0..=64 => 3,
            65..=128 => 2,
            _ => 1,
        };
        Self::SubgroupBroadcast { subgroup_size, rows_per_lane }
    }

    /// The matrix variant for a device's matrices and subgroups, where it can be made for these tensors.
    pub const fn cooperative(
        size: u32,
        subgroup_size: u32,
        subgroups: u32,
        storage: Storage,
        head_dim: u32,
    ) -> Option<Self> {
        let made = matches!(storage, Storage::F16)
            && head_dim <= attend::cooperative::MAX_HEAD_DIM
            && head_dim.is_multiple_of(size)
            && (size == 8 || size == 16)
            && subgroup_size.is_multiple_of(size)
            && subgroup_size <= size * size
            && subgroups > 0;
        if made { Some(Self::Cooperative { size, subgroup_size, subgroups }) } else { None }
    }

    /// Name for reports.
    pub fn name(self) -> String {
        match self {
            Self::Portable => "portable".to_owned(),
            Self::SubgroupBroadcast { subgroup_size, rows_per_lane } => {
                format!("subgroup-broadcast-{subgroup_size}x{rows_per_lane}")
            }
            Self::Cooperative { size, subgroup_size, subgroups } => {
                format!("cooperative-{size}x{size}-{subgroup_size}x{subgroups}")
            }
        }
    }
}

/// Parameters of an attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttendKernel {
    /// How it is computed.
    pub variant: AttendVariant,
    /// Storage type of q, k, v.
    pub storage: Storage,
    /// Elements of a head: a multiple of 8 up to [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM).
    pub head_dim: u32,
    /// Whether logits pass c · tanh(x / c).
    pub softcap: bool,
    /// What is read for each (query, key) pair. The matrix variant reads nothing.
    pub pairs: Pairs,
}

/// Extent of the tiles that an attention kernel works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Query rows of one workgroup.
    pub q_rows: u32,
    /// Keys in which its work list counts.
    pub kv_cols: u32,
}

impl AttendKernel {
    /// The tiles of this kernel.
    pub const fn tile(&self) -> Tile {
        match self.variant {
            AttendVariant::Portable => {
                Tile { q_rows: attend::portable::q_rows(self.head_dim), kv_cols: attend::portable::KV_COLS }
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

/// How attention of few query rows is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeVariant {
    /// Keys in threads, then columns of v in threads; runs within WebGPU's default limits and needs no feature.
    Portable,
    /// One subgroup is one workgroup, keys lie in its lanes. Made for drivers that compute on the host's cores; needs
    /// subgroups of exactly this size.
    Lanes {
        /// Lanes of a subgroup.
        subgroup_size: u32,
    },
}

impl DecodeVariant {
    /// Query rows, counted over all heads of a workgroup, that it is made for; 0 where heads are too
    /// large for it.
    pub const fn most_slots(self, head_dim: u32) -> u32 {
        match self {
            Self::Portable => decode::portable_slots(head_dim),
            Self::Lanes { .. } => decode::lanes_slots(head_dim),
        }
    }

    /// Keys that a workgroup takes in one turn: splits are multiples of it.
    pub const fn keys_at_once(self) -> u32 {
        match self {
            Self::Portable => decode::THREADS,
            Self::Lanes { subgroup_size } => subgroup_size,
        }
    }

    /// Name for reports.
    pub fn name(self) -> String {
        match self {
            Self::Portable => "portable".to_owned(),
            Self::Lanes { subgroup_size } => format!("lanes-{subgroup_size}"),
        }
    }
}

/// Parameters of a kernel for few query rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeKernel {
    /// How it is computed.
    pub variant: DecodeVariant,
    /// Storage type of q, k, v.
    pub storage: Storage,
    /// Elements of a head: a multiple of 8 up to [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM).
    pub head_dim: u32,
    /// Query rows, times the query heads that a workgroup takes: at most [`DecodeVariant::most_slots`].
    pub slots: u32,
    /// Whether logits pass c · tanh(x / c).
    pub softcap: bool,
    /// What is read for each (query, key) pair. The matrix variant reads nothing.
    pub pairs: Pairs,
}
