//! Events.

use std::ptr;
use std::sync::Arc;

use super::bindings as sys;
use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;

/// A point in a stream. Complete when everything that was submitted to the stream before it is
/// done.
#[derive(Debug)]
pub(crate) struct Event {
    raw: Handle<sys::CUevent_st>,
    context: Arc<Context>,
}

impl Event {
    /// An event that is complete when everything submitted to a stream of `context` so far is done.
    /// The stream exists.
    pub(super) fn record(context: &Arc<Context>, stream: &Handle<sys::CUstream_st>) -> Result<Self> {
        Self::record_with(context, stream, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    /// As [`Self::record`]; the event also keeps the time of the device at which it was complete.
    pub(super) fn record_timed(context: &Arc<Context>, stream: &Handle<sys::CUstream_st>) -> Result<Self> {
        Self::record_with(context, stream, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    fn record_with(
        context: &Arc<Context>,
        stream: &Handle<sys::CUstream_st>,
        flags: sys::CUevent_flags_enum,
    ) -> Result<Self> {
        let _current = context.push()?;
        let mut raw = ptr::null_mut();
        let flags = flags as u32;
        // SAFETY: the context is current. The driver writes one handle to `raw`, a local.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        let event = Self { raw: Handle(raw), context: context.clone() };
        // SAFETY: event and stream are of the same, current context, and both handles are valid.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw.0, stream.0) })?;
        Ok(event)
    }

    /// Operations that are submitted to `stream` later begin after this event is complete. The
    /// stream is of the event's context and exists.
    pub(super) fn awaited_by(&self, stream: &Handle<sys::CUstream_st>) -> Result<()> {
        let _current = self.context.push()?;
        // SAFETY: the context is current. Both handles are valid during the call, and the driver keeps what
        // it needs of the event, which may be destroyed before the wait is over.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.0, self.raw.0, 0) })
    }

    /// Milliseconds of the device from this event to a later one. Both keep their time and are
    /// complete.
    pub(crate) fn ms_until(&self, later: &Self) -> Result<f64> {
        let _current = self.context.push()?;
        let mut ms = 0.0_f32;
        // SAFETY: the context is current, and both handles are valid until their events are dropped. The
        // driver writes one float to `ms`, a local. It refuses events that keep no time or are not
        // complete.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&raw mut ms, self.raw.0, later.raw.0)
        })?;
        Ok(f64::from(ms))
    }

    /// Asks the driver and does not wait.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        let _current = self.context.push()?;
        // SAFETY: the event's context is current, and the handle is valid until `self` is dropped.
        match check("cuEventQuery", unsafe { sys::cuEventQuery(self.raw.0) }) {
            Ok(()) => Ok(true),
            Err(error) if error.code == sys::CUresult::CUDA_ERROR_NOT_READY as u32 => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.push() {
            // SAFETY: `record` created the event, `self` owns it, and nothing uses the handle after this. The
            // driver allows destroying an event that is not complete.
            let _ = check("cuEventDestroy_v2", unsafe { sys::cuEventDestroy_v2(self.raw.0) });
        }
    }
}
