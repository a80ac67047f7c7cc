//! Connections whose peer has been admitted.

use std::net::SocketAddr;

use quinn::{Connection, SendStream};

use crate::quic::network::frames::FrameReader;
use crate::rank::Rank;

/// A connection whose other side is known and welcome.
#[derive(Debug)]
pub(crate) struct PeerConnection {
    pub(crate) rank: Rank,
    /// Which of the data connections between two ranks; 0 of every other one.
    pub(crate) lane: usize,
    pub(crate) connection: Connection,
    pub(crate) send: SendStream,
    pub(crate) frames: FrameReader,
    /// The addresses that the other side says for itself, if it has dialled for control.
    pub(crate) advertised: Vec<SocketAddr>,
}

/// All connections of a rank.
#[derive(Debug, Default)]
pub(crate) struct Mesh {
    pub(crate) control: Vec<PeerConnection>,
    pub(crate) data: Vec<PeerConnection>,
    /// By rank, the addresses at which it can be reached; empty in a group of one.
    pub(crate) table: AddressTable,
}

/// By rank of a group, its addresses in the order in which to try them.
pub(crate) type AddressTable = Vec<Vec<SocketAddr>>;
