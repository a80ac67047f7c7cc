//! The streams of a [`Tunnel`](crate::quic::network::tunnel::Tunnel) by the address of their peer:
//! packets that wait for each, and which peers have proven that they belong to the group.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::{mpsc, watch};

/// The packets that wait for a stream, in the order of their sending.
pub(in crate::quic::network) type Packets = mpsc::UnboundedReceiver<Packet>;

/// A packet with its length before it. It counts as waiting until it is dropped.
#[derive(Debug)]
pub(in crate::quic::network) struct Packet {
    pub(in crate::quic::network) bytes: Vec<u8>,
    waiting: Arc<AtomicUsize>,
}

impl Drop for Packet {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.bytes.len() + PACKET_OVERHEAD, Ordering::Relaxed);
    }
}

/// The way to one address.
#[derive(Debug)]
struct Route {
    packets: mpsc::UnboundedSender<Packet>,
    /// Bytes of packets that wait for the stream.
    waiting: Arc<AtomicUsize>,
    /// True once the peer has shown an identity of the group, and from the start of a peer that
    /// this rank dials.
    proven: watch::Sender<bool>,
}

/// All routes of an endpoint.
#[derive(Debug)]
pub(in crate::quic::network) struct Routes {
    state: Mutex<State>,
    /// Bytes that may wait for a member.
    member_bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    routes: HashMap<SocketAddr, Route>,
    /// Addresses that this endpoint may dial: those that its rank has asked for, and those of
    /// proven members.
    known: HashSet<SocketAddr>,
}

/// What becomes of a packet.
#[derive(Debug)]
pub(in crate::quic::network) enum Sent {
    /// It waits for its stream, or is dropped because too many do. QUIC treats that as loss.
    Queued,
    /// There is no stream: the address must be dialled first.
    Dial(Packets),
    /// There is no stream, and an address at which no member is known is not dialled.
    Dropped,
}

impl Routes {
    pub(in crate::quic::network) fn new(member_bytes: usize) -> Self {
        Self { state: Mutex::default(), member_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a packet.
    pub(in crate::quic::network) fn send(&self, to: SocketAddr, packet: Vec<u8>) -> Sent {
        let mut state = self.lock();
        if let Some(route) = state.routes.get(&to)
            && !route.packets.is_closed()
        {
            route.queue(packet, self.member_bytes);
            return Sent::Queued;
        }
        if !state.known.contains(&to) {
            return Sent::Dropped;
        }
        let (route, packets, _) = Route::new(true);
        route.queue(packet, self.member_bytes);
        state.routes.insert(to, route);
        Sent::Dial(packets)
    }

    /// A stream from this address has been accepted. Returns its packets, and whether its peer has
    /// proven its identity.
    pub(in crate::quic::network) fn accepted(&self, from: SocketAddr) -> (Packets, watch::Receiver<bool>) {
        let mut state = self.lock();
        // A member opens a stream anew after an outage. Its connection goes on, so there is no other
        // handshake.
        let (route, packets, proven) = Route::new(state.known.contains(&from));
        // An earlier stream from the same address and port is dead; otherwise this stream could not exist.
        state.routes.insert(from, route);
        drop(state);
        (packets, proven)
    }

    /// Forgets the route of a stream that has ended, unless another stream has taken its place.
    pub(in crate::quic::network) fn ended(&self, from: SocketAddr) {
        self.lock().routes.retain(|at, route| *at != from || !route.packets.is_closed());
    }

    /// Forgets all routes. Queued packets are still sent; then the streams end.
    pub(in crate::quic::network) fn clear(&self) {
        self.lock().routes.clear();
    }
}

impl Route {
    fn new(proven: bool) -> (Self, Packets, watch::Receiver<bool>) {
        let (packets, queued) = mpsc::unbounded_channel();
        let (proven, is_proven) = watch::channel(proven);
        (Self { packets, waiting: Arc::default(), proven }, queued, is_proven)
    }

    fn queue(&self, bytes: Vec<u8>, member_bytes: usize) {
        let limit = if *self.proven.borrow() { member_bytes } else { STRANGER_BYTES };
        let cost = bytes.len() + PACKET_OVERHEAD;
        if self.waiting.fetch_add(cost, Ordering::Relaxed) + cost > limit {
            self.waiting.fetch_sub(cost, Ordering::Relaxed);
            return;
        }
        let _ = self.packets.send(Packet { bytes, waiting: Arc::clone(&self.waiting) });
    }
}

/// Tells a tunnel which peers belong to the group: strangers have little memory and little time.
#[derive(Clone, Debug)]
pub(crate) struct StreamPeers(pub(in crate::quic::network) Weak<Routes>);

impl StreamPeers {
    /// This rank is about to dial the address.
    pub(crate) fn will_dial(&self, address: SocketAddr) {
        if let Some(routes) = self.0.upgrade() {
            routes.lock().known.insert(address);
        }
    }

    /// The peer at this address has proven that it belongs to the group.
    pub(crate) fn prove(&self, address: SocketAddr) {
        if let Some(routes) = self.0.upgrade() {
            let mut state = routes.lock();
            state.known.insert(address);
            if let Some(route) = state.routes.get(&address) {
                route.proven.send_replace(true);
            }
        }
    }
}

/// Bytes that may wait for a peer that has not proven who it is: the answers of a handshake.
pub(in crate::quic::network) const STRANGER_BYTES: usize = 64 << 10;

/// Memory of a queued packet besides its bytes.
const PACKET_OVERHEAD: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 1);

    fn waiting(packets: &mut Packets) -> usize {
        std::iter::from_fn(|| packets.try_recv().ok()).map(|packet| packet.bytes.len()).sum()
    }

    #[test]
    fn a_stranger_has_little_memory_and_a_member_as_much_as_its_window() {
        let routes = Arc::new(Routes::new(1 << 20));
        let (mut packets, proven) = routes.accepted(PEER);
        for proof in [false, true] {
            for _ in 0..4000 {
                assert!(matches!(routes.send(PEER, vec![7; 1000]), Sent::Queued));
            }
            let limit = if proof { 1 << 20 } else { STRANGER_BYTES };
            let bytes = waiting(&mut packets);
            assert!(bytes <= limit && bytes > limit - (limit >> 3), "{proof} {bytes}");
            StreamPeers(Arc::downgrade(&routes)).prove(PEER);
        }
        assert!(*proven.borrow());
    }

    #[test]
    fn only_addresses_that_this_rank_knows_are_dialled() {
        let routes = Arc::new(Routes::new(1 << 20));
        let (packets, _) = routes.accepted(PEER);
        drop(packets);
        routes.ended(PEER);
        assert!(matches!(routes.send(PEER, vec![7; 1000]), Sent::Dropped));
        StreamPeers(Arc::downgrade(&routes)).will_dial(PEER);
        let Sent::Dial(packets) = routes.send(PEER, vec![7; 1000]) else { panic!("it is not dialled") };
        assert!(matches!(routes.send(PEER, vec![7; 1000]), Sent::Queued));
        // The stream has ended: the next packet dials again.
        drop(packets);
        assert!(matches!(routes.send(PEER, vec![7; 1000]), Sent::Dial(_)));
        // Or the peer does, and is no stranger.
        assert!(*routes.accepted(PEER).1.borrow());
    }
}
