//! Streams.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;
use super::event::Event;
use super::module::Launch;

/// A queue of operations that the device does in order.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(super) raw: Handle<sys::CUstream_st>,
    pub(super) context: Arc<Context>,
}

impl Stream {
    /// A stream that does not synchronise with the default stream. `urgent`: with the highest
    /// priority.
    pub(crate) fn new(context: &Arc<Context>, urgent: bool) -> Result<Self> {
        let _current = context.push()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = ptr::null_mut();
        // The driver clamps a priority that is out of range.
        let priority = if urgent { -5 } else { 0 };
        // SAFETY: the context is current. The driver writes one handle to `raw`, a local.
        check("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&raw mut raw, flags, priority)
        })?;
        Ok(Self { raw: Handle(raw), context: context.clone() })
    }

    /// The handle, for a library that submits to this stream; also a `cudaStream_t`.
    pub(crate) fn handle(&self) -> *mut c_void {
        self.raw.0.cast()
    }

    /// Operations that are submitted to this stream later begin after `event` is complete.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        event.awaited_by(&self.raw)
    }

    /// An event that is complete when everything submitted to this stream so far is done.
    pub(crate) fn record(&self) -> Result<Event> {
        Event::record(&self.context, &self.raw)
    }

    /// As [`Self::record`], with the time of the device.
    pub(crate) fn record_timed(&self) -> Result<Event> {
        Event::record_timed(&self.context, &self.raw)
    }

    /// Submits a launch. The driver has copied its arguments when this returns.
    pub(crate) fn launch(&self, launch: &Launch) -> Result<()> {
        let _current = self.context.push()?;
        let mut arguments = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
        let [x, y, z] = launch.grid;
        // SAFETY: stream and function are of the current context, and both handles are valid: the launch
        // keeps the module loaded. The driver reads one argument, of the size of the kernel's only
        // parameter, from `arguments[0]` before it returns; `launch.arguments` has at least that
        // size (see `Launch`).
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                launch.function.raw.0,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.raw.0,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.push() {
            // SAFETY: `new` created the stream, `self` owns it, and nothing uses the handle after this. Work
            // that is still in the stream is done by the device nonetheless, and the driver frees
            // the stream afterwards.
            let _ = check("cuStreamDestroy_v2", unsafe { sys::cuStreamDestroy_v2(self.raw.0) });
        }
    }
}
