//! What is counted as which work, on a clock that is set by hand.

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
    /// A message: the time of its posting, the time of the posting of its receive, and the time of
    /// its end.
    Taken(u64, u64, u64),
}
use Event::{Arrived, Taken};

/// Waits from 100 ns to 150 ns for an exchange with these events. Returns the times that the wait
/// was blocked by peers without a posted receive, and by messages under way.
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
fn steps_that_the_host_submits_ahead_share_the_time_without_overlap() {
    let clock = Arc::new(ManualClock::default());
    let meter = Meter::new(clock.clone(), true);
    let at = |ns| clock.0.store(ns, Ordering::Relaxed);
    let begin = |ns| {
        at(ns);
        meter.begin_ahead();
        meter.start()
    };
    let first = begin(100);
    let second = begin(105);
    // The host waits and copies while the device computes.
    let waiting = meter.start();
    at(120);
    let copying = meter.start();
    at(125);
    meter.end(copying, Timeline::Copy, String::new);
    at(140);
    meter.count_ahead(first, Timeline::Compute, String::new);
    meter.end_ahead();
    at(170);
    meter.count_ahead(second, Timeline::Wait, String::new);
    at(200);
    meter.count_ahead(second, Timeline::Compute, String::new);
    meter.end_ahead();
    // Now the device has nothing to do, and the host waits on and copies.
    at(210);
    let copying = meter.start();
    at(230);
    meter.end(copying, Timeline::Copy, String::new);
    at(260);
    meter.end_wait(waiting, EXCHANGE, String::new);
    let report = meter.report();
    assert_eq!([report.compute_ns, report.wait_ns, report.copy_ns], [40 + 30, 30 + 40, 20]);
    let counted: Vec<_> = meter.spans().iter().map(|span| span.start_ns..span.end_ns).collect();
    assert_eq!(counted, [100..140, 140..170, 170..200, 210..230, 200..260]);
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
