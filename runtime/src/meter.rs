//! Counters and timelines of a rank: its time and its traffic.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::Rank;

use crate::Clock;

/// One rank's counters over one operation. All times are wall time of the rank's own clock, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RankReport {
    /// Query tokens the rank owns.
    pub tokens: u64,
    /// Attention, merging and finalising.
    pub compute_ns: u64,
    /// Waiting for messages.
    pub wait_ns: u64,
    /// Part of `wait_ns` in which all messages for this rank had arrived, but a peer had not yet posted the receive of
    /// this rank's message: the peer was late.
    pub credit_blocked_ns: u64,
    /// Part of `wait_ns` in which all messages for this rank had arrived, and a peer had posted the receive, but this
    /// rank's message had not reached the peer yet: the network was slow.
    pub send_blocked_ns: u64,
    /// Packing, and copies between host and device.
    pub copy_ns: u64,
    /// Plan payload handed to the transport, bytes.
    pub bytes_sent: u64,
    /// Messages handed to the transport.
    pub messages_sent: u64,
    /// Most bytes of plan buffers alive at once.
    pub peak_bytes: u64,
    /// Pieces of attention done; a piece is about 100 ms of work.
    pub pieces: u64,
}

/// An interval on one of a rank's timelines, for traces.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Span {
    /// Kind of work. JSON calls it `lane`.
    #[serde(rename = "lane")]
    pub timeline: Timeline,
    /// The step in words.
    pub name: String,
    /// Start in nanoseconds, on the clock of the run.
    pub start_ns: u64,
    /// End in nanoseconds, on the clock of the run.
    pub end_ns: u64,
    /// Of a message: the other rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<u32>,
}

/// A rank's timelines, one for each kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Timeline {
    /// Attention, merging and finalising.
    Compute,
    /// Packing, and copies between host and device.
    Copy,
    /// Waiting for messages.
    Wait,
    /// A message to a peer: from its posting until this rank learns that the peer has received it.
    Send,
    /// A message from a peer: from the posting of its receive until this rank finds that it has arrived.
    Receive,
}

/// Counts time and traffic while a rank runs one operation.
#[derive(Debug)]
pub struct Meter {
    clock: Arc<dyn Clock>,
    /// Time on each timeline of the rank's own work; copies inside a wait are counted as copies.
    spent_ns: [Cell<u64>; 3],
    bytes_sent: Cell<u64>,
    messages_sent: Cell<u64>,
    credit_blocked_ns: Cell<u64>,
    send_blocked_ns: Cell<u64>,
    /// By id: exchanges that were posted and not yet waited for.
    under_way: RefCell<BTreeMap<u32, ExchangeTimes>>,
    spans: Option<RefCell<Vec<Span>>>,
}

impl Meter {
    /// A meter at zero. With `trace` it also keeps the spans.
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

    /// Counts a message of `bytes` bytes to a peer.
    pub fn sent(&self, bytes: u64) {
        self.bytes_sent.set(self.bytes_sent.get() + bytes);
        self.messages_sent.set(self.messages_sent.get() + 1);
    }

    /// Starts an interval. It ends when the result is given to [`Self::end`].
    pub(crate) fn start(&self) -> Started {
        let [copied_ns, waited_ns] =
            [Timeline::Copy, Timeline::Wait].map(|timeline| self.spent_ns[timeline as usize].get());
        Started { at_ns: self.clock.now_ns(), copied_ns, waited_ns }
    }

    pub(crate) fn end(&self, started: Started, timeline: Timeline, name: impl FnOnce() -> String) {
        let end_ns = self.clock.now_ns();
        let spent = |on: Timeline| self.spent_ns[on as usize].get();
        // Copies inside this interval have been counted as copies already, waits inside of a computation as waits.
        let waited =
            if timeline == Timeline::Compute { spent(Timeline::Wait) - started.waited_ns } else { 0 };
        let inside = spent(Timeline::Copy) - started.copied_ns + waited;
        let cell = &self.spent_ns[timeline as usize];
        cell.set(cell.get() + (end_ns - started.at_ns).saturating_sub(inside));
        if let Some(spans) = &self.spans {
            spans.borrow_mut().push(Span {
                timeline,
                name: name(),
                start_ns: started.at_ns,
                end_ns,
                peer: None,
            });
        }
    }

    /// Records the span of a message that was posted at `started` and is done: `timeline` is that of sends or of receives, with
    /// `peer`. Messages overlap each other and the rank's own work, so their time enters no counter.
    pub(crate) fn message_done(
        &self,
        started: Started,
        (timeline, peer): (Timeline, Rank),
        name: impl FnOnce() -> String,
    ) {
        if let Some(spans) = &self.spans {
            let (start_ns, end_ns) = (started.at_ns, self.clock.now_ns());
            spans.borrow_mut().push(Span { timeline, name: name(), start_ns, end_ns, peer: Some(peer.0) });
        }
    }

    /// All messages that the exchange `id` receives have arrived.
    pub(crate) fn arrived(&self, id: u32) {
        self.under_way.borrow_mut().entry(id).or_default().arrived_ns = Some(self.clock.now_ns());
    }

    /// A peer has received a message of the exchange `id` that was posted at `started`; `under_way` is the time since
    /// the peer had posted its receive. Returns the time in nanoseconds that the message waited for that receive.
    pub(crate) fn taken(&self, id: u32, started: Started, under_way: Duration) -> u64 {
        let under_way_ns = u64::try_from(under_way.as_nanos()).unwrap_or(u64::MAX);
        let asked_ns = self.clock.now_ns().saturating_sub(under_way_ns).max(started.at_ns);
        self.under_way.borrow_mut().entry(id).or_default().unasked_ns = started.at_ns..asked_ns;
        asked_ns - started.at_ns
    }

    /// Ends the wait for the exchange `id` that began at `started`.
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

    /// The spans so far; empty without `trace`.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.as_ref().map(|spans| spans.borrow().clone()).unwrap_or_default()
    }
}

/// When the parts of an exchange were done, in nanoseconds on the clock of the run.
#[derive(Debug, Default)]
struct ExchangeTimes {
    /// When all messages that it receives had arrived.
    arrived_ns: Option<u64>,
    /// The interval in which the message that ended last waited for the receive of its peer. A wait ends with this
    /// message.
    unasked_ns: Range<u64>,
}

/// The start of an interval.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started {
    at_ns: u64,
    copied_ns: u64,
    waited_ns: u64,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct ManualClock(AtomicU64);

    impl Clock for ManualClock {
        fn now_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    const EXCHANGE: u32 = 7;

    /// An event of an exchange, at these times in nanoseconds.
    #[derive(Clone, Copy)]
    enum Event {
        /// All messages that it receives have arrived.
        Arrived(u64),
        /// A message: the time of its posting, the time of the posting of its receive, and the time of its end.
        Taken(u64, u64, u64),
    }
    use Event::{Arrived, Taken};

    /// Waits from 100 ns to 150 ns for an exchange with these events. Returns the times that the wait was blocked by
    /// peers without a posted receive, and by messages under way.
    fn blocked(events: &[Event]) -> [u64; 2] {
        let clock = Arc::new(ManualClock::default());
        let meter = Meter::new(clock.clone(), false);
        let at = |ns| clock.0.store(ns, Ordering::Relaxed);
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
    fn a_wait_is_for_receives_until_they_have_arrived_and_then_for_sends() {
        let asked = Taken(20, 20, 150);
        assert_eq!([60, 120, 150].map(|at| blocked(&[Arrived(at), asked])), [[0, 50], [0, 30], [0, 0]]);
    }

    #[test]
    fn a_send_waits_for_its_peer_until_the_receive_is_posted_and_then_for_the_network() {
        // All messages had arrived before the wait.
        assert_eq!(blocked(&[Arrived(60), Taken(20, 130, 150)]), [30, 20]);
        // The receive was posted before the wait, before all messages had arrived, and only at the end.
        assert_eq!(blocked(&[Arrived(60), Taken(20, 90, 150)]), [0, 50]);
        assert_eq!(blocked(&[Arrived(120), Taken(20, 110, 150)]), [0, 30]);
        assert_eq!(blocked(&[Arrived(120), Taken(20, 150, 150)]), [30, 0]);
        assert_eq!(blocked(&[Arrived(120), Taken(20, 140, 150)]), [20, 10]);
        // The peer received the message before all messages had arrived here.
        assert_eq!(blocked(&[Taken(20, 110, 115), Arrived(150)]), [0, 0]);
        // This rank itself was late to send.
        assert_eq!(blocked(&[Arrived(60), Taken(125, 140, 150)]), [15, 35]);
    }

    #[test]
    fn of_several_messages_the_last_one_received_decides_what_a_wait_was_for() {
        let (late_asker, slow_way) = (Taken(20, 130, 135), Taken(20, 20, 150));
        assert_eq!(blocked(&[Arrived(60), late_asker, slow_way]), [0, 50]);
        let (slow_way, late_asker) = (Taken(20, 20, 125), Taken(20, 145, 150));
        assert_eq!(blocked(&[Arrived(60), slow_way, late_asker]), [45, 5]);
    }

    #[test]
    fn an_exchange_without_sends_blocks_nothing_and_one_with_only_sends_blocks_from_the_start() {
        assert_eq!(blocked(&[Arrived(150)]), [0, 0]);
        assert_eq!(blocked(&[Arrived(20), Taken(20, 120, 150)]), [20, 30]);
        // The exchange ended early.
        assert_eq!(blocked(&[Taken(20, 120, 150)]), [0, 0]);
    }

    #[test]
    fn a_wait_inside_a_computation_is_no_computation() {
        let clock = Arc::new(ManualClock::default());
        let meter = Meter::new(clock.clone(), false);
        let at = |ns| clock.0.store(ns, Ordering::Relaxed);
        at(100);
        let computing = meter.start();
        at(110);
        let waiting = meter.start();
        at(140);
        meter.end(waiting, Timeline::Wait, String::new);
        at(150);
        meter.end(computing, Timeline::Compute, String::new);
        let report = meter.report();
        assert_eq!([report.compute_ns, report.wait_ns], [20, 30]);
    }

    #[test]
    fn copies_inside_a_wait_do_not_count_as_blocked() {
        let clock = Arc::new(ManualClock::default());
        let meter = Meter::new(clock.clone(), false);
        let at = |ns| clock.0.store(ns, Ordering::Relaxed);
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
