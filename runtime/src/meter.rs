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
    /// What of `wait_ns` was waiting for messages of this rank to be taken, when all that it expected had come.
    pub send_blocked_ns: u64,
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
    /// A message on its way to another rank: from when it is posted until this rank has noticed that it was taken.
    Send,
    /// A message on its way here: from when it is posted until this rank has noticed that it came.
    Receive,
}

/// Counts while a rank runs.
#[derive(Debug)]
pub struct Meter {
    clock: Arc<dyn Clock>,
    /// Time of each lane on which the rank does something itself; copies inside a wait are counted as copies.
    lanes: [Cell<u64>; 3],
    bytes_sent: Cell<u64>,
    messages_sent: Cell<u64>,
    send_blocked_ns: Cell<u64>,
    /// Exchanges that have not been waited for, and when everything that they receive was here.
    arrived: RefCell<Vec<(u32, u64)>>,
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
            send_blocked_ns: Cell::new(0),
            arrived: RefCell::default(),
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

    /// Ends the way of a message that has been posted at `started`. Messages travel beside each other and beside whatever
    /// the rank does, so they are not counted, only shown.
    pub(crate) fn travelled(&self, started: Started, lane: Lane, name: impl FnOnce() -> String) {
        if let Some(spans) = &self.spans {
            let (start_ns, end_ns) = (started.at_ns, self.clock.now_ns());
            spans.borrow_mut().push(Span { lane, name: name(), start_ns, end_ns });
        }
    }

    /// Everything that the exchange `id` receives is here.
    pub(crate) fn arrived(&self, id: u32) {
        self.arrived.borrow_mut().push((id, self.clock.now_ns()));
    }

    /// Ends a wait for the exchange `id`.
    pub(crate) fn end_wait(&self, started: Started, id: u32, name: impl FnOnce() -> String) {
        let before = self.lanes[Lane::Wait as usize].get();
        self.end(started, Lane::Wait, name);
        let mut arrived = self.arrived.borrow_mut();
        if let Some(index) = arrived.iter().position(|(arrived, _)| *arrived == id) {
            let (_, at_ns) = arrived.swap_remove(index);
            let waited = self.lanes[Lane::Wait as usize].get() - before;
            let blocked = self.clock.now_ns().saturating_sub(at_ns.max(started.at_ns)).min(waited);
            self.send_blocked_ns.set(self.send_blocked_ns.get() + blocked);
        }
    }

    /// The counters so far.
    pub fn report(&self) -> RankReport {
        RankReport {
            compute_ns: self.lanes[Lane::Compute as usize].get(),
            wait_ns: self.lanes[Lane::Wait as usize].get(),
            send_blocked_ns: self.send_blocked_ns.get(),
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct Hands(AtomicU64);

    impl Clock for Hands {
        fn now_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    /// Waits from 100 to 150 for an exchange whose receives were all there at `arrived_ns`.
    fn blocked(arrived_ns: u64) -> u64 {
        let hands = Arc::new(Hands::default());
        let meter = Meter::new(hands.clone(), false);
        let at = |ns| hands.0.store(ns, Ordering::Relaxed);
        at(100);
        let started = meter.start();
        at(arrived_ns);
        meter.arrived(7);
        at(150);
        meter.end_wait(started, 7, String::new);
        let report = meter.report();
        assert_eq!(report.wait_ns, 50);
        report.send_blocked_ns
    }

    #[test]
    fn a_wait_is_for_receives_until_they_are_there_and_for_sends_after_that() {
        assert_eq!([blocked(60), blocked(120), blocked(150)], [50, 30, 0]);
    }
}
