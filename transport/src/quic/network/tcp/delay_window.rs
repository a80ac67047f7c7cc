//! How much QUIC has in flight inside TCP streams.
//!
//! TCP loses nothing, so loss does not tell how much the path takes; too much only waits in TCP's
//! queues, and control frames wait behind it. So the window follows the delay: it grows while
//! packets arrive soon, and shrinks when they wait.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory};
use quinn_proto::RttEstimator;

/// Makes a [`DelayWindow`] of at most so many bytes for each connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::quic::network) struct DelayWindows(pub(in crate::quic::network) u64);

impl ControllerFactory for DelayWindows {
    fn build(self: Arc<Self>, now: Instant, _: u16) -> Box<dyn Controller> {
        Box::new(DelayWindow::new(self.0, now))
    }
}

/// The window of one connection.
#[derive(Clone, Debug)]
struct DelayWindow {
    window: u64,
    most: u64,
    /// The shortest round trips in this period and in the one before it, and when this period
    /// began.
    shortest: [Duration; 2],
    period: Instant,
    /// Only packets sent after this show what the last cut has changed.
    cut: Option<Instant>,
}

impl DelayWindow {
    fn new(most: u64, now: Instant) -> Self {
        Self { window: INITIAL_BYTES.min(most), most, shortest: [Duration::MAX; 2], period: now, cut: None }
    }

    /// A packet of `bytes` has arrived. `limited` says whether there was more to send than the
    /// window allowed.
    fn arrived(&mut self, now: Instant, sent: Instant, bytes: u64, limited: bool) {
        let trip = now.saturating_duration_since(sent);
        if now.saturating_duration_since(self.period) > PERIOD {
            (self.shortest, self.period) = ([Duration::MAX, self.shortest[0]], now);
        }
        self.shortest[0] = self.shortest[0].min(trip);
        let base = self.shortest[0].min(self.shortest[1]);
        let waited = trip - base;
        if waited > MOST_DELAY {
            if self.cut.is_none_or(|cut| sent >= cut) {
                let fitting = (base + MOST_DELAY).as_secs_f64() / trip.as_secs_f64();
                self.window = ((self.window as f64 * fitting) as u64).max(LEAST_BYTES);
                self.cut = Some(now);
            }
        } else if waited < MOST_DELAY / 2 && limited {
            self.window += if self.cut.is_none() { bytes } else { bytes / 4 };
        }
        self.window = self.window.min(self.most);
    }
}

impl Controller for DelayWindow {
    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, _: &RttEstimator) {
        self.arrived(now, sent, bytes, !app_limited);
    }

    /// Packets are lost only with their stream.
    fn on_congestion_event(&mut self, _: Instant, _: Instant, _: bool, _: u64) {}

    fn on_mtu_update(&mut self, _: u16) {}

    fn window(&self) -> u64 {
        self.window
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        INITIAL_BYTES.min(self.most)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// A packet that waits longer on its way makes the window smaller: far less than the silence after
/// which a rank counts as dead, and far more than what a busy host adds.
const MOST_DELAY: Duration = Duration::from_millis(200);

/// Four of the largest packets, so that some are under way while others are acknowledged, in both
/// directions at once.
const LEAST_BYTES: u64 = 4 * 65_000;

/// Before any packet has arrived: an eighth of a second of 8 Mbit/s.
const INITIAL_BYTES: u64 = 2 * 65_000;

/// A path that has become longer is known after two periods.
const PERIOD: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const PACKET: u64 = 65_000;
    const MOST: u64 = 3 << 20;

    /// Connections that always have more to send share a link of so many bytes a second. Returns
    /// for each packet how long it waited, and the bytes that the link could have sent while it
    /// had none.
    fn share(rate: f64, base: Duration, connections: usize, packets: usize) -> (Vec<Duration>, f64) {
        let start = Instant::now();
        let mut now = start;
        let mut windows: Vec<_> = (0..connections).map(|_| (DelayWindow::new(MOST, now), 0)).collect();
        // The packets of their handshakes did not wait.
        windows.iter_mut().for_each(|(window, _)| window.arrived(now + base, now, 1000, false));
        let (mut queue, mut answers) = (VecDeque::new(), VecDeque::<(Instant, usize, Instant)>::new());
        let (mut delays, mut idle) = (Vec::new(), 0.0);
        while delays.len() < packets {
            while let Some(&(at, of, sent)) = answers.front()
                && at <= now
            {
                answers.pop_front();
                windows[of].0.arrived(at, sent, PACKET, true);
                windows[of].1 -= PACKET;
            }
            for (of, (window, in_flight)) in windows.iter_mut().enumerate() {
                while *in_flight + PACKET <= window.window {
                    *in_flight += PACKET;
                    queue.push_back((of, now));
                }
            }
            match (queue.pop_front(), answers.front()) {
                (Some((of, sent)), _) => {
                    now += Duration::from_secs_f64(PACKET as f64 / rate);
                    delays.push(now - sent);
                    answers.push_back((now + base, of, sent));
                }
                (None, Some(&(at, ..))) => {
                    idle += (at - now).as_secs_f64() * rate;
                    now = at;
                }
                (None, None) => unreachable!("a window holds a packet"),
            }
        }
        (delays, idle / (now - start).as_secs_f64() / rate)
    }

    #[test]
    fn packets_on_a_slow_link_wait_far_less_than_the_silence_of_a_dead_rank() {
        // 8 and 20 Mbit/s, alone and with others.
        for (rate, connections) in [(1e6, 1), (1e6, 3), (2.5e6, 2), (2.5e6, 8)] {
            let (delays, idle) = share(rate, Duration::from_millis(20), connections, 3000);
            let longest = delays.iter().max().unwrap();
            assert!(*longest < Duration::from_millis(1200), "{rate} {connections}: {longest:?}");
            assert!(idle < 0.1, "{rate} {connections}: idle for {idle}");
        }
    }

    #[test]
    fn a_fast_link_is_filled_up_to_the_largest_window() {
        for (rate, base) in [(125e6, 1), (125e6, 20), (1250e6, 1)] {
            let (_, idle) = share(rate, Duration::from_millis(base), 1, 20_000);
            assert!(idle < 0.1, "{rate} {base} ms: idle for {idle}");
        }
    }

    #[test]
    fn a_path_that_has_become_longer_is_filled_again() {
        let start = Instant::now();
        let mut window = DelayWindow::new(MOST, start);
        let mut now = start;
        for step in 0..4000 {
            let trip = Duration::from_millis(if step < 1000 { 5 } else { 300 });
            now += Duration::from_millis(50);
            window.arrived(now, now - trip, PACKET, true);
        }
        assert_eq!(window.window, MOST);
    }
}
