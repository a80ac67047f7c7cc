//! Counts the packets that a peer has acknowledged, which quinn does not tell: its congestion
//! controller sees each of them.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use quinn::Connection;
use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics};
use quinn_proto::RttEstimator;

/// Makes controllers of another factory that count as well.
pub(super) struct Counted(pub(super) Arc<dyn ControllerFactory + Send + Sync>);

impl ControllerFactory for Counted {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let inner = Arc::clone(&self.0).build(now, current_mtu);
        Box::new(CountingController { inner, acknowledged: 0 })
    }
}

/// The packets of a connection that its peer has acknowledged. The number begins again on another
/// path.
pub(crate) fn acknowledged_packets(connection: &Connection) -> u64 {
    let controller = connection.congestion_state().into_any().downcast::<CountingController>();
    controller.map_or(0, |controller| controller.acknowledged)
}

struct CountingController {
    inner: Box<dyn Controller>,
    acknowledged: u64,
}

impl Controller for CountingController {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        self.acknowledged += 1;
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        self.inner.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, persistent: bool, lost_bytes: u64) {
        self.inner.on_congestion_event(now, sent, persistent, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.inner.window()
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self { inner: self.inner.clone_box(), acknowledged: self.acknowledged })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
