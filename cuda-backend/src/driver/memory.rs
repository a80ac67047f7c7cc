//! Device memory, and pinned memory of the host.

use std::any::Any;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;

/// Linear memory of the device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(super) address: u64,
    pub(super) bytes: usize,
    pub(super) context: Arc<Context>,
    /// Of a caller's memory: what keeps it allocated. `None`: the memory is freed on drop.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

impl DeviceMemory {
    /// `bytes` of memory with unspecified contents.
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _current = context.push()?;
        let mut address = 0;
        // SAFETY: the context is current. The driver writes one device address to `address`, a local.
        check("cuMemAlloc_v2", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        Ok(Self { address, bytes, context: context.clone(), owner: None })
    }

    /// Memory of a caller, allocated until `owner` is dropped. A wrong address is an error of the
    /// device: the host never dereferences it.
    pub(crate) fn of_caller(
        context: &Arc<Context>,
        address: u64,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { address, bytes, context: context.clone(), owner: Some(owner) }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    /// To be dropped when the device no longer uses the memory.
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        if let Ok(_current) = self.context.push() {
            // SAFETY: the context is current. cuMemAlloc returned the address, `self` owns it, and this frees
            // it once. The host never dereferences a device address.
            let _ = check("cuMemFree_v2", unsafe { sys::cuMemFree_v2(self.address) });
        }
    }
}

/// Page-locked memory of the host, which the device reads and writes without the CPU. All bytes are
/// initialised.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    pub(super) raw: Handle<c_void>,
    pub(super) bytes: usize,
    /// Bytes from the beginning that are in use; at most `bytes`.
    pub(super) used: usize,
    context: Arc<Context>,
}

impl PinnedMemory {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _current = context.push()?;
        let mut raw = ptr::null_mut();
        // Portable: pinned for every context of the process.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current. The driver writes one host address to `raw`, a local.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut raw, bytes, flags) })?;
        // SAFETY: cuMemHostAlloc succeeded, so `raw` points to `bytes` bytes that nothing else uses.
        unsafe { ptr::write_bytes(raw.cast::<u8>(), 0, bytes) };
        Ok(Self { raw: Handle(raw), bytes, used: bytes, context: context.clone() })
    }

    /// Allocated bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.bytes
    }

    /// The same memory with its first `bytes` in use.
    pub(crate) fn using(mut self, bytes: usize) -> Self {
        assert!(bytes <= self.bytes, "{bytes} of {} bytes of staging", self.bytes);
        self.used = bytes;
        self
    }

    /// The bytes in use.
    pub(crate) fn contents(&self) -> &[u8] {
        // SAFETY: `used` is at most the size of the allocation, whose bytes `new` initialised. The device
        // does not write meanwhile: during a copy only a `PendingCopy` has the memory, and it gives
        // no access to it.
        unsafe { std::slice::from_raw_parts(self.raw.0.cast::<u8>().cast_const(), self.used) }
    }

    /// The bytes in use, to be changed.
    pub(crate) fn contents_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `contents`, and `&mut self` excludes other references.
        unsafe { std::slice::from_raw_parts_mut(self.raw.0.cast::<u8>(), self.used) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.push() {
            // SAFETY: the context is current. cuMemHostAlloc returned the address, `self` owns it, and this
            // frees it once. No copy is pending: a `PendingCopy` does not drop its memory.
            let _ = check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.raw.0) });
        }
    }
}
