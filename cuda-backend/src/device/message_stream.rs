//! A stream for messages between devices, beside the streams of the backend.

use std::sync::Arc;

use kyklos::{Error, Result};

use super::event_poller::PollerHandle;
use super::open_device::{OpenDevice, Resources};
use super::status::{AwaitsMessages, DeviceStatus};
use crate::device::memory::memory_pool::{CudaBuffer, InUse};
use crate::driver::{Context, DriverError, Event, Stream};

/// A stream of the highest priority for messages, which a library submits to it. Events order it
/// with the streams of the backend: [`Self::order`] before messages are submitted, [`Self::note`]
/// after.
#[derive(Debug)]
pub(crate) struct MessageStream {
    stream: Stream,
    resources: Arc<Resources>,
    poller: PollerHandle,
}

impl MessageStream {
    pub(crate) fn new(device: &OpenDevice) -> Result<Self> {
        let resources = device.resources.clone();
        let failed = |error: DriverError| resources.status.error("create a stream for messages", &error);
        let stream = Stream::new(&resources.context, true).map_err(failed)?;
        Ok(Self { stream, resources, poller: device.poller.handle() })
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.resources.context
    }

    /// Messages that are submitted from now on begin when they may read `reads` and write `writes`.
    pub(crate) fn order(&self, reads: &[&CudaBuffer], writes: &[&CudaBuffer]) -> Result<()> {
        self.resources.submitter.order(&self.stream, ORDER, reads, writes)
    }

    /// The messages that were submitted since [`Self::order`] read `reads` and write `writes`:
    /// operations of the backend that are submitted from now on wait for them. The event is
    /// complete when they have moved.
    pub(crate) fn note(&self, reads: &[&CudaBuffer], writes: &[&CudaBuffer]) -> Result<Arc<Event>> {
        self.resources.submitter.note(&self.stream, ORDER, reads, writes)
    }

    /// Copies the first bytes of `from`, memory of the device `other` in which they are complete,
    /// to the beginning of `into`, memory of the device of this stream. Operations of this
    /// device that are submitted from now on and use `into` wait for the copy. The memory of both
    /// is not used for anything else before the copy is done, and never where nobody will know.
    /// Takes no lock of `other` under which its driver is called: if that device hangs, so may
    /// such a call.
    pub(crate) fn copy_from(
        &self,
        other: &DeviceStatus,
        from: &CudaBuffer,
        into: &CudaBuffer,
        bytes: usize,
    ) -> Result<()> {
        let own = &self.resources.submitter;
        own.order(&self.stream, COPY, &[], &[into])?;
        let copied = self.stream.copy_between(&from.allocation().memory, &into.allocation().memory, bytes);
        copied.map_err(|error| match self.context().free_bytes() {
            // The context that the error has destroyed is the other one.
            Ok(_) if error.ends_context() => other.device_error(COPY, &error.to_string()),
            _ => self.driver_error(COPY, &error),
        })?;
        let in_use = InUse::new(&[from, into]);
        let event = own.note(&self.stream, COPY, &[], &[into])?;
        let read = from.allocation().accesses().record_read_elsewhere(&self.resources.status);
        self.poller.on_event_of_another_stream(event, move || read.done());
        in_use.release();
        Ok(())
    }

    /// To be kept while messages are under way.
    pub(crate) fn await_messages(&self) -> AwaitsMessages {
        self.resources.status.await_messages()
    }

    /// Whether an event is complete.
    pub(crate) fn is_complete(&self, event: &Event) -> Result<bool> {
        event.is_complete().map_err(|error| self.resources.status.error("wait for messages", &error))
    }

    /// The error of an operation whose call of the driver failed.
    pub(crate) fn driver_error(&self, operation: &str, error: &DriverError) -> Error {
        self.resources.status.error(operation, error)
    }

    /// The error of an operation on this device that failed with `native`.
    pub(crate) fn error(&self, operation: &str, native: &str) -> Error {
        self.resources.status.device_error(operation, native)
    }
}

/// Words for an error of the driver.
const ORDER: &str = "order messages";
const COPY: &str = "copy from another device";
