//! Elements of keys and values where they lie, as words of 32 bits: one f32, or two neighbours of
//! 16 bits. A vector of words becomes one or two vectors of f32 in registers. So rows of 16 bits
//! need no converted copy, and half of the bytes are read.
//!
//! The *order of words* of a row: the first elements of a vector of words, then their second
//! elements, then those of the next vector. Queries and sums that meet such elements are kept in
//! that order. Where an instruction converts f16, theirs is the order in memory.

use bytemuck::Pod;
use pulp::Simd;

#[cfg(target_arch = "x86_64")]
use super::simd::as_level;
use kyklos_plan::Dtype;

/// A type of elements, `N` of which make a word.
pub(in crate::backend::cpu) trait Element<const N: usize> {
    /// As it lies in memory. Rows need not be aligned to more.
    type Stored: Pod;
    /// A vector of words.
    type Words<S: Simd>: Copy;

    /// In a word, the bits of the exponents, and their lowest bits.
    const EXPONENTS: [u32; 2];

    /// The whole vectors of a row, and the elements after them.
    fn vectors<S: Simd>(row: &[Self::Stored]) -> (&[Self::Words<S>], &[Self::Stored]);

    /// Less than a vector of elements; 0 after them.
    fn partial<S: Simd>(simd: S, rest: &[Self::Stored]) -> Self::Words<S>;

    /// The elements of words, exactly: first all first ones. A NaN stays a NaN.
    fn of_words<S: Simd>(simd: S, words: Self::Words<S>) -> [S::f32s; N];
}

pub(in crate::backend::cpu) struct F32;
pub(in crate::backend::cpu) struct F16;
pub(in crate::backend::cpu) struct Bf16;
/// bf16, whose words stay words, for products of words (module `bf16`).
pub(in crate::backend::cpu) struct Bf16Words;

impl Element<1> for F32 {
    type Stored = f32;
    type Words<S: Simd> = S::f32s;

    const EXPONENTS: [u32; 2] = [0x7f80_0000, 0x0080_0000];

    #[inline(always)]
    fn vectors<S: Simd>(row: &[f32]) -> (&[S::f32s], &[f32]) {
        S::as_simd_f32s(row)
    }

    #[inline(always)]
    fn partial<S: Simd>(simd: S, rest: &[f32]) -> S::f32s {
        simd.partial_load_f32s(rest)
    }

    #[inline(always)]
    fn of_words<S: Simd>(_: S, words: S::f32s) -> [S::f32s; 1] {
        [words]
    }
}

impl Element<1> for Bf16Words {
    type Stored = u16;
    type Words<S: Simd> = S::u16s;

    const EXPONENTS: [u32; 2] = <Bf16 as Halves>::EXPONENTS;

    #[inline(always)]
    fn vectors<S: Simd>(row: &[u16]) -> (&[S::u16s], &[u16]) {
        S::as_simd_u16s(row)
    }

    #[inline(always)]
    fn partial<S: Simd>(_: S, rest: &[u16]) -> S::u16s {
        partial_halves::<S>(rest)
    }

    #[inline(always)]
    fn of_words<S: Simd>(_: S, words: S::u16s) -> [S::f32s; 1] {
        [bytemuck::cast(words)]
    }
}

/// Words with an element of `low` and the same element of `high`: of the first elements of words,
/// and of the second ones.
#[inline(always)]
pub(in crate::backend::cpu) fn paired<S: Simd>(simd: S, low: S::u16s, high: S::u16s) -> [S::f32s; 2] {
    let (low, high): (S::u32s, S::u32s) = (bytemuck::cast(low), bytemuck::cast(high));
    let (sixteen, uppers) = (simd.splat_u32s(16), simd.splat_u32s(0xffff_0000));
    let lowers = simd.splat_u32s(0xffff);
    let first = simd.or_u32s(simd.and_u32s(low, lowers), simd.wrapping_dyn_shl_u32s(high, sixteen));
    let second = simd.or_u32s(simd.wrapping_dyn_shr_u32s(low, sixteen), simd.and_u32s(high, uppers));
    [simd.transmute_f32s_u32s(first), simd.transmute_f32s_u32s(second)]
}

/// Elements of 16 bits.
trait Halves {
    /// In a word, the bits of the exponents, and their lowest bits.
    const EXPONENTS: [u32; 2];

    /// Elements in the upper halves of words as f32.
    fn widened<S: Simd>(simd: S, uppers: S::u32s) -> S::f32s;

    /// As [`Element::of_words`], where the instruction set has a better way.
    #[inline(always)]
    fn native<S: Simd>(_: S, _: S::u16s) -> Option<[S::f32s; 2]> {
        None
    }
}

impl<H: Halves> Element<2> for H {
    type Stored = u16;
    type Words<S: Simd> = S::u16s;

    const EXPONENTS: [u32; 2] = H::EXPONENTS;

    #[inline(always)]
    fn vectors<S: Simd>(row: &[u16]) -> (&[S::u16s], &[u16]) {
        S::as_simd_u16s(row)
    }

    #[inline(always)]
    fn partial<S: Simd>(_: S, rest: &[u16]) -> S::u16s {
        partial_halves::<S>(rest)
    }

    #[inline(always)]
    fn of_words<S: Simd>(simd: S, words: S::u16s) -> [S::f32s; 2] {
        if let Some(vectors) = H::native(simd, words) {
            return vectors;
        }
        let words: S::u32s = bytemuck::cast(words);
        let first = simd.wrapping_dyn_shl_u32s(words, simd.splat_u32s(16));
        let second = simd.and_u32s(words, simd.splat_u32s(0xffff_0000));
        [H::widened(simd, first), H::widened(simd, second)]
    }
}

impl Halves for Bf16 {
    const EXPONENTS: [u32; 2] = [0x7f80_7f80, 0x0080_0080];

    #[inline(always)]
    fn widened<S: Simd>(simd: S, uppers: S::u32s) -> S::f32s {
        simd.transmute_f32s_u32s(uppers)
    }
}

impl Halves for F16 {
    const EXPONENTS: [u32; 2] = [0x7c00_7c00, 0x0400_0400];

    #[inline(always)]
    fn widened<S: Simd>(simd: S, uppers: S::u32s) -> S::f32s {
        let sign = simd.and_u32s(uppers, simd.splat_u32s(0x8000_0000));
        let rest = simd.and_u32s(uppers, simd.splat_u32s(0x7fff_0000));
        // Exponents of f16 begin 112 lower. Its smallest numbers become those of f32, which the product
        // makes normal ones.
        let magnitude = simd.wrapping_dyn_shr_u32s(rest, simd.splat_u32s(3));
        let scale = simd.splat_f32s(f32::from_bits((127 + 112) << 23));
        let magnitude = simd.mul_f32s(simd.transmute_f32s_u32s(magnitude), scale);
        // The largest exponent, of ∞ and NaN, stands for 65,536 and more now.
        let special = simd.greater_than_or_equal_f32s(magnitude, simd.splat_f32s(65_536.0));
        let magnitude = simd.transmute_u32s_f32s(magnitude);
        let infinite = simd.or_u32s(magnitude, simd.splat_u32s(f32::INFINITY.to_bits()));
        let magnitude = simd.select_u32s(special, infinite, magnitude);
        simd.transmute_f32s_u32s(simd.or_u32s(magnitude, sign))
    }

    /// One instruction for each half of the vector, whose elements stay in their order.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn native<S: Simd>(simd: S, words: S::u16s) -> Option<[S::f32s; 2]> {
        let simd = as_level::<S, pulp::x86::V4>(simd)?;
        let [low, high]: [std::arch::x86_64::__m256i; 2] = bytemuck::cast(words);
        Some([
            bytemuck::cast(simd.avx512f._mm512_cvtph_ps(low)),
            bytemuck::cast(simd.avx512f._mm512_cvtph_ps(high)),
        ])
    }
}

/// pulp's own partial load of 16-bit elements does not compile for AVX-512.
#[inline(always)]
fn partial_halves<S: Simd>(rest: &[u16]) -> S::u16s {
    let mut words: S::u16s = bytemuck::Zeroable::zeroed();
    bytemuck::cast_slice_mut::<_, u16>(std::slice::from_mut(&mut words))[..rest.len()].copy_from_slice(rest);
    words
}

/// Where each element of a row is in the order of words.
#[inline(always)]
pub(in crate::backend::cpu) fn order_of_words<S: Simd>(
    elements: usize,
    dtype: Dtype,
) -> impl Iterator<Item = usize> {
    let per_word = if in_order::<S>(dtype) { 1 } else { 4 / dtype.bytes() };
    let vector = per_word * S::F32_LANES;
    (0..elements).map(move |element| {
        let (first, within) = (element / vector * vector, element % vector);
        first + within % per_word * S::F32_LANES + within / per_word
    })
}

/// Whether the order of words is that in memory.
pub(in crate::backend::cpu) fn in_order<S: Simd>(dtype: Dtype) -> bool {
    dtype == Dtype::F32 || dtype == Dtype::F16 && f16_in_order::<S>()
}

/// Whether the instruction set converts f16, so that their order is that in memory.
fn f16_in_order<S: Simd>() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::any::TypeId::of::<S>() == std::any::TypeId::of::<pulp::x86::V4>();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Consecutive rows of a head, where they lie.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Rows<'a, T> {
    elements: &'a [T],
    stride: usize,
    dim: usize,
}

impl<'a, T: Pod> Rows<'a, T> {
    /// Rows of `dim` elements, each `stride` elements after the one before.
    pub(in crate::backend::cpu) fn new(elements: &'a [T], stride: usize, dim: usize) -> Self {
        Self { elements, stride, dim }
    }

    #[inline(always)]
    pub(in crate::backend::cpu) fn row(&self, index: usize) -> &'a [T] {
        &self.elements[index * self.stride..][..self.dim]
    }

    /// Bytes from an element to that of the row `rows` further on.
    #[inline(always)]
    pub(in crate::backend::cpu) fn bytes_between(&self, rows: usize) -> usize {
        rows * self.stride * size_of::<T>()
    }

    /// Whether the first `count` rows hold neither NaN nor ∞.
    pub(in crate::backend::cpu) fn are_finite<E: Element<N, Stored = T>, const N: usize>(
        &self,
        count: usize,
    ) -> bool {
        let [exponents, lowest] = E::EXPONENTS;
        let mut carries = 0;
        for index in 0..count {
            for word in bytemuck::cast_slice::<T, u8>(self.row(index)).as_chunks::<4>().0 {
                // Beyond the largest exponent is the sign.
                carries |= (u32::from_ne_bytes(*word) & exponents) + lowest;
            }
        }
        carries & 0x8000_8000 == 0
    }
}

/// Lets the processor load the cache line that is so many bytes ahead of an element; it need not be
/// one of the program's. Into the second cache: a load into the first one occupies one of its few
/// places for misses until memory answers, and took twice the time on a Zen 4.
#[inline(always)]
pub(in crate::backend::cpu) fn load_ahead<T>(from: &T, bytes: usize) {
    let at = std::ptr::from_ref(from).cast::<i8>().wrapping_add(bytes);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: all processors of this target have the instruction, and it accesses no memory that the program
    // could notice.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use pulp::WithSimd;

    use super::*;
    use crate::backend::cpu::arithmetic::simd::Level;

    /// Takes a row of 16-bit elements apart, into f32 in their own order.
    struct TakeApart<'a> {
        row: &'a [u16],
        dtype: Dtype,
    }

    impl WithSimd for TakeApart<'_> {
        type Output = Vec<f32>;

        fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
            let Self { row, dtype } = self;
            let (whole, rest) = Bf16::vectors::<S>(row);
            let all = whole.iter().copied().chain((!rest.is_empty()).then(|| Bf16::partial::<S>(simd, rest)));
            let mut in_order_of_words = Vec::new();
            for words in all {
                let vectors = match dtype {
                    Dtype::F16 => F16::of_words(simd, words),
                    _ => Bf16::of_words(simd, words),
                };
                in_order_of_words.extend_from_slice(bytemuck::cast_slice::<S::f32s, f32>(&vectors));
            }
            let padded = in_order_of_words.len();
            order_of_words::<S>(padded, dtype).take(row.len()).map(|at| in_order_of_words[at]).collect()
        }
    }

    #[test]
    fn every_number_of_16_bits_is_widened_exactly_and_keeps_its_place() {
        // Rows of every length begin at every number, whole vectors or not.
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for level in [Level::portable(), Level::detect()] {
            for dtype in [Dtype::F16, Dtype::Bf16] {
                for row in all.chunks(72) {
                    let wide = level.dispatch(TakeApart { row, dtype });
                    assert_eq!(wide.len(), row.len());
                    for (bits, wide) in row.iter().zip(wide) {
                        let expected = match dtype {
                            Dtype::F16 => f16::from_bits(*bits).to_f32(),
                            _ => bf16::from_bits(*bits).to_f32(),
                        };
                        let same =
                            wide.to_bits() == expected.to_bits() || (wide.is_nan() && expected.is_nan());
                        assert!(same, "{dtype} {bits:#x} on {level:?}: {wide} is not {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_number_that_is_not_finite_is_found_wherever_it_is() {
        fn check<E: Element<N>, const N: usize>(one: E::Stored, largest: E::Stored, others: &[E::Stored]) {
            for at in 0..3 * 24 {
                let mut rows = vec![one; 3 * 24];
                rows[at] = largest;
                assert!(Rows::new(&rows, 24, 24).are_finite::<E, N>(3));
                for other in others {
                    rows[at] = *other;
                    let rows = Rows::new(&rows, 24, 24);
                    assert!(!rows.are_finite::<E, N>(3));
                    assert_eq!(rows.are_finite::<E, N>(2), at >= 48);
                }
            }
        }
        check::<F32, 1>(1.0, f32::MIN, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN]);
        let f16s = [f16::NAN, f16::INFINITY, f16::NEG_INFINITY, -f16::NAN].map(f16::to_bits);
        check::<F16, 2>(f16::ONE.to_bits(), f16::MIN.to_bits(), &f16s);
        let bf16s = [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY, -bf16::NAN].map(bf16::to_bits);
        check::<Bf16, 2>(bf16::ONE.to_bits(), bf16::MIN.to_bits(), &bf16s);
    }
}
