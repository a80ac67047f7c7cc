//! Which instruction set runs the kernels.

use pulp::{Arch, Scalar128b, Simd, WithSimd};

use super::bf16::WordProducts;
use crate::backend::cpu::tiles::TileProducts;

/// An instruction set found on this machine, or portable code in vectors of four that any compiler
/// target can lower.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Level {
    /// `None`: portable.
    arch: Option<Arch>,
    /// Products of bf16 elements without a conversion.
    bf16: Option<WordProducts>,
    /// The same by tile registers, for many rows at a time; `Some` only where `bf16` is.
    tiles: Option<TileProducts>,
    /// The kernel for 32 vector registers on any machine, for tests.
    #[cfg(test)]
    wide: bool,
}

impl Level {
    /// The best one that this machine has.
    pub(in crate::backend::cpu) fn detect() -> Self {
        Self::of(match Arch::new() {
            // pulp's scalar level has one lane. Groups of four lanes compile to the vectors of the target.
            Arch::Scalar => None,
            arch => Some(arch),
        })
    }

    /// The one that every machine has.
    #[cfg(test)]
    pub(in crate::backend::cpu) fn portable() -> Self {
        Self::of(None)
    }

    /// The one for AVX2, on machines that have it.
    #[cfg(test)]
    pub(in crate::backend::cpu) fn of_eight_lanes() -> Self {
        #[cfg(target_arch = "x86_64")]
        return Self::of(pulp::x86::V3::try_new().map(Arch::V3));
        #[cfg(not(target_arch = "x86_64"))]
        Self::portable()
    }

    /// This one with the kernel for 32 registers.
    #[cfg(test)]
    pub(in crate::backend::cpu) fn wide(self) -> Self {
        Self { wide: true, ..self }
    }

    /// This one with products of bf16 in f32 arithmetic.
    #[cfg(test)]
    pub(in crate::backend::cpu) fn with_emulated_bf16(self) -> Self {
        Self { bf16: Some(WordProducts::emulated()), tiles: None, ..self }
    }

    /// This one with products of bf16, and products of tiles, in f32 arithmetic. It must have 4 or
    /// 16 lanes.
    #[cfg(test)]
    pub(in crate::backend::cpu) fn with_emulated_tiles(self) -> Self {
        Self { tiles: Some(TileProducts::emulated()), wide: true, ..self.with_emulated_bf16() }
    }

    /// This one without tile registers.
    #[cfg(test)]
    pub(in crate::backend::cpu) fn without_tiles(self) -> Self {
        Self { tiles: None, ..self }
    }

    fn of(arch: Option<Arch>) -> Self {
        let bf16 = match arch {
            #[cfg(target_arch = "x86_64")]
            Some(Arch::V4(_)) => WordProducts::detect(),
            _ => None,
        };
        Self {
            arch,
            bf16,
            tiles: bf16.and_then(|_| TileProducts::detect()),
            #[cfg(test)]
            wide: false,
        }
    }

    /// Its products of bf16, if it has any.
    pub(in crate::backend::cpu) fn bf16(self) -> Option<WordProducts> {
        self.bf16
    }

    /// Its products of bf16 by tile registers, if it has any.
    pub(in crate::backend::cpu) fn tiles(self) -> Option<TileProducts> {
        self.tiles
    }

    /// Runs `op` with this level's kernel.
    #[inline(always)]
    pub(in crate::backend::cpu) fn run<Op: WithKernel>(self, op: Op) -> Op::Output {
        self.dispatch(Kernel {
            op,
            #[cfg(test)]
            wide: self.wide,
            #[cfg(test)]
            tiles: self.tiles.is_some(),
        })
    }

    /// Runs `op`, compiled for this level.
    #[inline(always)]
    pub(in crate::backend::cpu) fn dispatch<Op: WithSimd>(self, op: Op) -> Op::Output {
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
    pub(in crate::backend::cpu) fn name(self) -> &'static str {
        match self.arch {
            #[cfg(target_arch = "x86_64")]
            Some(Arch::V4(_)) if self.tiles.is_some() => "AVX-512 with bf16, AMX",
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
pub(in crate::backend::cpu) trait WithKernel {
    type Output;

    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, simd: S) -> Self::Output;
}

struct Kernel<Op> {
    op: Op,
    #[cfg(test)]
    wide: bool,
    #[cfg(test)]
    tiles: bool,
}

impl<Op: WithKernel> WithSimd for Kernel<Op> {
    type Output = Op::Output;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Op::Output {
        // A panel for tiles has 48 rows.
        #[cfg(test)]
        if self.tiles && S::F32_LANES == 4 {
            return self.op.with_kernel::<S, 8, 12>(simd);
        }
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
pub(in crate::backend::cpu) struct KernelShape {
    /// Broadcast values of a step.
    pub(in crate::backend::cpu) mr: usize,
    /// Rows of a panel.
    pub(in crate::backend::cpu) lanes: usize,
}

impl KernelShape {
    pub(in crate::backend::cpu) fn of<S: Simd, const MR: usize, const NV: usize>() -> Self {
        Self { mr: MR, lanes: NV * S::F32_LANES }
    }
}

/// Asks for a level's [`KernelShape`].
pub(in crate::backend::cpu) struct AskShape;

impl WithKernel for AskShape {
    type Output = KernelShape;

    #[inline(always)]
    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, _: S) -> KernelShape {
        KernelShape::of::<S, MR, NV>()
    }
}

/// `simd` as the level `L`, if it is that one: for instructions that pulp's trait lacks. It is
/// known when the code is compiled.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(in crate::backend::cpu) fn as_level<S: Simd, L: Simd>(simd: S) -> Option<L> {
    (&simd as &dyn std::any::Any).downcast_ref().copied()
}

/// The sum of the lanes of each vector: together they take half of the instructions.
#[inline(always)]
pub(in crate::backend::cpu) fn sums_of_four<S: Simd>(simd: S, vectors: [S::f32s; 4]) -> [f32; 4] {
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::x86::{V3, V4};
        use std::arch::x86_64::{__m256, __m512};
        if let Some(simd) = as_level::<S, V4>(simd) {
            let vectors: [__m512; 4] = bytemuck::cast(vectors);
            let mut halves: [__m256; 4] = bytemuck::Zeroable::zeroed();
            let f = simd.avx512f;
            for (half, vector) in halves.iter_mut().zip(vectors) {
                let high = f._mm512_extractf64x4_pd::<1>(f._mm512_castps_pd(vector));
                let low = f._mm512_castps512_ps256(vector);
                *half = simd.avx._mm256_add_ps(low, simd.avx._mm256_castpd_ps(high));
            }
            return sums_of_halves(*simd, halves);
        }
        if let Some(simd) = as_level::<S, V3>(simd) {
            return sums_of_halves(simd, bytemuck::cast(vectors));
        }
    }
    let mut sums = [0.0; 4];
    for (sum, vector) in sums.iter_mut().zip(vectors) {
        *sum = simd.reduce_sum_f32s(vector);
    }
    sums
}

/// [`sums_of_four`] for vectors of eight lanes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn sums_of_halves(simd: pulp::x86::V3, [a, b, c, d]: [std::arch::x86_64::__m256; 4]) -> [f32; 4] {
    let avx = simd.avx;
    let ab = avx._mm256_add_ps(avx._mm256_unpacklo_ps(a, b), avx._mm256_unpackhi_ps(a, b));
    let cd = avx._mm256_add_ps(avx._mm256_unpacklo_ps(c, d), avx._mm256_unpackhi_ps(c, d));
    let (ab, cd) = (avx._mm256_castps_pd(ab), avx._mm256_castps_pd(cd));
    let even = avx._mm256_castpd_ps(avx._mm256_unpacklo_pd(ab, cd));
    let odd = avx._mm256_castpd_ps(avx._mm256_unpackhi_pd(ab, cd));
    let sums = avx._mm256_add_ps(even, odd);
    let (low, high) = (avx._mm256_castps256_ps128(sums), avx._mm256_extractf128_ps::<1>(sums));
    bytemuck::cast(simd.sse._mm_add_ps(low, high))
}

/// Aligned numbers as groups of `NV` vectors.
#[inline(always)]
pub(in crate::backend::cpu) fn vectors<S: Simd, const NV: usize>(floats: &[f32]) -> &[[S::f32s; NV]] {
    S::as_simd_f32s(floats).0.as_chunks::<NV>().0
}

/// Aligned numbers as groups of `NV` vectors.
#[inline(always)]
pub(in crate::backend::cpu) fn vectors_mut<S: Simd, const NV: usize>(
    floats: &mut [f32],
) -> &mut [[S::f32s; NV]] {
    S::as_mut_simd_f32s(floats).0.as_chunks_mut::<NV>().0
}
