//! Streams and events.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Handle, InFlight, Launch, Memory, Pinned, Result, check};

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

    /// Copies all of `from` to `into`, `at` bytes behind its beginning. The staging comes back when it was read.
    pub(crate) fn upload(&self, from: Pinned, into: &Memory, at: usize) -> Result<InFlight> {
        assert!(at + from.used <= into.bytes, "{} bytes at {at} of {}", from.used, into.bytes);
        self.context.bind()?;
        call!(cuMemcpyHtoDAsync_v2(
            into.address + at as u64,
            from.raw.0.cast_const(),
            from.used,
            self.raw.0
        ))?;
        InFlight::new(from, self.record())
    }

    /// Copies `range` of `from` into staging, which comes back when it was written.
    pub(crate) fn download(&self, from: &Memory, range: Range<usize>, into: Pinned) -> Result<InFlight> {
        assert!(range.end <= from.bytes && range.len() == into.used, "{range:?} of {}", from.bytes);
        self.context.bind()?;
        call!(cuMemcpyDtoHAsync_v2(into.raw.0, from.address + range.start as u64, into.used, self.raw.0))?;
        InFlight::new(into, self.record())
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

/// A point in the order of a stream.
#[derive(Debug)]
pub(crate) struct Event {
    raw: Handle<sys::CUevent_st>,
    context: Arc<Context>,
}

impl Event {
    /// Whether it has happened.
    pub(crate) fn happened(&self) -> Result<bool> {
        self.context.bind()?;
        match call!(cuEventQuery(self.raw.0)) {
            Ok(()) => Ok(true),
            Err(fault) if fault.code == sys::CUresult::CUDA_ERROR_NOT_READY as u32 => Ok(false),
            Err(fault) => Err(fault),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuEventDestroy_v2(self.raw.0));
        }
    }
}
