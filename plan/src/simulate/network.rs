//! The links that a message crosses: ports of devices, uplinks of hosts, and links between two
//! hosts.

use std::collections::HashMap;

use super::cluster::Cluster;
use super::describe::{Duplex, LinkDescription};
use crate::error::{Error, Result};

/// One direction of a link, which messages share.
#[derive(Clone, Debug)]
pub(super) struct Channel {
    pub(super) name: String,
    /// Bytes in a nanosecond, which is GB in a second.
    pub(super) capacity: f64,
}

/// The channels that a message crosses, and the costs that do not depend on sharing.
#[derive(Clone, Debug, Default)]
pub(super) struct Route {
    pub(super) channels: Vec<usize>,
    pub(super) latency_ns: f64,
    pub(super) message_ns: f64,
    /// Compute nanoseconds of the device at either end for each byte.
    pub(super) host_ns_per_byte: f64,
}

/// Channels of a cluster, created when a route needs them for the first time.
#[derive(Debug)]
pub(super) struct Network<'a> {
    cluster: &'a Cluster,
    pub(super) channels: Vec<Channel>,
    names: HashMap<String, usize>,
    routes: HashMap<(usize, usize), Route>,
}

impl<'a> Network<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Self {
        Self { cluster, channels: Vec::new(), names: HashMap::new(), routes: HashMap::new() }
    }

    /// The route from one device to another, or to another rank on the same device.
    pub(super) fn route(&mut self, from: usize, to: usize) -> Result<Route> {
        if let Some(route) = self.routes.get(&(from, to)) {
            return Ok(route.clone());
        }
        let (a, b) = (self.cluster.host_of(from), self.cluster.host_of(to));
        let route = if a == b { self.inside(a, from, to)? } else { self.across(a, b, from, to)? };
        self.routes.insert((from, to), route.clone());
        Ok(route)
    }

    fn inside(&mut self, host: usize, from: usize, to: usize) -> Result<Route> {
        let host = self.cluster.host(host);
        let Some(kind) = &host.inside else {
            return Err(Error::request(
                format!("ranks talk inside host {}, which has no link for that", host.name),
                "name one with inside = \"…\"",
            ));
        };
        let link = self.cluster.link(kind);
        let channels = vec![
            self.channel(&format!("{} device {from} {kind}", host.name), "out", link),
            self.channel(&format!("{} device {to} {kind}", host.name), "in", link),
        ];
        Ok(route(channels, link))
    }

    fn across(&mut self, a: usize, b: usize, from: usize, to: usize) -> Result<Route> {
        let (cluster, between) = (self.cluster, self.cluster.between(a, b)?);
        let mut channels = Vec::new();
        let (first, last) = (cluster.host(a), cluster.host(b));
        for (host, device, end) in [(first, from, "out"), (last, to, "in")] {
            if let Some(nic) = &host.nic {
                let name = format!("{} device {device} {nic}", host.name);
                channels.push(self.channel(&name, end, cluster.link(nic)));
            }
            if let Some(uplink) = &host.uplink {
                channels.push(self.channel(&format!("{} {uplink}", host.name), end, cluster.link(uplink)));
            }
        }
        let (low, high) = (cluster.host(a.min(b)), cluster.host(a.max(b)));
        let way = if a < b { "out" } else { "in" };
        let name = format!("{} to {} {between}", low.name, high.name);
        channels.push(self.channel(&name, way, cluster.link(between)));
        Ok(route(channels, cluster.link(between)))
    }

    /// A half-duplex link is one channel for both directions.
    fn channel(&mut self, name: &str, way: &str, link: &LinkDescription) -> usize {
        let name = match link.duplex {
            Duplex::Full => format!("{name} {way}"),
            Duplex::Half => name.to_owned(),
        };
        if let Some(known) = self.names.get(&name) {
            return *known;
        }
        self.channels.push(Channel { name: name.clone(), capacity: link.gb_per_s });
        self.names.insert(name, self.channels.len() - 1);
        self.channels.len() - 1
    }
}

fn route(mut channels: Vec<usize>, link: &LinkDescription) -> Route {
    // If a half-duplex device sends to itself, both of its ports are the same channel.
    channels.sort_unstable();
    channels.dedup();
    Route {
        channels,
        latency_ns: link.latency_us * 1e3,
        message_ns: link.message_us * 1e3,
        host_ns_per_byte: link.host_s_per_gb,
    }
}
