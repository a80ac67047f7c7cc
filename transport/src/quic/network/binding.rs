//! Where the sockets of a rank are bound, and how.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

use super::path::Carrier;
use crate::error::{BootstrapKind, TransportError};

/// A socket of the system that has its address.
#[derive(Debug)]
pub(crate) enum SystemSocket {
    Udp(std::net::UdpSocket),
    Tcp(std::net::TcpListener),
}

impl SystemSocket {
    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Udp(socket) => socket.local_addr(),
            Self::Tcp(listener) => listener.local_addr(),
        }
    }
}

/// Binds a socket for packets in `carrier`.
pub(crate) fn bind(address: SocketAddr, carrier: Carrier) -> Result<SystemSocket, TransportError> {
    let bound = match carrier {
        Carrier::Udp => bind_udp(address).map(SystemSocket::Udp),
        Carrier::Tcp => bind_tcp(address).map(SystemSocket::Tcp),
    };
    bound.map_err(|error| {
        let (kind, why) = match error.kind() {
            io::ErrorKind::AddrNotAvailable => {
                (BootstrapKind::Address, ": listen on an address of this machine, or leave it out")
            }
            io::ErrorKind::PermissionDenied if (1..1024).contains(&address.port()) => {
                (BootstrapKind::Address, ": use a port from 1024 on")
            }
            _ => (BootstrapKind::Other, "; is another job using it?"),
        };
        kind.error(format!("cannot listen on {address} ({carrier}): {error}{why}"))
    })
}

/// Loopback if that is where the coordinator is, and all addresses otherwise.
pub(crate) fn usual_bind(coordinator: SocketAddr) -> IpAddr {
    match coordinator.ip().to_canonical() {
        ip if ip.is_loopback() => ip,
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// The same if there are addresses of both families: all addresses of both if the host has IPv6,
/// else those of IPv4.
pub(crate) fn bind_for_both(bind: IpAddr, addresses: &[SocketAddr]) -> IpAddr {
    let are_ipv6 = addresses.iter().map(|address| address.ip().to_canonical().is_ipv6());
    let mixed = are_ipv6.clone().any(|ipv6| ipv6) && !are_ipv6.clone().all(|ipv6| ipv6);
    let has_ipv6 = || bind_udp(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))).is_ok();
    match bind.is_unspecified() && mixed {
        false => bind,
        true if has_ipv6() => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        true => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    }
}

/// A socket for all addresses of IPv6 is for those of IPv4 too, whatever the default of the system.
fn open_both_families(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    if address.is_ipv6() && address.ip().is_unspecified() { socket.set_only_v6(false) } else { Ok(()) }
}

/// A socket with large buffers.
pub(crate) fn bind_udp(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    // Systems clamp values that they do not allow. The granted values are read back later.
    let _ = socket.set_recv_buffer_size(BUFFER_BYTES);
    let _ = socket.set_send_buffer_size(BUFFER_BYTES);
    socket.set_nonblocking(true)?;
    open_both_families(&socket, address)?;
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
    open_both_families(&socket, address)?;
    socket.bind(&address.into())?;
    // After the bind, so that a port that another job has is still refused.
    #[cfg(unix)]
    socket.set_reuse_port(true)?;
    socket.listen(LISTEN_BACKLOG)?;
    Ok(socket.into())
}

/// Ranks that may dial at once before any of them is answered.
const LISTEN_BACKLOG: i32 = 1024;

/// Bytes asked of the system for each direction; with the usual default of 208 KiB even loopback
/// loses packets.
const BUFFER_BYTES: usize = 16 << 20;
