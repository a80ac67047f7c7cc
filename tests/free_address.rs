//! Addresses for the coordinators of tests.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};

/// A loopback address that is free now, for UDP and TCP, and stays so until a test binds it: it is given once in this process, and lies
/// below the ports that systems give to sockets without one. Such a port may be given again at once, to any socket of another test.
/// `kyklos launch` takes ports from 20000 on.
pub(crate) fn free_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        // Another process begins elsewhere.
        let port = 10_000 + (std::process::id() * 617 + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, u16::try_from(port).unwrap()));
        if UdpSocket::bind(address).is_ok() && TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
