//! A buffer on the device.

use std::sync::Arc;

use super::memory::Lease;

/// Linear memory on a wgpu device.
#[derive(Clone, Debug)]
pub struct WgpuBuffer {
    pub(super) raw: wgpu::Buffer,
    /// The requested size. The buffer itself is rounded up and never empty.
    pub(super) bytes: usize,
    pub(super) _memory: Arc<HeldMemory>,
}

impl WgpuBuffer {
    /// The buffer of wgpu.
    pub fn raw(&self) -> &wgpu::Buffer {
        &self.raw
    }
}

/// The device memory of a buffer and all its handles; freed with the last of them.
#[derive(Debug)]
pub(super) struct HeldMemory {
    /// `None` for a caller's buffer.
    pub(super) _lease: Option<Lease>,
    /// Freed at once, though submitted work still completes. Otherwise a browser frees it by its garbage collector, which
    /// does not know the size.
    #[cfg(target_arch = "wasm32")]
    pub(super) raw: Option<wgpu::Buffer>,
}

#[cfg(target_arch = "wasm32")]
impl Drop for HeldMemory {
    fn drop(&mut self) {
        if let Some(raw) = &self.raw {
            raw.destroy();
        }
    }
}
