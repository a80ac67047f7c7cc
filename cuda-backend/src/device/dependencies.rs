//! Which stream does what, and who waits for whom.
//!
//! Kernels, copies to the device and copies to the host have a stream each, so that keys travel while others are
//! attended to. Between streams nothing has an order but what events give it: each buffer knows the last operation that
//! wrote it and the last ones that read it, and whoever comes next, on another stream, waits for those it has to.
//! DeviceMemory that goes from one buffer to another takes this knowledge along.
//!
//! Kernels may be held back, to be submitted with the next ones. What they read and write knows of them all the same: it
//! knows their [`Completion`], which comes to an event when they are submitted.

use std::sync::{Arc, OnceLock};

use kyklos::{Error, Result};

use crate::driver::{DriverError, Event};

/// The streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// Kernels.
    Compute,
    /// Copies to the device.
    Upload,
    /// Copies to the host.
    Download,
}

impl StreamKind {
    pub(crate) const COUNT: usize = 3;
    pub(crate) const ALL: [Self; Self::COUNT] = [Self::Compute, Self::Upload, Self::Download];
}

/// The end of operations that are submitted together: of some that were, or of some that are held back.
#[derive(Debug, Default)]
pub(crate) struct Completion(OnceLock<Submitted>);

#[derive(Debug)]
struct Submitted {
    /// None where none could be recorded, so that nobody will know when the device is done.
    event: Option<Arc<Event>>,
    /// Why not all of them were submitted.
    failure: Option<Error>,
}

impl Completion {
    /// Of an operation that was submitted.
    pub(crate) fn of(event: Arc<Event>) -> Arc<Self> {
        let end = Self::default();
        end.submitted(Some(event), None);
        Arc::new(end)
    }

    /// They were submitted, or as many of them as there was no error.
    pub(crate) fn submitted(&self, event: Option<Arc<Event>>, failure: Option<Error>) {
        self.0.set(Submitted { event, failure }).expect("what was held back is submitted once");
    }

    pub(crate) fn is_held(&self) -> bool {
        self.0.get().is_none()
    }

    /// What happens when the device is done, of operations that were submitted.
    pub(crate) fn event(&self) -> Option<&Arc<Event>> {
        self.0.get().and_then(|submitted| submitted.event.as_ref())
    }

    fn is_complete(&self) -> Result<bool, DriverError> {
        self.event().map_or(Ok(false), |event| event.is_complete())
    }
}

/// What was last done with some memory.
#[derive(Debug, Default)]
pub(crate) struct AccessRecord {
    written: Option<(StreamKind, Arc<Completion>)>,
    /// Since then.
    read: [Option<Arc<Completion>>; StreamKind::COUNT],
}

impl AccessRecord {
    /// What an operation on `kind` that reads has to wait for.
    pub(crate) fn awaited_by_read(&self, kind: StreamKind) -> impl Iterator<Item = &Arc<Completion>> {
        self.written.iter().filter(move |(by, _)| *by != kind).map(|(_, end)| end)
    }

    /// What an operation on `kind` that writes has to wait for.
    pub(crate) fn awaited_by_write(&self, kind: StreamKind) -> impl Iterator<Item = &Arc<Completion>> {
        let readers = StreamKind::ALL.into_iter().zip(&self.read).filter(move |(by, _)| *by != kind);
        self.awaited_by_read(kind).chain(readers.filter_map(|(_, end)| end.as_ref()))
    }

    pub(crate) fn record_read(&mut self, kind: StreamKind, end: &Arc<Completion>) {
        self.read[kind as usize] = Some(end.clone());
    }

    pub(crate) fn record_write(&mut self, kind: StreamKind, end: &Arc<Completion>) {
        *self = Self { written: Some((kind, end.clone())), read: [const { None }; StreamKind::COUNT] };
    }

    /// Why what is there is not what was to be written, if it is not.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.written.as_ref().and_then(|(_, end)| end.0.get()?.failure.as_ref())
    }

    /// It becomes somebody else's, who does not care what is there; only when the device is done with it still matters.
    pub(crate) fn clear_failure(&mut self) {
        if let Some((_, end)) = &mut self.written
            && end.0.get().is_some_and(|submitted| submitted.failure.is_some())
            && let Some(event) = end.event().cloned()
        {
            *end = Completion::of(event);
        }
    }

    /// Whether the device is done with it.
    pub(crate) fn idle(&self) -> Result<bool, DriverError> {
        let written = self.written.iter().map(|(_, end)| end);
        for end in written.chain(self.read.iter().flatten()) {
            if !end.is_complete()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
