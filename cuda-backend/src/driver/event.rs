//! Events.

use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;

/// A point in a stream. Complete when everything that was submitted to the stream before it is done.
#[derive(Debug)]
pub(crate) struct Event {
    pub(super) raw: Handle<sys::CUevent_st>,
    pub(super) context: Arc<Context>,
}

impl Event {
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
            // SAFETY: `Stream::record` created the event, `self` owns it, and nothing uses the handle after this. The driver
            // allows destroying an event that is not complete.
            let _ = check("cuEventDestroy_v2", unsafe { sys::cuEventDestroy_v2(self.raw.0) });
        }
    }
}
