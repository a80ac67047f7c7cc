//! The catalogue: which kernels there are, what they bind and what they need.

use crate::uniforms::{AttendParams, FinalizeParams, MergeParams, RepackParams, ResetParams, Uniform};
use crate::{Storage, attend, finish, repack};

/// Which compiler the text is for: they disagree about how a use of subgroups is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// wgpu's compiler, which rejects `enable subgroups;`.
    Naga,
    /// The browsers' compiler in Dawn, which requires it.
    Tint,
}

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
    /// Elements of a head: a multiple of 8 up to [`MAX_HEAD_DIM`].
    pub head_dim: u32,
    /// Whether logits pass c · tanh(x / c).
    pub softcap: bool,
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

/// Any kernel of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// One block of queries against one block of keys, into a running state.
    Attend(AttendKernel),
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
    },
    /// A strided copy.
    Repack {
        /// 32-bit words that one thread copies: 1 or 4.
        words: u32,
    },
    /// The m and l of a state that has seen nothing.
    ResetState,
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

/// `m` of a row that has seen no key: finite, because WGSL promises nothing about infinities.
pub const EMPTY_M: f32 = -0.7 * f32::MAX;

/// Name of the entry point of every kernel.
pub const ENTRY_POINT: &str = "main";

impl Kernel {
    /// Name for labels, unique among kernels.
    pub fn name(&self) -> String {
        match self {
            Self::Attend(kernel) => format!(
                "attend-{}-{}-d{}{}",
                kernel.variant.name(),
                kernel.storage.name(),
                kernel.head_dim,
                if kernel.softcap { "-softcap" } else { "" }
            ),
            Self::Merge { head_dim } => format!("merge-d{head_dim}"),
            Self::Finalize { storage, head_dim } => format!("finalize-{}-d{head_dim}", storage.name()),
            Self::Repack { words } => format!("repack-{words}"),
            Self::ResetState => "reset-state".to_owned(),
        }
    }

    /// The WGSL text; the same kernel gives the same text.
    ///
    /// # Panics
    /// On a head dim that is not a multiple of 8 up to [`MAX_HEAD_DIM`].
    pub fn source(&self, dialect: Dialect) -> String {
        match *self {
            Self::Attend(kernel) => {
                assert_head_dim(kernel.head_dim);
                let body = match kernel.variant {
                    AttendVariant::Portable => attend::portable::source(kernel),
                    AttendVariant::SubgroupBroadcast { subgroup_size, rows_per_lane } => {
                        attend::subgroup::source(kernel, subgroup_size, rows_per_lane)
                    }
                    AttendVariant::Cooperative { size, subgroup_size, subgroups } => {
                        attend::cooperative::source(kernel, size, subgroup_size, subgroups)
                    }
                };
                if self.needs_subgroups() && dialect == Dialect::Tint {
                    format!("enable subgroups;\n\n{body}")
                } else {
                    body
                }
            }
            Self::Merge { head_dim } => {
                assert_head_dim(head_dim);
                finish::merge(head_dim)
            }
            Self::Finalize { storage, head_dim } => {
                assert_head_dim(head_dim);
                finish::finalize(storage, head_dim)
            }
            Self::Repack { words } => repack::source(words),
            Self::ResetState => finish::reset_state(),
        }
    }

    /// Its uniform struct: binding 0.
    pub const fn uniform(&self) -> Uniform {
        match self {
            Self::Attend(_) => AttendParams::UNIFORM,
            Self::Merge { .. } => MergeParams::UNIFORM,
            Self::Finalize { .. } => FinalizeParams::UNIFORM,
            Self::Repack { .. } => RepackParams::UNIFORM,
            Self::ResetState => ResetParams::UNIFORM,
        }
    }

    /// Its bindings in group 0, in order.
    pub fn bindings(&self) -> Vec<Binding> {
        let read = |name, element| Binding { name, access: Access::Read, element };
        let write = |name, element| Binding { name, access: Access::ReadWrite, element };
        let mut bindings =
            vec![Binding { name: "params", access: Access::Uniform, element: self.uniform().name }];
        let key_value = |name, variant, storage: Storage| match variant {
            AttendVariant::Portable | AttendVariant::Cooperative { .. } => read(name, storage.unit_type()),
            AttendVariant::SubgroupBroadcast { .. } => {
                Binding { name, access: Access::Texture, element: "texture_storage_2d<rgba32uint, read>" }
            }
        };
        bindings.extend(match *self {
            Self::Attend(AttendKernel { variant, storage, .. }) => vec![
                read("q", storage.unit_type()),
                key_value("k", variant, storage),
                key_value("v", variant, storage),
                write("state_a", "vec4<f32>"),
                write("state_ml", "vec2<f32>"),
                read("positions", "u32"),
                read("work", "u32"),
            ],
            Self::Merge { .. } => vec![
                write("into_a", "vec4<f32>"),
                write("into_ml", "vec2<f32>"),
                read("from_a", "vec4<f32>"),
                read("from_ml", "vec2<f32>"),
            ],
            Self::Finalize { storage, .. } => vec![
                read("state_a", "vec4<f32>"),
                read("state_ml", "vec2<f32>"),
                write("o", storage.unit_type()),
                write("lse", "u32"),
            ],
            Self::Repack { words } => {
                let unit = if words == 4 { "vec4<u32>" } else { "u32" };
                vec![read("source", unit), write("destination", unit)]
            }
            Self::ResetState => vec![write("state_ml", "vec2<f32>")],
        });
        bindings
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
            Self::Merge { .. } | Self::Finalize { .. } | Self::Repack { .. } | Self::ResetState => 64,
        }
    }

    /// Bytes of workgroup memory.
    pub const fn workgroup_bytes(&self) -> u32 {
        match self {
            Self::Attend(kernel @ AttendKernel { variant: AttendVariant::Portable, .. }) => {
                attend::portable::workgroup_bytes(kernel.head_dim)
            }
            Self::Attend(AttendKernel {
                variant: AttendVariant::Cooperative { size, subgroups, .. },
                head_dim,
                ..
            }) => attend::cooperative::workgroup_bytes(*head_dim, *size, *subgroups),
            _ => 0,
        }
    }

    /// Threads, or groups of them, that share one (batch, row, head) triple or copy one unit: how many of those a
    /// workgroup of [`Self::Merge`], [`Self::Finalize`], [`Self::Repack`] or [`Self::ResetState`] handles.
    pub const fn rows_per_workgroup(&self) -> u32 {
        match self {
            Self::Attend(_) => 1,
            Self::Merge { .. } | Self::Finalize { .. } => self.workgroup_size() / finish::THREADS_PER_ROW,
            Self::Repack { .. } | Self::ResetState => self.workgroup_size(),
        }
    }

    /// Whether the device must have subgroups.
    pub const fn needs_subgroups(&self) -> bool {
        matches!(
            self,
            Self::Attend(AttendKernel {
                variant: AttendVariant::SubgroupBroadcast { .. } | AttendVariant::Cooperative { .. },
                ..
            })
        )
    }

    /// Whether the device must have matrix units and f16 arithmetic. No browser has the former, and of the compilers
    /// only naga knows the text, which it translates to SPIR-V and MSL alone.
    pub const fn needs_matrices(&self) -> bool {
        matches!(self, Self::Attend(AttendKernel { variant: AttendVariant::Cooperative { .. }, .. }))
    }

    /// Declarations of the uniform struct and of all bindings.
    pub(crate) fn declarations(&self) -> String {
        let mut text = self.uniform().declaration();
        text.push('\n');
        for (index, binding) in self.bindings().iter().enumerate() {
            let (space, ty) = match binding.access {
                Access::Uniform => ("<uniform>", binding.element.to_owned()),
                Access::Read => ("<storage, read>", format!("array<{}>", binding.element)),
                Access::ReadWrite => ("<storage, read_write>", format!("array<{}>", binding.element)),
                Access::Texture => ("", binding.element.to_owned()),
            };
            text.push_str(&format!("@group(0) @binding({index}) var{space} {}: {ty};\n", binding.name));
        }
        text
    }
}

fn assert_head_dim(head_dim: u32) {
    assert!(
        head_dim > 0 && head_dim.is_multiple_of(8) && head_dim <= MAX_HEAD_DIM,
        "head dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    );
}
