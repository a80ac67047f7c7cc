//! The multiply-add of a loop: of f32, or of words of two bf16 elements (module `bf16`).

use pulp::Simd;

use crate::backend::cpu::arithmetic::exp;

/// `a · b + c` in each lane; what a lane of `a` and `b` holds is the product's own matter.
pub(super) trait Product: Copy {
    fn mul_add<S: Simd>(self, simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s;
}

/// Loops that are written for any product.
pub(super) trait WithProduct {
    fn with_product<S: Simd, P: Product>(self, simd: S, product: P);
}

/// Products of f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floats;

impl Product for Floats {
    #[inline(always)]
    fn mul_add<S: Simd>(self, simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
        exp::mul_add(simd, a, b, c)
    }
}
