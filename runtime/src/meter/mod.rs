//! Counters and timelines of a rank: its time and its traffic.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::Rank;

use crate::clock::Clock;

/// One rank's counters over one operation. All times are wall time of the rank's own clock, in
/// nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RankReport {
    /// Query tokens the rank owns.
    pub tokens: u64,
    /// Attention, merging and finalising.
    pub compute_ns: u64,
    /// Waiting for messages.
    pub wait_ns: u64,
    /// Part of `wait_ns` in which all messages for this rank had arrived, but a peer had not yet
    /// posted the receive of this rank's message: the peer was late.
    pub credit_blocked_ns: u64,
    /// Part of `wait_ns` in which all messages for this rank had arrived, and a peer had posted the
    /// receive, but this rank's message had not reached the peer yet: the network was slow.
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
    /// A message from a peer: from the posting of its receive until this rank finds that it has
    /// arrived.
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
    /// Steps of the device for which the host does not wait, and whose ends it has not noticed yet.
    ahead: Cell<u32>,
    /// The end of the last part of such a step that was counted.
    counted_ns: Cell<u64>,
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
            ahead: Cell::new(0),
            counted_ns: Cell::new(0),
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

    /// Ends an interval of the host. It is not counted while the device does steps for which the
    /// host does not wait: the time is theirs.
    pub(crate) fn end(&self, started: Started, timeline: Timeline, name: impl FnOnce() -> String) {
        if self.ahead.get() == 0 {
            let at_ns = started.at_ns.max(self.counted_ns.get());
            self.count(Started { at_ns, ..started }, timeline, name);
        }
    }

    /// A step of the device begins for which the host does not wait.
    pub(crate) fn begin_ahead(&self) {
        self.ahead.set(self.ahead.get() + 1);
    }

    /// Counts a part of the first such step, which was begun at `started`: from the end of what was
    /// counted before, until now.
    pub(crate) fn count_ahead(&self, started: Started, timeline: Timeline, name: impl FnOnce() -> String) {
        let at_ns = started.at_ns.max(self.counted_ns.get());
        self.count(Started { at_ns, ..self.start() }, timeline, name);
        self.counted_ns.set(self.clock.now_ns());
    }

    /// The host has noticed the end of the first such step.
    pub(crate) fn end_ahead(&self) {
        self.ahead.set(self.ahead.get() - 1);
    }

    fn count(&self, started: Started, timeline: Timeline, name: impl FnOnce() -> String) {
        let end_ns = self.clock.now_ns();
        let spent = |on: Timeline| self.spent_ns[on as usize].get();
        // Copies inside this interval have been counted as copies already, waits inside of a computation as
        // waits.
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

    /// Records the span of a message that was posted at `started` and is done: `timeline` is that
    /// of sends or of receives, with `peer`. Messages overlap each other and the rank's own
    /// work, so their time enters no counter.
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
    pub fn arrived(&self, id: u32) {
        self.under_way.borrow_mut().entry(id).or_default().arrived_ns = Some(self.clock.now_ns());
    }

    /// A peer has received a message of the exchange `id` that was posted at `started`; `under_way`
    /// is the time since the peer had posted its receive. Returns the time in nanoseconds that
    /// the message waited for that receive.
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
    /// The interval in which the message that ended last waited for the receive of its peer. A wait
    /// ends with this message.
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
mod tests;
