//! Which attention kernels a device runs.

use kyklos_shaders::{
    AttendKernel, AttendVariant, BackwardKernel, BackwardVariant, BiasInput, DecodeKernel, DecodeVariant,
    Dialect, Kernel, Storage, Sums, Vendor,
};

use crate::backend::DeviceClass;
use crate::backend::wgpu::adapters::class::{class, vendor};
use crate::backend::wgpu::matrix_units::{MATRIX_FEATURES, MatrixUnits};
use crate::backend::wgpu::subgroups;
use crate::error::{Error, Result};

/// Which attention kernels a device may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelChoice {
    /// The kernel that suits the device.
    #[default]
    Auto,
    /// The kernel that runs on every device, without subgroups.
    Portable,
    /// The kernel for software drivers with subgroups; refused on other devices.
    SubgroupBroadcast,
    /// The kernel for matrix units, where the tensors allow it (f16, a head dim that is a multiple
    /// of the matrices' size, at most 256; gradients at most 128 and without a bias), and the
    /// portable one for others; refused on devices without f16 matrices that sum in f32. On a GPU
    /// that has them [`Self::Auto`] compares the two when f16 heads are first used, and takes the
    /// faster.
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
    /// Whether the portable kernel finds row maxima by shuffles.
    shuffles: bool,
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
    /// The portable kernel, or matrix units where a comparison shows that they are faster.
    Faster(MatrixUnits),
}

impl Variants {
    /// The variants that the backend chooses for the device.
    pub(super) fn auto(adapter: &wgpu::Adapter) -> Self {
        let info = adapter.get_info();
        let software = class(&info) == DeviceClass::SoftwareGpu;
        let matrices = if software { None } else { MatrixUnits::of(adapter).map(Family::Faster) };
        let family = subgroups::of_software(&info, adapter.features())
            .map(Family::Broadcast)
            .or(matrices)
            .unwrap_or(Family::Portable);
        let shuffles = subgroups::can_shuffle(&info, adapter.features());
        Self { vendor: vendor(&info), family, shuffles, choice: KernelChoice::Auto }
    }

    /// The variants of [`Self::auto`] without what a driver may fail to open; `None` if there is
    /// nothing like that.
    pub(super) fn plainer(self) -> Option<Self> {
        matches!(self.family, Family::Faster(_)).then_some(Self { family: Family::Portable, ..self })
    }

    /// The kernel for matrix units, if the device has them and one fits these tensors.
    pub(super) fn matrices(self, storage: Storage, head_dim: u32) -> Option<AttendVariant> {
        match self.family {
            Family::Faster(units) | Family::Cooperative(units) => units.built_in(storage, head_dim),
            Family::Portable | Family::Broadcast(_) => None,
        }
    }

    /// The same, if a comparison with the portable kernel decides whether it is used.
    pub(super) fn compared(self, storage: Storage, head_dim: u32) -> Option<AttendVariant> {
        matches!(self.family, Family::Faster(_)).then(|| self.matrices(storage, head_dim))?
    }

    /// The kernels for gradients on matrix units, if a comparison decides whether they are used.
    pub(super) fn backward_compared(self, storage: Storage, head_dim: u32) -> Option<BackwardVariant> {
        matches!(self.family, Family::Faster(_)).then(|| self.backward_matrices(storage, head_dim))?
    }

    /// The variants that the backend chooses for a device that a caller has opened with its own
    /// features.
    pub(super) fn of_opened(device: &wgpu::Device) -> Self {
        let info = device.adapter_info();
        let family =
            subgroups::of_software(&info, device.features()).map_or(Family::Portable, Family::Broadcast);
        let shuffles = subgroups::can_shuffle(&info, device.features());
        Self { vendor: vendor(&info), family, shuffles, choice: KernelChoice::Auto }
    }

    /// The variants of `choice`.
    ///
    /// # Errors
    /// [`Error::Request`] when the device cannot run it.
    pub(super) fn chosen(adapter: &wgpu::Adapter, choice: KernelChoice) -> Result<Self> {
        let info = adapter.get_info();
        let without = matches!(
            choice,
            KernelChoice::Portable | KernelChoice::Exactly(AttendVariant::Portable { shuffles: false, .. })
        );
        let shuffles = !without && subgroups::can_shuffle(&info, adapter.features());
        let family = match choice {
            KernelChoice::Auto => return Ok(Self::auto(adapter)),
            KernelChoice::Portable => Family::Portable,
            KernelChoice::SubgroupBroadcast => {
                Family::Broadcast(subgroups::of_software(&info, adapter.features()).ok_or_else(|| {
                    Error::request(
                        format!(
                            "{} cannot run the subgroup-broadcast kernel: a {:?} with subgroups of {} to {}",
                            info.name, info.device_type, info.subgroup_min_size, info.subgroup_max_size
                        ),
                        "it is for software drivers with subgroups of 4, 8 or 16; use the portable kernel",
                    )
                })?)
            }
            KernelChoice::Cooperative => Family::Cooperative(MatrixUnits::of(adapter).ok_or_else(|| {
                Error::request(
                    format!(
                        "{} cannot run the cooperative-matrix kernel: its driver lists {:?}, its subgroups have {} to {} \
                         lanes",
                        info.name,
                        adapter.cooperative_matrix_properties(),
                        info.subgroup_min_size,
                        info.subgroup_max_size
                    ),
                    "it needs 8x8x8 or 16x16x16 matrices of f16 that sum in f32, and subgroups of one size or of two, one \
                     twice the other; use the portable kernel",
                )
            })?),
            KernelChoice::Exactly(variant) => {
                let whole = match variant {
                    AttendVariant::Portable { .. } => KernelChoice::Portable,
                    AttendVariant::SubgroupBroadcast { .. } => KernelChoice::SubgroupBroadcast,
                    AttendVariant::Cooperative(_) => KernelChoice::Cooperative,
                };
                let whole = Self { shuffles, ..Self::chosen(adapter, whole)? };
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
        Ok(Self { vendor: vendor(&info), family, shuffles, choice })
    }

    /// The variant for these tensors without a measured choice.
    pub(super) fn built_in(self, storage: Storage, head_dim: u32) -> AttendVariant {
        match (self.choice, self.family) {
            (KernelChoice::Exactly(AttendVariant::Cooperative(matrices)), Family::Cooperative(units)) => {
                units.variant(matrices, storage, head_dim).unwrap_or(self.portable(head_dim))
            }
            (KernelChoice::Exactly(variant), _) => variant,
            (_, Family::Portable | Family::Faster(_)) => self.portable(head_dim),
            (_, Family::Broadcast(size)) => AttendVariant::subgroup_broadcast(size, head_dim),
            (_, Family::Cooperative(units)) => {
                units.built_in(storage, head_dim).unwrap_or(self.portable(head_dim))
            }
        }
    }

    /// The portable variant for heads of `head_dim` elements without a measured choice.
    pub(super) const fn portable(self, head_dim: u32) -> AttendVariant {
        AttendVariant::portable(self.vendor, head_dim, self.shuffles)
    }

    /// Every variant that can be chosen for these tensors: first the built-in one; in each family,
    /// first its built-in variant.
    pub(super) fn choices(self, storage: Storage, head_dim: u32) -> Vec<AttendVariant> {
        let built_in = self.built_in(storage, head_dim);
        let others: Vec<_> = match (self.choice, self.family) {
            (KernelChoice::Exactly(_), _) => Vec::new(),
            (KernelChoice::Auto, Family::Broadcast(size)) => {
                AttendVariant::subgroup_broadcast_choices(size, head_dim)
                    .chain([self.portable(head_dim)])
                    .chain(AttendVariant::portable_choices(self.shuffles))
                    .collect()
            }
            (_, Family::Broadcast(size)) => {
                AttendVariant::subgroup_broadcast_choices(size, head_dim).collect()
            }
            (_, Family::Cooperative(matrices)) if matches!(built_in, AttendVariant::Cooperative(_)) => {
                matrices.choices(storage, head_dim)
            }
            (_, Family::Faster(units)) => AttendVariant::portable_choices(self.shuffles)
                .chain(units.choices(storage, head_dim))
                .collect(),
            (_, Family::Portable | Family::Cooperative(_)) => {
                AttendVariant::portable_choices(self.shuffles).collect()
            }
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
            Family::Portable | Family::Cooperative(_) | Family::Faster(_) => DecodeVariant::Portable,
            Family::Broadcast(subgroup_size) => DecodeVariant::Lanes { subgroup_size },
        }
    }

    /// The variant for gradients of these tensors without a bias. Where a comparison decides it is
    /// the portable one.
    pub(super) fn backward(self, storage: Storage, head_dim: u32) -> BackwardVariant {
        let matrices = match self.family {
            Family::Cooperative(_) => self.backward_matrices(storage, head_dim),
            Family::Portable | Family::Broadcast(_) | Family::Faster(_) => None,
        };
        matrices.unwrap_or_else(|| self.backward_without_matrices(head_dim))
    }

    /// The kernels for gradients on matrix units, if the device has them and they fit these
    /// tensors.
    pub(super) fn backward_matrices(self, storage: Storage, head_dim: u32) -> Option<BackwardVariant> {
        let chosen = match self.choice {
            KernelChoice::Exactly(AttendVariant::Cooperative(matrices)) => Some(matrices),
            _ => None,
        };
        match self.family {
            Family::Faster(units) | Family::Cooperative(units) => units.backward(chosen, storage, head_dim),
            Family::Portable | Family::Broadcast(_) => None,
        }
    }

    /// The variant for gradients that needs no matrix units, and takes a bias.
    pub(super) fn backward_without_matrices(self, head_dim: u32) -> BackwardVariant {
        match self.family {
            Family::Portable | Family::Cooperative(_) | Family::Faster(_) => {
                BackwardVariant::Portable(match self.choice {
                    // A name for each form, so that any device can run it: Intel's is that of others.
                    KernelChoice::Exactly(AttendVariant::Portable {
                        rows_per_thread,
                        keys_per_thread,
                        ..
                    }) => match (rows_per_thread, keys_per_thread) {
                        (4, 8) => Vendor::Amd,
                        (4, 4) => Vendor::Nvidia,
                        (2, 4) => Vendor::Other,
                        _ => self.vendor,
                    },
                    _ => self.vendor,
                })
            }
            Family::Broadcast(subgroup_size) => BackwardVariant::lanes(subgroup_size, head_dim),
        }
    }

    /// The built-in kernels for these tensors, without softcap and bias.
    #[cfg_attr(target_arch = "wasm32", expect(dead_code, reason = "no browser lists kernels"))]
    pub(super) fn kernels(self, storage: Storage, head_dim: u32) -> Vec<Kernel> {
        let (softcap, bias) = (false, BiasInput::None);
        let variant = self.built_in(storage, head_dim);
        let mut kernels: Vec<_> = [Some(variant), self.compared(storage, head_dim)]
            .into_iter()
            .flatten()
            .map(|variant| Kernel::Attend(AttendKernel { variant, storage, head_dim, softcap, bias }))
            .collect();
        let variant = self.decode();
        let most = variant.most_slots(head_dim).min(MOST_SLOTS as u32);
        kernels.extend(
            [1, most].into_iter().filter(|slots| (1..=most).contains(slots)).map(|slots| {
                Kernel::Decode(DecodeKernel { variant, storage, head_dim, slots, softcap, bias })
            }),
        );
        let mut backward = vec![self.backward(storage, head_dim)];
        backward.extend(self.backward_compared(storage, head_dim));
        for variant in backward {
            kernels.extend([Sums::Queries].iter().chain(variant.of_keys(head_dim, bias)).map(|sums| {
                let sums = *sums;
                Kernel::AttendBackward(BackwardKernel { variant, sums, storage, head_dim, softcap, bias })
            }));
        }
        kernels
    }

    /// Features with which the device must be opened.
    pub(super) fn features(self) -> wgpu::Features {
        match self.family {
            Family::Portable if !self.shuffles => wgpu::Features::empty(),
            Family::Portable | Family::Broadcast(_) => wgpu::Features::SUBGROUP,
            Family::Cooperative(_) | Family::Faster(_) => MATRIX_FEATURES,
        }
    }

    /// Permission for the experimental ones among the features.
    pub(super) fn experimental(self) -> wgpu::ExperimentalFeatures {
        match self.family {
            // SAFETY: the only condition is that the caller accepts possible bugs in wgpu's support for these
            // features. They are used only if the caller asked for the cooperative kernel by
            // name, or if it gave right results on such a device, in a comparison or in a tuner's check.
            Family::Cooperative(_) | Family::Faster(_) => unsafe { wgpu::ExperimentalFeatures::enabled() },
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
            (_, Family::Cooperative(units)) => {
                format!("{} (f16), else portable", units.name())
            }
            (_, Family::Faster(units)) => {
                format!("portable, or {} (f16) where it is faster", units.name())
            }
        }
    }
}

/// Most query rows times query heads of a KV head for the decoding kernels; above it, tiles of rows
/// pay. A single row always uses the decoding kernels.
pub(super) const MOST_SLOTS: usize = 16;

/// wgpu gives WGSL to naga natively, and to the browser's compiler on the web.
pub(super) const DIALECT: Dialect = if cfg!(target_arch = "wasm32") { Dialect::Tint } else { Dialect::Naga };
