//! Which attention kernels a device runs.

use kyklos_shaders::{
    AttendKernel, AttendVariant, BackwardKernel, BackwardVariant, BiasInput, DecodeKernel, DecodeVariant,
    Dialect, Kernel, Matrices, Storage, Sums, Vendor,
};

use crate::backend::DeviceClass;
use crate::backend::wgpu::adapters::class::{class, vendor};
use crate::error::{Error, Result};

/// Which attention kernels a device may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelChoice {
    /// The kernel that suits the device.
    #[default]
    Auto,
    /// The kernel that runs on every device.
    Portable,
    /// The kernel for software drivers with subgroups; refused on other devices.
    SubgroupBroadcast,
    /// The kernel for matrix units, where the tensors allow it (f16, a head dim that is a multiple
    /// of the matrices' size, at most 256), and the portable one for others; refused on devices
    /// without f16 matrices that sum in f32. [`Self::Auto`] does not choose it: it has run on a
    /// software driver only, and uses experimental features of wgpu.
    Cooperative,
    /// Exactly this variant, for comparisons by a tuner. Refused where the device does not have it;
    /// where the tensors do not allow a cooperative variant, the portable kernel is used as in
    /// [`Self::Cooperative`].
    Exactly(AttendVariant),
}

/// The attention variants of an open device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Variants {
    vendor: Vendor,
    family: Family,
    choice: KernelChoice,
}

/// The kind of kernel that the device runs by choice. Every device can also run the portable
/// kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Portable,
    /// Subgroups of this size, on a driver that computes on the host's cores.
    Broadcast(u32),
    Cooperative(MatrixUnits),
}

/// A device's matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MatrixUnits {
    /// How a workgroup uses them in the built-in choice.
    built_in: Matrices,
    /// Threads that a workgroup may have.
    most_threads: u32,
    /// Workgroup memory of the device, in bytes.
    workgroup_bytes: u32,
}

impl Variants {
    /// The variants that the backend chooses for the device.
    pub(super) fn auto(adapter: &wgpu::Adapter) -> Self {
        let family = broadcast(adapter).map_or(Family::Portable, Family::Broadcast);
        Self { vendor: vendor(&adapter.get_info()), family, choice: KernelChoice::Auto }
    }

    /// The variants that the backend chooses for a device that a caller has opened with its own
    /// features.
    pub(super) fn of_opened(device: &wgpu::Device) -> Self {
        let info = device.adapter_info();
        let family = broadcast_size(&info, device.features()).map_or(Family::Portable, Family::Broadcast);
        Self { vendor: vendor(&info), family, choice: KernelChoice::Auto }
    }

    /// The variants of `choice`.
    ///
    /// # Errors
    /// [`Error::Request`] when the device cannot run it.
    pub(super) fn chosen(adapter: &wgpu::Adapter, choice: KernelChoice) -> Result<Self> {
        let info = adapter.get_info();
        let family = match choice {
            KernelChoice::Auto => return Ok(Self::auto(adapter)),
            KernelChoice::Portable => Family::Portable,
            KernelChoice::SubgroupBroadcast => {
                Family::Broadcast(broadcast(adapter).ok_or_else(|| {
                    Error::request(
                        format!(
                            "{} cannot run the subgroup-broadcast kernel: a {:?} with subgroups of {} to {}",
                            info.name, info.device_type, info.subgroup_min_size, info.subgroup_max_size
                        ),
                        "it is for software drivers with subgroups of 4, 8 or 16; use the portable kernel",
                    )
                })?)
            }
            KernelChoice::Cooperative => Family::Cooperative(matrices(adapter).ok_or_else(|| {
                Error::request(
                    format!(
                        "{} cannot run the cooperative-matrix kernel: its driver lists {:?}, its subgroups have {} to {} \
                         lanes",
                        info.name,
                        adapter.cooperative_matrix_properties(),
                        info.subgroup_min_size,
                        info.subgroup_max_size
                    ),
                    "it needs 8x8x8 or 16x16x16 matrices of f16 that sum in f32, and subgroups of one size; use the \
                     portable kernel",
                )
            })?),
            KernelChoice::Exactly(variant) => {
                let whole = match variant {
                    AttendVariant::Portable { .. } => KernelChoice::Portable,
                    AttendVariant::SubgroupBroadcast { .. } => KernelChoice::SubgroupBroadcast,
                    AttendVariant::Cooperative(_) => KernelChoice::Cooperative,
                };
                let whole = Self::chosen(adapter, whole)?;
                // With a small head dim and f16, which matrix units need, every variant exists.
                let choices = whole.choices(Storage::F16, 16);
                let runs = match (whole.family, variant) {
                    (Family::Cooperative(units), AttendVariant::Cooperative(matrices)) => units.run(matrices),
                    _ => choices.contains(&variant),
                };
                if !runs {
                    let names: Vec<_> = choices.into_iter().map(AttendVariant::name).collect();
                    return Err(Error::request(
                        format!("{} has no kernel {}", info.name, variant.name()),
                        format!("of this kind it has {}", names.join(", ")),
                    ));
                }
                whole.family
            }
        };
        Ok(Self { vendor: vendor(&info), family, choice })
    }

    /// The variant for these tensors without a measured choice.
    pub(super) fn built_in(self, storage: Storage, head_dim: u32) -> AttendVariant {
        match (self.choice, self.family) {
            (
                KernelChoice::Exactly(AttendVariant::Cooperative(matrices)),
                Family::Cooperative(units),
            ) => units.variant(matrices, storage, head_dim).unwrap_or(self.portable(head_dim)),
            (KernelChoice::Exactly(variant), _) => variant,
            (_, Family::Portable) => self.portable(head_dim),
            (_, Family::Broadcast(size)) => AttendVariant::subgroup_broadcast(size, head_dim),
            (_, Family::Cooperative(units)) => {
                units.variant(units.built_in, storage, head_dim).unwrap_or(self.portable(head_dim))
            }
        }
    }

    /// The portable variant for heads of `head_dim` elements without a measured choice.
    pub(super) const fn portable(self, head_dim: u32) -> AttendVariant {
        AttendVariant::portable(self.vendor, head_dim)
    }

    /// Every variant that can be chosen for these tensors: first the built-in one; in each family,
    /// first its built-in variant. Variants for matrix units are included only if the caller
    /// chose them by name (ADR 0008).
    pub(super) fn choices(self, storage: Storage, head_dim: u32) -> Vec<AttendVariant> {
        let built_in = self.built_in(storage, head_dim);
        let others: Vec<_> = match (self.choice, self.family) {
            (KernelChoice::Exactly(_), _) => Vec::new(),
            (KernelChoice::Auto, Family::Broadcast(size)) => {
                AttendVariant::subgroup_broadcast_choices(size, head_dim)
                    .chain([self.portable(head_dim)])
                    .chain(AttendVariant::portable_choices())
                    .collect()
            }
            (_, Family::Broadcast(size)) => {
                AttendVariant::subgroup_broadcast_choices(size, head_dim).collect()
            }
            (_, Family::Cooperative(matrices)) if matches!(built_in, AttendVariant::Cooperative(_)) => {
                matrices.choices(storage, head_dim)
            }
            (_, Family::Portable | Family::Cooperative(_)) => AttendVariant::portable_choices().collect(),
        };
        let mut choices = vec![built_in];
        for other in others {
            if !choices.contains(&other) {
                choices.push(other);
            }
        }
        choices
    }

    /// Name of the choice in tuning tables.
    pub(super) fn choice_name(self) -> String {
        match self.choice {
            KernelChoice::Auto => "auto".to_owned(),
            KernelChoice::Portable => "portable".to_owned(),
            KernelChoice::SubgroupBroadcast => "subgroup".to_owned(),
            KernelChoice::Cooperative => "cooperative".to_owned(),
            KernelChoice::Exactly(variant) => variant.name(),
        }
    }

    /// The variant for few query rows.
    pub(super) fn decode(self) -> DecodeVariant {
        match self.family {
            Family::Portable | Family::Cooperative(_) => DecodeVariant::Portable,
            Family::Broadcast(subgroup_size) => DecodeVariant::Lanes { subgroup_size },
        }
    }

    /// The variant for gradients of heads of `head_dim` elements.
    pub(super) fn backward(self, head_dim: u32) -> BackwardVariant {
        match self.family {
            Family::Portable | Family::Cooperative(_) => BackwardVariant::Portable(match self.choice {
                // The form for the GPUs that have this variant by choice: so it can be run on any device.
                KernelChoice::Exactly(variant) => [Vendor::Amd, Vendor::Nvidia, Vendor::Other]
                    .into_iter()
                    .find(|vendor| variant == AttendVariant::portable(*vendor, 64))
                    .unwrap_or(self.vendor),
                _ => self.vendor,
            }),
            Family::Broadcast(subgroup_size) => BackwardVariant::lanes(subgroup_size, head_dim),
        }
    }

    /// The built-in kernels for these tensors, without softcap and bias.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn kernels(self, storage: Storage, head_dim: u32) -> Vec<Kernel> {
        let (softcap, bias) = (false, BiasInput::None);
        let variant = self.built_in(storage, head_dim);
        let mut kernels = vec![Kernel::Attend(AttendKernel { variant, storage, head_dim, softcap, bias })];
        let variant = self.decode();
        let most = variant.most_slots(head_dim).min(MOST_SLOTS as u32);
        kernels.extend(
            [1, most].into_iter().filter(|slots| (1..=most).contains(slots)).map(|slots| {
                Kernel::Decode(DecodeKernel { variant, storage, head_dim, slots, softcap, bias })
            }),
        );
        let variant = self.backward(head_dim);
        kernels.extend([Sums::Queries].iter().chain(variant.of_keys(head_dim, bias)).map(|sums| {
            let sums = *sums;
            Kernel::AttendBackward(BackwardKernel { variant, sums, storage, head_dim, softcap, bias })
        }));
        kernels
    }

    /// Features with which the device must be opened.
    pub(super) fn features(self) -> wgpu::Features {
        match self.family {
            Family::Portable => wgpu::Features::empty(),
            Family::Broadcast(_) => wgpu::Features::SUBGROUP,
            Family::Cooperative(_) => MATRIX_FEATURES,
        }
    }

    /// Permission for the experimental ones among the features.
    pub(super) fn experimental(self) -> wgpu::ExperimentalFeatures {
        match self.family {
            // SAFETY: the only condition is that the caller accepts possible bugs in wgpu's support for these
            // features. They are used only if the caller asked for the cooperative kernel by
            // name.
            Family::Cooperative(_) => unsafe { wgpu::ExperimentalFeatures::enabled() },
            Family::Portable | Family::Broadcast(_) => wgpu::ExperimentalFeatures::disabled(),
        }
    }

    /// Name for reports.
    pub(super) fn name(self) -> String {
        match (self.choice, self.family) {
            // The tensors of a call decide which of the two kernels the call uses.
            (KernelChoice::Exactly(variant), Family::Cooperative(_)) => {
                format!("{} (f16), else portable", variant.name())
            }
            (KernelChoice::Exactly(variant), _) => variant.name(),
            (_, Family::Portable) => "portable".to_owned(),
            (_, Family::Broadcast(size)) => format!("subgroup-broadcast-{size}"),
            (_, Family::Cooperative(MatrixUnits { built_in: Matrices { size, .. }, .. })) => {
                format!("cooperative-{size}x{size} (f16), else portable")
            }
        }
    }
}

impl MatrixUnits {
    /// The variant with these matrices, where it exists for these tensors and fits workgroup memory.
    fn variant(self, matrices: Matrices, storage: Storage, head_dim: u32) -> Option<AttendVariant> {
        let variant = AttendVariant::cooperative(matrices, storage, head_dim)?;
        let kernel = Kernel::Attend(AttendKernel {
            variant,
            storage,
            head_dim,
            softcap: false,
            bias: BiasInput::None,
        });
        (kernel.workgroup_bytes() <= self.workgroup_bytes).then_some(variant)
    }

    fn choices(self, storage: Storage, head_dim: u32) -> Vec<AttendVariant> {
        let matrices = [1, 2, 4].map(|subgroups| Matrices { subgroups, ..self.built_in });
        let run = matrices.into_iter().filter(|matrices| self.run(*matrices));
        run.filter_map(|matrices| self.variant(matrices, storage, head_dim)).collect()
    }

    /// Whether the device has such matrices, and no subgroups but those that they are for.
    fn run(self, matrices: Matrices) -> bool {
        let lanes = |of: Matrices| [of.subgroup_size, if of.halves { of.subgroup_size / 2 } else { of.subgroup_size }];
        matrices.size == self.built_in.size
            && matrices.subgroups * matrices.subgroup_size <= self.most_threads
            && lanes(self.built_in).iter().all(|one| lanes(matrices).contains(one))
    }
}

/// The subgroup size for the broadcast kernel, on devices where it pays: drivers that compute on
/// the host's cores.
fn broadcast(adapter: &wgpu::Adapter) -> Option<u32> {
    broadcast_size(&adapter.get_info(), adapter.features())
}

fn broadcast_size(info: &wgpu::AdapterInfo, features: wgpu::Features) -> Option<u32> {
    let size = info.subgroup_min_size;
    (class(info) == DeviceClass::SoftwareGpu
        && features.contains(wgpu::Features::SUBGROUP)
        && size == info.subgroup_max_size
        && AttendVariant::SUBGROUP_SIZES.contains(&size))
    .then_some(size)
}

/// The device's matrix units, if the cooperative kernel can use them.
fn matrices(adapter: &wgpu::Adapter) -> Option<MatrixUnits> {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let [least, most] = subgroup_sizes(&info);
    let software = class(&info) == DeviceClass::SoftwareGpu;
    if !adapter.features().contains(MATRIX_FEATURES)
        || !(least == most || 2 * least == most)
        // Mesa's software driver lists matrices at every vector width, and crashes on their use at another width than
        // 256 bits.
        || software && most != 8
    {
        return None;
    }
    let listed = adapter.cooperative_matrix_properties();
    let has = |size: u32| {
        listed.iter().any(|matrix| {
            [matrix.m_size, matrix.n_size, matrix.k_size] == [size; 3]
                && matrix.ab_type == wgpu::CooperativeScalarType::F16
                && matrix.cr_type == wgpu::CooperativeScalarType::F32
        })
    };
    let most_threads = limits.max_compute_invocations_per_workgroup;
    // Several subgroups share a staged tile: 128 threads. On a software driver the barriers between them
    // cost more than that saves.
    let subgroups = if software { 1 } else { (most_threads.min(128) / most).max(1) };
    let built_in = [16, 8].into_iter().find_map(|size| {
        let matrices = Matrices { size, subgroup_size: most, halves: least < most, subgroups };
        (has(size) && AttendVariant::cooperative(matrices, Storage::F16, 64).is_some()).then_some(matrices)
    })?;
    Some(MatrixUnits {
        built_in,
        most_threads,
        workgroup_bytes: limits.max_compute_workgroup_storage_size,
    })
}

/// Fewest and most lanes of a subgroup. wgpu does not ask Metal, which tells only of compiled
/// kernels, and says 4 to 64; every Apple GPU has 32, and only these have matrices there.
fn subgroup_sizes(info: &wgpu::AdapterInfo) -> [u32; 2] {
    match info.backend {
        wgpu::Backend::Metal => [32, 32],
        _ => [info.subgroup_min_size, info.subgroup_max_size],
    }
}

const MATRIX_FEATURES: wgpu::Features = wgpu::Features::SUBGROUP
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);

/// Most query rows times query heads of a KV head for the decoding kernels; above it, tiles of rows
/// pay. A single row always uses the decoding kernels.
pub(super) const MOST_SLOTS: usize = 16;

/// wgpu gives WGSL to naga natively, and to the browser's compiler on the web.
pub(super) const DIALECT: Dialect = if cfg!(target_arch = "wasm32") { Dialect::Tint } else { Dialect::Naga };
