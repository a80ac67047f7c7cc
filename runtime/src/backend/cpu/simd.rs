//! Which instruction set runs the kernels.

use pulp::{Arch, Scalar128b, Simd, WithSimd};

use super::bf16::WordProducts;

/// An instruction set found on this machine, or portable code in vectors of four that any compiler target can lower.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    /// `None`: portable.
    arch: Option<Arch>,
    /// Products of bf16 elements without a conversion.
    bf16: Option<WordProducts>,
    /// The kernel for 32 vector registers on any machine, for tests.
    #[cfg(test)]
    wide: bool,
}

impl Level {
    /// The best one that this machine has.
    pub(super) fn detect() -> Self {
        Self::of(match Arch::new() {
            // pulp's scalar level has one lane. Groups of four lanes compile to the vectors of the target.
            Arch::Scalar => None,
            arch => Some(arch),
        })
    }

    /// The one that every machine has.
    #[cfg(test)]
    pub(super) fn portable() -> Self {
        Self::of(None)
    }

    /// This one with the kernel for 32 registers.
    #[cfg(test)]
    pub(super) fn wide(self) -> Self {
        Self { wide: true, ..self }
    }

    /// This one with products of bf16 in f32 arithmetic.
    #[cfg(test)]
    pub(super) fn with_emulated_bf16(self) -> Self {
        Self { bf16: Some(WordProducts::emulated()), ..self }
    }

    fn of(arch: Option<Arch>) -> Self {
        Self {
            arch,
            bf16: match arch {
                #[cfg(target_arch = "x86_64")]
                Some(Arch::V4(_)) => WordProducts::detect(),
                _ => None,
            },
            #[cfg(test)]
            wide: false,
        }
    }

    /// Its products of bf16, if it has any.
    pub(super) fn bf16(self) -> Option<WordProducts> {
        self.bf16
    }

    /// Runs `op` with this level's kernel.
    #[inline(always)]
    pub(super) fn run<Op: WithKernel>(self, op: Op) -> Op::Output {
        self.dispatch(Kernel {
            op,
            #[cfg(test)]
            wide: self.wide,
        })
    }

    /// Runs `op`, compiled for this level.
    #[inline(always)]
    pub(super) fn dispatch<Op: WithSimd>(self, op: Op) -> Op::Output {
        match self.arch {
            #[cfg(target_arch = "x86_64")]
            Some(Arch::V4(simd)) => Simd::vectorize(simd, op),
            #[cfg(target_arch = "x86_64")]
            Some(Arch::V3(simd)) => Simd::vectorize(simd, op),
            #[cfg(target_arch = "aarch64")]
            Some(Arch::Neon(simd)) => Simd::vectorize(simd, op),
            _ => Simd::vectorize(Scalar128b, op),
        }
    }

    /// Its name, for reports.
    pub(super) fn name(self) -> &'static str {
        match self.arch {
            #[cfg(target_arch = "x86_64")]
            Some(Arch::V4(_)) if self.bf16.is_some() => "AVX-512 with bf16",
            #[cfg(target_arch = "x86_64")]
            Some(Arch::V4(_)) => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Some(Arch::V3(_)) => "AVX2+FMA",
            #[cfg(target_arch = "aarch64")]
            Some(Arch::Neon(_)) => "NEON",
            _ => "portable 4-wide",
        }
    }
}

/// Work that is written for any SIMD level and any shape of [`super::kernel::add_outer_products`].
pub(super) trait WithKernel {
    type Output;

    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, simd: S) -> Self::Output;
}

struct Kernel<Op> {
    op: Op,
    #[cfg(test)]
    wide: bool,
}

impl<Op: WithKernel> WithSimd for Kernel<Op> {
    type Output = Op::Output;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Op::Output {
        #[cfg(test)]
        if self.wide {
            return self.op.with_kernel::<S, 8, 3>(simd);
        }
        if S::REGISTER_COUNT >= 32 {
            self.op.with_kernel::<S, 8, 3>(simd)
        } else {
            self.op.with_kernel::<S, 6, 2>(simd)
        }
    }
}

/// The kernel's shape on one SIMD level.
#[derive(Clone, Copy, Debug)]
pub(super) struct KernelShape {
    /// Broadcast values of a step.
    pub(super) mr: usize,
    /// Rows of a panel.
    pub(super) lanes: usize,
}

impl KernelShape {
    pub(super) fn of<S: Simd, const MR: usize, const NV: usize>() -> Self {
        Self { mr: MR, lanes: NV * S::F32_LANES }
    }
}

/// Asks for a level's [`KernelShape`].
pub(super) struct AskShape;

impl WithKernel for AskShape {
    type Output = KernelShape;

    #[inline(always)]
    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, _: S) -> KernelShape {
        KernelShape::of::<S, MR, NV>()
    }
}

/// Aligned numbers as groups of `NV` vectors.
#[inline(always)]
pub(super) fn vectors<S: Simd, const NV: usize>(floats: &[f32]) -> &[[S::f32s; NV]] {
    S::as_simd_f32s(floats).0.as_chunks::<NV>().0
}

/// Aligned numbers as groups of `NV` vectors.
#[inline(always)]
pub(super) fn vectors_mut<S: Simd, const NV: usize>(floats: &mut [f32]) -> &mut [[S::f32s; NV]] {
    S::as_mut_simd_f32s(floats).0.as_chunks_mut::<NV>().0
}
