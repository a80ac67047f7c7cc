//! What a connection tells of itself, to tell a slow network from a slow rank.

use std::time::Duration;

/// Figures of the connection over which messages to and from one rank go, or of all of them if there are several lanes;
/// totals since they were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionFigures {
    /// Round-trip time, as it was lately.
    pub round_trip: Duration,
    /// Bytes that may be under way to the rank at a time.
    pub window_bytes: u64,
    /// Payload of the largest packet that gets through, in bytes.
    pub packet_bytes: u16,
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets taken for lost, and sent again.
    pub packets_lost: u64,
    /// How often loss made the rank send less.
    pub congestion_events: u64,
    /// How often large packets ceased to arrive, so that smaller ones are sent.
    pub black_holes: u64,
    /// Bytes sent, headers of QUIC and what was sent again included.
    pub bytes_sent: u64,
    /// Bytes that came, likewise.
    pub bytes_received: u64,
}
