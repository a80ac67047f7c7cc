//! How a rank that has a token gets its identity from rank 0.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Connection, ConnectionError, TransportErrorCode};
use rustls::pki_types::CertificateDer;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::applicant::{Applicant, Enrolled};
use super::binding::binding;
use super::pinned::{OF_ANOTHER, PinnedVerifier};
use super::register::kind_of_reject;
use super::token::Token;
use crate::error::{BootstrapKind, TransportError};
use crate::quic::network::binding::{self, SystemSocket, bind_for_both, usual_bind};
use crate::quic::network::connection::{describe, describe_stranger, is_busy, is_silence, kind_of};
use crate::quic::network::frames::FrameReader;
use crate::quic::network::interface::too_small_to;
use crate::quic::network::io_thread::IoThread;
use crate::quic::network::path::{Carrier, LinkSettings, Path};
use crate::quic::network::socket::{Endpoints, LaneEndpoint, SocketSource};
use crate::quic::network::tcp::refusal::refusal_hint;
use crate::quic::network::tcp::staggered::{first_ok, listed};
use crate::quic::network::timing::Timing;
use crate::quic::trust::provider::{cannot_set_up, provider};
use crate::quic::trust::tls;
use crate::rank::Rank;
use crate::wire::{Frame, RejectCode};

/// How a rank asks for an identity.
#[derive(Clone, Debug)]
pub struct EnrolConfig {
    /// The token.
    pub token: Token,
    /// Where rank 0 is: the address of the token's [`Token::place`].
    pub coordinator: SocketAddr,
    /// Other addresses of rank 0: all are dialled, and the first at which rank 0 answers is used.
    pub coordinator_also: Vec<SocketAddr>,
    /// Which rank it wants; `None` takes any.
    pub rank: Option<Rank>,
    /// Local address to dial from.
    pub bind: IpAddr,
    /// Known properties of the network; its carrier must be rank 0's.
    pub link: LinkSettings,
    /// How long to try: rank 0 may start later.
    pub deadline: Duration,
}

impl EnrolConfig {
    /// The usual settings: any rank, 20 s, bound as
    /// [`QuicConfig::new`](crate::quic::QuicConfig::new) does.
    pub fn new(token: Token, coordinator: SocketAddr) -> Self {
        let (bind, link) = (usual_bind(coordinator), LinkSettings::default());
        let (coordinator_also, deadline) = (Vec::new(), Duration::from_secs(20));
        Self { token, coordinator, coordinator_also, rank: None, bind, link, deadline }
    }
}

impl EnrolConfig {
    /// As [`QuicConfig::bind_both_families`](crate::quic::QuicConfig::bind_both_families).
    pub fn bind_both_families(&mut self) {
        self.bind = bind_for_both(self.bind, &self.candidates());
    }

    fn candidates(&self) -> Vec<SocketAddr> {
        [&[self.coordinator][..], &self.coordinator_also].concat()
    }
}

/// Asks rank 0 for an identity. Blocks until it is there.
///
/// # Errors
///
/// [`TransportError::Bootstrap`] if there is no answer by the deadline, if the peer is not rank 0
/// of the token's authority, or if rank 0 refuses: a token that is wrong, used up or has expired, a
/// rank that is taken.
pub fn enrol(config: EnrolConfig) -> Result<Enrolled, TransportError> {
    let socket = binding::bind(SocketAddr::new(config.bind, 0), config.link.carrier)?;
    let thread = IoThread::start()?;
    let alive = thread.alive();
    thread.run(async move {
        let enrolled = on(&config, socket).await;
        drop(alive);
        enrolled
    })?
}

async fn on(config: &EnrolConfig, socket: SystemSocket) -> Result<Enrolled, TransportError> {
    let applicant = Applicant::new(config.token.clone(), config.rank)
        .map_err(|error| TransportError::bootstrap(format!("cannot make a key: {error}")))?;
    let path = Path::new(&LinkSettings { lanes: 1, ..config.link }, config.bind, 2)?;
    let Endpoints { lanes, refused, .. } = SocketSource::Real(vec![socket]).endpoints(&path, None, false)?;
    let [lane @ LaneEndpoint { endpoint, .. }] = &lanes[..] else {
        return Err(TransportError::bootstrap("one socket is not one endpoint"));
    };
    let provider = provider();
    let pinned = PinnedVerifier { authority: config.token.authority, provider: Arc::clone(&provider) };
    let crypto =
        QuicClientConfig::try_from(tls::applicant(Arc::new(pinned), provider)?).map_err(cannot_set_up)?;
    let timing = Timing::new(config.link.profile, None);
    let mut client = ClientConfig::new(Arc::new(crypto));
    client.transport_config(Arc::new(path.transport_config(timing.idle)));
    let deadline = Instant::now() + config.deadline;
    let trying = async {
        loop {
            match attempt(config, &applicant, lane, client.clone()).await {
                Err(EnrolError::Retry) => sleep(PAUSE).await,
                Err(EnrolError::Refused(text, kind)) => return Err(kind.error(text)),
                Ok(enrolled) => return Ok(enrolled),
            }
        }
    };
    let tried = timeout_at(deadline, trying).await;
    let enrolled = tried.unwrap_or_else(|_| {
        let candidates = config.candidates();
        let small = (config.link.carrier == Carrier::Udp).then(|| too_small_to(&candidates)).flatten();
        let kind = if small.is_some() { BootstrapKind::SmallMtu } else { BootstrapKind::Other };
        let why =
            small.unwrap_or_else(|| format!("is it running, and does {} get through?", config.link.carrier));
        Err(kind.error(format!(
            "rank 0 did not give an identity at {} within {:?}: {why}{}",
            listed(&candidates),
            config.deadline,
            refusal_hint(&refused, &candidates)
        )))
    });
    endpoint.close(0_u32.into(), b"");
    let _ = timeout(PAUSE, endpoint.wait_idle()).await;
    enrolled
}

/// Why an attempt has failed.
enum EnrolError {
    /// Packets did not get through, or rank 0 is busy.
    Retry,
    Refused(String, BootstrapKind),
}

async fn attempt(
    config: &EnrolConfig,
    applicant: &Applicant,
    lane: &LaneEndpoint,
    client: ClientConfig,
) -> Result<Enrolled, EnrolError> {
    let dial = Timing::new(config.link.profile, None).dial;
    let mut dials = Vec::new();
    for at in config.candidates().into_iter().filter(|at| lane.can_dial(at)) {
        dials.push(connect(lane, client.clone(), at, dial));
    }
    let connected = first_ok(dials).await;
    let connection = connected.map_err(|errors| {
        let refusals = errors.into_iter().map(|error| match error {
            EnrolError::Refused(text, kind) => Some((text, kind)),
            EnrolError::Retry => None,
        });
        // Rank 0 may still answer at another address.
        let refusals: Option<(Vec<String>, Vec<BootstrapKind>)> = refusals.collect();
        refusals.map_or(EnrolError::Retry, |(texts, kinds)| {
            EnrolError::Refused(texts.join("; "), kinds.first().copied().unwrap_or_default())
        })
    })?;
    let at = connection.remote_address();
    let at = SocketAddr::new(at.ip().to_canonical(), at.port());
    let refused = |what: String| refused_at(at, what, BootstrapKind::Other);
    let ended = |error| ended_with(at, error, describe);
    let lost = |error: String| connection.close_reason().map_or_else(|| refused(error), ended);
    let (asked, request) = applicant.words();
    let binding =
        binding(&connection, asked, request).ok_or_else(|| refused("TLS has no keying material".into()))?;
    let (mut send, recv) = connection.open_bi().await.map_err(ended)?;
    send.write_all(&applicant.apply(&binding).encode()).await.map_err(|error| lost(error.to_string()))?;
    match FrameReader::new(recv).next().await {
        Ok(Some(Frame::Grant { rank, size, certificate })) => {
            let chain = connection
                .peer_identity()
                .and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
            let chain = chain.as_deref().map_or(&[][..], Vec::as_slice);
            applicant.accept(chain, (rank, size), certificate).map_err(refused)
        }
        Ok(Some(Frame::Reject { code: RejectCode::Busy, .. })) => Err(EnrolError::Retry),
        Ok(Some(Frame::Reject { code, text })) => Err(refused_at(at, text, kind_of_reject(code))),
        Ok(Some(other)) => Err(refused(format!("it answered {other:?} to an application"))),
        Ok(None) => Err(refused("it closed the stream without an answer".into())),
        Err(error) => Err(lost(error.to_string())),
    }
}

/// The connection to one address, if the peer there is of the token's authority.
async fn connect(
    lane: &LaneEndpoint,
    client: ClientConfig,
    at: SocketAddr,
    dial: Duration,
) -> Result<Connection, EnrolError> {
    let connecting = lane
        .connect(client, at, NAME)
        .map_err(|error| refused_at(at, format!("cannot dial it: {error}"), BootstrapKind::Other))?;
    timeout(dial, connecting)
        .await
        .map_err(|_| EnrolError::Retry)?
        .map_err(|error| ended_with(at, error, describe_stranger))
}

fn refused_at(at: SocketAddr, what: String, kind: BootstrapKind) -> EnrolError {
    EnrolError::Refused(format!("rank 0 at {at} gave no identity: {what}"), kind)
}

fn ended_with(
    at: SocketAddr,
    error: ConnectionError,
    describe: fn(&ConnectionError) -> String,
) -> EnrolError {
    match error {
        error if is_silence(&error) || is_busy(&error) => EnrolError::Retry,
        ConnectionError::ConnectionClosed(close)
            if close.error_code == TransportErrorCode::crypto(NO_SUCH_PROTOCOL) =>
        {
            let text = "it takes no tokens, because its group is complete or it was started without an invitation: start \
                        rank 0 with the invitation";
            refused_at(at, text.to_owned(), BootstrapKind::Invitation)
        }
        // What this end has found: the other end's words are in another variant.
        ConnectionError::TransportError(ref found) if found.reason.contains(OF_ANOTHER) => {
            refused_at(at, describe(&error), BootstrapKind::Token)
        }
        error => refused_at(at, describe(&error), kind_of(&error)),
    }
}

/// TLS' alert for a protocol name that the other side does not have (RFC 7301).
const NO_SUCH_PROTOCOL: u8 = 120;

/// The server name of the handshake; rank 0 is verified by its authority instead.
const NAME: &str = "rank-0.kyklos.internal";

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(300);
