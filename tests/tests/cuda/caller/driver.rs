//! A caller of the driver, as PyTorch is one: its contexts, memory and streams. It runs on the fake
//! driver only.
#![expect(unsafe_code, reason = "the driver is a C library")]

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// A context of the caller. Values that were made in it keep it.
#[derive(Debug)]
pub(crate) struct Context {
    raw: sys::CUcontext,
    /// The device, if it is the primary context.
    primary_of: Option<i32>,
}

// SAFETY: the driver takes a handle from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device.
    pub(crate) fn primary(device: i32) -> Arc<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the driver writes one handle to a local.
        ok(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) });
        Arc::new(Self { raw, primary_of: Some(device) })
    }

    /// A context of its own.
    pub(crate) fn other(device: i32) -> Arc<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the driver writes one handle to a local; it may be given no parameters.
        ok(unsafe { sys::cuCtxCreate_v4(&raw mut raw, ptr::null_mut(), 0, device) });
        Arc::new(Self { raw, primary_of: None })
    }

    /// Whether anybody has the primary context of a device.
    pub(crate) fn is_retained(device: i32) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the driver writes one number to each of two locals.
        ok(unsafe { sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) });
        active != 0
    }

    /// Bytes of the device that are in use.
    pub(crate) fn used_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current, and the driver writes one size to each of two locals.
        self.with(|| ok(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }));
        total - free
    }

    /// Makes it current on this thread.
    pub(crate) fn set_current(&self) {
        // SAFETY: the handle is valid until `self` is dropped.
        ok(unsafe { sys::cuCtxSetCurrent(self.raw) });
    }

    /// Whether it is current on this thread.
    pub(crate) fn is_current(&self) -> bool {
        let mut raw = ptr::null_mut();
        // SAFETY: the driver writes one handle to a local.
        ok(unsafe { sys::cuCtxGetCurrent(&raw mut raw) });
        raw == self.raw
    }

    fn with<T>(&self, work: impl FnOnce() -> T) -> T {
        // SAFETY: the handle is valid until `self` is dropped.
        ok(unsafe { sys::cuCtxPushCurrent_v2(self.raw) });
        let done = work();
        let mut raw = ptr::null_mut();
        // SAFETY: the driver writes one handle to a local.
        ok(unsafe { sys::cuCtxPopCurrent_v2(&raw mut raw) });
        done
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        ok(match self.primary_of {
            // SAFETY: `primary` retained it once.
            Some(device) => unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) },
            // SAFETY: `other` made it, and nothing that was made in it is left.
            None => unsafe { sys::cuCtxDestroy_v2(self.raw) },
        });
    }
}

/// Memory of the device, or pinned memory of the host.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) address: u64,
    bytes: usize,
    on_host: bool,
    context: Arc<Context>,
}

impl Memory {
    pub(crate) fn on_device(context: &Arc<Context>, bytes: usize) -> Self {
        let mut address = 0;
        // SAFETY: a context is current, and the driver writes one address to a local.
        context.with(|| ok(unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) }));
        Self { address, bytes, on_host: false, context: context.clone() }
    }

    /// Memory of a pool, which has no context.
    pub(crate) fn of_pool(stream: &Stream, bytes: usize) -> Self {
        let (mut address, context) = (0, &stream.context);
        // SAFETY: a context is current, the stream exists, and the driver writes one address to a local.
        context.with(|| ok(unsafe { sys::cuMemAllocAsync(&raw mut address, bytes, stream.raw) }));
        Self { address, bytes, on_host: false, context: context.clone() }
    }

    pub(crate) fn on_host(context: &Arc<Context>, data: &[u8]) -> Self {
        let mut raw = ptr::null_mut();
        // SAFETY: a context is current, and the driver writes one address to a local.
        context.with(|| ok(unsafe { sys::cuMemHostAlloc(&raw mut raw, data.len(), 0) }));
        // SAFETY: the allocation has as many bytes, and nothing else uses it.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), raw.cast::<u8>(), data.len()) };
        Self { address: raw as u64, bytes: data.len(), on_host: true, context: context.clone() }
    }

    /// The bytes of host memory that no copy writes any more.
    pub(crate) fn contents(&self) -> Vec<u8> {
        assert!(self.on_host);
        // SAFETY: `on_host` initialised as many bytes.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }.to_vec()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.context.with(|| {
            ok(if self.on_host {
                // SAFETY: cuMemHostAlloc returned it, and no copy uses it any more.
                unsafe { sys::cuMemFreeHost(self.address as *mut c_void) }
            } else {
                // SAFETY: cuMemAlloc returned it, and this frees it once.
                unsafe { sys::cuMemFree_v2(self.address) }
            });
        });
    }
}

/// A stream of the caller.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver takes a handle from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        let mut raw = ptr::null_mut();
        // SAFETY: a context is current, and the driver writes one handle to a local.
        context.with(|| ok(unsafe { sys::cuStreamCreate(&raw mut raw, 0) }));
        Self { raw, context: context.clone() }
    }

    /// The default stream of a context.
    pub(crate) fn default_of(context: &Arc<Context>) -> Self {
        Self { raw: ptr::null_mut(), context: context.clone() }
    }

    pub(crate) fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Copies `from` to the beginning of `into`. Both stay allocated until the stream is
    /// synchronised.
    pub(crate) fn upload(&self, from: &Memory, into: &Memory) {
        assert!(from.on_host && !into.on_host && from.bytes <= into.bytes);
        self.context.with(|| {
            // SAFETY: a context is current, the stream exists, and both allocations are large enough.
            ok(unsafe {
                sys::cuMemcpyHtoDAsync_v2(into.address, from.address as *const c_void, from.bytes, self.raw)
            });
        });
    }

    /// Copies as many bytes as `into` has from the address `from`. `into` stays allocated until the
    /// stream is synchronised.
    pub(crate) fn download(&self, from: u64, into: &Memory) {
        assert!(into.on_host);
        self.context.with(|| {
            // SAFETY: a context is current, the stream exists, and `into` is large enough. The driver checks
            // the source.
            ok(unsafe { sys::cuMemcpyDtoHAsync_v2(into.address as *mut c_void, from, into.bytes, self.raw) });
        });
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: a context is current, and the stream exists.
        self.context.with(|| ok(unsafe { sys::cuStreamSynchronize(self.raw) }));
    }

    /// Starts to capture a graph.
    pub(crate) fn capture(&self) {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a context is current, and the stream exists.
        self.context.with(|| ok(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) }));
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        // SAFETY: a context is current, and nothing uses the stream after this.
        self.context.with(|| ok(unsafe { sys::cuStreamDestroy_v2(self.raw) }));
    }
}

/// Bytes that the backend has copied so far: to the host, and both ways.
pub(crate) fn copied() -> [u64; 2] {
    // SAFETY: the fake driver is loaded, and has this function of this type.
    let ask = unsafe { sys::culib().get::<unsafe extern "C" fn(bool) -> u64>(b"kyklos_fake_copied\0") };
    let ask = ask.unwrap();
    // SAFETY: as above.
    [true, false].map(|only_to_host| unsafe { ask(only_to_host) })
}
