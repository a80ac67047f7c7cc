//! Which operation has to wait for which.
//!
//! Kernels, copies to the device and copies to the host have a stream each, so that keys travel
//! while the device computes. Operations of different streams have no order unless an event gives
//! them one. Therefore each allocation records the last operation that wrote it and the operations
//! that read it since. The next operation on another stream waits for those that conflict with it.
//! When memory is reused for another buffer, its record stays with it.
//!
//! Launches may be deferred and submitted together. A record then refers to their [`Completion`],
//! which gets its event when they are submitted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use kyklos::{Error, Result};

use super::status::DeviceStatus;
use crate::driver::{DriverError, Event};

/// The streams of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// Kernels.
    Compute,
    /// Copies from the host to the device.
    Upload,
    /// Copies from the device to the host.
    Download,
}

impl StreamKind {
    pub(crate) const COUNT: usize = 3;
    pub(crate) const ALL: [Self; Self::COUNT] = [Self::Compute, Self::Upload, Self::Download];
}

/// The completion of operations that are submitted together, or will be: a pending one belongs to
/// deferred launches.
#[derive(Debug, Default)]
pub(crate) struct Completion(OnceLock<Submitted>);

#[derive(Debug)]
struct Submitted {
    /// `None` if no event could be recorded: then the operations never count as complete.
    event: Option<Arc<Event>>,
    /// Why some of the operations were not submitted.
    failure: Option<Error>,
}

impl Completion {
    /// The completion of an operation that was submitted.
    pub(crate) fn of(event: Arc<Event>) -> Arc<Self> {
        let completion = Self::default();
        completion.set_submitted(Some(event), None);
        Arc::new(completion)
    }

    /// Called once, when the operations were submitted, or those before the first that failed.
    pub(crate) fn set_submitted(&self, event: Option<Arc<Event>>, failure: Option<Error>) {
        self.0.set(Submitted { event, failure }).expect("a batch is submitted once");
    }

    /// Whether the operations are still deferred.
    pub(crate) fn is_pending(&self) -> bool {
        self.0.get().is_none()
    }

    /// Complete when the operations are done; `None` while they are deferred.
    pub(crate) fn event(&self) -> Option<&Arc<Event>> {
        self.0.get().and_then(|submitted| submitted.event.as_ref())
    }

    fn is_complete(&self) -> Result<bool, DriverError> {
        self.event().map_or(Ok(false), |event| event.is_complete())
    }
}

/// The last write to an allocation and the reads since then.
#[derive(Debug, Default)]
pub(crate) struct AccessRecord {
    /// `None`: by a stream of a caller, or one for messages.
    last_write: Option<(Option<StreamKind>, Arc<Completion>)>,
    /// The last read of each stream since that write.
    reads: [Option<Arc<Completion>>; StreamKind::COUNT],
    /// Reads by streams of a caller, and by those for messages, since that write.
    caller_reads: Vec<Arc<Completion>>,
    /// Reads by streams of other devices.
    reads_elsewhere: Vec<Arc<ReadElsewhere>>,
}

/// A read by another device. That device says when it is done: so nobody else asks its driver, and
/// it can be closed while this is kept.
#[derive(Debug)]
pub(crate) struct ReadElsewhere {
    by: Arc<DeviceStatus>,
    is_done: AtomicBool,
}

impl ReadElsewhere {
    pub(crate) fn done(&self) {
        self.is_done.store(true, Ordering::Release);
    }

    fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }
}

impl AccessRecord {
    /// Of memory that a stream of a caller, or one for messages, has written when `event` is
    /// complete.
    pub(crate) fn written_by_caller(event: Option<Arc<Event>>) -> Self {
        Self { last_write: event.map(|event| (None, Completion::of(event))), ..Self::default() }
    }

    /// A stream of a caller, or one for messages, reads the memory until `event` is complete.
    pub(crate) fn record_caller_read(&mut self, event: Arc<Event>) {
        // What a query of an event fails with is the error of the next operation.
        self.caller_reads.retain(|read| !read.is_complete().unwrap_or(false));
        self.caller_reads.push(Completion::of(event));
    }

    /// A stream of another device, `by`, reads the memory until that device says that it is done.
    pub(crate) fn record_read_elsewhere(&mut self, by: &Arc<DeviceStatus>) -> Arc<ReadElsewhere> {
        self.is_used_elsewhere();
        let read = Arc::new(ReadElsewhere { by: by.clone(), is_done: AtomicBool::new(false) });
        self.reads_elsewhere.push(read.clone());
        read
    }

    /// Whether another device may still use the memory, so that it cannot be freed. Nobody knows
    /// what a lost device uses: then it stays in use. Forgets the reads that are done.
    pub(crate) fn is_used_elsewhere(&mut self) -> bool {
        self.reads_elsewhere.retain(|read| !read.is_done());
        !self.reads_elsewhere.is_empty()
    }

    /// Another device whose read must end before the memory is written. What a lost device reads
    /// does not matter.
    pub(crate) fn reader_elsewhere(&self) -> Option<Arc<DeviceStatus>> {
        let reads = |read: &&Arc<ReadElsewhere>| !read.is_done() && !read.by.is_lost();
        self.reads_elsewhere.iter().find(reads).map(|read| read.by.clone())
    }

    /// Whether launches use the memory that are not submitted.
    pub(crate) fn is_deferred(&self) -> bool {
        self.last_write()
            .into_iter()
            .chain(self.reads.iter().flatten())
            .any(|completion| completion.is_pending())
    }

    /// The last write.
    pub(crate) fn last_write(&self) -> Option<&Arc<Completion>> {
        self.last_write.as_ref().map(|(_, completion)| completion)
    }

    /// The last read of each stream of the backend since the last write.
    pub(crate) fn reads(&self) -> impl Iterator<Item = (StreamKind, &Arc<Completion>)> {
        let reads = StreamKind::ALL.into_iter().zip(&self.reads);
        reads.filter_map(|(kind, read)| Some((kind, read.as_ref()?)))
    }

    /// What a read on stream `kind` has to wait for: the last write, if another stream made it.
    /// `None`: a stream that is not of the backend.
    pub(crate) fn awaited_by_read(&self, kind: Option<StreamKind>) -> impl Iterator<Item = &Arc<Completion>> {
        let other = move |by: &Option<StreamKind>| by.is_none() || *by != kind;
        self.last_write.iter().filter(move |(by, _)| other(by)).map(|(_, completion)| completion)
    }

    /// What a write on stream `kind` has to wait for: the last write and the reads since, if other
    /// streams of this device made them. For other devices see [`Self::reader_elsewhere`].
    pub(crate) fn awaited_by_write(
        &self,
        kind: Option<StreamKind>,
    ) -> impl Iterator<Item = &Arc<Completion>> {
        let readers = self.reads().filter(move |(by, _)| Some(*by) != kind).map(|(_, completion)| completion);
        self.awaited_by_read(kind).chain(readers).chain(&self.caller_reads)
    }

    pub(crate) fn record_read(&mut self, kind: StreamKind, completion: &Arc<Completion>) {
        self.reads[kind as usize] = Some(completion.clone());
    }

    pub(crate) fn record_write(&mut self, kind: StreamKind, completion: &Arc<Completion>) {
        // A lost device may still read it.
        let reads_elsewhere = std::mem::take(&mut self.reads_elsewhere);
        *self =
            Self { last_write: Some((Some(kind), completion.clone())), reads_elsewhere, ..Self::default() };
    }

    /// The error of the last write, if it failed.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.last_write.as_ref().and_then(|(_, completion)| completion.0.get()?.failure.as_ref())
    }

    /// Forgets the error of the last write but not its event: for memory that becomes another
    /// buffer, whose contents are unspecified.
    pub(crate) fn clear_failure(&mut self) {
        if let Some((_, completion)) = &mut self.last_write
            && completion.0.get().is_some_and(|submitted| submitted.failure.is_some())
            && let Some(event) = completion.event().cloned()
        {
            *completion = Completion::of(event);
        }
    }

    /// Whether all recorded operations are complete.
    ///
    /// # Errors
    /// That of this device; another device's is none of them.
    pub(crate) fn is_idle(&mut self) -> Result<bool, DriverError> {
        let last_write = self.last_write.iter().map(|(_, completion)| completion);
        for completion in last_write.chain(self.reads.iter().flatten()).chain(&self.caller_reads) {
            if !completion.is_complete()? {
                return Ok(false);
            }
        }
        Ok(!self.is_used_elsewhere())
    }
}
