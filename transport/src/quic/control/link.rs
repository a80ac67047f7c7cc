//! The connections to one other rank, and the way frames go out on them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use quinn::{Connection, VarInt};
use tokio::runtime::Handle;
use tokio::sync::{MutexGuard, watch};

use crate::figures::ConnectionFigures;
use crate::quic::network::acknowledged::acknowledged_packets;
use crate::quic::network::frames::{FrameSender, weight};
use crate::quic::shared_memory::sharing::Sharing;
use crate::wire::Frame;

/// A connection for messages, and the runtime on whose thread it lives.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    pub(crate) connection: Connection,
    pub(crate) runtime: Handle,
    turns: Arc<Turns>,
}

/// Large messages are sent one at a time, in the order of their requests. Interleaved, all of them
/// would finish late.
///
/// The turn goes to the next message when the connection has taken the last byte of this one, which
/// may still have to leave. Until then it has the higher priority.
type Turns = tokio::sync::Mutex<i32>;

impl Lane {
    pub(crate) fn new(connection: Connection, runtime: Handle) -> Self {
        Self { connection, runtime, turns: Arc::default() }
    }

    /// Waits for the turn of a large message, which ends when the guard is dropped. The guard has
    /// the priority of its streams.
    pub(crate) async fn turn(&self) -> MutexGuard<'_, i32> {
        let mut priority = self.turns.lock().await;
        // After 2^31 messages the next one overtakes those that still leave.
        *priority = priority.checked_sub(1).unwrap_or(-1);
        priority
    }
}

/// A connection to a rank and the way its frames go out.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    /// All lanes of a data connection, itself the first. Empty for a control connection.
    pub(crate) lanes: Vec<Lane>,
    /// Of a data connection to a rank on this host.
    pub(crate) sharing: Sharing,
    frames: Mutex<Option<FrameSender>>,
    /// Frames that have not been handed to the connection, by their weight.
    queued: Arc<AtomicUsize>,
    /// Becomes true when every frame has reached the peer, or never will.
    pub(crate) flushed: watch::Receiver<bool>,
}

impl Link {
    pub(crate) fn new(
        connection: Connection,
        (frames, queued): (FrameSender, Arc<AtomicUsize>),
        flushed: watch::Receiver<bool>,
    ) -> Self {
        let (lanes, sharing) = (Vec::new(), Sharing::new());
        Self { connection, lanes, sharing, frames: Mutex::new(Some(frames)), queued, flushed }
    }

    pub(crate) fn close(&self, code: VarInt, reason: &[u8]) {
        for connection in
            std::iter::once(&self.connection).chain(self.lanes.iter().map(|lane| &lane.connection))
        {
            connection.close(code, reason);
        }
    }

    /// Queues a frame. A link whose connection has ended drops it: the task that watches the
    /// connection handles that.
    pub(crate) fn say(&self, frame: Frame) {
        self.say_encoded(frame.encode().into());
    }

    /// The same of one or more frames that are encoded already. No other frame comes between them.
    pub(crate) fn say_encoded(&self, bytes: Bytes) {
        if let Some(frames) = &*self.frames.lock().unwrap_or_else(PoisonError::into_inner) {
            self.queued.fetch_add(weight(&bytes), Ordering::Relaxed);
            let _ = frames.send(bytes);
        }
    }

    /// More frames are queued than any plan needs: the peer is alive, and does not read.
    pub(crate) fn is_unresponsive(&self) -> bool {
        self.queued.load(Ordering::Relaxed) > MAX_QUEUED_FRAMES
    }

    /// Grows with each packet of the peer, which nobody else can make: a sign of life also while a
    /// lost packet holds back the frames of the stream.
    pub(crate) fn signs_of_life(&self) -> u64 {
        let received = self.connection.stats().frame_rx;
        received.acks + received.stream + received.ping + received.max_data + received.max_stream_data
    }

    /// Changes with each packet of this rank that the peer has received.
    pub(crate) fn acknowledged(&self) -> u64 {
        acknowledged_packets(&self.connection)
    }

    /// Figures of all lanes together: sums, the longest round trip and the smallest packets.
    pub(crate) fn figures(&self) -> ConnectionFigures {
        let mut all = ConnectionFigures { packet_bytes: u16::MAX, ..ConnectionFigures::default() };
        for lane in &self.lanes {
            let stats = lane.connection.stats();
            all.round_trip = all.round_trip.max(stats.path.rtt);
            all.window_bytes += stats.path.cwnd;
            all.packet_bytes = all.packet_bytes.min(stats.path.current_mtu);
            all.packets_sent += stats.path.sent_packets;
            all.packets_lost += stats.path.lost_packets;
            all.congestion_events += stats.path.congestion_events;
            all.black_holes += stats.path.black_holes_detected;
            all.bytes_sent += stats.udp_tx.bytes;
            all.bytes_received += stats.udp_rx.bytes;
        }
        (all.shared_bytes_sent, all.shared_bytes_received) = self.sharing.moved_bytes();
        all
    }

    /// No frame follows: the stream ends once the peer has all of them.
    pub(crate) fn close_links(&self) {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Frames that may wait for one peer, by their weight: 64 MiB of long ones.
pub(crate) const MAX_QUEUED_FRAMES: usize = 1 << 16;
