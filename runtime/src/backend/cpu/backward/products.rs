//! The product of which dK and dV are made, as a function of its own ([`alone`](super::super::kernel::alone)). The others are those of
//! the forward pass.

use pulp::{Simd, WithSimd};

use super::super::exp::mul_add;

/// `sums[key][d] += Σ_row factors[key][row] · rows[row][d]`: dK and dV, with the elements of a head in lanes. Rows and sums are cut into
/// blocks of `W` vectors, one after the other.
///
/// Every lane of a panel is a row here. The number of lanes is known to the compiler, so that it needs one address for the broadcasts of
/// a group of keys, and no checks.
pub(super) struct OfKeys<'a, S: Simd, const MR: usize, const NV: usize, const W: usize> {
    pub(super) simd: S,
    /// `[key]`, in whole groups of `MR` keys.
    pub(super) factors: &'a [[S::f32s; NV]],
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
        let blocks = rows.chunks_exact(NV * S::F32_LANES);
        for (rows, sums) in blocks.zip(sums.chunks_exact_mut(stride)) {
            for (factors, sums) in factors.as_chunks::<MR>().0.iter().zip(sums.as_chunks_mut::<MR>().0) {
                *sums = add_products_of_rows(simd, *sums, factors, rows);
            }
        }
    }
}

/// `c[i][lane] += Σ_t a[i][t] · b[t][lane]`: the broadcast values are rows of `a`.
#[inline(always)]
fn add_products_of_rows<S: Simd, const MR: usize, const NV: usize, const W: usize>(
    simd: S,
    mut c: [[S::f32s; W]; MR],
    a: &[[S::f32s; NV]; MR],
    b: &[[S::f32s; W]],
) -> [[S::f32s; W]; MR] {
    let length = NV * S::F32_LANES;
    let a = bytemuck::cast_slice::<S::f32s, f32>(a.as_flattened());
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
