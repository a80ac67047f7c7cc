//! What a rank hands to the system: packets of bulk data leave many in a datagram, with the version
//! of quinn that is built in.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};

use super::free_address::free_address;
use super::lanes::{JOB, close, config, runtime, send};
use crate::quic::network::socket::SocketSource;
use crate::quic::*;

/// A socket of the system, and the number of packets in each datagram that it was given.
struct Counting {
    socket: Arc<dyn AsyncUdpSocket>,
    datagrams: Mutex<Vec<usize>>,
}

impl fmt::Debug for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket.fmt(f)
    }
}

impl Counting {
    fn bound(address: SocketAddr) -> Arc<Self> {
        let socket = TokioRuntime.wrap_udp_socket(UdpSocket::bind(address).unwrap()).unwrap();
        Arc::new(Self { socket, datagrams: Mutex::default() })
    }
}

impl AsyncUdpSocket for Counting {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.socket.try_send(transmit)?;
        let packets = transmit.segment_size.map_or(1, |size| transmit.contents.len().div_ceil(size));
        self.datagrams.lock().unwrap().push(packets);
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(context, buffers, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}

/// quinn hands over ten packets at a time. If it came to be another number, `BatchingSocket` would
/// keep nothing back, and no other test would fail.
#[test]
fn bulk_data_leave_in_datagrams_of_more_packets_than_quinn_hands_over() {
    runtime().block_on(async {
        let authority = ClusterAuthority::new(JOB).unwrap();
        let coordinator = free_address();
        let near = Counting::bound((Ipv4Addr::LOCALHOST, 0).into());
        let far = Counting::bound(coordinator);
        if near.max_transmit_segments() < 45 {
            println!("this system does not take several packets in a datagram");
            return;
        }
        let sockets = [&far, &near].map(|socket| vec![Arc::clone(socket) as Arc<dyn AsyncUdpSocket>]);
        let [zero, one] = [0, 1].map(|rank| {
            let mut config = config(&authority, rank, coordinator, 1);
            config.link.mtu = Some(1500);
            let source = SocketSource::Simulated(sockets[rank as usize].clone(), [7; 32]);
            QuicTransport::form_on(config, source, None)
        });
        let (zero, one) = tokio::join!(zero, one);
        let (zero, one) = (zero.unwrap(), one.unwrap());
        far.datagrams.lock().unwrap().clear();
        send(&zero, &one, 24 << 20).await;
        let datagrams = std::mem::take(&mut *far.datagrams.lock().unwrap());
        let packets: usize = datagrams.iter().sum();
        let together: usize = datagrams.iter().filter(|packets| **packets > 10).sum();
        println!(
            "{packets} packets in {} datagrams, {together} of them in datagrams of more than ten",
            datagrams.len()
        );
        assert!(datagrams.iter().all(|packets| *packets <= 45), "{datagrams:?}");
        assert!(together > packets / 2, "{together} of {packets} packets");
        close(zero, one).await;
    });
}
