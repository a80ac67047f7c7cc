//! Which stream does what, and who waits for whom.
//!
//! Kernels, copies to the device and copies to the host have a stream each, so that keys travel while others are
//! attended to. Between streams nothing has an order but what events give it: each buffer knows the last operation that
//! wrote it and the last ones that read it, and whoever comes next, on another stream, waits for those it has to.
//! Memory that goes from one buffer to another takes this knowledge along.

use std::sync::Arc;

use crate::driver::Event;
use crate::fault::Fault;

/// The streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Kernels.
    Compute,
    /// Copies to the device.
    Up,
    /// Copies to the host.
    Down,
}

impl Lane {
    pub(crate) const COUNT: usize = 3;
    pub(crate) const ALL: [Self; Self::COUNT] = [Self::Compute, Self::Up, Self::Down];
}

/// What was last done with some memory.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    written: Option<(Lane, Arc<Event>)>,
    /// Since then.
    read: [Option<Arc<Event>>; Lane::COUNT],
}

impl Marks {
    /// What an operation on `lane` that reads has to wait for.
    pub(crate) fn before_reading(&self, lane: Lane) -> impl Iterator<Item = &Arc<Event>> {
        self.written.iter().filter(move |(by, _)| *by != lane).map(|(_, event)| event)
    }

    /// What an operation on `lane` that writes has to wait for.
    pub(crate) fn before_writing(&self, lane: Lane) -> impl Iterator<Item = &Arc<Event>> {
        let readers = Lane::ALL.into_iter().zip(&self.read).filter(move |(by, _)| *by != lane);
        self.before_reading(lane).chain(readers.filter_map(|(_, event)| event.as_ref()))
    }

    pub(crate) fn was_read(&mut self, lane: Lane, event: &Arc<Event>) {
        self.read[lane as usize] = Some(event.clone());
    }

    pub(crate) fn was_written(&mut self, lane: Lane, event: &Arc<Event>) {
        *self = Self { written: Some((lane, event.clone())), read: [const { None }; Lane::COUNT] };
    }

    /// Whether the device is done with it.
    pub(crate) fn idle(&self) -> Result<bool, Fault> {
        let written = self.written.iter().map(|(_, event)| event);
        for event in written.chain(self.read.iter().flatten()) {
            if !event.happened()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
