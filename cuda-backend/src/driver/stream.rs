//! Streams and events.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;
use super::event::Event;
use super::module::Launch;

/// Operations that the device does in order.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(super) raw: Handle<sys::CUstream_st>,
    pub(super) context: Arc<Context>,
}

impl Stream {
    /// A stream that does not wait for the default stream. `urgent` ones get the device first.
    pub(crate) fn new(context: &Arc<Context>, urgent: bool) -> Result<Self> {
        context.bind()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = ptr::null_mut();
        // The driver takes a priority beyond what there is for the nearest one there is.
        call!(cuStreamCreateWithPriority(&raw mut raw, flags, if urgent { -5 } else { 0 }))?;
        Ok(Self { raw: Handle(raw), context: context.clone() })
    }

    /// Later operations of this stream begin when `event` has happened.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        call!(cuStreamWaitEvent(self.raw.0, event.raw.0, 0))
    }

    /// An event that happens when everything before it is done.
    pub(crate) fn record(&self) -> Result<Event> {
        self.context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        call!(cuEventCreate(&raw mut raw, flags))?;
        let event = Event { raw: Handle(raw), context: self.context.clone() };
        call!(cuEventRecord(event.raw.0, self.raw.0))?;
        Ok(event)
    }

    /// Submits a launch. The driver has copied its arguments when it returns.
    pub(crate) fn launch(&self, launch: &Launch) -> Result<()> {
        self.context.bind()?;
        let mut arguments = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
        let [x, y, z] = launch.grid;
        call!(cuLaunchKernel(
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
        ))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuStreamDestroy_v2(self.raw.0));
        }
    }
}
