//! A buffer on the device.

use super::memory::Lease;

/// Linear memory on a wgpu device.
#[derive(Debug)]
pub struct WgpuBuffer {
    pub(super) raw: wgpu::Buffer,
    /// The requested size. The buffer itself is rounded up and never empty.
    pub(super) bytes: usize,
    pub(super) _lease: Lease,
}

/// Frees the memory at once. Otherwise a browser frees it by its garbage collector, which does not know the size.
/// Submitted work still completes.
#[cfg(target_arch = "wasm32")]
impl Drop for WgpuBuffer {
    fn drop(&mut self) {
        self.raw.destroy();
    }
}
