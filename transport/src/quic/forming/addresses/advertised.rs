//! The addresses that a rank says for itself. An address proves nothing: whatever answers there
//! must show the certificate of the rank.

use std::net::SocketAddr;

use crate::error::TransportError;
use crate::quic::forming::config::QuicConfig;
use crate::wire::MOST_ADVERTISED;

impl QuicConfig {
    /// The addresses of rank 0 in the order in which to try them.
    pub(crate) fn coordinator_candidates(&self) -> Vec<SocketAddr> {
        once_each([&[self.coordinator][..], &self.coordinator_also].concat())
    }

    /// The addresses that this rank says, if it listens at `port`.
    pub(crate) fn advertised(&self, port: u16) -> Vec<SocketAddr> {
        let with_port = |address: &SocketAddr| match address.port() {
            0 => SocketAddr::new(address.ip(), port),
            _ => *address,
        };
        self.advertise.iter().map(with_port).collect()
    }

    /// Checks what this rank says about itself.
    pub(crate) fn check_advertise(&self) -> Result<(), TransportError> {
        if self.advertise.len() > usize::from(MOST_ADVERTISED) {
            return Err(TransportError::bootstrap(format!(
                "{} advertised addresses: a rank has at most {MOST_ADVERTISED}",
                self.advertise.len()
            )));
        }
        match self.advertise.iter().find(|address| !is_dialable(address)) {
            None => Ok(()),
            Some(wrong) => Err(TransportError::bootstrap(format!(
                "the advertised address {} is no address of one host",
                wrong.ip()
            ))),
        }
    }
}

/// Whether an address can be of one host.
fn is_dialable(address: &SocketAddr) -> bool {
    let ip = address.ip().to_canonical();
    let broadcast = matches!(ip, std::net::IpAddr::V4(ip) if ip.is_broadcast());
    !ip.is_unspecified() && !ip.is_multicast() && !broadcast
}

/// The addresses that a peer has said, if all of them can be dialled.
pub(crate) fn judge_advertised(addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, String> {
    match addresses.iter().find(|address| !is_dialable(address) || address.port() == 0) {
        None => Ok(once_each(addresses)),
        Some(wrong) => Err(format!("it advertises {wrong}, which is no address of one host")),
    }
}

/// Removes an address that has come before, also as the same IPv4 address in IPv6.
pub(crate) fn once_each(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let mut kept: Vec<SocketAddr> = Vec::new();
    for address in addresses {
        if !kept.iter().any(|one| canonical(*one) == canonical(address)) {
            kept.push(address);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_advertised_address_is_of_one_host_and_is_kept_once() {
        for wrong in ["0.0.0.0:1", "[::]:1", "224.0.0.1:1", "255.255.255.255:1", "10.0.0.1:0", "[ff02::1]:1"]
        {
            assert!(judge_advertised(vec![at("10.0.0.1:1"), at(wrong)]).is_err(), "{wrong}");
        }
        let said = vec![at("10.0.0.1:1"), at("[::ffff:10.0.0.1]:1"), at("[fd00::1]:1"), at("10.0.0.1:2")];
        assert_eq!(judge_advertised(said).unwrap(), [at("10.0.0.1:1"), at("[fd00::1]:1"), at("10.0.0.1:2")]);
    }
}
