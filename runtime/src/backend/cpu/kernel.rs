//! The one inner loop: a sum of outer products, held in registers. `S = K·Qᵀ` and `O = Vᵀ·P` are
//! both made of it, and all products of the backward pass; those for dK and dV have a loop of their
//! own, because their broadcast values lie otherwise in memory.
//!
//! The loops over a tile are functions of their own ([`alone`]). Within the code around them the
//! compiler ran out of registers and kept one accumulator in memory, which halved the speed: each
//! step then waits for the store and the load of the step before.

use pulp::{Simd, WithSimd};

use crate::backend::cpu::arithmetic::exp::mul_add;

/// `c[i][lane] += Σ_t a[t][i] · b[t][lane]` for `MR` broadcast values against `NV` vectors.
///
/// `MR · NV` accumulators, `NV` vectors of `b` and one broadcast must fit the register file with
/// one register to spare. Otherwise the compiler spills an accumulator in every step (4 × 3 in 16
/// registers ran at a third of the speed). So the shapes are 6 × 2 in 16 registers and 8 × 3 in 32.
/// A fused multiply-add takes 4 cycles on current cores and two start in each cycle, so at least 8
/// accumulators are needed.
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

/// Runs `op` with the instruction set of `simd`, as a function with registers of its own.
///
/// This function lacks the instruction set, so the compiler cannot put the one that it calls in
/// line here; and it is not put in line where it is called.
#[inline(never)]
pub(super) fn alone<S: Simd, Op: WithSimd<Output = ()>>(simd: S, op: Op) {
    simd.vectorize(op);
}

/// The scores of a tile: `into[key][row] = Σ_d k[key / MR][d][key % MR] · q[d][row]`.
pub(super) struct Scores<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) simd: S,
    /// `[key / MR][dim][MR]`.
    pub(super) k: &'a [[f32; MR]],
    /// `[dim]`.
    pub(super) q: &'a [[S::f32s; NV]],
    /// `[key]`.
    pub(super) into: &'a mut [[S::f32s; NV]],
}

impl<S: Simd, const MR: usize, const NV: usize> WithSimd for Scores<'_, S, MR, NV> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, k, q, into } = self;
        let zero = [[simd.splat_f32s(0.0); NV]; MR];
        for (k, into) in k.chunks_exact(q.len()).zip(into.as_chunks_mut::<MR>().0) {
            *into = add_outer_products(simd, zero, k, q);
        }
    }
}

/// The weighted sum of a tile's values: `o[d][row] = o[d][row] · keep[row] + Σ_key v[d / MR][key][d
/// % MR] · p[key][row]`.
pub(super) struct WeightedSum<'a, S: Simd, const MR: usize, const NV: usize> {
    pub(super) simd: S,
    /// `[dim / MR][stride][MR]`, from the first key on.
    pub(super) v: &'a [[f32; MR]],
    /// Keys in a group of `v`.
    pub(super) stride: usize,
    /// `[key]`.
    pub(super) p: &'a [[S::f32s; NV]],
    /// `None`: 1.
    pub(super) keep: Option<&'a [S::f32s; NV]>,
    /// `[dim]`.
    pub(super) o: &'a mut [[S::f32s; NV]],
}

impl<S: Simd, const MR: usize, const NV: usize> WithSimd for WeightedSum<'_, S, MR, NV> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, v, stride, p, keep, o } = self;
        let zero = [[simd.splat_f32s(0.0); NV]; MR];
        for (o, v) in o.as_chunks_mut::<MR>().0.iter_mut().zip(v.chunks(stride)) {
            add_sums(simd, o, &add_outer_products(simd, zero, &v[..p.len()], p), keep);
        }
    }
}

/// `o[d][row] = o[d][row] · keep[row] + sums[d][row]`. Each tile has a sum of its own: one sum over
/// all keys would lose digits with each.
#[inline(always)]
pub(super) fn add_sums<S: Simd, const NV: usize>(
    simd: S,
    o: &mut [[S::f32s; NV]],
    sums: &[[S::f32s; NV]],
    keep: Option<&[S::f32s; NV]>,
) {
    for (o, sums) in o.iter_mut().zip(sums) {
        for (j, (o, sum)) in o.iter_mut().zip(sums).enumerate() {
            *o = match keep {
                Some(keep) => mul_add(simd, *o, keep[j], *sum),
                None => simd.add_f32s(*o, *sum),
            };
        }
    }
}

/// `o[d][row] *= keep[row]`.
#[inline(always)]
pub(super) fn scale<S: Simd, const NV: usize>(simd: S, o: &mut [[S::f32s; NV]], keep: &[S::f32s; NV]) {
    for o in o {
        for (o, keep) in o.iter_mut().zip(keep) {
            *o = simd.mul_f32s(*o, *keep);
        }
    }
}

/// `sums[key][d] += Σ_row factors[key][row] · rows[row][d]`: dK and dV, with the elements of a head
/// in lanes. Rows and sums are cut into blocks of `W` vectors, one after the other.
///
/// Every lane of a panel is a row here. The number of lanes is known to the compiler, so that it
/// needs one address for the broadcasts of a group of keys, and no checks.
pub(super) struct OfKeys<'a, S: Simd, const MR: usize, const NV: usize, const W: usize> {
    pub(super) simd: S,
    /// `[key][row]`, in whole groups of `MR` keys.
    pub(super) factors: &'a [f32],
    /// `[block][row]`
    pub(super) rows: &'a [[S::f32s; W]],
    /// `[block][stride]`, from the first key on.
    pub(super) sums: &'a mut [[S::f32s; W]],
    /// Keys in a block of `sums`.
    pub(super) stride: usize,
}

impl<S: Simd, const MR: usize, const NV: usize, const W: usize> WithSimd for OfKeys<'_, S, MR, NV, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<T: Simd>(self, _: T) {
        let Self { simd, factors, rows, sums, stride } = self;
        let length = NV * S::F32_LANES;
        for (rows, sums) in rows.chunks_exact(length).zip(sums.chunks_exact_mut(stride)) {
            for (factors, sums) in factors.chunks_exact(MR * length).zip(sums.as_chunks_mut::<MR>().0) {
                *sums = add_products_of_rows::<S, MR, NV, W>(simd, *sums, factors, rows);
            }
        }
    }
}

/// `c[i][lane] += Σ_t a[i][t] · b[t][lane]`: the broadcast values are rows of `a`.
#[inline(always)]
fn add_products_of_rows<S: Simd, const MR: usize, const NV: usize, const W: usize>(
    simd: S,
    mut c: [[S::f32s; W]; MR],
    a: &[f32],
    b: &[[S::f32s; W]],
) -> [[S::f32s; W]; MR] {
    let length = NV * S::F32_LANES;
    let a = &a[..MR * length];
    for (t, b) in b[..length].iter().enumerate() {
        for (i, c) in c.iter_mut().enumerate() {
            let a = simd.splat_f32s(a[i * length + t]);
            for (c, b) in c.iter_mut().zip(b) {
                *c = mul_add(simd, a, *b, *c);
            }
        }
    }
    c
}
