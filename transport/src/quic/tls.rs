//! TLS and QUIC settings of both sides.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::congestion::CubicConfig;
use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Connection, ServerConfig, TransportConfig, VarInt};
use rustls::pki_types::CertificateDer;

use super::control::SILENT_TICKS;
use super::identity::Identity;
use super::names::Claims;
use super::verifier::{Dialled, Dialler};
use crate::error::TransportError;
use crate::wire::Purpose;

/// What both sides of a connection run, made once per endpoint.
#[derive(Clone)]
pub(crate) struct TlsConfigs {
    control: Arc<QuicClientConfig>,
    data: Arc<QuicClientConfig>,
    server: Arc<QuicServerConfig>,
    idle_timeout: Duration,
}

impl TlsConfigs {
    pub(crate) fn new(identity: &Identity, heartbeat: Duration) -> Result<Self, TransportError> {
        let client = |purpose| Ok::<_, TransportError>(Arc::new(client_config(identity, purpose)?));
        Ok(Self {
            control: client(Purpose::Control)?,
            data: client(Purpose::Data)?,
            server: Arc::new(server_config(identity)?),
            idle_timeout: idle_timeout(heartbeat),
        })
    }

    pub(crate) fn client(&self, purpose: Purpose, path: Path) -> ClientConfig {
        let crypto = match purpose {
            Purpose::Control | Purpose::Reform | Purpose::Rejoin => Arc::clone(&self.control),
            Purpose::Data => Arc::clone(&self.data),
        };
        let mut config = ClientConfig::new(crypto);
        config.transport_config(Arc::new(transport_config(path, self.idle_timeout)));
        config
    }

    pub(crate) fn server(&self, path: Path) -> ServerConfig {
        let mut config = ServerConfig::with_crypto(Arc::<QuicServerConfig>::clone(&self.server));
        config.transport_config(Arc::new(transport_config(path, self.idle_timeout)));
        config.migration(false);
        // Strangers can only fill these; members need a handful.
        config.max_incoming(256).incoming_buffer_size(64 << 10).incoming_buffer_size_total(8 << 20);
        config
    }
}

/// The kind of path between two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Both ends on this host, where one packet may be as large as UDP allows.
    Loopback,
    /// Anything else: packets that every Ethernet carries.
    Network,
}

impl Path {
    /// What an endpoint bound to `bind` can assume.
    ///
    /// Loopback interfaces of other systems than Linux carry smaller datagrams.
    pub(crate) fn of_endpoint(bind: IpAddr) -> Self {
        if cfg!(target_os = "linux") && bind.is_loopback() { Self::Loopback } else { Self::Network }
    }

    /// Largest UDP payload that is sent.
    pub(crate) fn mtu(self) -> u16 {
        match self {
            Self::Loopback => LOOPBACK_MTU,
            Self::Network => NETWORK_MTU,
        }
    }
}

/// UDP payload over loopback; the largest that IPv4 allows is 65,507.
const LOOPBACK_MTU: u16 = 65_000;

/// Bytes under way to one rank over loopback. There the only queue is the receiver's socket buffer, usually of 4 to
/// 16 MiB: more than it holds is lost and sent again.
const LOOPBACK_WINDOW_BYTES: u64 = 4 << 20;

/// Handshake packets are padded to the floor, and quinn-proto panics on those of 16,384 bytes and more.
const LOOPBACK_MTU_FLOOR: u16 = 16_000;

/// UDP payload in one Ethernet packet, as quinn's own MTU discovery would find.
const NETWORK_MTU: u16 = 1452;

/// Streams that a peer may have open towards us: messages that we asked for and small ones that come early.
const STREAMS: u32 = 256;

fn transport_config(path: Path, idle_timeout: Duration) -> TransportConfig {
    let mut cubic = CubicConfig::default();
    cubic.initial_window(1 << 20);
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(VarInt::from_u32(16 << 20))
        // quinn's default is unlimited; this is what bounds a peer's hold on our memory.
        .receive_window(VarInt::from_u32(64 << 20))
        .send_window(32 << 20)
        .max_concurrent_uni_streams(VarInt::from_u32(STREAMS))
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .datagram_receive_buffer_size(None)
        .congestion_controller_factory(Arc::new(cubic))
        .keep_alive_interval(Some(idle_timeout / 4))
        .max_idle_timeout(quinn::IdleTimeout::try_from(idle_timeout).ok())
        .initial_rtt(Duration::from_millis(50));
    match path {
        // Without a floor, a burst of loss on a busy host would look like a path that carries small packets only.
        Path::Loopback => config
            .send_window(LOOPBACK_WINDOW_BYTES)
            .initial_mtu(LOOPBACK_MTU)
            .min_mtu(LOOPBACK_MTU_FLOOR)
            .mtu_discovery_config(None)
            .enable_segmentation_offload(false),
        // The default discovery probes up to NETWORK_MTU and falls back when the path drops such packets.
        Path::Network => config.initial_mtu(1200),
    };
    config
}

/// How long a connection may be without any packet.
///
/// Half as long again as the silence after which a rank counts as dead: heartbeats notice that first, and unlike this
/// clock they do not count the time in which this rank itself stood still. Two ranks use the lower of their values.
fn idle_timeout(heartbeat: Duration) -> Duration {
    heartbeat.saturating_mul(SILENT_TICKS + SILENT_TICKS / 2).max(SHORTEST_IDLE_TIMEOUT)
}

/// The same clock runs during the handshake, which may take longer than a short heartbeat's silence.
const SHORTEST_IDLE_TIMEOUT: Duration = Duration::from_secs(5);

fn alpn(purpose: Purpose) -> Vec<u8> {
    match purpose {
        Purpose::Control | Purpose::Reform | Purpose::Rejoin => b"kyklos-ctl/1".to_vec(),
        Purpose::Data => b"kyklos/1".to_vec(),
    }
}

fn client_config(identity: &Identity, purpose: Purpose) -> Result<QuicClientConfig, TransportError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = Dialled::new(identity, Arc::clone(&provider))?;
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(cannot_set_up)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(vec![identity.certificate.clone()], identity.key.clone_key())
        .map_err(cannot_set_up)?;
    config.alpn_protocols = vec![alpn(purpose)];
    // No session is ever resumed, so no early data can be replayed.
    config.resumption = rustls::client::Resumption::disabled();
    QuicClientConfig::try_from(config).map_err(cannot_set_up)
}

fn server_config(identity: &Identity) -> Result<QuicServerConfig, TransportError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = Arc::new(Dialler::new(identity, Arc::clone(&provider))?);
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(cannot_set_up)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate.clone()], identity.key.clone_key())
        .map_err(cannot_set_up)?;
    config.alpn_protocols = vec![alpn(Purpose::Control), alpn(Purpose::Data)];
    config.send_tls13_tickets = 0;
    QuicServerConfig::try_from(config).map_err(cannot_set_up)
}

/// What the peer proved in the handshake.
pub(crate) fn proven_claims(connection: &Connection) -> Result<Claims, TransportError> {
    let chain =
        connection.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    match chain.as_deref().map(Vec::as_slice) {
        Some([certificate, ..]) => Claims::of(certificate),
        _ => Err(TransportError::Bootstrap { text: "a peer without a certificate".into() }),
    }
}

/// What the peer said the connection is for, in the handshake.
pub(crate) fn negotiated_purpose(connection: &Connection) -> Option<Purpose> {
    let data = connection.handshake_data()?.downcast::<HandshakeData>().ok()?;
    let protocol = data.protocol?;
    [Purpose::Control, Purpose::Data].into_iter().find(|purpose| alpn(*purpose) == protocol)
}

fn cannot_set_up(error: impl std::fmt::Display) -> TransportError {
    TransportError::Bootstrap { text: format!("cannot set up TLS: {error}") }
}
