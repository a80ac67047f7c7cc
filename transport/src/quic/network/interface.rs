//! The network interface behind a local address, and the largest packets of a path; only Linux
//! tells.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// A network interface of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    name: String,
    /// Bytes of the largest IP packet.
    mtu: u32,
}

/// Such as `eth0, MTU 1500`.
impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, MTU {}", self.name, self.mtu)
    }
}

/// The interface behind a local address; only Linux tells.
pub(crate) fn interface(ip: IpAddr) -> Option<Interface> {
    let name = match ip {
        ip if ip.is_loopback() => "lo".to_owned(),
        IpAddr::V4(ip) => in_routes(&std::fs::read_to_string("/proc/net/route").ok()?, u32::from(ip))?,
        IpAddr::V6(ip) => in_addresses(&std::fs::read_to_string("/proc/net/if_inet6").ok()?, u128::from(ip))?,
    };
    let mtu = std::fs::read_to_string(format!("/sys/class/net/{name}/mtu")).ok()?;
    Some(Interface { name, mtu: mtu.trim().parse().ok()? })
}

/// Why QUIC cannot reach any of these addresses, if the system knows that their packets must be
/// smaller than those of QUIC.
pub(crate) fn too_small_to(addresses: &[SocketAddr]) -> Option<String> {
    let mut each = addresses.iter().map(|address| {
        let to = SocketAddr::new(address.ip().to_canonical(), address.port());
        let (local, mtu) = path(to)?;
        let needed = needed(to.ip());
        (mtu < needed).then(|| {
            let of_path = || text(needed, &format!("the path to {} carries {mtu} at most", to.ip()));
            too_small(interface(local), needed).unwrap_or_else(of_path)
        })
    });
    let first = each.next()??;
    each.all(|why| why.is_some()).then_some(first)
}

/// The same of every packet from a local address.
pub(crate) fn too_small_from(ip: IpAddr) -> Option<String> {
    let ip = ip.to_canonical();
    too_small(interface(ip), needed(ip))
}

fn too_small(interface: Option<Interface>, needed: u32) -> Option<String> {
    let Interface { name, mtu } = interface.filter(|interface| interface.mtu < needed)?;
    Some(text(needed, &format!("the interface {name} has MTU {mtu}")))
}

fn text(needed: u32, why: &str) -> String {
    format!("QUIC needs IP packets of {needed} bytes, and {why}: use TCP between all ranks, or a larger MTU")
}

/// Bytes of the IP packet around QUIC's smallest first packet.
fn needed(ip: IpAddr) -> u32 {
    let headers = if ip.is_ipv4() { 20 + 8 } else { 40 + 8 };
    1200 + headers
}

/// The local address from which packets go to `to`, and the bytes of the largest one, as far as the
/// system knows the path. Sends nothing.
#[cfg(target_os = "linux")]
fn path(to: SocketAddr) -> Option<(IpAddr, u32)> {
    use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};

    use rustix::net::sockopt::{ip_mtu, ipv6_mtu};

    let any =
        if to.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    let mtu = if to.is_ipv4() { ip_mtu(&socket) } else { ipv6_mtu(&socket) };
    Some((socket.local_addr().ok()?.ip(), mtu.ok()?))
}

#[cfg(not(target_os = "linux"))]
fn path(_: SocketAddr) -> Option<(IpAddr, u32)> {
    None
}

/// Of the table of IPv4 routes, the interface with the smallest network around an address.
fn in_routes(table: &str, ip: u32) -> Option<String> {
    let routes = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [name, network, .., mask, _, _, _] = fields[..] else { return None };
        // Bytes in the order of the wire, printed as a number of this machine.
        let number = |text| Some(u32::from_be_bytes(u32::from_str_radix(text, 16).ok()?.to_ne_bytes()));
        let (network, mask) = (number(network)?, number(mask)?);
        (ip & mask == network).then(|| (mask, name.to_owned()))
    });
    routes.max_by_key(|(mask, _)| *mask).map(|(_, name)| name)
}

/// Of the table of IPv6 addresses, the interface of one.
fn in_addresses(table: &str, ip: u128) -> Option<String> {
    let line = table.lines().find(|line| line.starts_with(&format!("{ip:032x}")))?;
    line.split_whitespace().last().map(str::to_owned)
}

/// The system's tables in `text`, for the fuzz targets: an interface is a word of its table.
pub(crate) fn tables(text: &str, ip: u128) {
    let found = [in_routes(text, ip as u32), in_addresses(text, ip)];
    for name in found.into_iter().flatten() {
        assert!(text.split_whitespace().any(|word| word == name), "{name:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn an_address_has_the_interface_of_its_smallest_network() {
        let table = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                     eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                     eth1\t0002A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
                     short line\n";
        let of = |ip: [u8; 4]| in_routes(table, u32::from(Ipv4Addr::from(ip)));
        assert_eq!(of([192, 168, 2, 7]).as_deref(), Some("eth1"));
        assert_eq!(of([10, 0, 0, 1]).as_deref(), Some("eth0"));
        let table = "fd000000000000000000000000000002 04 40 00 82     eth0\n";
        assert_eq!(in_addresses(table, 0xfd00 << 112 | 2).as_deref(), Some("eth0"));
        assert_eq!(in_addresses(table, 1), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn loopback_is_an_interface_with_an_mtu() {
        let local = interface(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap();
        assert!(local.to_string().starts_with("lo, MTU "), "{local}");
    }

    #[test]
    fn an_interface_that_is_too_small_for_quic_is_named_with_its_mtu_and_the_remedy() {
        let of = |mtu, ip: &str| {
            too_small(Some(Interface { name: "wg0".to_owned(), mtu }), needed(ip.parse().unwrap()))
        };
        let text = of(1227, "10.0.0.1").unwrap();
        for words in ["1228 bytes", "wg0 has MTU 1227", "use TCP", "a larger MTU"] {
            assert!(text.contains(words), "{text}");
        }
        assert_eq!(of(1228, "10.0.0.1"), None);
        assert!(of(1247, "fd00::1").unwrap().contains("1248 bytes"));
        assert_eq!(of(1248, "fd00::1"), None);
        assert_eq!(too_small(None, 1228), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_path_to_this_host_itself_is_large_enough() {
        let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
        assert!(path(here).unwrap().1 >= 1500);
        assert_eq!(too_small_to(&[here]), None);
        assert_eq!(too_small_to(&[]), None);
    }
}
