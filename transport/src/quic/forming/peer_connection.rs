//! Connections whose peer has been admitted.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;

use quinn::{Connection, SendStream};

use crate::quic::network::connection::describe;
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

impl PeerConnection {
    /// How it has ended, for people.
    pub(crate) fn end(&self) -> String {
        self.connection.close_reason().map_or_else(|| "no answer".into(), |reason| describe(&reason))
    }
}

/// Waits until one of the connections is closed, and returns that one.
pub(crate) async fn first_closed<'a>(
    joined: impl IntoIterator<Item = &'a PeerConnection>,
) -> &'a PeerConnection {
    let mut all: Vec<_> = joined.into_iter().map(|one| (one, Box::pin(one.connection.closed()))).collect();
    poll_fn(|context| {
        let closed =
            all.iter_mut().find_map(|(one, closed)| closed.as_mut().poll(context).is_ready().then_some(*one));
        closed.map_or(Poll::Pending, Poll::Ready)
    })
    .await
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
