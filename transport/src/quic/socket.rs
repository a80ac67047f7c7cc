//! The UDP socket below an endpoint.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Endpoint, EndpointConfig, Runtime, TokioRuntime, UdpPoller};
use socket2::{Domain, Protocol, Socket, Type};

use super::tls::{Path, TlsConfigs};
use crate::error::TransportError;

/// Bytes asked of the system for each direction; with the usual default of 208 KiB even loopback loses packets.
const BUFFER_BYTES: usize = 16 << 20;

/// Less than this, and bursts of a fast sender will be lost.
const LITTLE_BYTES: usize = 4 << 20;

/// A bound socket with large buffers.
pub(crate) fn bind(address: SocketAddr) -> Result<std::net::UdpSocket, TransportError> {
    let cannot = |error: io::Error| TransportError::Bootstrap {
        text: format!("cannot listen on {address} (UDP): {error}; is another job using it?"),
    };
    let socket =
        Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP)).map_err(cannot)?;
    // Systems clamp what they do not allow; what was granted is read back below.
    let _ = socket.set_recv_buffer_size(BUFFER_BYTES);
    let _ = socket.set_send_buffer_size(BUFFER_BYTES);
    let granted = (socket.recv_buffer_size().unwrap_or(0), socket.send_buffer_size().unwrap_or(0));
    if granted.0.min(granted.1) < LITTLE_BYTES {
        tracing::warn!(
            receive_bytes = granted.0,
            send_bytes = granted.1,
            "the system grants small socket buffers: expect packet loss; raise net.core.rmem_max and wmem_max to 16 MiB"
        );
    } else {
        tracing::debug!(receive_bytes = granted.0, send_bytes = granted.1, "socket buffers");
    }
    socket.set_nonblocking(true).map_err(cannot)?;
    socket.bind(&address.into()).map_err(cannot)?;
    Ok(socket.into())
}

/// What an endpoint stands on.
#[derive(Debug)]
pub(crate) struct Ground {
    socket: Arc<dyn AsyncUdpSocket>,
    /// Of quinn's random numbers; `None` takes the system's.
    seed: Option<[u8; 32]>,
}

impl Ground {
    /// A socket of the system. Must be called in a tokio context with I/O.
    pub(crate) fn real(socket: std::net::UdpSocket) -> Result<Self, TransportError> {
        let socket = TokioRuntime.wrap_udp_socket(socket).map_err(|error| cannot(&error))?;
        Ok(Self { socket, seed: None })
    }

    pub(crate) fn simulated(socket: Arc<dyn AsyncUdpSocket>, seed: [u8; 32]) -> Self {
        Self { socket, seed: Some(seed) }
    }
}

/// An endpoint that dials and listens. Must be called in a tokio context, whose clock it goes by.
pub(crate) fn endpoint(ground: Ground, path: Path, tls: &TlsConfigs) -> Result<Endpoint, TransportError> {
    let Ground { mut socket, seed } = ground;
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(path.mtu().max(1472)).map_err(|error| cannot(&error))?;
    config.rng_seed(seed);
    if path == Path::Loopback {
        socket = Arc::new(WholePackets(socket));
    }
    let runtime = Arc::new(TokioRuntime);
    Endpoint::new_with_abstract_socket(config, Some(tls.server(path)), socket, runtime)
        .map_err(|error| cannot(&error))
}

fn cannot(error: &dyn std::fmt::Display) -> TransportError {
    TransportError::Bootstrap { text: format!("cannot set up the QUIC endpoint: {error}") }
}

/// A socket that sends and receives one packet per datagram.
///
/// quinn sizes its receive buffer as packet size × 64 segments × 32 messages, which is 134 MB for packets of 65,000
/// bytes. Such a packet cannot be one of several segments, in either direction.
#[derive(Debug)]
struct WholePackets(Arc<dyn AsyncUdpSocket>);

impl AsyncUdpSocket for WholePackets {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.0).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.0.try_send(transmit)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_recv(context, buffers, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        1
    }

    fn max_receive_segments(&self) -> usize {
        1
    }

    fn may_fragment(&self) -> bool {
        self.0.may_fragment()
    }
}
