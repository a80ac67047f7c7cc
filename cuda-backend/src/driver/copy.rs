//! Copies between the host and the device.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::error::Result;
use super::event::Event;
use super::memory::{DeviceMemory, PinnedMemory};
use super::stream::Stream;

impl Stream {
    /// Copies all of `from` to `into`, `at` bytes behind its beginning. The staging comes back when it was read.
    pub(crate) fn upload(&self, from: PinnedMemory, into: &DeviceMemory, at: usize) -> Result<PendingCopy> {
        assert!(at + from.used <= into.bytes, "{} bytes at {at} of {}", from.used, into.bytes);
        self.context.bind()?;
        call!(cuMemcpyHtoDAsync_v2(
            into.address + at as u64,
            from.raw.0.cast_const(),
            from.used,
            self.raw.0
        ))?;
        PendingCopy::new(from, self.record())
    }

    /// Copies `range` of `from` into staging, which comes back when it was written.
    pub(crate) fn download(
        &self,
        from: &DeviceMemory,
        range: Range<usize>,
        into: PinnedMemory,
    ) -> Result<PendingCopy> {
        assert!(range.end <= from.bytes && range.len() == into.used, "{range:?} of {}", from.bytes);
        self.context.bind()?;
        call!(cuMemcpyDtoHAsync_v2(into.raw.0, from.address + range.start as u64, into.used, self.raw.0))?;
        PendingCopy::new(into, self.record())
    }
}

/// Staging that a copy is under way to or from.
///
/// Dropped before it has landed, its memory is never freed: the device may still write to it.
#[derive(Debug)]
pub(crate) struct PendingCopy {
    staging: ManuallyDrop<PinnedMemory>,
    event: Arc<Event>,
}

impl PendingCopy {
    /// Staging whose copy was submitted. Where no event could be recorded nobody can know when it lands.
    fn new(staging: PinnedMemory, event: Result<Event>) -> Result<Self> {
        let staging = ManuallyDrop::new(staging);
        Ok(Self { staging, event: Arc::new(event?) })
    }

    pub(crate) fn event(&self) -> &Arc<Event> {
        &self.event
    }

    /// The staging, when the copy is done.
    pub(crate) fn into_staging(self) -> Result<Option<PinnedMemory>> {
        Ok(self.event.is_complete()?.then(|| ManuallyDrop::into_inner(self.staging)))
    }
}
