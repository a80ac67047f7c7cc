//! Exponential and hyperbolic tangent on SIMD vectors.

use pulp::Simd;

/// `a · b + c`, fused where the instruction set can, in two roundings where only a library call
/// could.
#[inline(always)]
pub(in crate::backend::cpu) fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
    // The fallback's vectors are 16 bytes; of the real ones only NEON's are, which has FMA.
    if size_of::<S::f32s>() > 16 || cfg!(target_arch = "aarch64") {
        simd.mul_add_e_f32s(a, b, c)
    } else {
        simd.add_f32s(simd.mul_f32s(a, b), c)
    }
}

/// `e^x` for `x <= 88`, see [`exp_each`].
#[inline(always)]
pub(in crate::backend::cpu) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let [[y]] = exp_each(simd, [[x]]);
    y
}

/// `e^x` of several vectors side by side, for `x <= 88`. Below −87.7 it is exactly 0, NaN stays
/// NaN, and e^0 is exactly 1. The relative error is an ulp (2 without FMA) and `|x|` · 1.4e-8, from
/// log2 e as one f32: of a weight, at most 2^−27 of the largest one of its row, since `|x| · e^x`
/// is at most 1/e.
///
/// One vector alone is a chain of dependent instructions, longer than a core can look ahead; four
/// vectors keep its multipliers busy.
///
/// Splits `x · log2 e` into an integer and a rest in ±½ (by adding 1.5·2²³, which rounds), a
/// minimax polynomial for the rest.
#[inline(always)]
pub(in crate::backend::cpu) fn exp_each<S: Simd, const N: usize, const M: usize>(
    simd: S,
    mut x: [[S::f32s; N]; M],
) -> [[S::f32s; N]; M] {
    // 127 is added to the rounding constant, so that the low bits of the sum are the biased exponent.
    let rounder = simd.splat_f32s(12_582_912.0 + 127.0);
    let factor = simd.splat_f32s(std::f32::consts::LOG2_E);
    let mut shifted = x;
    for (x, shifted) in x.as_flattened_mut().iter_mut().zip(shifted.as_flattened_mut()) {
        // There the biased exponent is 0, so the power is 0 too.
        *x = at_least(simd, simd.splat_f32s(-88.029_69), *x);
        *shifted = mul_add(simd, *x, factor, rounder);
        *x = mul_add(simd, *x, factor, simd.sub_f32s(rounder, *shifted));
    }
    let mut p = [[simd.splat_f32s(POWERS[0]); N]; M];
    for c in &POWERS[1..] {
        let c = simd.splat_f32s(*c);
        for (p, x) in p.as_flattened_mut().iter_mut().zip(x.as_flattened()) {
            *p = mul_add(simd, *p, *x, c);
        }
    }
    for (p, shifted) in p.as_flattened_mut().iter_mut().zip(shifted.as_flattened()) {
        // Multiplying keeps a NaN a NaN, adding to the exponent's bits would not.
        let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(*shifted), simd.splat_u32s(23));
        *p = simd.mul_f32s(*p, simd.transmute_f32s_u32s(power));
    }
    p
}

/// The smaller one of `x` and 0; NaN where `x` is NaN.
#[inline(always)]
pub(in crate::backend::cpu) fn at_most_zero<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let zero = simd.splat_f32s(0.0);
    // As in `at_least`.
    if size_of::<S::f32s>() > 16 && cfg!(any(target_arch = "x86", target_arch = "x86_64")) {
        simd.min_f32s(zero, x)
    } else {
        simd.select_f32s(simd.less_than_f32s(zero, x), zero, x)
    }
}

/// The larger one; NaN where `x` is NaN.
#[inline(always)]
fn at_least<S: Simd>(simd: S, bound: S::f32s, x: S::f32s) -> S::f32s {
    // One instruction on x86: it returns the second operand when either one is NaN. On other targets a
    // maximum may return the number.
    if size_of::<S::f32s>() > 16 && cfg!(any(target_arch = "x86", target_arch = "x86_64")) {
        simd.max_f32s(bound, x)
    } else {
        simd.select_f32s(simd.less_than_f32s(x, bound), bound, x)
    }
}

/// `tanh x` to about 2 ulp; NaN stays NaN.
#[inline(always)]
pub(in crate::backend::cpu) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let magnitude = simd.abs_f32s(x);
    // Small x: x + x³·p(x²), because 1 − 2/(e^2x + 1) cancels there.
    let square = simd.mul_f32s(x, x);
    let mut p = simd.splat_f32s(TANH[0]);
    for c in &TANH[1..] {
        p = mul_add(simd, p, square, simd.splat_f32s(*c));
    }
    let small = mul_add(simd, simd.mul_f32s(p, square), x, x);
    // From 10 on it is 1 in f32. A comparison, not a minimum, so that NaN passes on every instruction
    // set.
    let ten = simd.splat_f32s(10.0);
    let bounded = simd.select_f32s(simd.less_than_f32s(ten, magnitude), ten, magnitude);
    let e = exp(simd, simd.add_f32s(bounded, bounded));
    let one = simd.splat_f32s(1.0);
    let fraction = simd.div_f32s(simd.splat_f32s(2.0), simd.add_f32s(e, one));
    let large = simd.sub_f32s(one, fraction);
    let signed = simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(0.0)), simd.neg_f32s(large), large);
    simd.select_f32s(simd.less_than_f32s(magnitude, simd.splat_f32s(0.625)), small, signed)
}

/// Minimax for 2^x on ±½ with the constant held at 1, highest power first; relative error below
/// 4e-9.
const POWERS: [f32; 7] =
    [1.535_334_2e-4, 1.339_887_2e-3, 9.618_438e-3, 5.550_332_4e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0];
/// Minimax for (tanh x − x) / x³ in x² on ±0.625, highest power first (Cephes, S. L. Moshier).
const TANH: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;

    struct Map<'a> {
        values: &'a mut [f32],
        tanh: bool,
    }

    impl pulp::WithSimd for Map<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let (vectors, rest) = S::as_mut_simd_f32s(self.values);
            assert!(rest.is_empty(), "the test feeds whole vectors");
            for v in vectors {
                *v = if self.tanh { tanh(simd, *v) } else { exp(simd, *v) };
            }
        }
    }

    fn map(level: Level, values: &[f32], tanh: bool) -> Vec<f32> {
        let mut out = values.to_vec();
        out.resize(values.len().next_multiple_of(16), 0.0);
        level.dispatch(Map { values: &mut out, tanh });
        out.truncate(values.len());
        out
    }

    /// The largest error, in ulp, beyond `growth · |x|` ulp.
    fn worst_ulp(level: Level, values: &[f32], tanh: bool, exact: fn(f64) -> f64, growth: f64) -> f64 {
        let got = map(level, values, tanh);
        values
            .iter()
            .zip(got)
            .map(|(x, y)| {
                let exact = exact(f64::from(*x));
                let ulp = f64::from((exact as f32).abs().next_up()) - f64::from((exact as f32).abs());
                (f64::from(y) - exact).abs() / ulp - growth * f64::from(x.abs())
            })
            .fold(0.0, f64::max)
    }

    /// log2 e in f32 is off by 1.34e-8: at most 0.225 ulp of the power for each unit of x. Without
    /// FMA the product is rounded too.
    #[test]
    fn exp_is_within_an_ulp_of_f64_near_zero_and_a_quarter_for_each_unit_below() {
        let values: Vec<f32> = (0..2_000_000).map(|i| -87.3 + i as f32 * 44e-6).collect();
        for (level, allowed, growth) in [(Level::detect(), 1.1, 0.225), (Level::portable(), 2.0, 1.225)] {
            let worst = worst_ulp(level, &values, false, f64::exp, growth);
            assert!(worst <= allowed, "{level:?}: {worst} ulp");
        }
    }

    #[test]
    fn exp_keeps_nan_and_underflows_to_exact_zero() {
        let quiet_payload = f32::from_bits(0x7fc0_0001);
        let input = [0.0, -0.0, f32::NEG_INFINITY, -87.8, -1e30, f32::MIN, f32::NAN, quiet_payload];
        for level in [Level::detect(), Level::portable()] {
            let got = map(level, &input, false);
            assert_eq!(got[..6], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
            assert!(got[6].is_nan() && got[7].is_nan());
        }
    }

    #[test]
    fn tanh_is_within_three_ulp_of_f64_and_ends_at_one() {
        let values: Vec<f32> = (0..400_001).map(|i| (i as f32 - 200_000.0) * 6e-5).collect();
        for level in [Level::detect(), Level::portable()] {
            let worst = worst_ulp(level, &values, true, f64::tanh, 0.0);
            assert!(worst <= 3.0, "{level:?}: {worst} ulp");
            let got = map(level, &[f32::INFINITY, f32::NEG_INFINITY, 1e30, f32::NAN, 0.0], true);
            assert_eq!(got[..3], [1.0, -1.0, 1.0]);
            assert!(got[3].is_nan());
            assert_eq!(got[4], 0.0);
        }
    }
}
