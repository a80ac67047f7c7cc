//! Functions of single numbers, with the same bits on every system.
//!
//! Those of the standard library are the C library's, and each C library rounds its own way: with
//! them one call gave other bytes on Windows than on Linux. These are computed in f64 in Rust;
//! rounded to f32 nearly all results are the nearest number.
#![expect(clippy::cast_possible_truncation, reason = "rounding to f32 is what these functions end with")]

pub(in crate::backend::cpu) fn exp(x: f32) -> f32 {
    libm::exp(f64::from(x)) as f32
}

pub(in crate::backend::cpu) fn ln(x: f32) -> f32 {
    libm::log(f64::from(x)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST_EXP: u64 = 0xdfcf_68a4_551b_86b6;
    const DIGEST_LN: u64 = 0xee20_866e_398c_e831;

    /// FNV-1a over the bits of `f` at 20000 arguments.
    fn digest(f: impl Fn(f32) -> f32) -> u64 {
        (0..20_000_u32).fold(0xcbf2_9ce4_8422_2325, |hash, i| {
            let bits = f(i as f32 / 256.0).to_bits();
            (hash ^ u64::from(bits)).wrapping_mul(0x100_0000_01b3)
        })
    }

    /// The digests are of the nearest f32 of each result, computed with 60 digits (Python's
    /// `decimal`).
    #[test]
    fn every_system_computes_the_same_bits() {
        assert_eq!(digest(|x| exp(-x)), DIGEST_EXP, "exp");
        assert_eq!(digest(|x| ln(x + 0.125)), DIGEST_LN, "ln");
    }

    #[test]
    fn what_is_not_finite_is_as_in_the_standard_library() {
        assert_eq!((exp(f32::NEG_INFINITY), exp(0.0), exp(f32::INFINITY)), (0.0, 1.0, f32::INFINITY));
        assert_eq!((ln(0.0), ln(1.0), ln(f32::INFINITY)), (f32::NEG_INFINITY, 0.0, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan() && ln(f32::NAN).is_nan() && ln(-1.0).is_nan());
    }
}
