//! The network side of a rank, which outlives its groups: its endpoints, admission of others, and
//! dialling them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, ConnectionError, VarInt};
use tokio::sync::mpsc::WeakSender;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::admission::Admission;
use super::config::QuicConfig;
use super::link_terms::LinkTerms;
use super::peer_connection::PeerConnection;
use super::refusals::{UNREACHED_REMEDY, unreached_text};
use crate::error::{BootstrapKind, TransportError};
use crate::quic::network::connection::{CLOSE_TIMEOUT, close_code, cut, describe, describe_stranger};
use crate::quic::network::connection::{is_busy, is_silence, kind_of};
use crate::quic::network::frames::FrameReader;
use crate::quic::network::interface;
use crate::quic::network::path::{Carrier, Path};
use crate::quic::network::socket::LaneEndpoint;
use crate::quic::network::socket::SocketCapabilities;
use crate::quic::network::tcp::refusal;
use crate::quic::network::tcp::refusal::RefusedFlag;
use crate::quic::network::tcp::staggered::{first_ok, listed};
use crate::quic::network::timing::Timing;
use crate::quic::trust::names::rank_name;
use crate::quic::trust::presented::PresentedIdentity;
use crate::quic::trust::revoked::Revoked;
use crate::quic::trust::tls::{self, TlsConfigs};
use crate::quic::trust::validity::Date;
use crate::rank::Rank;
use crate::wire::{Frame, PROTOCOL_VERSION, Purpose, RejectCode};

/// The network side of a rank, for its whole life. Ranks have their numbers of the first group.
pub(crate) struct RankEndpoint {
    pub(crate) config: QuicConfig,
    /// By lane; the first is also for control connections, and for ranks with a token.
    pub(crate) lane_endpoints: Vec<LaneEndpoint>,
    pub(crate) path: Path,
    pub(crate) timing: Timing,
    pub(crate) capabilities: SocketCapabilities,
    pub(crate) refused: RefusedFlag,
    pub(crate) is_simulated: bool,
    pub(crate) identity: PresentedIdentity,
    pub(crate) tls: TlsConfigs,
    pub(crate) admission: Arc<Admission>,
    /// What keeps the I/O thread running, if this rank has one.
    pub(crate) thread: Option<WeakSender<Infallible>>,
}

/// The purpose of a dialled connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DialPurpose {
    pub(crate) purpose: Purpose,
    pub(crate) lane: usize,
    pub(crate) epoch: u32,
}

impl DialPurpose {
    pub(crate) fn control(epoch: u32) -> Self {
        Self { purpose: Purpose::Control, lane: 0, epoch }
    }

    pub(crate) fn data(epoch: u32) -> Self {
        Self { purpose: Purpose::Data, lane: 0, epoch }
    }

    pub(crate) fn lane(lane: usize, epoch: u32) -> Self {
        Self { purpose: Purpose::Lane, lane, epoch }
    }
}

impl std::fmt::Debug for RankEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankEndpoint").field("rank", &self.config.rank).finish_non_exhaustive()
    }
}

/// Why a rank that was dialled did not take the connection.
#[derive(Debug)]
pub(crate) enum DialError {
    /// Packets did not get through, or no process listens there. Another process may have answered
    /// at one of several addresses: what was wrong with it.
    NoAnswer { elsewhere: Option<TransportError> },
    /// It takes no handshake now.
    Busy,
    /// It refused, with a code.
    Rejected(RejectCode, TransportError),
    /// One of both sides refused the other.
    Failed(TransportError),
}

impl From<DialError> for TransportError {
    fn from(error: DialError) -> Self {
        match error {
            DialError::Rejected(_, error) | DialError::Failed(error) => error,
            DialError::NoAnswer { elsewhere: Some(error) } => error,
            DialError::NoAnswer { elsewhere: None } | DialError::Busy => Self::bootstrap("no answer"),
        }
    }
}

impl DialError {
    /// The one error of several dials of a rank. It may still answer, unless a rank has answered
    /// everywhere.
    fn of_all(errors: Vec<Self>) -> Self {
        let (mut busy, mut failed, mut silent) = (false, None, false);
        for error in errors {
            match error {
                Self::Busy => busy = true,
                Self::NoAnswer { .. } => silent = true,
                Self::Rejected(_, error) | Self::Failed(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            _ if busy => Self::Busy,
            Some(error) if !silent => Self::Failed(error),
            elsewhere => Self::NoAnswer { elsewhere },
        }
    }
}

impl RankEndpoint {
    /// Dials until there is an answer or the deadline passes: others may start later, and packets
    /// may be lost. Calls `on_busy` whenever the rank takes no handshake now. Returns the
    /// connection, and the ports of the other's lanes beside the first.
    pub(crate) async fn dial_until_answered(
        &self,
        rank: Rank,
        addresses: &[SocketAddr],
        dial_purpose: DialPurpose,
        deadline: Instant,
        on_busy: impl Fn(),
    ) -> Result<(PeerConnection, Vec<u16>), DialError> {
        let (mut busy, mut wrong) = (false, None);
        loop {
            match timeout_at(deadline, self.dial(rank, addresses, dial_purpose, deadline)).await {
                Ok(Ok(joined)) => return Ok(joined),
                Ok(Err(DialError::NoAnswer { elsewhere })) => wrong = elsewhere.or(wrong),
                Ok(Err(DialError::Busy)) => {
                    busy = true;
                    on_busy();
                    // Its places become free when strangers' handshakes end.
                    let _ = timeout_at(deadline, sleep(BUSY_PAUSE)).await;
                }
                Ok(Err(error @ (DialError::Rejected(..) | DialError::Failed(_)))) => return Err(error),
                Err(_) => {
                    let wrong = wrong.map_or(String::new(), |wrong| format!("; {wrong}"));
                    let (text, kind) = self.no_answer(rank, addresses, dial_purpose.purpose, busy);
                    let hint = self.refusal_hint(addresses);
                    return Err(DialError::Failed(kind.error(format!("{text}{wrong}{hint}"))));
                }
            }
        }
    }

    /// The words for a rank that has not answered by the deadline.
    fn no_answer(
        &self,
        rank: Rank,
        addresses: &[SocketAddr],
        purpose: Purpose,
        busy: bool,
    ) -> (String, BootstrapKind) {
        let QuicConfig { rank: me, connect_deadline: within, link, .. } = &self.config;
        // Both have reached rank 0, so both are running.
        let between = matches!(purpose, Purpose::Data | Purpose::Lane);
        let who = match between {
            true => unreached_text(*me, rank, addresses, 1),
            false => format!("rank {rank} did not answer at {}", listed(addresses)),
        };
        let small = self.too_small(addresses).filter(|_| !busy);
        let kind = if small.is_some() { BootstrapKind::SmallMtu } else { BootstrapKind::Other };
        let why = match small {
            _ if busy => {
                "it takes no more handshakes now, because too many others have begun one there".to_owned()
            }
            Some(small) => small,
            None if between => format!("let {} through {UNREACHED_REMEDY}", link.carrier),
            None => format!("is it running, and does {} get through?", link.carrier),
        };
        (format!("{who} within {within:?}: {why}"), kind)
    }

    /// Why packets cannot get to these addresses, if the system knows that they are too large.
    pub(crate) fn too_small(&self, addresses: &[SocketAddr]) -> Option<String> {
        self.sends_packets().then(|| interface::too_small_to(addresses)).flatten()
    }

    /// The same of every packet of rank 0.
    pub(crate) fn own_mtu_too_small(&self) -> Option<String> {
        self.sends_packets().then(|| interface::too_small_from(self.config.coordinator.ip())).flatten()
    }

    /// Whether the packets of QUIC are those of the system.
    fn sends_packets(&self) -> bool {
        !self.is_simulated && self.config.link.carrier == Carrier::Udp
    }

    /// Dials all addresses of a rank, one shortly after the other. The first at which the rank
    /// proves who it is counts.
    pub(crate) async fn dial(
        &self,
        rank: Rank,
        addresses: &[SocketAddr],
        dial_purpose: DialPurpose,
        deadline: Instant,
    ) -> Result<(PeerConnection, Vec<u16>), DialError> {
        let end = &self.lane_endpoints[dial_purpose.lane];
        let mut dials = Vec::new();
        for &address in addresses.iter().filter(|address| end.can_dial(address)) {
            dials.push(self.shake_hands(rank, address, dial_purpose));
        }
        match first_ok(dials).await {
            Ok(connection) => self.greet(rank, connection, dial_purpose, deadline).await,
            Err(errors) if errors.is_empty() => Err(DialError::Failed(TransportError::bootstrap(format!(
                "rank {rank} is at {}, which a socket for IPv4 cannot dial",
                listed(addresses)
            )))),
            Err(errors) => Err(DialError::of_all(errors)),
        }
    }

    /// Dials one address until the peer there has shown that it is the rank.
    async fn shake_hands(
        &self,
        rank: Rank,
        address: SocketAddr,
        DialPurpose { purpose, lane, .. }: DialPurpose,
    ) -> Result<Connection, DialError> {
        let config = self.tls.client(purpose);
        let name = rank_name(rank, self.config.job);
        let fail = |text: String| DialError::Failed(TransportError::bootstrap(text));
        let ended = |error: &ConnectionError, text: String| DialError::Failed(kind_of(error).error(text));
        let connecting = self.lane_endpoints[lane]
            .connect(config, address, &name)
            .map_err(|error| fail(format!("cannot dial rank {rank} at {address}: {error}")))?;
        let connection = match timeout(self.timing.dial, connecting).await {
            Ok(Ok(connection)) => connection,
            Err(_) => return Err(DialError::NoAnswer { elsewhere: None }),
            Ok(Err(error)) if is_silence(&error) => return Err(DialError::NoAnswer { elsewhere: None }),
            Ok(Err(error)) if is_busy(&error) => return Err(DialError::Busy),
            Ok(Err(error @ ConnectionError::TransportError(_))) => {
                let text = format!("this rank refuses rank {rank} at {address}: {}", describe(&error));
                return Err(ended(&error, text));
            }
            Ok(Err(error)) => {
                let why = describe_stranger(&error);
                let text = format!("rank {rank} at {address} refused the connection: {why}");
                return Err(ended(&error, text));
            }
        };
        let claims = tls::proven_claims(&connection).map_err(DialError::Failed)?;
        if claims.job != self.config.job {
            return Err(fail(format!("the peer at {address} is {claims}, not rank {rank} of this job")));
        }
        claims
            .check_rank(rank, self.config.known(rank), Some(connection.remote_address().ip()))
            .map_err(|text| fail(format!("rank {rank} at {address} is not who it should be: {text}")))?;
        Ok(connection)
    }

    /// Says hello to a rank that has shown who it is.
    async fn greet(
        &self,
        rank: Rank,
        connection: Connection,
        DialPurpose { purpose, lane, epoch }: DialPurpose,
        deadline: Instant,
    ) -> Result<(PeerConnection, Vec<u16>), DialError> {
        let address = SocketAddr::new(
            connection.remote_address().ip().to_canonical(),
            connection.remote_address().port(),
        );
        let fail = |text: String| DialError::Failed(TransportError::bootstrap(text));
        let in_words = |what: String| format!("rank {rank} at {address} refused this rank: {what}");
        let refused = |what: String| TransportError::bootstrap(in_words(what));
        let lost = |connection: &Connection, error: String| match connection.close_reason() {
            Some(reason) if is_silence(&reason) => DialError::NoAnswer { elsewhere: None },
            Some(reason) => DialError::Failed(kind_of(&reason).error(in_words(describe(&reason)))),
            None => DialError::Failed(refused(error)),
        };
        let (send, recv) =
            connection.open_bi().await.map_err(|error| lost(&connection, error.to_string()))?;
        let frames = FrameReader::new(recv);
        let mut joined = PeerConnection { rank, lane, connection, send, frames, advertised: Vec::new() };
        let hello = Frame::Hello {
            protocol: PROTOCOL_VERSION,
            purpose,
            job: self.config.job.0,
            epoch,
            rank: self.config.rank,
            size: self.config.size,
        };
        let mut frames = hello.encode();
        if !matches!(purpose, Purpose::Data | Purpose::Lane) {
            frames.extend(Frame::Advertise { addresses: self.advertised() }.encode());
        }
        let written = joined.send.write_all(&frames).await;
        written.map_err(|error| lost(&joined.connection, error.to_string()))?;
        match timeout_at(deadline, joined.frames.next()).await {
            Ok(Ok(Some(Frame::Welcome { protocol: PROTOCOL_VERSION, lane_ports, heartbeat_us, wan }))) => {
                let theirs = LinkTerms { lanes: lane_ports.len() + 1, heartbeat_us, wan };
                if let Some(text) = theirs.difference(rank, &LinkTerms::of(&self.config), self.config.rank) {
                    // The other side has let this rank in, and would wait for it.
                    joined.connection.close(close_code::REJECTED, cut(&text).as_bytes());
                    return Err(fail(text));
                }
                Ok((joined, lane_ports))
            }
            Ok(Ok(Some(Frame::Reject { code, text }))) => Err(DialError::Rejected(code, refused(text))),
            Ok(Ok(Some(other))) => Err(fail(format!("rank {rank} answered {other:?} to a hello"))),
            Ok(Ok(None)) => Err(DialError::Failed(refused("it closed the stream without an answer".into()))),
            Ok(Err(error)) => Err(lost(&joined.connection, error.to_string())),
            Err(_) => Err(DialError::Failed(refused("it does not answer".into()))),
        }
    }

    /// Warns once if a listener that this rank dials refuses TCP. The rank keeps dialling: anybody
    /// can send that.
    pub(crate) async fn warn_of_refusal(&self) -> Infallible {
        refusal::refusal(self.refused.clone()).await;
        let hint = self.refusal_hint(&self.config.coordinator_candidates());
        (self.config.warn)(&format!("rank {} still dials{hint}", self.config.rank), BootstrapKind::Other);
        std::future::pending().await
    }

    /// The words for a rank that was not reached, if a listener has refused TCP; otherwise empty.
    pub(crate) fn refusal_hint(&self, addresses: &[SocketAddr]) -> String {
        refusal::refusal_hint(&self.refused, addresses)
    }

    /// The addresses that this rank says for itself.
    pub(crate) fn advertised(&self) -> Vec<SocketAddr> {
        let port = self.lane_endpoints[0].endpoint.local_addr().map_or(0, |address| address.port());
        self.config.advertised(port)
    }

    /// Reads the lists and the identity again, for the connections of the next group.
    pub(crate) fn read_again(&self) -> Result<(), TransportError> {
        let config = &self.config;
        config.revoked.as_ref().map_or(Ok(()), Revoked::read_again)?;
        match self.identity.read_again(|later| config.check_identity(later)) {
            Ok(false) => {}
            Ok(true) => {
                let until = Date(self.identity.now().claims()?.validity.until);
                (config.note)(&format!("rank {}: a new identity, until {until}", config.rank));
            }
            Err(error) => {
                let text = format!("rank {} keeps the identity that it has: {error}", config.rank);
                (config.warn)(&text, error.bootstrap_kind());
            }
        }
        config.check_identity(&self.identity.now())
    }

    /// Closes all connections with the reason for which this rank gives up, so that waiting ranks
    /// learn it.
    pub(crate) async fn part(&self, why: &TransportError) {
        self.close(close_code::REJECTED, cut(&why.to_string()).as_bytes(), CLOSE_TIMEOUT).await;
    }

    /// Closes all connections, and waits up to `patience` for the last packets.
    pub(crate) async fn close(&self, code: VarInt, reason: &[u8], patience: Duration) {
        for end in &self.lane_endpoints {
            end.endpoint.close(code, reason);
        }
        let until = Instant::now() + patience;
        for end in &self.lane_endpoints {
            let _ = timeout_at(until, end.endpoint.wait_idle()).await;
        }
    }

    /// Listens on all lanes, each on its own thread.
    pub(crate) fn listen(&self) {
        for (lane, end) in self.lane_endpoints.iter().enumerate() {
            let listening =
                Arc::clone(&self.admission).listen(end.endpoint.clone(), lane, end.streams.clone());
            end.runtime.spawn(listening);
        }
    }
}

/// Between two dials of a rank that takes no handshake now.
const BUSY_PAUSE: Duration = Duration::from_millis(250);
