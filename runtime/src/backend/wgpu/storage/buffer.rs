//! A buffer on the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::memory::Lease;
use super::pool::{Idle, StoragePool};

/// Linear memory on a wgpu device.
#[derive(Clone, Debug)]
pub struct WgpuBuffer {
    pub(in crate::backend::wgpu) raw: wgpu::Buffer,
    /// The requested size. The buffer itself is rounded up and never empty.
    pub(in crate::backend::wgpu) bytes: usize,
    pub(in crate::backend::wgpu) memory: Arc<HeldMemory>,
}

impl WgpuBuffer {
    /// The buffer of wgpu. It belongs to the caller then as well, so no later call writes to it.
    pub fn raw(&self) -> &wgpu::Buffer {
        self.memory.given_out.store(true, Ordering::Relaxed);
        &self.raw
    }
}

/// The device memory of a buffer and all its handles; freed, or given back to its pool, with the
/// last of them.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct HeldMemory {
    /// `None` for a caller's buffer.
    owned: Option<Idle>,
    /// `None` for buffers that are freed.
    pool: Option<Arc<StoragePool>>,
    /// Whether a caller has the buffer of wgpu.
    given_out: AtomicBool,
}

impl HeldMemory {
    /// Memory of a caller.
    pub(in crate::backend::wgpu) fn of_caller() -> Self {
        Self { owned: None, pool: None, given_out: AtomicBool::new(true) }
    }

    /// Memory of this backend; `pool` takes it back.
    pub(in crate::backend::wgpu) fn owned(
        raw: wgpu::Buffer,
        lease: Lease,
        pool: Option<Arc<StoragePool>>,
    ) -> Self {
        Self { owned: Some(Idle { raw, lease }), pool, given_out: AtomicBool::new(false) }
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        let Some(idle) = self.owned.take() else { return };
        match (&self.pool, *self.given_out.get_mut()) {
            (Some(pool), true) => pool.gone(idle.raw.size()),
            (Some(pool), false) => pool.put(idle),
            (None, true) => {}
            (None, false) => idle.free(),
        }
    }
}
