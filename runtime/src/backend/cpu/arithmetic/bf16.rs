//! Products of bf16 operands, two elements in one instruction, with sums in f32.
//!
//! A *word* is 32 bits with two bf16 elements: the first one in the low half. An instruction
//! multiplies both elements of a word by both elements of another one and adds the two products to
//! an f32. So a sum over `n` elements takes `n / 2` steps, over half of the bytes. Words travel in
//! `f32` slices and vectors; only their bits count.
//!
//! `K·Qᵀ` pairs neighbours of the head dimension, as they lie in memory. `Vᵀ·P` pairs neighbouring
//! keys: the weights are rounded to bf16 for it, as kernels for matrix units do. Scores, the
//! maximum, the sum of the weights and all accumulators are f32.
//!
//! The backward pass has dP as K·Qᵀ, dQ as Vᵀ·P, and pairs neighbouring query rows for dK and dV: P
//! and dS are rounded to bf16.

#![cfg_attr(
    not(any(target_arch = "x86_64", test)),
    allow(unused, unreachable_code, reason = "no processor of this target has these products")
)]

use pulp::Simd;

use crate::backend::cpu::kernel::{OfKeys, Scores, WeightedSum};
use crate::backend::cpu::product::WithProduct;

/// Instructions that multiply words.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct WordProducts(Unit);

#[derive(Clone, Copy, Debug)]
enum Unit {
    /// Only [`WordProducts::detect`] makes it.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(test)]
    Emulated,
}

/// The shape of [`super::kernel::add_outer_products`] for which the AVX-512 loops are written, and
/// their lanes.
#[cfg(target_arch = "x86_64")]
const MR: usize = 8;
#[cfg(target_arch = "x86_64")]
const NV: usize = 3;

impl WordProducts {
    /// Those of this machine, if it has any.
    pub(in crate::backend::cpu) fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
            return Some(Self(Unit::Avx512));
        }
        None
    }

    /// The same products in f32 arithmetic, for any kernel shape on any machine.
    #[cfg(test)]
    pub(in crate::backend::cpu) fn emulated() -> Self {
        Self(Unit::Emulated)
    }

    /// Runs `op` with these products, as [`super::kernel::alone`] does with those of f32.
    #[inline(always)]
    pub(in crate::backend::cpu) fn alone<S: Simd, Op: WithProduct>(self, simd: S, op: Op) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => {
                assert!(S::F32_LANES == 16, "vectors are those of AVX-512");
                // SAFETY: only `detect` makes this variant, and it found the feature; whoever has vectors of
                // AVX-512 has the others.
                unsafe { avx512::alone(simd, op) }
            }
            #[cfg(test)]
            Unit::Emulated => crate::backend::cpu::kernel::alone(simd, emulated::Alone { simd, op }),
        }
    }

    /// As [`Scores`], with `k` and `q` in words along the head dimension, and all scores times
    /// `factor`.
    #[inline(always)]
    pub(in crate::backend::cpu) fn scores<S: Simd, const M: usize, const N: usize>(
        self,
        tile: Scores<'_, S, M, N>,
        factor: f32,
    ) {
        let Scores { simd, k, q, into } = tile;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => {
                let _ = simd;
                assert!(M == MR && N * S::F32_LANES == NV * 16, "the kernel's shape is that of AVX-512");
                let q = bytemuck::cast_slice(q.as_flattened());
                let into = bytemuck::cast_slice_mut(into.as_flattened_mut());
                let k = k.as_flattened().as_chunks().0;
                // SAFETY: only `detect` makes this variant, and it found the features.
                unsafe { avx512::scores(k, q, factor, into) }
            }
            #[cfg(test)]
            Unit::Emulated => {
                let zero = [[simd.splat_f32s(0.0); N]; M];
                for (k, into) in k.chunks_exact(q.len()).zip(into.as_chunks_mut::<M>().0) {
                    *into = emulated::add_products(simd, zero, k, q);
                    crate::backend::cpu::kernel::scale(simd, into, &[simd.splat_f32s(factor); N]);
                }
            }
        }
    }

    /// As [`WeightedSum`], with `v` and `p` in words of two keys, and `stride` in words.
    #[inline(always)]
    pub(in crate::backend::cpu) fn weighted_sum<S: Simd, const M: usize, const N: usize>(
        self,
        tile: WeightedSum<'_, S, M, N>,
    ) {
        let WeightedSum { simd, v, stride, p, keep, o } = tile;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => {
                let _ = simd;
                assert!(M == MR && N * S::F32_LANES == NV * 16, "the kernel's shape is that of AVX-512");
                let v = v.as_flattened().as_chunks().0;
                let p = bytemuck::cast_slice(p.as_flattened());
                // An array on the stack: it need not be aligned to a vector.
                let keep = keep.map(|keep| {
                    let mut vectors = [bytemuck::Zeroable::zeroed(); NV];
                    bytemuck::cast_slice_mut(&mut vectors)
                        .copy_from_slice(bytemuck::cast_slice::<S::f32s, f32>(keep));
                    vectors
                });
                let o = bytemuck::cast_slice_mut(o.as_flattened_mut());
                // SAFETY: as in `scores`.
                unsafe { avx512::weighted_sum(v, stride, p, keep, o) }
            }
            #[cfg(test)]
            Unit::Emulated => {
                let zero = [[simd.splat_f32s(0.0); N]; M];
                for (o, v) in o.as_chunks_mut::<M>().0.iter_mut().zip(v.chunks(stride)) {
                    let sums = emulated::add_products(simd, zero, &v[..p.len()], p);
                    crate::backend::cpu::kernel::add_sums(simd, o, &sums, keep);
                }
            }
        }
    }

    /// As [`OfKeys`], with `factors` and `rows` in words of two rows.
    #[inline(always)]
    pub(in crate::backend::cpu) fn of_keys<S: Simd, const M: usize, const N: usize, const W: usize>(
        self,
        product: OfKeys<'_, S, M, N, W>,
    ) {
        let OfKeys { simd, factors, rows, sums, stride } = product;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => {
                let _ = simd;
                assert!(M == MR && N * S::F32_LANES == NV * 16, "the kernel's shape is that of AVX-512");
                let rows = bytemuck::cast_slice(rows.as_flattened());
                let sums = bytemuck::cast_slice_mut(sums.as_flattened_mut());
                // SAFETY: as in `scores`.
                unsafe { avx512::of_keys::<W>(factors, rows, sums, stride) }
            }
            #[cfg(test)]
            Unit::Emulated => {
                let length = N * S::F32_LANES / 2;
                for (rows, sums) in rows.chunks_exact(length).zip(sums.chunks_exact_mut(stride)) {
                    for (factors, sums) in factors.chunks_exact(M * length).zip(sums.as_chunks_mut::<M>().0) {
                        let by_row: Vec<[f32; M]> = (0..length)
                            .map(|row| std::array::from_fn(|key| factors[key * length + row]))
                            .collect();
                        *sums = emulated::add_products(simd, *sums, &by_row, rows);
                    }
                }
            }
        }
    }
}

/// Two vectors of weights as words, rounded to bf16: half up, which differs from half to even only
/// in exact halves. The bits of a NaN may become a number, but the f32 sum of the weights has seen
/// it.
#[inline(always)]
pub(in crate::backend::cpu) fn words_of<S: Simd, const NV: usize>(
    simd: S,
    [low, high]: [[S::f32s; NV]; 2],
) -> [S::f32s; NV] {
    let half = simd.splat_u32s(0x8000);
    let mut words = low;
    for ((word, low), high) in words.iter_mut().zip(&low).zip(&high) {
        let low = simd.add_u32s(simd.transmute_u32s_f32s(*low), half);
        let high = simd.add_u32s(simd.transmute_u32s_f32s(*high), half);
        let low = simd.wrapping_dyn_shr_u32s(low, simd.splat_u32s(16));
        let high = simd.and_u32s(high, simd.splat_u32s(0xffff_0000));
        *word = simd.transmute_f32s_u32s(simd.or_u32s(low, high));
    }
    words
}

/// The element of each word in its low half, or in its high half.
#[inline(always)]
pub(in crate::backend::cpu) fn element_of<S: Simd>(simd: S, words: S::f32s, high: bool) -> S::f32s {
    let words = simd.transmute_u32s_f32s(words);
    simd.transmute_f32s_u32s(if high {
        simd.and_u32s(words, simd.splat_u32s(0xffff_0000))
    } else {
        simd.wrapping_dyn_shl_u32s(words, simd.splat_u32s(16))
    })
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{
        __m512, __m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_mul_ps, _mm512_set1_ps,
    };

    use pulp::Simd;

    use super::{MR, NV};
    use crate::backend::cpu::product::{Product, WithProduct};

    /// Products of words. Only [`alone`] makes it.
    #[derive(Clone, Copy)]
    struct Words(());

    impl Product for Words {
        #[inline(always)]
        fn mul_add<S: Simd>(self, _: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
            // SAFETY: `self` is proof that the processor has the instruction.
            let sum = unsafe { _mm512_dpbf16_ps(bytemuck::cast(c), bytemuck::cast(a), bytemuck::cast(b)) };
            bytemuck::cast(sum)
        }
    }

    /// Runs `op` in a function of its own, which has the features of pulp's level and this one.
    #[inline(never)]
    #[target_feature(enable = "sse3,ssse3,sse4.1,sse4.2,popcnt,avx,avx2,bmi1,bmi2,fma,lzcnt")]
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16")]
    pub(super) fn alone<S: Simd, Op: WithProduct>(simd: S, op: Op) {
        op.with_product(simd, Words(()));
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn scores(k: &[[f32; MR]], q: &[__m512bh], factor: f32, into: &mut [__m512]) {
        let q = q.as_chunks::<NV>().0;
        let factor = _mm512_set1_ps(factor);
        let into = into.as_chunks_mut::<NV>().0.as_chunks_mut::<MR>().0;
        for (k, into) in k.chunks_exact(q.len()).zip(into) {
            let mut sums = add_products([[_mm512_set1_ps(0.0); NV]; MR], k, q);
            for sum in sums.as_flattened_mut() {
                *sum = _mm512_mul_ps(*sum, factor);
            }
            *into = sums;
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn weighted_sum(
        v: &[[f32; MR]],
        stride: usize,
        p: &[__m512bh],
        keep: Option<[__m512; NV]>,
        o: &mut [__m512],
    ) {
        let p = p.as_chunks::<NV>().0;
        for (o, v) in o.as_chunks_mut::<NV>().0.as_chunks_mut::<MR>().0.iter_mut().zip(v.chunks(stride)) {
            let sums = add_products([[_mm512_set1_ps(0.0); NV]; MR], &v[..p.len()], p);
            for (o, sums) in o.iter_mut().zip(&sums) {
                for (j, (o, sum)) in o.iter_mut().zip(sums).enumerate() {
                    *o = match &keep {
                        Some(keep) => _mm512_fmadd_ps(*o, keep[j], *sum),
                        None => _mm512_add_ps(*o, *sum),
                    };
                }
            }
        }
    }

    /// Words of rows in a panel.
    const LENGTH: usize = NV * 16 / 2;

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn of_keys<const W: usize>(
        factors: &[f32],
        rows: &[__m512bh],
        sums: &mut [__m512],
        stride: usize,
    ) {
        let (rows, sums) = (rows.as_chunks::<W>().0, sums.as_chunks_mut::<W>().0);
        for (rows, sums) in rows.as_chunks::<LENGTH>().0.iter().zip(sums.chunks_exact_mut(stride)) {
            let groups = factors.as_chunks::<{ MR * LENGTH }>().0;
            for (factors, sums) in groups.iter().zip(sums.as_chunks_mut::<MR>().0) {
                let mut c = *sums;
                for (t, b) in rows.iter().enumerate() {
                    for (i, c) in c.iter_mut().enumerate() {
                        let a: __m512bh = bytemuck::cast(_mm512_set1_ps(factors[i * LENGTH + t]));
                        for (c, b) in c.iter_mut().zip(b) {
                            *c = _mm512_dpbf16_ps(*c, a, *b);
                        }
                    }
                }
                *sums = c;
            }
        }
    }

    /// [`super::super::kernel::add_outer_products`] of words: the 24 sums stay in registers.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    fn add_products(mut c: [[__m512; NV]; MR], a: &[[f32; MR]], b: &[[__m512bh; NV]]) -> [[__m512; NV]; MR] {
        for (a, b) in a.iter().zip(b) {
            for (c, a) in c.iter_mut().zip(a) {
                let a: __m512bh = bytemuck::cast(_mm512_set1_ps(*a));
                for (c, b) in c.iter_mut().zip(b) {
                    *c = _mm512_dpbf16_ps(*c, a, *b);
                }
            }
        }
        c
    }
}

#[cfg(test)]
mod emulated {
    use pulp::{Simd, WithSimd};

    use super::element_of;
    use crate::backend::cpu::arithmetic::exp::mul_add;
    use crate::backend::cpu::product::{Product, WithProduct};

    #[derive(Clone, Copy)]
    struct Words;

    impl Product for Words {
        #[inline(always)]
        fn mul_add<S: Simd>(self, simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
            let [low, high] =
                [false, true].map(|high| (element_of(simd, a, high), element_of(simd, b, high)));
            mul_add(simd, low.0, low.1, mul_add(simd, high.0, high.1, c))
        }
    }

    pub(super) struct Alone<S, Op> {
        pub(super) simd: S,
        pub(super) op: Op,
    }

    impl<S: Simd, Op: WithProduct> WithSimd for Alone<S, Op> {
        type Output = ();

        #[inline(always)]
        fn with_simd<T: Simd>(self, _: T) {
            self.op.with_product(self.simd, Words);
        }
    }

    /// `c[i][lane] += Σ_t low(a[t][i]) · low(b[t][lane]) + high(a[t][i]) · high(b[t][lane])`.
    #[inline(always)]
    pub(super) fn add_products<S: Simd, const MR: usize, const NV: usize>(
        simd: S,
        mut c: [[S::f32s; NV]; MR],
        a: &[[f32; MR]],
        b: &[[S::f32s; NV]],
    ) -> [[S::f32s; NV]; MR] {
        for (a, b) in a.iter().zip(b) {
            for (c, a) in c.iter_mut().zip(a) {
                let a = simd.splat_f32s(*a);
                for (c, b) in c.iter_mut().zip(b) {
                    for high in [false, true] {
                        *c = mul_add(simd, element_of(simd, a, high), element_of(simd, *b, high), *c);
                    }
                }
            }
        }
        c
    }
}
