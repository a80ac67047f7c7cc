//! Which instruction set runs the kernels.

use pulp::{Arch, Scalar128b, Simd, WithSimd};

/// An instruction set found on this machine, or portable code in vectors of four that any compiler target can lower.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level(Option<Arch>);

impl Level {
    /// The best one that this machine has.
    pub(super) fn detect() -> Self {
        match Arch::new() {
            // Not pulp's one lane at a time: four at a time become whatever vectors the target has.
            Arch::Scalar => Self(None),
            arch => Self(Some(arch)),
        }
    }

    /// The one that every machine has.
    #[cfg(test)]
    pub(super) fn portable() -> Self {
        Self(None)
    }

    /// Runs `op`, compiled for this level.
    #[inline(always)]
    pub(super) fn dispatch<Op: WithSimd>(self, op: Op) -> Op::Output {
        match self.0 {
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
        match self.0 {
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
