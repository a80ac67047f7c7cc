//! The catalogue: the kernels, their bindings and the features that they need.

use crate::backward::params::{BackwardParams, RowStatsParams};
use crate::backward::variant::{BackwardKernel, BackwardVariant, Sums};
use crate::uniforms::{
    AttendParams, CodesParams, ConvertParams, DecodeParams, FinalizeParams, MergeParams, MergePartsParams,
    RepackParams, ResetParams, Uniform,
};
use crate::variant::{AttendKernel, AttendVariant, DecodeKernel, DecodeVariant};
use crate::{Scales, Storage};

/// Any kernel of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// One block of queries against one block of keys, into a running state.
    Attend(AttendKernel),
    /// Few rows of queries against one block of keys, split by split, into parts.
    Decode(DecodeKernel),
    /// The parts of [`Self::Decode`] into a running state.
    MergeParts {
        /// Elements of a head.
        head_dim: u32,
    },
    /// A running state into another of the same rows.
    Merge {
        /// Elements of a head.
        head_dim: u32,
    },
    /// A running state to output and log-sum-exp.
    Finalize {
        /// Storage type of the output.
        storage: Storage,
        /// Elements of a head.
        head_dim: u32,
        /// Whether each head has a sink.
        sinks: bool,
    },
    /// A strided copy.
    Repack {
        /// 32-bit words that one thread copies: 1 or 4.
        words: u32,
    },
    /// Converts elements from one storage type to another; one of the two types is f32. 8 elements
    /// for each thread.
    Convert {
        /// Type of the source.
        from: Storage,
        /// Type of the destination.
        into: Storage,
        /// Whether it reports finite elements that become infinite; from f32 to f16 only.
        reports: bool,
    },
    /// Elements to 8-bit codes and their scales; one thread for each group of 8 channels or for
    /// each row.
    ToCodes {
        /// Type of the source.
        storage: Storage,
        /// Which elements share a scale.
        scales: Scales,
    },
    /// 8-bit codes back to elements; as many threads.
    FromCodes {
        /// Type of the destination.
        storage: Storage,
        /// Which elements share a scale.
        scales: Scales,
    },
    /// Makes m and l of a state empty.
    ResetState,
    /// Gradients of one block of queries against one block of keys, added to sums.
    AttendBackward(BackwardKernel),
    /// Log-sum-exp and δ of each row of a finished output.
    RowStats {
        /// Storage type of the output and of its gradient.
        storage: Storage,
        /// Elements of a head.
        head_dim: u32,
        /// Whether the log-sum-exp has a gradient.
        d_lse: bool,
    },
    /// A strided addition of f32.
    Accumulate {
        /// Numbers that one thread adds: 1 or 4.
        words: u32,
    },
}

/// How a kernel uses a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// A uniform struct.
    Uniform,
    /// Storage that is read.
    Read,
    /// Storage that is read and written.
    ReadWrite,
    /// A read-only storage texture of four u32 in a texel.
    Texture,
}

/// A binding of group 0; its number is its index in [`Kernel::bindings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// Name of the variable.
    pub name: &'static str,
    /// How it is used.
    pub access: Access,
    /// WGSL type of the struct, or of the elements of the array.
    pub element: &'static str,
}

/// Largest head dim for which kernels are made.
pub const MAX_HEAD_DIM: u32 = 512;

/// `m` of a row that saw no key: finite, because WGSL promises nothing about infinities.
pub const EMPTY_M: f32 = -0.7 * f32::MAX;

/// Name of the entry point of every kernel.
pub const ENTRY_POINT: &str = "main";

impl Kernel {
    /// Name for labels, unique among kernels.
    pub fn name(&self) -> String {
        match self {
            Self::Attend(kernel) => format!(
                "attend-{}-{}-d{}{}{}",
                kernel.variant.name(),
                kernel.storage.name(),
                kernel.head_dim,
                if kernel.softcap { "-softcap" } else { "" },
                kernel.bias.suffix()
            ),
            Self::Decode(kernel) => format!(
                "decode-{}-{}-d{}x{}{}{}",
                kernel.variant.name(),
                kernel.storage.name(),
                kernel.head_dim,
                kernel.slots,
                if kernel.softcap { "-softcap" } else { "" },
                kernel.bias.suffix()
            ),
            Self::MergeParts { head_dim } => format!("merge-parts-d{head_dim}"),
            Self::Merge { head_dim } => format!("merge-d{head_dim}"),
            Self::Finalize { storage, head_dim, sinks } => {
                format!("finalize-{}-d{head_dim}{}", storage.name(), if *sinks { "-sinks" } else { "" })
            }
            Self::Repack { words } => format!("repack-{words}"),
            Self::Convert { from, into, reports } => {
                format!("convert-{}-{}{}", from.name(), into.name(), if *reports { "-reports" } else { "" })
            }
            Self::ToCodes { storage, scales } => format!("codes-{}-{}", storage.name(), scales.name()),
            Self::FromCodes { storage, scales } => format!("from-codes-{}-{}", storage.name(), scales.name()),
            Self::ResetState => "reset-state".to_owned(),
            Self::AttendBackward(kernel) => format!(
                "backward-{}-{}-{}-d{}{}{}",
                kernel.sums.name(),
                kernel.variant.name(),
                kernel.storage.name(),
                kernel.head_dim,
                if kernel.softcap { "-softcap" } else { "" },
                kernel.bias.suffix()
            ),
            Self::RowStats { storage, head_dim, d_lse } => {
                format!("row-stats-{}-d{head_dim}{}", storage.name(), if *d_lse { "-d-lse" } else { "" })
            }
            Self::Accumulate { words } => format!("accumulate-{words}"),
        }
    }

    /// Its uniform struct: binding 0.
    pub const fn uniform(&self) -> Uniform {
        match self {
            Self::Attend(_) => AttendParams::UNIFORM,
            Self::Decode(_) => DecodeParams::UNIFORM,
            Self::MergeParts { .. } => MergePartsParams::UNIFORM,
            Self::Merge { .. } => MergeParams::UNIFORM,
            Self::Finalize { .. } => FinalizeParams::UNIFORM,
            Self::Repack { .. } | Self::Accumulate { .. } => RepackParams::UNIFORM,
            Self::Convert { .. } => ConvertParams::UNIFORM,
            Self::ToCodes { .. } | Self::FromCodes { .. } => CodesParams::UNIFORM,
            Self::ResetState => ResetParams::UNIFORM,
            Self::AttendBackward(_) => BackwardParams::UNIFORM,
            Self::RowStats { .. } => RowStatsParams::UNIFORM,
        }
    }

    /// Its bindings in group 0, in order.
    pub fn bindings(&self) -> Vec<Binding> {
        let read = |name, element| Binding { name, access: Access::Read, element };
        let write = |name, element| Binding { name, access: Access::ReadWrite, element };
        let mut bindings =
            vec![Binding { name: "params", access: Access::Uniform, element: self.uniform().name }];
        let key_value = |name, element| {
            if self.reads_textures() {
                Binding { name, access: Access::Texture, element: "texture_storage_2d<rgba32uint, read>" }
            } else {
                read(name, element)
            }
        };
        bindings.extend(match *self {
            Self::Decode(DecodeKernel { storage, bias, .. }) => vec![
                read("q", storage.unit_type()),
                key_value("k", storage.unit_type()),
                key_value("v", storage.unit_type()),
                write("part_a", "vec4<f32>"),
                write("part_ml", "vec2<f32>"),
                read("positions", "u32"),
                read("work", "u32"),
            ]
            .into_iter()
            .chain(bias.any().then(|| read("bias", "u32")))
            .collect(),
            Self::MergeParts { .. } => vec![
                write("state_a", "vec4<f32>"),
                write("state_ml", "vec2<f32>"),
                read("part_a", "vec4<f32>"),
                read("part_ml", "vec2<f32>"),
            ],
            Self::Attend(AttendKernel { storage, bias, .. }) => vec![
                read("q", storage.unit_type()),
                key_value("k", storage.unit_type()),
                key_value("v", storage.unit_type()),
                write("state_a", "vec4<f32>"),
                write("state_ml", "vec2<f32>"),
                read("positions", "u32"),
                read("work", "u32"),
            ]
            .into_iter()
            .chain(bias.any().then(|| read("bias", "u32")))
            .collect(),
            Self::Merge { .. } => vec![
                write("into_a", "vec4<f32>"),
                write("into_ml", "vec2<f32>"),
                read("from_a", "vec4<f32>"),
                read("from_ml", "vec2<f32>"),
            ],
            Self::Finalize { storage, sinks, .. } => {
                let mut bindings = vec![
                    read("state_a", "vec4<f32>"),
                    read("state_ml", "vec2<f32>"),
                    write("o", storage.unit_type()),
                    write("lse", "vec2<u32>"),
                ];
                bindings.extend(sinks.then(|| read("sinks", "f32")));
                bindings
            }
            Self::Repack { words } => {
                let unit = if words == 4 { "vec4<u32>" } else { "u32" };
                vec![read("source", unit), write("destination", unit)]
            }
            Self::Convert { from, into, reports } => {
                let mut bindings =
                    vec![read("source", from.unit_type()), write("destination", into.unit_type())];
                bindings.extend(reports.then(|| write("overflow", "atomic<u32>")));
                bindings
            }
            Self::ToCodes { storage, .. } => {
                vec![read("source", storage.unit_type()), write("codes", "u32"), write("scales", "f32")]
            }
            Self::FromCodes { storage, .. } => {
                vec![read("codes", "u32"), read("scales", "f32"), write("destination", storage.unit_type())]
            }
            Self::ResetState => vec![write("state_ml", "vec2<f32>")],
            Self::AttendBackward(BackwardKernel { sums, storage, bias, .. }) => {
                let moving: &[&str] =
                    if sums.rows_are_fixed() { &["k", "v"] } else { &["q", "d_o", "stats"] };
                let tensor = |name, element| {
                    if moving.contains(&name) { key_value(name, element) } else { read(name, element) }
                };
                let tensors = ["q", "d_o", "k", "v"].map(|name| tensor(name, storage.unit_type()));
                let mut bindings: Vec<_> =
                    tensors.into_iter().filter(|one| sums != Sums::Values || one.name != "v").collect();
                bindings.push(tensor("stats", "vec4<f32>"));
                let sum = if sums.of_bias() { "f32" } else { "vec4<f32>" };
                bindings.extend(sums.targets().iter().map(|name| write(name, sum)));
                bindings.push(read("lists", "u32"));
                bindings.extend(bias.any().then(|| read("bias", "u32")));
                bindings
            }
            Self::RowStats { storage, d_lse, .. } => {
                let mut bindings = vec![
                    read("o", storage.unit_type()),
                    read("d_o", storage.unit_type()),
                    read("lse", "vec2<u32>"),
                    write("stats", "vec4<f32>"),
                ];
                bindings.extend(d_lse.then(|| read("d_lse", "f32")));
                bindings
            }
            Self::Accumulate { words } => {
                let unit = if words == 4 { "vec4<f32>" } else { "f32" };
                vec![read("source", unit), write("destination", unit)]
            }
        });
        bindings
    }

    /// Whether the device must have subgroups.
    pub const fn needs_subgroups(&self) -> bool {
        matches!(
            self,
            Self::Attend(AttendKernel {
                variant: AttendVariant::Portable { shuffles: true, .. }
                    | AttendVariant::SubgroupBroadcast { .. }
                    | AttendVariant::Cooperative(_),
                ..
            }) | Self::Decode(DecodeKernel { variant: DecodeVariant::Lanes { .. }, .. })
                | Self::AttendBackward(BackwardKernel {
                    variant: BackwardVariant::Lanes { .. } | BackwardVariant::Cooperative(_),
                    ..
                })
        )
    }

    /// Whether k and v are textures, or what a backward kernel loops over.
    pub const fn reads_textures(&self) -> bool {
        matches!(
            self,
            Self::Attend(AttendKernel { variant: AttendVariant::SubgroupBroadcast { .. }, .. })
                | Self::Decode(DecodeKernel { variant: DecodeVariant::Lanes { .. }, .. })
                | Self::AttendBackward(BackwardKernel { variant: BackwardVariant::Lanes { .. }, .. })
        )
    }

    /// Whether the device must have matrix units and f16 arithmetic. No browser has matrix units.
    /// Of the compilers only naga accepts the text, and it translates the text to SPIR-V and
    /// MSL alone.
    pub const fn needs_matrices(&self) -> bool {
        matches!(
            self,
            Self::Attend(AttendKernel { variant: AttendVariant::Cooperative(_), .. })
                | Self::AttendBackward(BackwardKernel { variant: BackwardVariant::Cooperative(_), .. })
        )
    }
}
