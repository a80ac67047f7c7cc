//! What a rank spent its time on, and what it sent.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

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
    /// What of `wait_ns` was waiting for another rank to ask for a message of this one, when all that this one expected had
    /// come: that rank was late.
    pub credit_blocked_ns: u64,
    /// What of `wait_ns` was waiting for a message of this rank to reach the rank that had asked for it, when all that this
    /// one expected had come: the way there was slow.
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
    #[serde(rename = "lane")]
    pub timeline: Timeline,
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
pub enum Timeline {
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
    /// Time of each timeline on which the rank does something itself; copies inside a wait are counted as copies.
    spent_ns: [Cell<u64>; 3],
    bytes_sent: Cell<u64>,
    messages_sent: Cell<u64>,
    credit_blocked_ns: Cell<u64>,
    send_blocked_ns: Cell<u64>,
    /// Exchanges that have not been waited for.
    under_way: RefCell<BTreeMap<u32, Ends>>,
    spans: Option<RefCell<Vec<Span>>>,
}

impl Meter {
    /// A meter at zero; with `trace` it also keeps the spans.
    pub fn new(clock: Arc<dyn Clock>, trace: bool) -> Self {
        Self {
            clock,
            spent_ns: Default::default(),
            bytes_sent: Cell::new(0),
            messages_sent: Cell::new(0),
            credit_blocked_ns: Cell::new(0),
            send_blocked_ns: Cell::new(0),
            under_way: RefCell::default(),
            spans: trace.then(RefCell::default),
        }
    }

    /// Counts a message of `bytes` bytes.
    pub fn sent(&self, bytes: u64) {
        self.bytes_sent.set(self.bytes_sent.get() + bytes);
        self.messages_sent.set(self.messages_sent.get() + 1);
    }

    /// Starts a stretch of a timeline; it ends when the result is given to [`Self::end`].
    pub(crate) fn start(&self) -> Started {
        Started { at_ns: self.clock.now_ns(), copied_ns: self.spent_ns[Timeline::Copy as usize].get() }
    }

    pub(crate) fn end(&self, started: Started, timeline: Timeline, name: impl FnOnce() -> String) {
        let end_ns = self.clock.now_ns();
        let copy = &self.spent_ns[Timeline::Copy as usize];
        // What was copied inside this stretch has been counted already.
        let inside = copy.get() - started.copied_ns;
        let cell = &self.spent_ns[timeline as usize];
        cell.set(cell.get() + (end_ns - started.at_ns).saturating_sub(inside));
        if let Some(spans) = &self.spans {
            spans.borrow_mut().push(Span { timeline, name: name(), start_ns: started.at_ns, end_ns });
        }
    }

    /// Ends the way of a message that has been posted at `started`. Messages travel beside each other and beside whatever
    /// the rank does, so they are not counted, only shown.
    pub(crate) fn travelled(&self, started: Started, timeline: Timeline, name: impl FnOnce() -> String) {
        if let Some(spans) = &self.spans {
            let (start_ns, end_ns) = (started.at_ns, self.clock.now_ns());
            spans.borrow_mut().push(Span { timeline, name: name(), start_ns, end_ns });
        }
    }

    /// Everything that the exchange `id` receives is here.
    pub(crate) fn arrived(&self, id: u32) {
        self.under_way.borrow_mut().entry(id).or_default().arrived_ns = Some(self.clock.now_ns());
    }

    /// A message of the exchange `id`, posted at `started`, has been taken after it was under way for so long. Returns for
    /// how many nanoseconds nobody had asked for it.
    pub(crate) fn taken(&self, id: u32, started: Started, under_way: Duration) -> u64 {
        let under_way_ns = u64::try_from(under_way.as_nanos()).unwrap_or(u64::MAX);
        let asked_ns = self.clock.now_ns().saturating_sub(under_way_ns).max(started.at_ns);
        self.under_way.borrow_mut().entry(id).or_default().unasked_ns = started.at_ns..asked_ns;
        asked_ns - started.at_ns
    }

    /// Ends a wait for the exchange `id`.
    pub(crate) fn end_wait(&self, started: Started, id: u32, name: impl FnOnce() -> String) {
        let before = self.spent_ns[Timeline::Wait as usize].get();
        self.end(started, Timeline::Wait, name);
        let Some(ends) = self.under_way.borrow_mut().remove(&id) else { return };
        let Some(arrived_ns) = ends.arrived_ns else { return };
        let waited = self.spent_ns[Timeline::Wait as usize].get() - before;
        let blocked_from = arrived_ns.max(started.at_ns);
        let blocked = self.clock.now_ns().saturating_sub(blocked_from).min(waited);
        let unasked =
            ends.unasked_ns.end.saturating_sub(ends.unasked_ns.start.max(blocked_from)).min(blocked);
        self.credit_blocked_ns.set(self.credit_blocked_ns.get() + unasked);
        self.send_blocked_ns.set(self.send_blocked_ns.get() + blocked - unasked);
    }

    /// The counters so far.
    pub fn report(&self) -> RankReport {
        RankReport {
            compute_ns: self.spent_ns[Timeline::Compute as usize].get(),
            wait_ns: self.spent_ns[Timeline::Wait as usize].get(),
            credit_blocked_ns: self.credit_blocked_ns.get(),
            send_blocked_ns: self.send_blocked_ns.get(),
            copy_ns: self.spent_ns[Timeline::Copy as usize].get(),
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

/// How an exchange came to its end, on the clock of the run.
#[derive(Debug, Default)]
struct Ends {
    /// When everything that it receives was here.
    arrived_ns: Option<u64>,
    /// From when to when nobody had asked for the message that was taken last: it is the one that a wait was for.
    unasked_ns: Range<u64>,
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

    const EXCHANGE: u32 = 7;

    /// What becomes of an exchange, at these times.
    #[derive(Clone, Copy)]
    enum Event {
        /// Everything that it receives is here.
        Arrived(u64),
        /// A message that was posted at the first time and asked for at the second has been taken at the third.
        Taken(u64, u64, u64),
    }
    use Event::{Arrived, Taken};

    /// Waits from 100 to 150 for an exchange to which this happens; for how long it was blocked by ranks that had not
    /// asked, and by messages on their way.
    fn blocked(events: &[Event]) -> [u64; 2] {
        let hands = Arc::new(Hands::default());
        let meter = Meter::new(hands.clone(), false);
        let at = |ns| hands.0.store(ns, Ordering::Relaxed);
        at(100);
        let waiting = meter.start();
        for &event in events {
            match event {
                Arrived(arrived_ns) => {
                    at(arrived_ns);
                    meter.arrived(EXCHANGE);
                }
                Taken(posted_ns, asked_ns, taken_ns) => {
                    at(posted_ns);
                    let posted = meter.start();
                    at(taken_ns);
                    let under_way = Duration::from_nanos(taken_ns - asked_ns);
                    assert_eq!(meter.taken(EXCHANGE, posted, under_way), asked_ns - posted_ns);
                }
            }
        }
        at(150);
        meter.end_wait(waiting, EXCHANGE, String::new);
        let report = meter.report();
        assert_eq!(report.wait_ns, 50);
        [report.credit_blocked_ns, report.send_blocked_ns]
    }

    #[test]
    fn a_wait_is_for_receives_until_they_are_there_and_for_sends_after_that() {
        let asked = Taken(20, 20, 150);
        assert_eq!([60, 120, 150].map(|at| blocked(&[Arrived(at), asked])), [[0, 50], [0, 30], [0, 0]]);
    }

    #[test]
    fn it_is_for_a_rank_until_that_has_asked_and_for_the_network_after_that() {
        // Everything was here before the wait.
        assert_eq!(blocked(&[Arrived(60), Taken(20, 130, 150)]), [30, 20]);
        // Asked for before the wait began, before everything was here, and only when it was handed over.
        assert_eq!(blocked(&[Arrived(60), Taken(20, 90, 150)]), [0, 50]);
        assert_eq!(blocked(&[Arrived(120), Taken(20, 110, 150)]), [0, 30]);
        assert_eq!(blocked(&[Arrived(120), Taken(20, 150, 150)]), [30, 0]);
        assert_eq!(blocked(&[Arrived(120), Taken(20, 140, 150)]), [20, 10]);
        // Taken before everything was here.
        assert_eq!(blocked(&[Taken(20, 110, 115), Arrived(150)]), [0, 0]);
        // This rank itself was late to send.
        assert_eq!(blocked(&[Arrived(60), Taken(125, 140, 150)]), [15, 35]);
    }

    #[test]
    fn of_several_messages_the_last_to_be_taken_is_what_a_wait_was_for() {
        let (late_asker, slow_way) = (Taken(20, 130, 135), Taken(20, 20, 150));
        assert_eq!(blocked(&[Arrived(60), late_asker, slow_way]), [0, 50]);
        let (slow_way, late_asker) = (Taken(20, 20, 125), Taken(20, 145, 150));
        assert_eq!(blocked(&[Arrived(60), slow_way, late_asker]), [45, 5]);
    }

    #[test]
    fn an_exchange_that_sends_nothing_blocks_nothing_and_one_that_only_sends_blocks_from_the_start() {
        assert_eq!(blocked(&[Arrived(150)]), [0, 0]);
        assert_eq!(blocked(&[Arrived(20), Taken(20, 120, 150)]), [20, 30]);
        // It ended early.
        assert_eq!(blocked(&[Taken(20, 120, 150)]), [0, 0]);
    }

    #[test]
    fn what_was_copied_in_a_wait_is_no_part_of_what_blocked_it() {
        let hands = Arc::new(Hands::default());
        let meter = Meter::new(hands.clone(), false);
        let at = |ns| hands.0.store(ns, Ordering::Relaxed);
        at(100);
        let waiting = meter.start();
        meter.arrived(EXCHANGE);
        let copying = meter.start();
        at(130);
        meter.end(copying, Timeline::Copy, String::new);
        at(150);
        meter.taken(EXCHANGE, waiting, Duration::ZERO);
        meter.end_wait(waiting, EXCHANGE, String::new);
        let report = meter.report();
        let split = [report.copy_ns, report.wait_ns, report.credit_blocked_ns, report.send_blocked_ns];
        assert_eq!(split, [30, 20, 20, 0]);
    }
}
