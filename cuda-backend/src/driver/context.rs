//! A device's context.

use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::error::Result;
use super::properties::device;

/// A handle of the driver, a pointer that only the driver dereferences.
#[derive(Debug)]
pub(super) struct Handle<T>(pub(super) *mut T);

// SAFETY: the driver API takes a handle from any thread, not only from the one that created it.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: the driver API locks internally and may be called from several threads with one handle.
// The exception, a graph that is launched, is behind `&mut` (see `Stream::launch_graph`).
unsafe impl<T> Sync for Handle<T> {}

/// The primary context of a device. The whole process shares it.
#[derive(Debug)]
pub(crate) struct Context {
    pub(super) raw: Handle<sys::CUctx_st>,
    device: sys::CUdevice,
    ordinal: usize,
}

impl Context {
    pub(crate) fn retain(ordinal: usize) -> Result<Arc<Self>> {
        let device = device(ordinal)?;
        let mut raw = ptr::null_mut();
        // SAFETY: `device` comes from cuDeviceGet. The driver writes one handle to `raw`, a local.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) })?;
        Ok(Arc::new(Self { raw: Handle(raw), device, ordinal }))
    }

    /// The device's index.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Makes this context current on the calling thread until the guard is dropped. Then the
    /// context of before is current again: the thread may be of a caller that uses CUDA itself.
    pub(crate) fn push(&self) -> Result<Current<'_>> {
        // SAFETY: the context is retained until `self` is dropped, so the handle is valid.
        check("cuCtxPushCurrent_v2", unsafe { sys::cuCtxPushCurrent_v2(self.raw.0) })?;
        Ok(Current(PhantomData))
    }

    /// Free memory of the device, in bytes, as the driver reports it.
    pub(crate) fn free_bytes(&self) -> Result<usize> {
        let _current = self.push()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: this context is current. The driver writes one size to each of two locals.
        check("cuMemGetInfo_v2", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free)
    }
}

/// While this lives, a context is current on the thread that made it. Not `Send`: contexts are
/// current for a thread.
#[derive(Debug)]
pub(crate) struct Current<'a>(PhantomData<(&'a Context, *const ())>);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // An error has no receiver here.
        // SAFETY: `Context::push` pushed a context on this thread. Guards are dropped in the reverse order
        // of their creation, so that context is the topmost one. The driver writes one handle to
        // `popped`, a local.
        let _ = check("cuCtxPopCurrent_v2", unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) });
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // An error has no receiver here.
        // SAFETY: `retain` retained the context of `device` once, and this releases it once. Every value
        // that calls the driver in this context holds an `Arc` of it, so none is left.
        let _ =
            check("cuDevicePrimaryCtxRelease_v2", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}
