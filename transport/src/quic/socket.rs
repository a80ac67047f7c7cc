//! The UDP socket below an endpoint.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Endpoint, EndpointConfig, Runtime, ServerConfig, TokioRuntime, UdpPoller};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::sync::watch;

use super::link::{Carrier, Path};
use super::tunnel::Tunnel;
use crate::error::TransportError;

/// Bytes asked of the system for each direction; with the usual default of 208 KiB even loopback loses packets.
const BUFFER_BYTES: usize = 16 << 20;

/// Less than this, and bursts of a fast sender will be lost.
const LITTLE_BYTES: usize = 4 << 20;

/// A socket of the system that has its address.
#[derive(Debug)]
pub(crate) enum Bound {
    Udp(std::net::UdpSocket),
    Tcp(std::net::TcpListener),
}

impl Bound {
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Udp(socket) => socket.local_addr(),
            Self::Tcp(listener) => listener.local_addr(),
        }
    }
}

/// Binds a socket for packets in `carrier`.
pub(crate) fn bind(address: SocketAddr, carrier: Carrier) -> Result<Bound, TransportError> {
    let bound = match carrier {
        Carrier::Udp => bind_udp(address).map(Bound::Udp),
        Carrier::Tcp => bind_tcp(address).map(Bound::Tcp),
    };
    bound.map_err(|error| TransportError::Bootstrap {
        text: format!("cannot listen on {address} ({carrier}): {error}; is another job using it?"),
    })
}

/// A socket with large buffers.
pub(crate) fn bind_udp(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    // Systems clamp what they do not allow; what was granted is read back later.
    let _ = socket.set_recv_buffer_size(BUFFER_BYTES);
    let _ = socket.set_send_buffer_size(BUFFER_BYTES);
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// A socket that listens, and from whose port others of this rank may dial.
fn bind_tcp(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    // An earlier run's streams may linger on the port.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    // After the bind, so that a port that another job has is still refused.
    #[cfg(unix)]
    socket.set_reuse_port(true)?;
    socket.listen(LISTEN_BACKLOG)?;
    Ok(socket.into())
}

/// Ranks that may dial at once before any of them is answered.
const LISTEN_BACKLOG: i32 = 1024;

/// What the system has granted a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Granted {
    Udp {
        /// Bytes of its buffers, of packets that come and that go.
        buffers: Option<(usize, usize)>,
        /// Packets that it sends and hands over as one datagram.
        segments: (usize, usize),
    },
    Tcp,
}

impl fmt::Display for Granted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Udp { buffers, segments } = self else { return f.write_str("TCP") };
        let batch = |name, segments| match segments {
            1 => format!("{name} off"),
            _ => format!("{name} of {segments} packets"),
        };
        write!(f, "UDP, {}, {}", batch("GSO", segments.0), batch("GRO", segments.1))?;
        let Some((receive, send)) = *buffers else { return Ok(()) };
        write!(f, ", socket buffers of {} KiB in and {} KiB out", receive >> 10, send >> 10)?;
        match receive.min(send) < LITTLE_BYTES {
            true => f.write_str(" (too little for bursts: raise net.core.rmem_max and wmem_max to 16 MiB)"),
            false => Ok(()),
        }
    }
}

/// What somebody said who was dialled with TCP and does not talk it.
pub(crate) type Refused = Option<watch::Receiver<Option<String>>>;

/// Ends with the words of somebody who was dialled and talks over another carrier.
pub(crate) async fn refusal(refused: Refused) -> String {
    if let Some(mut refused) = refused
        && let Ok(said) = refused.wait_for(Option::is_some).await
        && let Some(text) = said.clone()
    {
        return text;
    }
    std::future::pending().await
}

/// What an endpoint stands on.
#[derive(Debug)]
pub(crate) struct Ground {
    socket: Arc<dyn AsyncUdpSocket>,
    granted: Granted,
    refused: Refused,
    /// Of quinn's random numbers; `None` takes the system's.
    seed: Option<[u8; 32]>,
}

impl Ground {
    /// A socket of the system. Must be called in a tokio context with I/O.
    pub(crate) fn real(socket: Bound) -> Result<Self, TransportError> {
        match socket {
            Bound::Udp(socket) => {
                let open = SockRef::from(&socket);
                let buffers = open.recv_buffer_size().ok().zip(open.send_buffer_size().ok());
                let socket = TokioRuntime.wrap_udp_socket(socket).map_err(|error| cannot(&error))?;
                Ok(Self { granted: granted(&*socket, buffers), socket, refused: None, seed: None })
            }
            Bound::Tcp(listener) => {
                let tunnel = Tunnel::new(listener).map_err(|error| cannot(&error))?;
                let refused = Some(tunnel.refused());
                Ok(Self { socket: Arc::new(tunnel), granted: Granted::Tcp, refused, seed: None })
            }
        }
    }

    pub(crate) fn simulated(socket: Arc<dyn AsyncUdpSocket>, seed: [u8; 32]) -> Self {
        Self { granted: granted(&*socket, None), socket, refused: None, seed: Some(seed) }
    }

    pub(crate) fn is_simulated(&self) -> bool {
        self.seed.is_some()
    }

    pub(crate) fn granted(&self) -> Granted {
        self.granted
    }

    pub(crate) fn refused(&self) -> Refused {
        self.refused.clone()
    }
}

fn granted(socket: &dyn AsyncUdpSocket, buffers: Option<(usize, usize)>) -> Granted {
    Granted::Udp { buffers, segments: (socket.max_transmit_segments(), socket.max_receive_segments()) }
}

/// An endpoint that dials, and listens if it has what to answer. Must be called in a tokio context, whose clock it goes by.
pub(crate) fn endpoint(
    ground: Ground,
    path: &Path,
    server: Option<ServerConfig>,
) -> Result<Endpoint, TransportError> {
    let Ground { socket, seed, .. } = ground;
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(path.largest_datagram()).map_err(|error| cannot(&error))?;
    config.rng_seed(seed);
    let socket =
        Arc::new(Segmented { socket, transmit: path.transmit_segments(), receive: path.receive_segments() });
    let runtime = Arc::new(TokioRuntime);
    Endpoint::new_with_abstract_socket(config, server, socket, runtime).map_err(|error| cannot(&error))
}

fn cannot(error: &dyn fmt::Display) -> TransportError {
    TransportError::Bootstrap { text: format!("cannot set up the QUIC endpoint: {error}") }
}

/// A socket that has no more packets in a datagram than the datagram holds.
///
/// quinn hands ten packets at a time to the system, which refuses more than 65,507 bytes; quinn takes the refusal for
/// loss, and falls back to small packets. Its receive buffer has 32 datagrams of as many packets as the socket says: of
/// 64 packets of 65,000 bytes, 134 MB.
#[derive(Debug)]
struct Segmented {
    socket: Arc<dyn AsyncUdpSocket>,
    transmit: usize,
    receive: usize,
}

impl AsyncUdpSocket for Segmented {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.socket.try_send(transmit)
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
        self.socket.max_transmit_segments().min(self.transmit)
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments().min(self.receive)
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}
