//! What is compared, and what a comparison says.

use kyklos_shaders::{
    AttendKernel, AttendVariant, BackwardKernel, BackwardVariant, BiasInput, Kernel, Storage, Sums,
};

use crate::backend::wgpu::variant::KernelChoice;

/// The portable kernels and those for matrix units, for heads of f16.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Candidates {
    pub(in crate::backend::wgpu) pass: Pass,
    pub(in crate::backend::wgpu) head_dim: u32,
}

/// Which kernels are compared: the portable variant, and that for matrix units.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) enum Pass {
    Forward([AttendVariant; 2]),
    Gradients([BackwardVariant; 2]),
}

impl Candidates {
    /// How the devices are opened that run them.
    pub(in crate::backend::wgpu) fn choices(self) -> [KernelChoice; 2] {
        match self.pass {
            Pass::Forward(variants) => variants.map(KernelChoice::Exactly),
            Pass::Gradients(_) => [KernelChoice::Portable, KernelChoice::Cooperative],
        }
    }

    pub(super) fn of_gradients(self) -> bool {
        matches!(self.pass, Pass::Gradients(_))
    }

    /// All of them, without softcap.
    pub(super) fn kernels(self) -> Vec<Kernel> {
        let (storage, head_dim) = (Storage::F16, self.head_dim);
        let (softcap, bias) = (false, BiasInput::None);
        match self.pass {
            Pass::Forward(variants) => variants
                .map(|variant| Kernel::Attend(AttendKernel { variant, storage, head_dim, softcap, bias }))
                .to_vec(),
            Pass::Gradients(variants) => variants
                .into_iter()
                .flat_map(|variant| {
                    let of_keys = variant.of_keys(head_dim, bias);
                    [Sums::Queries].iter().chain(of_keys).map(move |sums| {
                        let sums = *sums;
                        Kernel::AttendBackward(BackwardKernel {
                            variant,
                            sums,
                            storage,
                            head_dim,
                            softcap,
                            bias,
                        })
                    })
                })
                .collect(),
        }
    }
}

/// The kernels for matrix units beside the portable ones, on a small problem in f16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probe {
    /// Seconds of the portable kernel: the shortest of some runs.
    pub portable_s: f64,
    /// Seconds of the kernel for matrix units.
    pub matrices_s: f64,
    /// Largest difference of the two in `o`, of values up to 1, and in the log-sum-exp; of
    /// gradients that of each, relative to its largest element. NaN where a result is not
    /// finite.
    pub difference: f64,
}

impl Probe {
    /// Whether the results are equal but for rounding: matrix units take weights in f16, so each is
    /// off by 2^-11 of itself, and a sum of products with values up to 1 by as much. Gradients are
    /// sums of products with weights, or with numbers that are rounded like them.
    pub fn agrees(&self) -> bool {
        self.difference <= 1.0 / 1024.0
    }
}
