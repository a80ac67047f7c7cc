//! The port of rank 0 of a job on this host.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;

use crate::failure::{Failure, Result};

/// A port of the loopback interface that is free for UDP and TCP. It lies below the ports that systems usually give to sockets without
/// one: such a port could go to any socket of this host before rank 0 binds it. If many of these are in use, it is one of those.
pub(super) fn free_port() -> Result<u16> {
    // Jobs that start at the same time begin elsewhere.
    let first = RandomState::new().hash_one(std::process::id());
    let ports =
        (0..TRIES).map(|n| PORTS.start + (first.wrapping_add(n * STRIDE) % PORTS.len() as u64) as u16);
    let free = ports.into_iter().chain([0; 10]).find_map(|port| bound(port).ok());
    free.map_or_else(|| bound(0), Ok)
        .map_err(|error| Failure::run(format!("cannot find a free port on loopback: {error}")))
}

/// The port, or with 0 any port, after it was bound for a moment.
fn bound(port: u16) -> io::Result<u16> {
    let port = UdpSocket::bind((Ipv4Addr::LOCALHOST, port))?.local_addr()?.port();
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map(|_| port)
}

const PORTS: Range<u16> = 20_000..29_000;
const TRIES: u64 = 100;
/// So that a row of ports in use does not take all tries.
const STRIDE: u64 = 89;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn jobs_that_start_at_the_same_time_have_ports_of_their_own() {
        let ports: HashSet<u16> = (0..100).map(|_| free_port().unwrap()).collect();
        assert!(ports.len() > 50, "{ports:?}");
        assert!(ports.iter().all(|port| PORTS.contains(port)), "{ports:?}");
    }
}
