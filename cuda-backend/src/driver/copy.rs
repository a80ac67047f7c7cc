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
    /// Copies the used bytes of `from` to byte `at` of `into`. The copy owns `from` until it is
    /// complete.
    pub(crate) fn upload(&self, from: PinnedMemory, into: &DeviceMemory, at: usize) -> Result<PendingCopy> {
        assert!(at + from.used <= into.bytes, "{} bytes at {at} of {}", from.used, into.bytes);
        let _current = self.context.push()?;
        // SAFETY: the context is current and the stream's handle is valid. The destination lies within
        // `into`, as asserted. The source is pinned and `from.used` bytes long. It stays allocated
        // and unchanged until the copy is complete: `PendingCopy` owns it from here on. After an
        // error nothing was submitted.
        check("cuMemcpyHtoDAsync_v2", unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                into.address + at as u64,
                from.raw.0.cast_const(),
                from.used,
                self.raw.0,
            )
        })?;
        PendingCopy::new(from, self.record())
    }

    /// Copies bytes `range` of `from` to `into`, whose used bytes are as many. The copy owns `into`
    /// until it is complete.
    pub(crate) fn download(
        &self,
        from: &DeviceMemory,
        range: Range<usize>,
        into: PinnedMemory,
    ) -> Result<PendingCopy> {
        assert!(range.end <= from.bytes && range.len() == into.used, "{range:?} of {}", from.bytes);
        let _current = self.context.push()?;
        // SAFETY: the context is current and the stream's handle is valid. The source lies within `from`,
        // as asserted. The destination is pinned and `into.used` bytes long. No one else reads,
        // writes or frees it until the copy is complete: `PendingCopy` owns it from here on. After
        // an error nothing was submitted.
        check("cuMemcpyDtoHAsync_v2", unsafe {
            sys::cuMemcpyDtoHAsync_v2(into.raw.0, from.address + range.start as u64, into.used, self.raw.0)
        })?;
        PendingCopy::new(into, self.record())
    }
}

impl Stream {
    /// Copies the first `bytes` bytes of `from`, memory of any device, to the beginning of `into`,
    /// which is of the device of this stream. Both stay allocated until the copy is complete.
    pub(crate) fn copy_between(&self, from: &DeviceMemory, into: &DeviceMemory, bytes: usize) -> Result<()> {
        assert!(bytes <= from.bytes && bytes <= into.bytes, "{bytes} of {} and {}", from.bytes, into.bytes);
        let _current = self.context.push()?;
        // SAFETY: the context of the stream is current, and all handles are valid. Both ranges lie within
        // their memory, as asserted. The host dereferences neither. The caller keeps the memory,
        // and the order of its uses, until the copy is complete.
        check("cuMemcpyPeerAsync", unsafe {
            sys::cuMemcpyPeerAsync(
                into.address,
                into.context.raw.0,
                from.address,
                from.context.raw.0,
                bytes,
                self.raw.0,
            )
        })
    }
}

/// Staging memory that the device reads or writes.
///
/// If this is dropped before the copy is complete, the memory is leaked: the device may still write
/// to it.
#[derive(Debug)]
pub(crate) struct PendingCopy {
    staging: ManuallyDrop<PinnedMemory>,
    event: Arc<Event>,
}

impl PendingCopy {
    /// A copy that was submitted. If no event could be recorded, its completion is unknown and the
    /// memory is leaked.
    fn new(staging: PinnedMemory, event: Result<Event>) -> Result<Self> {
        let staging = ManuallyDrop::new(staging);
        Ok(Self { staging, event: Arc::new(event?) })
    }

    pub(crate) fn event(&self) -> &Arc<Event> {
        &self.event
    }

    /// The staging memory if the copy is complete; otherwise it is leaked.
    pub(crate) fn into_staging(self) -> Result<Option<PinnedMemory>> {
        Ok(self.event.is_complete()?.then(|| ManuallyDrop::into_inner(self.staging)))
    }
}
