//! Events.

use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;

/// A point in the order of a stream.
#[derive(Debug)]
pub(crate) struct Event {
    pub(super) raw: Handle<sys::CUevent_st>,
    pub(super) context: Arc<Context>,
}

impl Event {
    /// Whether it has happened.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        self.context.bind()?;
        match call!(cuEventQuery(self.raw.0)) {
            Ok(()) => Ok(true),
            Err(error) if error.code == sys::CUresult::CUDA_ERROR_NOT_READY as u32 => Ok(false),
            Err(error) => Err(error),
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
