//! The address of rank 0: its syntax and its resolution.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use kyklos_transport::quic::look_up;
use kyklos_transport::wire::MOST_ADVERTISED;
use kyklos_transport::{BootstrapKind, TransportError};

use crate::error::{Error, Result};

/// A host by name or address, and a UDP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// Name or address, an IPv6 address without brackets: 1 to 253 bytes.
    pub host: String,
    /// 1 to 65535.
    pub port: u16,
}

impl HostPort {
    /// Reads `HOST:PORT`; an IPv6 address is in brackets. `origin` is where it was written, for
    /// errors.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] if it is no address, with an example.
    pub fn parse(text: &str, origin: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::request(
                format!("{origin} is not the address of rank 0: {why}"),
                "write host:port, such as node1:29600 or [fd00::1]:29600",
            )
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(Some(inner)) => inner,
            Some(None) => return Err(wrong("a bracket is not closed")),
            None if host.contains(':') => return Err(wrong("an IPv6 address has no brackets")),
            None => host,
        };
        let port = port.parse().ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| wrong("the port is not a number from 1 to 65535"))?;
        Self::new(host, port)
            .ok_or_else(|| wrong("the host is empty or has characters that a host name cannot have"))
    }

    /// `None` if `host` is neither a name nor an address.
    pub fn new(host: &str, port: u16) -> Option<Self> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || ".-_:%".contains(c);
        let fits = (1..=253).contains(&host.len()) && host.chars().all(allowed);
        fits.then(|| Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Reads the addresses that a rank says for itself: IP addresses with or without a port, separated
/// by commas. Without a port it is that of the rank's socket, which is 0 here. `origin` is where
/// they were written, for errors.
///
/// # Errors
///
/// [`Error::Request`] if one is no IP address, or there are more than a rank may say.
pub fn parse_advertised(text: &str, origin: &str) -> Result<Vec<SocketAddr>> {
    let address = |text: &str| {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        let with_port = || text.parse::<SocketAddr>().ok().filter(|address| address.port() != 0);
        bare.parse().map(|ip| SocketAddr::new(ip, 0)).ok().or_else(with_port)
    };
    let remedy = "write them with or without a port, such as 203.0.113.7,[fd00::1]:29601";
    let addresses: Option<Vec<SocketAddr>> = text.split(',').map(|text| address(text.trim())).collect();
    let addresses =
        addresses.ok_or_else(|| Error::request(format!("{origin} is not a list of IP addresses"), remedy))?;
    if addresses.len() > usize::from(MOST_ADVERTISED) {
        return Err(Error::request(
            format!("{origin} lists {} addresses", addresses.len()),
            format!("name at most {MOST_ADVERTISED}"),
        ));
    }
    Ok(addresses)
}

/// The socket addresses of rank 0, at least one, in the order in which to try them. A name without
/// an address is looked up again until `until`, by whichever way it was given: the name service may
/// not be up yet, or not know the host of rank 0 yet.
pub(crate) fn resolve(
    HostPort { host, port }: &HostPort,
    until: Instant,
    note: fn(&str),
) -> Result<Vec<SocketAddr>> {
    // Names under localhost are this host (RFC 6761); not every resolver implements that.
    if is_localhost(host) {
        return Ok(vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), *port)]);
    }
    let waits = |why: &str| note(&format!("waiting for the address of {host}: {why}"));
    look_up(host, *port, until, waits).map(reachable).map_err(|why| {
        let text = format!(
            "rank 0 cannot be found at {host}: {why}: correct the name, look at the resolver of this host, name an address \
             instead, or wait longer (join deadline)"
        );
        Error::Transport(TransportError::Bootstrap { text, kind: BootstrapKind::Other })
    })
}

/// The time until the deadline, in whole seconds, because errors quote it; at least one.
pub(crate) fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis().div_ceil(1000);
    Duration::from_secs(u64::try_from(left).unwrap_or(1).max(1))
}

/// Names under localhost are this host (RFC 6761). Debian has two more for the loopback address of
/// IPv6.
fn is_localhost(host: &str) -> bool {
    ["localhost", "ip6-localhost", "ip6-loopback"].contains(&host) || host.ends_with(".localhost")
}

/// A warning if rank 0 is at a loopback address, and the hosts of the ranks are several: only one
/// of them can reach it.
pub(crate) fn loopback_between_hosts(address: IpAddr, hosts: &[Option<String>]) -> Option<String> {
    let is_elsewhere = |host: &&str| {
        !is_localhost(host) && !host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
    };
    let mut named = hosts.iter().flatten().map(String::as_str);
    let first = named.next()?;
    let other = named.find(|host| *host != first && (is_elsewhere(host) || is_elsewhere(&first)))?;
    address.to_canonical().is_loopback().then(|| {
        format!(
            "rank 0 is at {address}, which no other host can reach, and there are ranks on {first} and on {other}"
        )
    })
}

/// The addresses that other hosts can reach, or else all: a hosts file may give a host's own name a
/// loopback address besides the real one.
fn reachable(mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let is_loopback = |address: &SocketAddr| address.ip().to_canonical().is_loopback();
    if !addresses.iter().all(is_loopback) {
        addresses.retain(|address| !is_loopback(address));
    }
    addresses
}

/// Where to bind although `host` is at the loopback address `address` here: all addresses, if ranks
/// may be on other hosts. Debian gives a host's own name the address 127.0.1.1, which no other host
/// can reach. `None`: nothing speaks against loopback.
pub(crate) fn bind_beyond_loopback(host: &str, address: IpAddr, one_host: bool) -> Option<IpAddr> {
    let is_meant = is_localhost(host) || host.parse::<IpAddr>().is_ok() || one_host;
    match address.to_canonical() {
        address if is_meant || !address.is_loopback() => None,
        IpAddr::V4(_) => Some(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        IpAddr::V6(_) => Some(IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
    }
}

/// Rank 0's default port: next to torch's 29500, which its own store uses.
pub const DEFAULT_PORT: u16 = 29_600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_several_addresses_is_reached_at_one_that_other_hosts_can_reach() {
        let all = |texts: &[&str]| {
            let found = reachable(texts.iter().map(|text| text.parse().unwrap()).collect());
            found.iter().map(SocketAddr::to_string).collect::<Vec<_>>()
        };
        assert_eq!(all(&["127.0.1.1:1", "10.0.0.1:1", "[fd00::2]:1"]), ["10.0.0.1:1", "[fd00::2]:1"]);
        assert_eq!(all(&["127.0.1.1:1", "[::1]:1"]), ["127.0.1.1:1", "[::1]:1"]);
        assert_eq!(all(&[]), [""; 0]);
    }

    #[test]
    fn advertised_addresses_have_a_port_or_not() {
        let read = |text: &str| parse_advertised(text, &format!("option advertise={text}"));
        let said = read("10.0.0.1, 203.0.113.7:4000,fd00::1,[fd00::2],[fd00::3]:5").unwrap();
        let said: Vec<String> = said.iter().map(SocketAddr::to_string).collect();
        assert_eq!(said, ["10.0.0.1:0", "203.0.113.7:4000", "[fd00::1]:0", "[fd00::2]:0", "[fd00::3]:5"]);
        for wrong in ["", "node1", "10.0.0.1,", "10.0.0.1:0", "10.0.0.1:70000", "[fd00::1"] {
            let error = read(wrong).unwrap_err();
            assert!(error.is_request() && error.to_string().contains("203.0.113.7"), "{wrong}: {error}");
        }
        let many = ["10.0.0.1"; 9].join(",");
        assert!(read(&many).unwrap_err().to_string().contains("at most 8"));
    }

    #[test]
    fn rank_0_is_not_hidden_on_loopback_by_the_name_of_its_host() {
        let bind = |host, address: &str, one_host| {
            bind_beyond_loopback(host, address.parse().unwrap(), one_host).map(|address| address.to_string())
        };
        assert_eq!(bind("node1", "127.0.1.1", false).as_deref(), Some("0.0.0.0"));
        assert_eq!(bind("node1", "::1", false).as_deref(), Some("::"));
        // Loopback is meant, or enough.
        assert_eq!(bind("node1", "127.0.1.1", true), None);
        assert_eq!(bind("localhost", "127.0.0.1", false), None);
        assert_eq!(bind("node1.localhost", "127.0.0.1", false), None);
        assert_eq!(bind("127.0.1.1", "127.0.1.1", false), None);
        assert_eq!(bind("node1", "10.0.0.1", false), None);
        assert_eq!(bind("node1", "::ffff:127.0.1.1", false).as_deref(), Some("0.0.0.0"));
        assert_eq!(bind("ip6-localhost", "::1", false), None);
    }

    #[test]
    fn a_rank_0_on_loopback_is_not_silent_about_other_hosts() {
        let warning = |address: &str, hosts: &[&str]| {
            let hosts: Vec<_> =
                hosts.iter().map(|host| (!host.is_empty()).then(|| (*host).to_owned())).collect();
            loopback_between_hosts(address.parse().unwrap(), &hosts)
        };
        for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
            let said = warning(address, &["node1", "node1", "", "node2"]).unwrap();
            assert!(said.contains(address) && said.contains("node1 and on node2"), "{said}");
        }
        assert!(warning("127.0.0.1", &["localhost", "node2"]).is_some());
        // One host, or several names of this one.
        assert_eq!(warning("127.0.0.1", &["node1", "node1"]), None);
        assert_eq!(warning("127.0.0.1", &["a.localhost", "b.localhost", "127.0.0.1", "::1"]), None);
        assert_eq!(warning("10.0.0.1", &["node1", "node2"]), None);
        assert_eq!(warning("127.0.0.1", &[]), None);
    }

    #[test]
    fn addresses_are_read_or_refused_with_an_example() {
        let read = |text: &str| HostPort::parse(text, &format!("option coordinator={text}"));
        for (text, host, port) in [
            ("node1:29600", "node1", 29600),
            ("10.0.0.1:1", "10.0.0.1", 1),
            ("[fd00::1]:65535", "fd00::1", 65535),
            ("a.b-c_d:2", "a.b-c_d", 2),
        ] {
            let read = read(text).unwrap();
            assert_eq!((read.host.as_str(), read.port), (host, port));
            assert_eq!(read.to_string(), text);
        }
        let long = format!("{}:1", "a".repeat(300));
        for wrong in
            ["", "node1", ":1", "node1:", "node1:0", "node1:65536", "node1:x", "fd00::1:1", "[fd00::1:1"]
                .into_iter()
                .chain(["a b:1", "a/b:1", "a\n:1", "ä:1", &long])
        {
            let error = read(wrong).unwrap_err();
            assert!(error.is_request() && error.to_string().contains("node1:29600"), "{wrong}: {error}");
        }
    }
}
