//! Where the packets of a rank go and how, in one line for people.

use std::net::SocketAddr;

use super::endpoint::RankEndpoint;
use super::peer_connection::Mesh;
use crate::quic::network::interface::interface;
use crate::quic::shared_memory::MEMORY_CAN_BE_SHARED;
use crate::quic::trust::tls;

/// Where packets go and how, in one line.
pub(crate) fn describe_network(endpoint: &RankEndpoint, mesh: &Mesh) -> String {
    let RankEndpoint { config, lane_endpoints, path, capabilities, .. } = endpoint;
    let mut ends = lane_endpoints.iter().map(|end| end.endpoint.local_addr().ok());
    let local = ends.next().flatten();
    // For a socket that is bound to all addresses, each packet shows the address at which it arrived.
    let seen = mesh.data.iter().find_map(|joined| joined.connection.local_ip());
    let at = local.map(|local| SocketAddr::new(seen.unwrap_or(local.ip()).to_canonical(), local.port()));
    let at = match at {
        Some(at) => {
            format!("{at}{}", interface(at.ip()).map(|name| format!(" ({name})")).unwrap_or_default())
        }
        None => "an unknown address".to_owned(),
    };
    let beside: Vec<String> = ends.flatten().map(|address| address.port().to_string()).collect();
    let beside = match beside.len() {
        0 => String::new(),
        _ => format!(" and ports {}", beside.join(", ")),
    };
    let shared = match config.link.shared_memory && MEMORY_CAN_BE_SHARED {
        true => ", shared memory with ranks of this host that allow it",
        false => "",
    };
    format!("{at}{beside}, {capabilities}, {path}, {} offered first{shared}", tls::first_cipher())
}
