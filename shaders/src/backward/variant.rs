//! How gradients are computed, and the kernels for it.

use crate::{AttendVariant, BiasInput, Matrices, Storage, Vendor};

/// How gradients are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackwardVariant {
    /// Tiles in workgroup memory; runs within WebGPU's default limits and needs no feature. The
    /// vendor says how many rows a thread has, and whether dK and dV are made together.
    Portable(Vendor),
    /// Rows or keys in the lanes of a subgroup; for drivers that compute on the host's cores, with
    /// subgroups of exactly this size.
    Lanes {
        /// Lanes of a subgroup.
        subgroup_size: u32,
    },
    /// Products on matrix units, f16 times f16 summed in f32; needs what
    /// [`AttendVariant::Cooperative`](crate::AttendVariant::Cooperative) needs, and reads no bias.
    Cooperative(Matrices),
}

impl BackwardVariant {
    /// The variant for a driver with subgroups of `subgroup_size` that computes on the host's
    /// cores.
    pub const fn lanes(subgroup_size: u32, head_dim: u32) -> Self {
        if head_dim <= MOST_HEAD_DIM {
            Self::Lanes { subgroup_size }
        } else {
            Self::Portable(Vendor::Software)
        }
    }

    /// Name for labels.
    pub fn name(self) -> String {
        match self {
            Self::Portable(vendor) => format!("portable-{}", vendor.name()),
            Self::Lanes { subgroup_size } => format!("lanes-{subgroup_size}"),
            Self::Cooperative(matrices) => AttendVariant::Cooperative(matrices).name(),
        }
    }

    /// The kernels that together make dK and dV.
    pub const fn of_keys(self, head_dim: u32, bias: BiasInput) -> &'static [Sums] {
        match self {
            Self::Portable(Vendor::Amd | Vendor::Nvidia | Vendor::Software)
                if head_dim <= 128 && !bias.any() =>
            {
                &[Sums::KeysValues]
            }
            Self::Portable(_) => &[Sums::Keys, Sums::Values],
            Self::Lanes { .. } | Self::Cooperative(_) => &[Sums::KeysValues],
        }
    }
}

/// The sums that a backward kernel adds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// dQ, of a tile of query rows.
    Queries,
    /// dK and dV, of a tile of keys.
    KeysValues,
    /// Only dK: where the sums of both would not fit into registers, or their bindings not into
    /// WebGPU's eight.
    Keys,
    /// Only dV.
    Values,
    /// dBias of an additive bias tensor with a row for each query: of a tile of query rows, of one
    /// query head at a time.
    Bias,
    /// The same of a bias tensor whose row all queries share: of a tile of keys, of one query head
    /// at a time.
    SharedBias,
}

impl Sums {
    /// Name for labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queries => "dq",
            Self::KeysValues => "dkv",
            Self::Keys => "dk",
            Self::Values => "dv",
            Self::Bias => "dbias",
            Self::SharedBias => "dbias-shared",
        }
    }

    /// Names of the bindings of the sums.
    pub(crate) const fn targets(self) -> &'static [&'static str] {
        match self {
            Self::Queries => &["dq"],
            Self::KeysValues => &["dk", "dv"],
            Self::Keys => &["dk"],
            Self::Values => &["dv"],
            Self::Bias | Self::SharedBias => &["d_bias"],
        }
    }

    /// Whether it is the gradient of a bias, whose elements a kernel reads and writes one by one.
    pub const fn of_bias(self) -> bool {
        matches!(self, Self::Bias | Self::SharedBias)
    }

    /// Whether the tile is one of query rows, and keys are looped over.
    pub const fn rows_are_fixed(self) -> bool {
        matches!(self, Self::Queries | Self::Bias)
    }

    /// Whether a workgroup is of one query head. Otherwise it is of a KV head, and loops over the
    /// query heads that read it.
    pub const fn of_one_query_head(self) -> bool {
        self.rows_are_fixed() || self.of_bias()
    }

    /// Whether dS is computed.
    pub(crate) const fn needs_scores(self) -> bool {
        !matches!(self, Self::Values)
    }

    /// Multiply-adds for each pair and element of a head.
    pub const fn products(self) -> u32 {
        match self {
            Self::Queries | Self::Keys => 3,
            Self::KeysValues => 4,
            Self::Values | Self::Bias | Self::SharedBias => 2,
        }
    }
}

/// Parameters of a backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardKernel {
    /// How it is computed.
    pub variant: BackwardVariant,
    /// What it computes.
    pub sums: Sums,
    /// Storage type of q, k, v, d_o.
    pub storage: Storage,
    /// Elements of a head: a multiple of 8 up to [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM).
    pub head_dim: u32,
    /// Whether logits pass c · tanh(x / c).
    pub softcap: bool,
    /// Which mask or bias tensor it reads. [`Sums::KeysValues`] of the portable variant and the
    /// matrix variant read none, [`Sums::Bias`] and [`Sums::SharedBias`] read a bias.
    pub bias: BiasInput,
}

/// Largest heads for which the variant with lanes is made: the unrolled text of larger ones takes a
/// minute to compile.
const MOST_HEAD_DIM: u32 = 128;
