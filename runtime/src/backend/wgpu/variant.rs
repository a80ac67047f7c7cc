//! Which attention kernels a device runs.

use kyklos_shaders::{AttendKernel, AttendVariant, DecodeVariant, Kernel, Pairs, Storage};

use super::KernelChoice;
use super::adapter::class;
use crate::backend::DeviceClass;
use crate::{Error, Result};

/// What the device was opened for. The portable kernel is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variants {
    Portable,
    /// Subgroups of this size, on a driver that computes on the host's cores.
    Broadcast(u32),
    Cooperative(Matrices),
}

/// A device's matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrices {
    /// Rows and columns of a matrix.
    size: u32,
    subgroup_size: u32,
    /// Subgroups of a workgroup.
    subgroups: u32,
    /// Workgroup memory that the device has.
    workgroup_bytes: u32,
}

impl Variants {
    /// What suits the device.
    pub(super) fn auto(adapter: &wgpu::Adapter) -> Self {
        broadcast(adapter).map_or(Self::Portable, Self::Broadcast)
    }

    /// What was asked for.
    ///
    /// # Errors
    /// [`Error::Request`] when the device cannot run it.
    pub(super) fn chosen(adapter: &wgpu::Adapter, choice: KernelChoice) -> Result<Self> {
        let info = adapter.get_info();
        match choice {
            KernelChoice::Auto => Ok(Self::auto(adapter)),
            KernelChoice::Portable => Ok(Self::Portable),
            KernelChoice::SubgroupBroadcast => {
                broadcast(adapter).map(Self::Broadcast).ok_or_else(|| {
                    Error::request(
                        format!(
                            "{} cannot run the subgroup-broadcast kernel: a {:?} with subgroups of {} to {}",
                            info.name, info.device_type, info.subgroup_min_size, info.subgroup_max_size
                        ),
                        "it is for software drivers with subgroups of 4, 8 or 16; use the portable kernel",
                    )
                })
            }
            KernelChoice::Cooperative => matrices(adapter).map(Self::Cooperative).ok_or_else(|| {
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
            }),
        }
    }

    /// The variant for these tensors.
    pub(super) fn of(self, storage: Storage, head_dim: u32) -> AttendVariant {
        match self {
            Self::Portable => AttendVariant::Portable,
            Self::Broadcast(size) => AttendVariant::subgroup_broadcast(size, head_dim),
            Self::Cooperative(matrices) => {
                matrices.variant(storage, head_dim).unwrap_or(AttendVariant::Portable)
            }
        }
    }

    /// The variant for few query rows, of any tensors.
    pub(super) fn decode(self) -> DecodeVariant {
        match self {
            Self::Portable | Self::Cooperative(_) => DecodeVariant::Portable,
            Self::Broadcast(subgroup_size) => DecodeVariant::Lanes { subgroup_size },
        }
    }

    /// What the device has to be opened with.
    pub(super) fn features(self) -> wgpu::Features {
        match self {
            Self::Portable => wgpu::Features::empty(),
            Self::Broadcast(_) => wgpu::Features::SUBGROUP,
            Self::Cooperative(_) => MATRIX_FEATURES,
        }
    }

    /// Permission for the experimental ones among the features.
    pub(super) fn experimental(self) -> wgpu::ExperimentalFeatures {
        match self {
            // SAFETY: wgpu asks for no more than the knowledge that its support for these features may have bugs.
            // They are used only where the caller asked for the cooperative kernel by name.
            Self::Cooperative(_) => unsafe { wgpu::ExperimentalFeatures::enabled() },
            Self::Portable | Self::Broadcast(_) => wgpu::ExperimentalFeatures::disabled(),
        }
    }

    /// Name for reports.
    pub(super) fn name(self) -> String {
        match self {
            Self::Portable => "portable".to_owned(),
            Self::Broadcast(size) => format!("subgroup-broadcast-{size}"),
            // Which of the two a call gets, its tensors say.
            Self::Cooperative(Matrices { size, .. }) => {
                format!("cooperative-{size}x{size} (f16), else portable")
            }
        }
    }
}

impl Matrices {
    fn variant(self, storage: Storage, head_dim: u32) -> Option<AttendVariant> {
        let variant =
            AttendVariant::cooperative(self.size, self.subgroup_size, self.subgroups, storage, head_dim)?;
        let kernel =
            Kernel::Attend(AttendKernel { variant, storage, head_dim, softcap: false, pairs: Pairs::None });
        (kernel.workgroup_bytes() <= self.workgroup_bytes).then_some(variant)
    }
}

/// The subgroup size for the broadcast kernel, where it pays off: drivers that compute on the host's cores.
fn broadcast(adapter: &wgpu::Adapter) -> Option<u32> {
    let info = adapter.get_info();
    let size = info.subgroup_min_size;
    (class(&info) == DeviceClass::SoftwareGpu
        && adapter.features().contains(wgpu::Features::SUBGROUP)
        && size == info.subgroup_max_size
        && AttendVariant::SUBGROUP_SIZES.contains(&size))
    .then_some(size)
}

/// The matrices that the cooperative kernel can use, if the device has such.
fn matrices(adapter: &wgpu::Adapter) -> Option<Matrices> {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let subgroup_size = info.subgroup_min_size;
    let software = class(&info) == DeviceClass::SoftwareGpu;
    if !adapter.features().contains(MATRIX_FEATURES)
        || subgroup_size != info.subgroup_max_size
        // Mesa's software driver lists them at every vector width; at others than 256 bits using one crashes it.
        || software && subgroup_size != 8
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
    let size = [16, 8].into_iter().find(|size| {
        has(*size) && AttendVariant::cooperative(*size, subgroup_size, 1, Storage::F16, 64).is_some()
    })?;
    let most = limits.max_compute_invocations_per_workgroup / subgroup_size;
    Some(Matrices {
        size,
        subgroup_size,
        // Several share a staged tile; where lanes are a core's vector, barriers between them cost more than that.
        subgroups: if software { 1 } else { most.clamp(1, 4) },
        workgroup_bytes: limits.max_compute_workgroup_storage_size,
    })
}

const MATRIX_FEATURES: wgpu::Features = wgpu::Features::SUBGROUP
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
