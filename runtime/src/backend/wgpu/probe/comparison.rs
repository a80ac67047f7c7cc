//! What is compared, and what a comparison says.

use kyklos_shaders::AttendVariant;

/// Two kernels for heads of f16.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Candidates {
    pub(in crate::backend::wgpu) portable: AttendVariant,
    pub(in crate::backend::wgpu) matrices: AttendVariant,
    pub(in crate::backend::wgpu) head_dim: u32,
}

/// The kernel for matrix units beside the portable one, on a small problem in f16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probe {
    /// Seconds of the portable kernel: the shortest of some runs.
    pub portable_s: f64,
    /// Seconds of the kernel for matrix units.
    pub matrices_s: f64,
    /// Largest difference of the two in `o`, of values up to 1, and in the log-sum-exp; NaN where
    /// a result is not finite.
    pub difference: f64,
}

impl Probe {
    /// Whether the results are equal but for rounding: matrix units take weights in f16, so each is
    /// off by 2^-11 of itself, and a sum of products with values up to 1 by as much.
    pub fn agrees(&self) -> bool {
        self.difference <= 1.0 / 1024.0
    }
}
