//! Addresses for the coordinators of tests.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A loopback address whose port is free now, for UDP and TCP on all addresses of this host. It is
/// given once in this process, and lies below the ports that systems usually give to sockets
/// without one: such a port may be given again at once, to any socket of another test. `kyklos
/// launch` takes ports from 20000 on.
pub(crate) fn free_address() -> SocketAddr {
    // Another process begins elsewhere.
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(0) >> 1));
    (0..PORTS)
        .map(|_| 10_000 + u16::try_from(NEXT.fetch_add(1, Ordering::Relaxed) % PORTS).unwrap())
        .find(|port| {
            let everywhere = (Ipv4Addr::UNSPECIFIED, *port);
            UdpSocket::bind(everywhere).is_ok() && TcpListener::bind(everywhere).is_ok()
        })
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .unwrap()
}

const PORTS: u64 = 10_000;
