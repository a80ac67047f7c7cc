//! DeviceMemory of the device, and pinned memory of the host.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;

/// DeviceMemory of the device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(super) address: u64,
    pub(super) bytes: usize,
    context: Arc<Context>,
}

impl DeviceMemory {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let mut address = 0;
        call!(cuMemAlloc_v2(&raw mut address, bytes))?;
        Ok(Self { address, bytes, context: context.clone() })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    /// The device must be done with it.
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuMemFree_v2(self.address));
        }
    }
}

/// DeviceMemory of the host that the device copies from and to by itself.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    pub(super) raw: Handle<c_void>,
    pub(super) bytes: usize,
    /// How many of them are being used.
    pub(super) used: usize,
    context: Arc<Context>,
}

impl PinnedMemory {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let mut raw = ptr::null_mut();
        // Portable: pinned for every context of the process.
        call!(cuMemHostAlloc(&raw mut raw, bytes, sys::CU_MEMHOSTALLOC_PORTABLE))?;
        // SAFETY: it is of that many bytes; from here on all are initialised.
        unsafe { ptr::write_bytes(raw.cast::<u8>(), 0, bytes) };
        Ok(Self { raw: Handle(raw), bytes, used: bytes, context: context.clone() })
    }

    /// Bytes that it has.
    pub(crate) fn capacity(&self) -> usize {
        self.bytes
    }

    /// Has the first `bytes` used from now on.
    pub(crate) fn using(mut self, bytes: usize) -> Self {
        assert!(bytes <= self.bytes, "{bytes} of {} bytes of staging", self.bytes);
        self.used = bytes;
        self
    }

    /// The bytes in use.
    pub(crate) fn contents(&self) -> &[u8] {
        // SAFETY: initialised when it was made. While the device writes to it only an `PendingCopy` has it.
        unsafe { std::slice::from_raw_parts(self.raw.0.cast::<u8>().cast_const(), self.used) }
    }

    /// The bytes in use, to be changed.
    pub(crate) fn contents_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.raw.0.cast::<u8>(), self.used) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuMemFreeHost(self.raw.0));
        }
    }
}
