//! What a rank spent its time on, and what it sent.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use crate::Clock;

/// One rank's counters over one operation. All times are wall time on the rank's own timeline.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RankReport {
    /// Query tokens the rank owns.
    pub tokens: u64,
    /// Attention, merging and finalising.
    pub compute_ns: u64,
    /// Waiting for messages.
    pub wait_ns: u64,
    /// Packing, and copies between host and device.
    pub copy_ns: u64,
    /// Plan payload handed to the transport, bytes.
    pub bytes_sent: u64,
    /// Messages handed to the transport.
    pub messages_sent: u64,
    /// Most bytes of plan buffers alive at once.
    pub peak_bytes: u64,
    /// Pieces of attention done.
    pub pieces: u64,
}

/// A stretch of a rank's timeline, for traces.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Span {
    /// What kind of work.
    pub lane: Lane,
    /// The step in words.
    pub name: String,
    /// Start, on the clock of the run.
    pub start_ns: u64,
    /// End, on the clock of the run.
    pub end_ns: u64,
}

/// Kind of work on a rank's timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Attention, merging and finalising.
    Compute,
    /// Packing, and copies between host and device.
    Copy,
    /// Waiting for messages.
    Wait,
}

/// Counts while a rank runs.
#[derive(Debug)]
pub struct Meter {
    clock: Arc<dyn Clock>,
    /// Time of each lane; copies inside a wait are counted as copies.
    lanes: [Cell<u64>; 3],
    bytes_sent: Cell<u64>,
    messages_sent: Cell<u64>,
    spans: Option<RefCell<Vec<Span>>>,
}

impl Meter {
    /// A meter at zero; with `trace` it also keeps the spans.
    pub fn new(clock: Arc<dyn Clock>, trace: bool) -> Self {
        Self {
            clock,
            lanes: Default::default(),
            bytes_sent: Cell::new(0),
            messages_sent: Cell::new(0),
            spans: trace.then(RefCell::default),
        }
    }

    /// Counts a message of `bytes` bytes.
    pub fn sent(&self, bytes: u64) {
        self.bytes_sent.set(self.bytes_sent.get() + bytes);
        self.messages_sent.set(self.messages_sent.get() + 1);
    }

    /// Starts a stretch of `lane`; it ends when the result is given to [`Self::end`].
    pub(crate) fn start(&self) -> Started {
        Started { at_ns: self.clock.now_ns(), copied_ns: self.lanes[Lane::Copy as usize].get() }
    }

    pub(crate) fn end(&self, started: Started, lane: Lane, name: impl FnOnce() -> String) {
        let end_ns = self.clock.now_ns();
        let copy = &self.lanes[Lane::Copy as usize];
        // What was copied inside this stretch has been counted already.
        let inside = copy.get() - started.copied_ns;
        let cell = &self.lanes[lane as usize];
        cell.set(cell.get() + (end_ns - started.at_ns).saturating_sub(inside));
        if let Some(spans) = &self.spans {
            spans.borrow_mut().push(Span { lane, name: name(), start_ns: started.at_ns, end_ns });
        }
    }

    /// The counters so far.
    pub fn report(&self) -> RankReport {
        RankReport {
            compute_ns: self.lanes[Lane::Compute as usize].get(),
            wait_ns: self.lanes[Lane::Wait as usize].get(),
            copy_ns: self.lanes[Lane::Copy as usize].get(),
            bytes_sent: self.bytes_sent.get(),
            messages_sent: self.messages_sent.get(),
            ..RankReport::default()
        }
    }

    /// The spans so far, if they are kept.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.as_ref().map(|spans| spans.borrow().clone()).unwrap_or_default()
    }
}

/// The start of a stretch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started {
    at_ns: u64,
    copied_ns: u64,
}
