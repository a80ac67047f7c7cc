//! The text of each kernel, and the numbers that depend on it: threads and memory of a workgroup,
//! tiles.

use minijinja::context;
use minijinja::value::Value;

use crate::attend::portable::SIDE;
use crate::kernel::{Access, EMPTY_M, Kernel, MAX_HEAD_DIM};
use crate::templates::render;
use crate::variant::{AttendKernel, AttendVariant, DecodeKernel, DecodeVariant, Tile};
use crate::{BackwardKernel, BackwardVariant, BiasInput, Storage, Sums, attend, backward, decode};

/// Threads that share one (batch, row, head) triple, each taking every 8th chunk of it.
const THREADS_PER_ROW: u32 = 8;

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
        self.assert_exists();
        let (template, values) = self.template();
        render(template, context! { ..values, ..self.interface(dialect) })
    }

    fn assert_exists(&self) {
        let head_dim = match *self {
            Self::Attend(kernel) => {
                let matrices = matches!(kernel.variant, AttendVariant::Cooperative { .. });
                assert!(!(matrices && kernel.bias.any()), "the matrix variant reads no bias");
                kernel.head_dim
            }
            Self::Decode(kernel) => {
                let most = kernel.variant.most_slots(kernel.head_dim);
                assert!((1..=most).contains(&kernel.slots), "{} slots, at most {most}", kernel.slots);
                kernel.head_dim
            }
            Self::AttendBackward(kernel) => {
                let matrices = matches!(kernel.variant, BackwardVariant::Cooperative { .. });
                assert!(!(matrices && kernel.bias.any()), "the matrix variant reads no bias");
                let of_keys = kernel.variant.of_keys(kernel.head_dim, kernel.bias);
                let made = match kernel.sums {
                    Sums::Queries => true,
                    Sums::Bias | Sums::SharedBias => kernel.bias == BiasInput::Bias,
                    sums => of_keys.contains(&sums),
                };
                assert!(made, "{:?} is not made", kernel.sums);
                kernel.head_dim
            }
            Self::Convert { from, into, reports } => {
                assert!((from == Storage::F32) != (into == Storage::F32), "one side is f32");
                assert!(!reports || into == Storage::F16, "the range of bf16 is that of f32");
                return;
            }
            Self::MergeParts { head_dim }
            | Self::Merge { head_dim }
            | Self::Finalize { head_dim, .. }
            | Self::RowStats { head_dim, .. } => head_dim,
            Self::Repack { .. }
            | Self::Accumulate { .. }
            | Self::ToCodes { .. }
            | Self::FromCodes { .. }
            | Self::ResetState => return,
        };
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(8) && head_dim <= MAX_HEAD_DIM,
            "head dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
        );
    }

    /// Its file in `shaders/wgsl/`, and the values of that file alone.
    fn template(&self) -> (&'static str, Value) {
        match *self {
            Self::Attend(kernel) => {
                let logits = logits(kernel.storage, kernel.head_dim, kernel.softcap, kernel.bias);
                let (file, values) = match kernel.variant {
                    AttendVariant::Portable { rows_per_thread, keys_per_thread, shuffles } => {
                        let values = attend::portable::values(kernel, rows_per_thread, keys_per_thread);
                        ("attend/portable.wgsl", context! { shuffles, ..values })
                    }
                    AttendVariant::SubgroupBroadcast { subgroup_size, rows_per_lane } => (
                        "attend/subgroup.wgsl",
                        attend::subgroup::values(kernel, subgroup_size, rows_per_lane),
                    ),
                    AttendVariant::Cooperative(matrices) => {
                        ("attend/matrix.wgsl", attend::matrix::values(kernel, matrices))
                    }
                };
                (file, context! { ..values, ..logits })
            }
            Self::Decode(kernel) => {
                let logits = logits(kernel.storage, kernel.head_dim, kernel.softcap, kernel.bias);
                let (file, values) = match kernel.variant {
                    DecodeVariant::Portable => ("decode/portable.wgsl", decode::portable_values(kernel)),
                    DecodeVariant::Lanes { subgroup_size } => (
                        "decode/lanes.wgsl",
                        context! { slots => kernel.slots, lanes => subgroup_size, many => false },
                    ),
                };
                (file, context! { ..values, ..logits })
            }
            Self::AttendBackward(kernel) => {
                let logits = logits(kernel.storage, kernel.head_dim, kernel.softcap, kernel.bias);
                let (file, values) = match kernel.variant {
                    BackwardVariant::Portable(vendor) => {
                        ("backward/portable.wgsl", backward::portable::values(kernel, vendor))
                    }
                    BackwardVariant::Lanes { subgroup_size } => {
                        ("backward/lanes.wgsl", backward::lanes::values(kernel, subgroup_size))
                    }
                    BackwardVariant::Cooperative(matrices) => {
                        ("backward/matrix.wgsl", backward::matrix::values(kernel, matrices))
                    }
                };
                (file, context! { ..values, ..backward::values(kernel), ..logits })
            }
            Self::RowStats { storage, head_dim, d_lse } => {
                ("backward/row_stats.wgsl", context! { d_lse, ..head(storage, head_dim) })
            }
            Self::MergeParts { head_dim } => ("decode/merge_parts.wgsl", context! { chunks => head_dim / 4 }),
            Self::Merge { head_dim } => ("state/merge.wgsl", context! { chunks => head_dim / 4 }),
            Self::Finalize { storage, head_dim, sinks } => {
                ("state/finalize.wgsl", context! { sinks, ..head(storage, head_dim) })
            }
            Self::ResetState => ("state/reset.wgsl", context! {}),
            Self::Repack { .. } => ("tensors/strided.wgsl", context! { adds => false }),
            Self::Accumulate { .. } => ("tensors/strided.wgsl", context! { adds => true }),
            Self::Convert { from, into, reports } => {
                let widens = into == Storage::F32;
                let short = if widens { from } else { into };
                ("tensors/convert.wgsl", context! { widens, reports, storage => short.name() })
            }
            Self::ToCodes { storage, scales } => {
                ("tensors/to_codes.wgsl", context! { storage => storage.name(), scales => scales.name() })
            }
            Self::FromCodes { storage, scales } => {
                ("tensors/from_codes.wgsl", context! { storage => storage.name(), scales => scales.name() })
            }
        }
    }

    /// The values of `parts/interface.wgsl`, and what else every kernel may use.
    fn interface(&self, dialect: Dialect) -> Value {
        let uniform = self.uniform();
        let fields: Vec<Value> =
            uniform.fields.iter().map(|field| context! { name => field.name, type => field.ty }).collect();
        let bindings: Vec<Value> = self
            .bindings()
            .iter()
            .map(|binding| {
                let array = format!("array<{}>", binding.element);
                let (space, ty) = match binding.access {
                    Access::Uniform => ("<uniform>", binding.element.to_owned()),
                    Access::Read => ("<storage, read>", array),
                    Access::ReadWrite => ("<storage, read_write>", array),
                    Access::Texture => ("", binding.element.to_owned()),
                };
                context! { name => binding.name, space, type => ty }
            })
            .collect();
        context! {
            name => self.name(),
            dialect => match dialect {
                Dialect::Naga => "naga",
                Dialect::Tint => "tint",
            },
            needs_subgroups => self.needs_subgroups(),
            needs_matrices => self.needs_matrices(),
            uniform => context! { name => uniform.name, fields },
            bindings,
            threads => self.workgroup_size(),
            workgroup_bytes => self.workgroup_bytes(),
            EMPTY_M => format!("{EMPTY_M:?}f"),
        }
    }

    /// Threads of a workgroup; workgroups are one-dimensional.
    pub const fn workgroup_size(&self) -> u32 {
        match self {
            Self::Attend(AttendKernel {
                variant: AttendVariant::SubgroupBroadcast { subgroup_size, .. },
                ..
            }) => *subgroup_size,
            Self::Attend(AttendKernel { variant: AttendVariant::Cooperative(matrices), .. }) => {
                matrices.subgroup_size * matrices.subgroups
            }
            Self::Attend(_) => SIDE * SIDE,
            Self::Decode(kernel) => match kernel.variant {
                DecodeVariant::Portable => decode::THREADS,
                DecodeVariant::Lanes { subgroup_size } => subgroup_size,
            },
            Self::AttendBackward(BackwardKernel { variant, .. }) => match variant {
                BackwardVariant::Portable(_) => backward::portable::THREADS,
                BackwardVariant::Lanes { subgroup_size } => *subgroup_size,
                BackwardVariant::Cooperative(matrices) => matrices.subgroup_size * matrices.subgroups,
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
                variant: AttendVariant::Portable { rows_per_thread, .. },
                storage,
                ..
            }) => attend::portable::workgroup_bytes(*storage, *rows_per_thread),
            Self::Attend(kernel @ AttendKernel { variant: AttendVariant::Cooperative(matrices), .. }) => {
                attend::matrix::workgroup_bytes(*kernel, *matrices)
            }
            Self::Attend(AttendKernel {
                variant: AttendVariant::SubgroupBroadcast { .. },
                bias: BiasInput::Visible,
                ..
            }) => attend::subgroup::VISIBLE_BYTES,
            Self::Decode(kernel @ DecodeKernel { variant: DecodeVariant::Portable, .. }) => {
                decode::portable_bytes(kernel)
            }
            Self::AttendBackward(kernel @ BackwardKernel { variant: BackwardVariant::Portable(_), .. }) => {
                backward::portable::workgroup_bytes(kernel)
            }
            Self::AttendBackward(BackwardKernel {
                variant: BackwardVariant::Cooperative(matrices),
                head_dim,
                ..
            }) => backward::matrix::workgroup_bytes(*head_dim, *matrices),
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
                self.workgroup_size() / THREADS_PER_ROW
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
            AttendVariant::Portable { rows_per_thread, keys_per_thread, .. } => {
                Tile { q_rows: SIDE * rows_per_thread, kv_cols: SIDE * keys_per_thread }
            }
            AttendVariant::SubgroupBroadcast { subgroup_size, rows_per_lane } => {
                Tile { q_rows: subgroup_size * rows_per_lane, kv_cols: attend::subgroup::KV_COLS }
            }
            AttendVariant::Cooperative(matrices) => Tile {
                q_rows: attend::matrix::q_rows(self.head_dim, matrices),
                kv_cols: attend::matrix::kv_cols(self.head_dim, matrices.size),
            },
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

/// What kernels on heads depend on: storage type, units in a head, chunks of 4 elements in a head
/// and in a unit.
fn head(storage: Storage, head_dim: u32) -> Value {
    context! {
        storage => storage.name(),
        units => storage.units(head_dim),
        chunks => head_dim / 4,
        unit_chunks => storage.unit_chunks(),
    }
}

/// What kernels that compute logits depend on: the same, softcap and bias.
fn logits(storage: Storage, head_dim: u32, softcap: bool, bias: BiasInput) -> Value {
    context! { softcap, bias => bias.value(), ..head(storage, head_dim) }
}
