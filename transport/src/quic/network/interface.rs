//! The network interface behind a local address; only Linux tells.

use std::net::IpAddr;

/// The interface behind a local address and its MTU, such as `eth0, MTU 1500`; only Linux tells.
pub(crate) fn interface(ip: IpAddr) -> Option<String> {
    let name = match ip {
        ip if ip.is_loopback() => "lo".to_owned(),
        IpAddr::V4(ip) => in_routes(&std::fs::read_to_string("/proc/net/route").ok()?, u32::from(ip))?,
        IpAddr::V6(ip) => in_addresses(&std::fs::read_to_string("/proc/net/if_inet6").ok()?, u128::from(ip))?,
    };
    let mtu = std::fs::read_to_string(format!("/sys/class/net/{name}/mtu")).ok()?;
    Some(format!("{name}, MTU {}", mtu.trim()))
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
        assert!(interface(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap().starts_with("lo, MTU "));
    }
}
