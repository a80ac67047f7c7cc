//! Matrix units of a device, as the kernel for them uses them.

use kyklos_shaders::{
    AttendKernel, AttendVariant, BackwardKernel, BackwardVariant, BiasInput, Kernel, Matrices, Storage, Sums,
};

use crate::backend::DeviceClass;
use crate::backend::wgpu::adapters::class::class;
use crate::backend::wgpu::subgroups;

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

impl MatrixUnits {
    /// The device's matrix units, if the cooperative kernel can use them.
    pub(super) fn of(adapter: &wgpu::Adapter) -> Option<Self> {
        let (info, limits) = (adapter.get_info(), adapter.limits());
        let [least, most] = subgroups::sizes(&info);
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
        // Several subgroups share a staged tile: 256 threads. On a software driver the barriers between
        // them cost more than that saves.
        let subgroups = if software { 1 } else { (most_threads.min(256) / most).max(1) };
        let built_in = [16, 8].into_iter().find_map(|size| {
            let matrices = Matrices { size, subgroup_size: most, halves: least < most, subgroups };
            (has(size) && AttendVariant::cooperative(matrices, Storage::F16, 64).is_some())
                .then_some(matrices)
        })?;
        Some(Self { built_in, most_threads, workgroup_bytes: limits.max_compute_workgroup_storage_size })
    }

    /// Name for reports.
    pub(super) fn name(self) -> String {
        let Matrices { size, .. } = self.built_in;
        format!("cooperative-{size}x{size}")
    }

    /// The built-in variant, where there is one for these tensors.
    pub(super) fn built_in(self, storage: Storage, head_dim: u32) -> Option<AttendVariant> {
        self.variant(self.built_in, storage, head_dim)
    }

    /// The variant with these matrices, where it exists for these tensors and fits workgroup
    /// memory.
    pub(super) fn variant(
        self,
        matrices: Matrices,
        storage: Storage,
        head_dim: u32,
    ) -> Option<AttendVariant> {
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

    /// The variant for gradients, where there is one for these tensors that fits workgroup memory.
    /// Where the caller has chosen `matrices` for the forward pass, with these, but at least two
    /// subgroups.
    pub(super) fn backward(
        self,
        matrices: Option<Matrices>,
        storage: Storage,
        head_dim: u32,
    ) -> Option<BackwardVariant> {
        let matrices = matrices.unwrap_or(self.built_in);
        let matrices = Matrices { subgroups: matrices.subgroups.max(2), ..matrices };
        let variant = BackwardVariant::cooperative(matrices, storage, head_dim)?;
        let fits = [Sums::Queries, Sums::KeysValues].into_iter().all(|sums| {
            let (softcap, bias) = (false, BiasInput::None);
            let kernel = BackwardKernel { variant, sums, storage, head_dim, softcap, bias };
            Kernel::AttendBackward(kernel).workgroup_bytes() <= self.workgroup_bytes
        });
        (fits && matrices.subgroups * matrices.subgroup_size <= self.most_threads).then_some(variant)
    }

    pub(super) fn choices(self, storage: Storage, head_dim: u32) -> Vec<AttendVariant> {
        let matrices = [1, 2, 4, 8].map(|subgroups| Matrices { subgroups, ..self.built_in });
        let run = matrices.into_iter().filter(|matrices| self.run(*matrices));
        run.filter_map(|matrices| self.variant(matrices, storage, head_dim)).collect()
    }

    /// Whether the device has such matrices, and no subgroups but those that they are for.
    pub(super) fn run(self, matrices: Matrices) -> bool {
        let lanes = |of: Matrices| {
            [of.subgroup_size, if of.halves { of.subgroup_size / 2 } else { of.subgroup_size }]
        };
        matrices.size == self.built_in.size
            && matrices.subgroups * matrices.subgroup_size <= self.most_threads
            && lanes(self.built_in).iter().all(|one| lanes(matrices).contains(one))
    }
}

pub(super) const MATRIX_FEATURES: wgpu::Features = wgpu::Features::SUBGROUP
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
