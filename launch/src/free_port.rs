//! The port of rank 0, for programs that start the ranks of a group on this host.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::ops::Range;

/// A port of `ip`, an address of this host, that is free for UDP and TCP. An unspecified address
/// stands for all addresses of its kind.
///
/// Nothing reserves it. So it lies below the ports that systems usually give to sockets without
/// one: such a port could go to any socket of this host before rank 0 binds it. If 100 tries find
/// none, it is a port that the system gives.
///
/// ```
/// use std::net::Ipv4Addr;
///
/// let port = kyklos_launch::free_port(Ipv4Addr::LOCALHOST.into())?;
/// assert_ne!(port, 0);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// The system's, if no socket can be bound to `ip`.
pub fn free_port(ip: IpAddr) -> io::Result<u16> {
    // Jobs that start at the same time begin elsewhere.
    let first = RandomState::new().hash_one(std::process::id());
    let ports =
        (0..TRIES).map(|n| PORTS.start + (first.wrapping_add(n * STRIDE) % PORTS.len() as u64) as u16);
    let free = ports.into_iter().chain([0; 10]).find_map(|port| bound(ip, port).ok());
    free.map_or_else(|| bound(ip, 0), Ok)
}

/// The port, or with 0 any port, after it was bound for a moment.
fn bound(ip: IpAddr, port: u16) -> io::Result<u16> {
    let udp = UdpSocket::bind((ip, port))?;
    let port = udp.local_addr()?.port();
    TcpListener::bind((ip, port)).map(|_| port)
}

const PORTS: Range<u16> = 20_000..29_000;
const TRIES: u64 = 100;
/// So that a row of ports in use does not take all tries.
const STRIDE: u64 = 89;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn jobs_that_start_at_the_same_time_have_ports_of_their_own() {
        let ports: HashSet<u16> = (0..100).map(|_| free_port(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
        assert!(ports.len() > 50, "{ports:?}");
        assert!(ports.iter().all(|port| PORTS.contains(port)), "{ports:?}");
    }

    #[test]
    fn a_port_in_use_is_not_given_and_an_address_of_another_host_is_an_error() {
        let taken: Vec<_> =
            (0..20).filter_map(|n| UdpSocket::bind((Ipv4Addr::LOCALHOST, PORTS.start + n)).ok()).collect();
        assert!(!taken.is_empty());
        for socket in taken {
            let ip = socket.local_addr().unwrap().ip();
            assert!(bound(ip, socket.local_addr().unwrap().port()).is_err());
        }
        // RFC 3849: of documentation only.
        let of_nobody = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        assert!(free_port(of_nobody.into()).is_err());
    }
}
