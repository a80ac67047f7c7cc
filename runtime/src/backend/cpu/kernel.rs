//! The one inner loop: a sum of outer products, held in registers. `S = K·Qᵀ` and `O = Vᵀ·P` are both made of it.

use pulp::Simd;

use super::exp::mul_add;

/// `c[i][lane] += Σ_t a[t][i] · b[t][lane]` for `MR` broadcast values against `NV` vectors.
///
/// `MR · NV` accumulators, `NV` vectors of `b` and one broadcast must fit the register file with one register to spare.
/// Otherwise the compiler spills an accumulator in every step (4 × 3 in 16 registers ran at a third of the speed). So
/// the shapes are 6 × 2 in 16 registers and 8 × 3 in 32. A fused multiply-add takes 4 cycles on current cores and two
/// start in each cycle, so at least 8 accumulators are needed.
#[inline(always)]
pub(super) fn add_outer_products<S: Simd, const MR: usize, const NV: usize>(
    simd: S,
    mut c: [[S::f32s; NV]; MR],
    a: &[[f32; MR]],
    b: &[[S::f32s; NV]],
) -> [[S::f32s; NV]; MR] {
    for (a, b) in a.iter().zip(b) {
        for (c, a) in c.iter_mut().zip(a) {
            let a = simd.splat_f32s(*a);
            for (c, b) in c.iter_mut().zip(b) {
                *c = mul_add(simd, a, *b, *c);
            }
        }
    }
    c
}
