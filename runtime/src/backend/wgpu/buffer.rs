//! A buffer on the device.

use super::memory::Lease;

/// Linear memory on a wgpu device.
#[derive(Debug)]
pub struct WgpuBuffer {
    pub(super) raw: wgpu::Buffer,
    /// As asked for; the buffer itself is a little larger and never empty.
    pub(super) bytes: usize,
    pub(super) _lease: Lease,
}

/// A browser frees the memory of a buffer when it is told to, or when its garbage collector comes by, which does not
/// know how much there is to gain. What was submitted still has the use of it.
#[cfg(target_arch = "wasm32")]
impl Drop for WgpuBuffer {
    fn drop(&mut self) {
        self.raw.destroy();
    }
}
