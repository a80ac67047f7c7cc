//! Owners on the local network: announced and found by multicast DNS (RFC 6762), for helpers whose
//! token has an address that no longer holds.
//!
//! What is announced is no secret, and nothing that is found is trusted: who answers at an address
//! must prove that it is the owner of the token. Where multicast does not work, nobody is found.

use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::time::{Duration, Instant};

use kyklos_transport::harmless;
use kyklos_transport::quic::Token;
use mdns_sd::{Receiver, ResolvedService, ScopedIp, ServiceDaemon, ServiceEvent, ServiceInfo};

/// Tells the local network where an owner is, until it is dropped.
pub(crate) struct Announcement(ServiceDaemon);

impl std::fmt::Debug for Announcement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Announcement")
    }
}

impl Announcement {
    /// That the owner of `token`, at this port, waits for the helper `name`. None where that is not
    /// possible.
    pub(crate) fn new(name: &str, token: &Token, port: u16) -> Option<Self> {
        let owner = token.owner();
        let properties = [(OWNER, owner.as_str()), (NAME, name)];
        let (instance, host) = (format!("{name}-{owner}"), format!("kyklos-{owner}.local."));
        let service = ServiceInfo::new(SERVICE, &instance, &host, "", port, &properties[..]).ok()?;
        let daemon = daemon()?;
        let announcement = Self(daemon);
        announcement.0.register(service.enable_addr_auto()).ok()?;
        Some(announcement)
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        stop(&self.0);
    }
}

/// An owner that says it is there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundOwner {
    /// The helper that it waits for, by the name of the invitation.
    pub helper: String,
    /// As [`Token::owner`] of the token that it takes.
    pub owner: String,
    /// Where it says that it is, the likeliest first.
    pub addresses: Vec<SocketAddr>,
}

impl FoundOwner {
    fn of(service: &ResolvedService) -> Option<Self> {
        let text = |key| service.get_property_val_str(key).map(harmless);
        let (owner, helper) = (text(OWNER)?, text(NAME)?);
        let mut addresses: Vec<SocketAddr> =
            service.addresses.iter().filter_map(|address| reachable(address, service.port)).collect();
        // IPv4 first: links between machines at home rarely have another one.
        addresses.sort_by_key(|address| (address.is_ipv6(), *address));
        addresses.truncate(MOST_ADDRESSES);
        let is_whole = !owner.is_empty() && !helper.is_empty() && service.port != 0 && !addresses.is_empty();
        (is_whole && owner.len() <= LONGEST && helper.len() <= LONGEST).then_some(Self {
            helper,
            owner,
            addresses,
        })
    }
}

fn reachable(address: &ScopedIp, port: u16) -> Option<SocketAddr> {
    match address {
        ScopedIp::V6(scoped) => {
            let ip = *scoped.addr();
            let scope = scoped.scope_id().index;
            let usable = !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast();
            (usable && (!ip.is_unicast_link_local() || scope != 0))
                .then(|| SocketAddrV6::new(ip, port, 0, scope).into())
        }
        other => {
            let ip = other.to_ip_addr();
            let usable = !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast();
            usable.then(|| SocketAddr::new(ip, port))
        }
    }
}

/// A search for owners, until it is dropped.
pub struct OwnerSearch {
    daemon: ServiceDaemon,
    events: Receiver<ServiceEvent>,
    found: Vec<FoundOwner>,
}

impl std::fmt::Debug for OwnerSearch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnerSearch").field("found", &self.found).finish_non_exhaustive()
    }
}

impl OwnerSearch {
    /// Asks the local network, in the background. None where that is not possible.
    pub fn new() -> Option<Self> {
        let daemon = daemon()?;
        let events = daemon.browse(SERVICE).ok()?;
        Some(Self { daemon, events, found: Vec::new() })
    }

    /// The owners that have been found up to now; it does not wait.
    pub fn found(&mut self) -> &[FoundOwner] {
        self.take(Instant::now())
    }

    /// Looks for so long.
    pub fn look(&mut self, patience: Duration) -> &[FoundOwner] {
        self.take(Instant::now() + patience)
    }

    fn take(&mut self, until: Instant) -> &[FoundOwner] {
        for _ in 0..MOST_EVENTS {
            let event = match self.events.try_recv() {
                Ok(event) => event,
                Err(_) => match self.events.recv_deadline(until) {
                    Ok(event) => event,
                    Err(_) => break,
                },
            };
            if let ServiceEvent::ServiceResolved(service) = event
                && let Some(owner) = FoundOwner::of(&service)
            {
                keep(&mut self.found, owner);
            }
        }
        &self.found
    }
}

impl Drop for OwnerSearch {
    fn drop(&mut self) {
        stop(&self.daemon);
    }
}

/// A later word of an owner counts.
fn keep(found: &mut Vec<FoundOwner>, owner: FoundOwner) {
    found.retain(|known| (&known.owner, &known.helper) != (&owner.owner, &owner.helper));
    if found.len() == MOST_OWNERS {
        found.remove(0);
    }
    found.push(owner);
}

fn daemon() -> Option<ServiceDaemon> {
    ServiceDaemon::new().inspect_err(|error| tracing::debug!("no multicast DNS: {error}")).ok()
}

/// Takes back what has been announced, and ends the thread.
fn stop(daemon: &ServiceDaemon) {
    if let Ok(status) = daemon.shutdown() {
        let _ = status.recv_timeout(GOODBYE);
    }
}

/// The address of this machine at which others on the local network reach it, as far as this
/// machine can know. None without a network.
pub fn local_address() -> Option<IpAddr> {
    // The system says from where it would send; nothing is sent to this address (RFC 5737).
    let from = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    let of_route = from.ok().map(|address| address.ip()).filter(|ip| !ip.is_unspecified());
    let of_interface = || {
        let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
        let mut addresses: Vec<IpAddr> = interfaces.iter().map(if_addrs::Interface::ip).collect();
        addresses.retain(|ip| matches!(ip, IpAddr::V4(ip) if !ip.is_loopback() && !ip.is_link_local()));
        addresses.first().copied()
    };
    of_route.or_else(of_interface).filter(|ip| !ip.is_loopback())
}

const SERVICE: &str = "_kyklos._udp.local.";
const OWNER: &str = "owner";
const NAME: &str = "helper";
const GOODBYE: Duration = Duration::from_millis(300);
/// Others on the network choose what they announce.
const LONGEST: usize = 64;
const MOST_OWNERS: usize = 64;
const MOST_ADDRESSES: usize = 8;
const MOST_EVENTS: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn service(owner: &str, helper: &str, addresses: &str, port: u16) -> ResolvedService {
        let properties = [(OWNER, owner), (NAME, helper)];
        ServiceInfo::new(SERVICE, "x", "x.local.", addresses, port, &properties[..])
            .unwrap()
            .as_resolved_service()
    }

    #[test]
    fn what_is_announced_is_read_back_and_what_is_no_owner_is_none() {
        let found =
            FoundOwner::of(&service("0123", "kitchen", "10.0.0.7,192.168.1.7,fd00::1", 29_700)).unwrap();
        let addresses: Vec<_> = found.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["10.0.0.7:29700", "192.168.1.7:29700", "[fd00::1]:29700"]);
        assert_eq!((found.owner.as_str(), found.helper.as_str()), ("0123", "kitchen"));
        for none in [
            service("", "kitchen", "10.0.0.7", 1),
            service("0123", "", "10.0.0.7", 1),
            service("0123", "kitchen", "10.0.0.7", 0),
            service("0123", "kitchen", "", 1),
            service("0123", "kitchen", "127.0.0.1", 1),
            service("0123", "kitchen", "fe80::1", 1),
            service(&"0".repeat(65), "kitchen", "10.0.0.7", 1),
        ] {
            assert_eq!(FoundOwner::of(&none), None, "{none:?}");
        }
        let hostile = FoundOwner::of(&service("0123", "kit\u{1b}[2Jchen", "10.0.0.7", 1)).unwrap();
        assert!(!hostile.helper.contains('\u{1b}'), "{hostile:?}");
    }

    #[test]
    fn the_last_word_of_an_owner_counts_and_a_flood_is_bounded() {
        let owner = |number: usize, address: &str| {
            FoundOwner::of(&service(&number.to_string(), "kitchen", address, 1)).unwrap()
        };
        let mut found = Vec::new();
        keep(&mut found, owner(0, "10.0.0.1"));
        keep(&mut found, owner(0, "10.0.0.2"));
        assert_eq!(found, [owner(0, "10.0.0.2")]);
        (0..1000).for_each(|number| keep(&mut found, owner(number, "10.0.0.1")));
        assert_eq!((found.len(), &found[63]), (64, &owner(999, "10.0.0.1")));
    }
}
