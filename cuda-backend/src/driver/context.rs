//! A device's context.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::error::Result;
use super::properties::device;

/// A handle of the driver's. The driver takes them from any thread.
#[derive(Debug)]
pub(super) struct Handle<T>(pub(super) *mut T);

// SAFETY: the driver API may be called from any thread, with any handle.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above, also at the same time.
unsafe impl<T> Sync for Handle<T> {}

/// A device's primary context: the one that a whole process shares.
#[derive(Debug)]
pub(crate) struct Context {
    raw: Handle<sys::CUctx_st>,
    device: sys::CUdevice,
}

impl Context {
    pub(crate) fn retain(ordinal: usize) -> Result<Arc<Self>> {
        let device = device(ordinal)?;
        let mut raw = ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut raw, device))?;
        Ok(Arc::new(Self { raw: Handle(raw), device }))
    }

    pub(super) fn bind(&self) -> Result<()> {
        call!(cuCtxSetCurrent(self.raw.0))
    }

    /// Bytes of the device that nobody has.
    pub(crate) fn free_bytes(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok(free)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Whoever has the context still calls with it is dropped before; a failure has nobody to be told to.
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}
