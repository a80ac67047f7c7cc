//! The sockets below the endpoints of a rank.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use quinn::{
    AsyncTimer, AsyncUdpSocket, ClientConfig, ConnectError, Connecting, Endpoint, EndpointConfig, Runtime,
    ServerConfig, TokioRuntime,
};
use quinn_proto::RandomConnectionIdGenerator;
use socket2::SockRef;
use tokio::runtime::Handle;

use super::batches::BatchingSocket;
use super::binding::SystemSocket;
use super::io_thread::{Alive, IoThread};
use super::path::Path;
use crate::error::TransportError;
use crate::quic::network::tcp::refusal::RefusedFlag;
use crate::quic::network::tcp::routes::StreamPeers;
use crate::quic::network::tcp::tunnel::Tunnel;

/// With less than this, bursts of a fast sender are lost.
const LITTLE_BYTES: usize = 4 << 20;

/// The capabilities that the system has granted to a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SocketCapabilities {
    Udp {
        /// Bytes of its buffers, for received packets and for sent packets.
        buffers: Option<(usize, usize)>,
        /// Packets that it sends and hands over as one datagram.
        segments: (usize, usize),
    },
    Tcp,
}

impl SocketCapabilities {
    /// The capabilities for packets as large as those of a path.
    fn at_most(self, path: &Path) -> Self {
        match self {
            Self::Udp { buffers, segments: (send, receive) } => Self::Udp {
                buffers,
                segments: (send.min(path.transmit_segments()), receive.min(path.receive_segments())),
            },
            Self::Tcp => Self::Tcp,
        }
    }
}

impl fmt::Display for SocketCapabilities {
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

/// The sockets from which the endpoints of a rank are made, by lane.
#[derive(Debug)]
pub(crate) enum SocketSource {
    /// Sockets of the system.
    Real(Vec<SystemSocket>),
    /// Others, with the seed of quinn's random numbers.
    Simulated(Vec<Arc<dyn AsyncUdpSocket>>, [u8; 32]),
}

/// The endpoints of a rank, and the capabilities that the system has granted to them.
pub(crate) struct Endpoints {
    pub(crate) lanes: Vec<LaneEndpoint>,
    pub(crate) capabilities: SocketCapabilities,
    pub(crate) refused: RefusedFlag,
}

/// The endpoint of a lane, and the runtime on whose thread it lives.
pub(crate) struct LaneEndpoint {
    pub(crate) endpoint: Endpoint,
    pub(crate) runtime: Handle,
    /// Over TCP: which peers belong to the group.
    pub(crate) streams: Option<StreamPeers>,
    /// Of a thread that is there for this lane alone.
    pub(crate) _thread: Option<Alive>,
}

impl LaneEndpoint {
    /// Dials an address.
    pub(crate) fn connect(
        &self,
        config: ClientConfig,
        address: SocketAddr,
        name: &str,
    ) -> Result<Connecting, ConnectError> {
        let address = match address {
            // quinn dials it like this.
            SocketAddr::V4(v4) if self.is_ipv6() => SocketAddr::from((v4.ip().to_ipv6_mapped(), v4.port())),
            address => address,
        };
        if let Some(streams) = &self.streams {
            streams.will_dial(address);
        }
        self.endpoint.connect_with(config, address, name)
    }

    /// Whether the socket of the lane can reach addresses of this family.
    pub(crate) fn can_dial(&self, address: &SocketAddr) -> bool {
        address.ip().to_canonical().is_ipv4() || self.is_ipv6()
    }

    fn is_ipv6(&self) -> bool {
        self.endpoint.local_addr().is_ok_and(|local| local.is_ipv6())
    }
}

impl SocketSource {
    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated(..))
    }

    /// The address of the first socket.
    pub(crate) fn local_addr(&self) -> Result<SocketAddr, TransportError> {
        match self {
            Self::Real(sockets) => sockets.first().map(SystemSocket::local_addr),
            Self::Simulated(sockets, _) => sockets.first().map(|socket| socket.local_addr()),
        }
        .unwrap_or_else(|| Err(io::ErrorKind::AddrNotAvailable.into()))
        .map_err(|error| cannot(&error))
    }

    /// Checks the number of sockets, which a caller with its own sockets chooses.
    pub(crate) fn has_lanes(&self, lanes: u8) -> Result<(), TransportError> {
        match self.lanes() {
            sockets if sockets == usize::from(lanes) => Ok(()),
            sockets => Err(cannot(&format!("{sockets} sockets for {lanes} lanes"))),
        }
    }

    fn lanes(&self) -> usize {
        match self {
            Self::Real(sockets) => sockets.len(),
            Self::Simulated(sockets, _) => sockets.len(),
        }
    }

    /// Endpoints that dial, and listen if they have what to answer. Must be called in a tokio
    /// context, in which the first lane lives; the others do too unless they get threads of
    /// their own.
    pub(crate) fn endpoints(
        self,
        path: &Path,
        server: Option<&ServerConfig>,
        own_threads: bool,
    ) -> Result<Endpoints, TransportError> {
        let runtimes = (0..self.lanes()).map(|lane| {
            if lane > 0 && own_threads {
                IoThread::start().map(IoThread::into_parts).map(|(runtime, alive)| (runtime, Some(alive)))
            } else {
                Ok((Handle::current(), None))
            }
        });
        let runtimes = runtimes.collect::<Result<Vec<_>, _>>()?;
        let bound: Vec<(BoundSocket, _)> = match self {
            Self::Real(sockets) => sockets
                .into_iter()
                .zip(&runtimes)
                .map(|(socket, (runtime, _))| Ok((BoundSocket::real(socket, runtime, path)?, None)))
                .collect::<Result<_, TransportError>>()?,
            Self::Simulated(sockets, seed) => (0..)
                .zip(sockets)
                .map(|(lane, socket)| {
                    let mut seed = seed;
                    seed[0] ^= lane;
                    (
                        BoundSocket {
                            capabilities: capabilities(&*socket, None),
                            socket,
                            refused: None,
                            streams: None,
                        },
                        Some(seed),
                    )
                })
                .collect(),
        };
        let mut ends = Endpoints { lanes: Vec::new(), capabilities: SocketCapabilities::Tcp, refused: None };
        for ((runtime, thread), (bound, seed)) in runtimes.into_iter().zip(bound) {
            let endpoint = endpoint(bound.socket, seed, path, server.cloned(), &runtime)?;
            if ends.lanes.is_empty() {
                ends.capabilities = bound.capabilities.at_most(path);
                ends.refused = bound.refused;
            }
            ends.lanes.push(LaneEndpoint { endpoint, runtime, streams: bound.streams, _thread: thread });
        }
        Ok(ends)
    }
}

/// The socket of one endpoint.
struct BoundSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    capabilities: SocketCapabilities,
    refused: RefusedFlag,
    streams: Option<StreamPeers>,
}

impl BoundSocket {
    fn real(socket: SystemSocket, runtime: &Handle, path: &Path) -> Result<Self, TransportError> {
        // Sockets belong to the runtime that waits for them.
        let _inside = runtime.enter();
        match socket {
            SystemSocket::Udp(socket) => {
                let open = SockRef::from(&socket);
                let buffers = open.recv_buffer_size().ok().zip(open.send_buffer_size().ok());
                let socket = TokioRuntime.wrap_udp_socket(socket).map_err(|error| cannot(&error))?;
                Ok(Self {
                    capabilities: capabilities(&*socket, buffers),
                    socket,
                    refused: None,
                    streams: None,
                })
            }
            SystemSocket::Tcp(listener) => {
                let tunnel = Tunnel::new(listener, path.stream_queue_bytes(), path.profile)
                    .map_err(|error| cannot(&error))?;
                let (refused, streams) = (Some(tunnel.refused()), Some(tunnel.peers()));
                Ok(Self { socket: Arc::new(tunnel), capabilities: SocketCapabilities::Tcp, refused, streams })
            }
        }
    }
}

fn capabilities(socket: &dyn AsyncUdpSocket, buffers: Option<(usize, usize)>) -> SocketCapabilities {
    SocketCapabilities::Udp {
        buffers,
        segments: (socket.max_transmit_segments(), socket.max_receive_segments()),
    }
}

/// An endpoint that dials, and listens if it has what to answer, on the thread of `runtime`.
fn endpoint(
    socket: Arc<dyn AsyncUdpSocket>,
    seed: Option<[u8; 32]>,
    path: &Path,
    server: Option<ServerConfig>,
    runtime: &Handle,
) -> Result<Endpoint, TransportError> {
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(path.largest_datagram()).map_err(|error| cannot(&error))?;
    config.rng_seed(seed);
    config.cid_generator(|| Box::new(connection_ids()));
    let socket = BatchingSocket::new(socket, path.transmit_segments(), path.receive_segments(), runtime);
    let runtime = Arc::new(OnThread(runtime.clone()));
    Endpoint::new_with_abstract_socket(config, server, socket, runtime).map_err(|error| cannot(&error))
}

/// Ids of 64 random bits. quinn's default has 24, and the id in a Retry may then be that of an
/// established connection: of some ten thousand dials among 200 ranks, one was lost until it timed
/// out.
fn connection_ids() -> RandomConnectionIdGenerator {
    RandomConnectionIdGenerator::new(8)
}

/// Runs quinn's tasks on the thread of one runtime, wherever they are started.
#[derive(Debug)]
struct OnThread(Handle);

impl Runtime for OnThread {
    fn new_timer(&self, at: std::time::Instant) -> Pin<Box<dyn AsyncTimer>> {
        let _inside = self.0.enter();
        TokioRuntime.new_timer(at)
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.0.spawn(future);
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        let _inside = self.0.enter();
        TokioRuntime.wrap_udp_socket(socket)
    }

    fn now(&self) -> std::time::Instant {
        let _inside = self.0.enter();
        TokioRuntime.now()
    }
}

fn cannot(error: &dyn fmt::Display) -> TransportError {
    TransportError::bootstrap(format!("cannot set up the QUIC endpoint: {error}"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use quinn_proto::ConnectionIdGenerator;

    use super::*;

    #[test]
    fn connection_ids_of_many_handshakes_differ() {
        let mut ids = connection_ids();
        // Of 24 random bits, twelve would be there twice.
        let many: HashSet<_> = (0..20_000).map(|_| ids.generate_cid()).collect();
        assert_eq!(many.len(), 20_000);
    }
}
