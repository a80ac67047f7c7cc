//! Figures of a connection. They tell a slow network from a slow rank.

use std::time::Duration;

/// Figures of the connection over which messages to and from one rank go, or of all of them if
/// there are several lanes; totals since they were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionFigures {
    /// Recent round-trip time.
    pub round_trip: Duration,
    /// Bytes that may be in flight to the rank at a time.
    pub window_bytes: u64,
    /// Payload of the largest packet that arrives, in bytes.
    pub packet_bytes: u16,
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets that were considered lost and were sent again.
    pub packets_lost: u64,
    /// How often loss reduced the sending rate of the rank.
    pub congestion_events: u64,
    /// How often large packets stopped arriving, so that the rank sends smaller ones.
    pub black_holes: u64,
    /// Bytes sent, including headers of QUIC and repeated bytes.
    pub bytes_sent: u64,
    /// Bytes received, including headers of QUIC and repeated bytes.
    pub bytes_received: u64,
    /// Payload bytes sent through memory that both ranks share; they are in no packet.
    pub shared_bytes_sent: u64,
    /// Payload bytes received through memory that both ranks share.
    pub shared_bytes_received: u64,
}
