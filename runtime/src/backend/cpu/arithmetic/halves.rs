//! Slices of f16 and bf16 as f32, and back to bf16, in loops that the compiler makes vectors of.
//! The functions of the crate `half` take one element at a time for bf16, and eight in a call of
//! their own for f16.

use half::{bf16, f16};

/// `into` = `from`, exactly. A NaN stays a NaN.
#[inline(always)]
pub(in crate::backend::cpu) fn widen_bf16(from: &[bf16], into: &mut [f32]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// `into` = `from`, exactly. A NaN stays a NaN.
#[inline(always)]
pub(in crate::backend::cpu) fn widen_f16(from: &[f16], into: &mut [f32]) {
    // The exponents of f16 begin 112 lower; f16's smallest numbers become f32's, which the product
    // makes normal ones.
    let shift = f32::from_bits((127 + 112) << 23);
    for (into, from) in into.iter_mut().zip(from) {
        let from = u32::from(from.to_bits());
        let magnitude = f32::from_bits((from & 0x7fff) << 13) * shift;
        let special = if from & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        *into = f32::from_bits(magnitude.to_bits() | special | (from & 0x8000) << 16);
    }
}

/// `into` = `from`, rounded to nearest, ties to even. A NaN stays a NaN.
#[inline(always)]
pub(in crate::backend::cpu) fn narrow_bf16(from: &[f32], into: &mut [bf16]) {
    for (into, from) in into.iter_mut().zip(from) {
        let bits = from.to_bits();
        let even = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff + even) >> 16;
        let nan = (bits >> 16) | 0x40;
        let chosen = if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded };
        #[expect(clippy::cast_possible_truncation, reason = "the upper half was shifted down")]
        let chosen = chosen as u16;
        *into = bf16::from_bits(chosen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_16_bits_is_widened_exactly() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let mut wide = vec![0.0; all.len()];
        widen_bf16(bytemuck::cast_slice(&all), &mut wide);
        for (bits, wide) in all.iter().zip(&wide) {
            let expected = bf16::from_bits(*bits).to_f32();
            assert!(
                wide.to_bits() == expected.to_bits() || (wide.is_nan() && expected.is_nan()),
                "{bits:#x}"
            );
        }
        widen_f16(bytemuck::cast_slice(&all), &mut wide);
        for (bits, wide) in all.iter().zip(&wide) {
            let expected = f16::from_bits(*bits).to_f32();
            assert!(
                wide.to_bits() == expected.to_bits() || (wide.is_nan() && expected.is_nan()),
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn bf16_is_rounded_to_nearest_with_ties_to_even() {
        // Every upper half, with lower halves around the boundaries of rounding.
        let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        let all: Vec<f32> = (0..=u16::MAX)
            .flat_map(|upper| lower.map(|lower| f32::from_bits(u32::from(upper) << 16 | lower)))
            .collect();
        let mut narrow = vec![bf16::ZERO; all.len()];
        narrow_bf16(&all, &mut narrow);
        for (wide, narrow) in all.iter().zip(&narrow) {
            let expected = bf16::from_f32(*wide);
            let same = narrow.to_bits() == expected.to_bits() || (narrow.is_nan() && expected.is_nan());
            assert!(same, "{:#x}: {narrow} is not {expected}", wide.to_bits());
        }
    }
}
