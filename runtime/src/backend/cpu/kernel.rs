//! The one inner loop: a sum of outer products, held in registers. `S = K·Qᵀ` and `O = Vᵀ·P` are both made of it, and all products of
//! the backward pass. The three functions differ in how the broadcast values lie in memory.

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

/// `c[i][lane] += Σ_t a[i · stride + t] · b[t · b_stride][lane]` for `count` steps: the broadcast values are rows of `a`, `stride` apart,
/// and `b` has `b_stride` vectors for each step, of which the first `NV` count.
#[inline(always)]
pub(super) fn add_products_of_rows<S: Simd, const MR: usize, const NV: usize>(
    simd: S,
    mut c: [[S::f32s; NV]; MR],
    (a, stride): (&[f32], usize),
    (b, b_stride): (&[S::f32s], usize),
    count: usize,
) -> [[S::f32s; NV]; MR] {
    // All rows have the same length, so one check of the index serves all.
    let mut rows = [&a[..count]; MR];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = &a[i * stride..][..count];
    }
    for (t, b) in b.chunks(b_stride).take(count).enumerate() {
        let Some(b) = b.first_chunk::<NV>() else { break };
        for (c, row) in c.iter_mut().zip(&rows) {
            let a = simd.splat_f32s(row[t]);
            for (c, b) in c.iter_mut().zip(b) {
                *c = mul_add(simd, a, *b, *c);
            }
        }
    }
    c
}

/// `c[i][lane] += Σ_t a[t · stride + i] · b[t][lane]`: the broadcast values are columns of `a`.
#[inline(always)]
pub(super) fn add_products_of_columns<S: Simd, const MR: usize, const NV: usize>(
    simd: S,
    mut c: [[S::f32s; NV]; MR],
    (a, stride): (&[f32], usize),
    b: &[[S::f32s; NV]],
) -> [[S::f32s; NV]; MR] {
    for (a, b) in a.chunks(stride).zip(b) {
        let Some(a) = a.first_chunk::<MR>() else { break };
        for (c, a) in c.iter_mut().zip(a) {
            let a = simd.splat_f32s(*a);
            for (c, b) in c.iter_mut().zip(b) {
                *c = mul_add(simd, a, *b, *c);
            }
        }
    }
    c
}
