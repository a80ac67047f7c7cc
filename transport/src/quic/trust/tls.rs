//! TLS and QUIC settings of both sides.

use std::sync::Arc;
use std::time::SystemTime;

use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Connection, ServerConfig, TimeSource, TransportConfig};
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;

use super::names::Claims;
use super::presented::PresentedIdentity;
use super::provider::{cannot_set_up, provider};
use super::revoked::Revoked;
use super::verifier::{ClientVerifier, ServerVerifier};
use crate::error::TransportError;
use crate::wire::Purpose;

/// The TLS and QUIC settings of both sides of a connection, made once per endpoint.
#[derive(Clone)]
pub(crate) struct TlsConfigs {
    control: Arc<QuicClientConfig>,
    data: Arc<QuicClientConfig>,
    server: Arc<QuicServerConfig>,
    transport: Arc<TransportConfig>,
}

impl TlsConfigs {
    /// `transport` holds for every connection of the rank.
    pub(crate) fn new(
        identity: &PresentedIdentity,
        revoked: Option<&Revoked>,
        transport: TransportConfig,
    ) -> Result<Self, TransportError> {
        let client = |purpose| {
            let config = QuicClientConfig::try_from(client_tls(identity, revoked, purpose)?);
            config.map(Arc::new).map_err(cannot_set_up)
        };
        Ok(Self {
            control: client(Purpose::Control)?,
            data: client(Purpose::Data)?,
            server: Arc::new(
                QuicServerConfig::try_from(server_tls(identity, revoked, false)?).map_err(cannot_set_up)?,
            ),
            transport: Arc::new(transport),
        })
    }

    pub(crate) fn client(&self, purpose: Purpose) -> ClientConfig {
        let crypto = match purpose {
            Purpose::Control | Purpose::Reform | Purpose::Rejoin => Arc::clone(&self.control),
            Purpose::Data | Purpose::Lane => Arc::clone(&self.data),
        };
        let mut config = ClientConfig::new(crypto);
        config.transport_config(Arc::clone(&self.transport));
        config
    }

    pub(crate) fn server(&self) -> ServerConfig {
        self.server_of(Arc::clone(&self.server))
    }

    /// The same with another handshake.
    pub(crate) fn server_of(&self, crypto: Arc<QuicServerConfig>) -> ServerConfig {
        let mut config = ServerConfig::with_crypto(crypto);
        config.transport_config(Arc::clone(&self.transport));
        // The port of a rank behind address translation may change at any time. QUIC moves a connection
        // only after the new address has proven that it has the keys.
        config.migration(true);
        // Strangers can only fill these; members need a handful.
        config.max_incoming(256).incoming_buffer_size(64 << 10).incoming_buffer_size_total(8 << 20);
        config.time_source(Arc::new(TokioTime { started: Instant::now() }));
        config
    }
}

/// Time for the tokens of QUIC Retry, which are valid for 15 s: by the clock of all other
/// deadlines, which no operator sets.
#[derive(Debug)]
struct TokioTime {
    started: Instant,
}

impl TimeSource for TokioTime {
    fn now(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.started.elapsed()
    }
}

fn alpn(purpose: Purpose) -> Vec<u8> {
    match purpose {
        Purpose::Control | Purpose::Reform | Purpose::Rejoin => b"kyklos-ctl/1".to_vec(),
        Purpose::Data | Purpose::Lane => b"kyklos/1".to_vec(),
    }
}

/// The cipher suite that ranks of this program agree on, because both offer it first.
pub(crate) fn first_cipher() -> String {
    provider()
        .cipher_suites
        .first()
        .map_or_else(|| "no cipher".to_owned(), |suite| format!("{:?}", suite.suite()))
}

fn client_tls(
    identity: &PresentedIdentity,
    revoked: Option<&Revoked>,
    purpose: Purpose,
) -> Result<rustls::ClientConfig, TransportError> {
    let provider = provider();
    let verifier = ServerVerifier::new(&identity.now(), revoked, Arc::clone(&provider))?;
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(cannot_set_up)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(identity.resolver(false));
    config.alpn_protocols = vec![alpn(purpose)];
    // No session is ever resumed, so no early data can be replayed.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// The settings of a rank that has a token and no certificate.
pub(crate) fn applicant(
    verifier: Arc<dyn ServerCertVerifier>,
    provider: Arc<CryptoProvider>,
) -> Result<rustls::ClientConfig, TransportError> {
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(cannot_set_up)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![JOIN_PROTOCOL.to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// The settings of rank 0 while others may enrol with a token. They have no certificate yet, so
/// none is required; a peer without one gets no further than an application, because a hello counts
/// for nothing without a certificate. The authority's own is shown too: they know its hash.
pub(crate) fn inviting_server(
    identity: &PresentedIdentity,
    revoked: Option<&Revoked>,
) -> Result<QuicServerConfig, TransportError> {
    QuicServerConfig::try_from(server_tls(identity, revoked, true)?).map_err(cannot_set_up)
}

fn server_tls(
    identity: &PresentedIdentity,
    revoked: Option<&Revoked>,
    invites: bool,
) -> Result<rustls::ServerConfig, TransportError> {
    let provider = provider();
    let verifier = ClientVerifier::new(&identity.now(), revoked, Arc::clone(&provider))?;
    let verifier = Arc::new(if invites { verifier.or_without_certificate() } else { verifier });
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(cannot_set_up)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(identity.resolver(invites));
    config.alpn_protocols = vec![alpn(Purpose::Control), alpn(Purpose::Data)];
    config.alpn_protocols.extend(invites.then(|| JOIN_PROTOCOL.to_vec()));
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// The contents of the certificate that the peer proved in the handshake.
pub(crate) fn proven_claims(connection: &Connection) -> Result<Claims, TransportError> {
    let chain =
        connection.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    match chain.as_deref().map(Vec::as_slice) {
        Some([certificate, ..]) => Claims::of(certificate),
        _ => Err(TransportError::bootstrap("a peer without a certificate")),
    }
}

/// The purpose of the connection, as negotiated in the handshake.
pub(crate) fn negotiated_purpose(connection: &Connection) -> Option<Purpose> {
    let protocol = negotiated_protocol(connection)?;
    [Purpose::Control, Purpose::Data].into_iter().find(|purpose| alpn(*purpose) == protocol)
}

/// Whether the peer enrols with a token.
pub(crate) fn is_application(connection: &Connection) -> bool {
    negotiated_protocol(connection).is_some_and(|protocol| protocol == JOIN_PROTOCOL)
}

fn negotiated_protocol(connection: &Connection) -> Option<Vec<u8>> {
    connection.handshake_data()?.downcast::<HandshakeData>().ok()?.protocol
}

/// The protocol of ranks that have a token and no certificate.
const JOIN_PROTOCOL: &[u8] = b"kyklos-join/1";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::trust::authority::ClusterAuthority;
    use crate::quic::trust::job::JobId;
    use crate::quic::trust::names::rank_name;
    use crate::rank::Rank;

    /// A handshake without a network, because quinn does not report the negotiated suite.
    #[test]
    fn ranks_agree_on_the_first_cipher() {
        let authority = ClusterAuthority::new(JobId([1; 16])).unwrap();
        let name = rank_name(Rank(0), JobId([1; 16])).try_into().unwrap();
        let identity = |rank| PresentedIdentity::new(authority.issue(Rank(rank)).unwrap(), None).unwrap();
        let client = client_tls(&identity(1), None, Purpose::Data).unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(client), name).unwrap();
        let mut server =
            rustls::ServerConnection::new(Arc::new(server_tls(&identity(0), None, false).unwrap())).unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            let mut flight = Vec::new();
            client.write_tls(&mut flight).unwrap();
            server.read_tls(&mut &flight[..]).unwrap();
            server.process_new_packets().unwrap();
            flight.clear();
            server.write_tls(&mut flight).unwrap();
            client.read_tls(&mut &flight[..]).unwrap();
            client.process_new_packets().unwrap();
        }
        let agreed = format!("{:?}", client.negotiated_cipher_suite().unwrap().suite());
        assert_eq!(agreed, first_cipher());
    }
}
