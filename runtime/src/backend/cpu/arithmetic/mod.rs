//! Arithmetic on vectors: levels of SIMD, elements of each type, products and exponentials.

pub(super) mod bf16;
pub(super) mod elements;
pub(super) mod exp;
pub(super) mod halves;
pub(super) mod scalar;
pub(super) mod simd;
