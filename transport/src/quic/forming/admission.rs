//! Admission: every connection to this rank's endpoint is admitted here, or refused with a reason.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quinn::{Connection, ConnectionError, Endpoint, Incoming, SendStream, ServerConfig};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::config::QuicConfig;
use super::link_terms::LinkTerms;
use super::peer_connection::PeerConnection;
use super::refusals::{AdmissionRefusal, Refusals};
use crate::error::{BootstrapKind, TransportError};
use crate::membership::Claim;
use crate::quic::forming::addresses::advertised::judge_advertised;
use crate::quic::join::{EnrolServer, kind_of_reject};
use crate::quic::network::connection::{
    CLOSE_TIMEOUT, close_code, cut, describe, describe_stranger, kind_of,
};
use crate::quic::network::frames::FrameReader;
use crate::quic::network::handshakes::{HandshakeDecision, PendingHandshakes};
use crate::quic::network::tcp::routes::StreamPeers;
use crate::quic::trust::presented::PresentedIdentity;
use crate::quic::trust::tls::{self, TlsConfigs};
use crate::rank::Rank;
use crate::wire::{Frame, PROTOCOL_VERSION, Purpose, RejectCode};

/// Admission of connections, for as long as the endpoint lives.
pub(crate) struct Admission {
    pub(crate) config: QuicConfig,
    tls: TlsConfigs,
    /// Ports of the lanes after the first.
    lane_ports: Vec<u16>,
    /// On rank 0, if other ranks may enrol with a token.
    enrol_server: Option<EnrolServer>,
    open: Mutex<AdmissionState>,
    pending: PendingHandshakes,
    /// How long a handshake may take, and again the hello after it.
    handshake_timeout: Duration,
    idle_timeout: Duration,
    /// For the error that says which ranks are missing.
    refusals: Mutex<Refusals>,
}

/// Which group is forming or at work, and the connections admitted to it.
struct AdmissionState {
    status: GroupStatus,
    /// The admitted connections, to notice a second one of the same rank.
    admitted: HashMap<(bool, usize, Rank), Connection>,
    arrived: mpsc::Sender<AdmittedConnection>,
}

/// The group to which a rank belongs, if any.
#[derive(Clone, Debug)]
pub(crate) enum GroupStatus {
    /// The first group is forming, of all ranks.
    First { epoch: u32 },
    /// A group at work.
    Group { epoch: u32, members: Vec<Rank> },
    /// Between two groups: the next one has this epoch or a later one, and is of all ranks or of
    /// survivors.
    Between { from_epoch: u32, everyone: bool },
}

/// A connection that has been admitted.
#[derive(Debug)]
pub(crate) struct AdmittedConnection {
    pub(crate) purpose: Purpose,
    /// The epoch in the hello of the other side.
    pub(crate) epoch: u32,
    pub(crate) joined: PeerConnection,
    /// The claims of a rank that wants to form the next group; otherwise empty.
    pub(crate) claims: Vec<Claim>,
    pub(crate) patience: Duration,
}

impl Admission {
    /// Admits no rank before [`Self::open`].
    pub(crate) fn new(
        config: &QuicConfig,
        (identity, tls): (&PresentedIdentity, &TlsConfigs),
        lane_ports: Vec<u16>,
    ) -> Result<Self, TransportError> {
        let enrol_server = match &config.invitation {
            Some(invitation) => {
                Some(EnrolServer::new(Arc::clone(invitation), identity, config.revoked.as_ref())?)
            }
            None => None,
        };
        if let Some(text) = enrol_server.as_ref().and_then(EnrolServer::complaint) {
            let text = format!("rank 0 lets nobody in by its token: {text}");
            (config.warn)(&text, BootstrapKind::Invitation);
        }
        let status = GroupStatus::First { epoch: config.epoch };
        let open = AdmissionState { status, admitted: HashMap::new(), arrived: mpsc::channel(1).0 };
        Ok(Self {
            config: config.clone(),
            tls: tls.clone(),
            lane_ports,
            enrol_server,
            open: Mutex::new(open),
            pending: PendingHandshakes::default(),
            handshake_timeout: config.timing().handshake,
            idle_timeout: config.timing().idle,
            refusals: Mutex::default(),
        })
    }

    /// Lets others in by a token from now on, if this rank has an invitation.
    pub(crate) fn open_enrolment(&self) {
        self.enrol_server.iter().for_each(EnrolServer::open);
    }

    /// The TLS settings for connections that arrive now.
    pub(crate) fn server(&self) -> ServerConfig {
        let inviting = self.enrol_server.as_ref().and_then(EnrolServer::tls);
        inviting.map_or_else(|| self.tls.server(), |tls| self.tls.server_of(tls))
    }

    /// Ends enrolment: every rank is present.
    pub(crate) fn close_enrolment(&self) {
        self.enrol_server.iter().for_each(EnrolServer::close);
    }

    /// Admits the ranks that belong to `status` from now on.
    pub(crate) fn open(&self, status: GroupStatus) -> mpsc::Receiver<AdmittedConnection> {
        let (arrived, arrivals) = mpsc::channel(64);
        *self.lock() = AdmissionState { status, admitted: HashMap::new(), arrived };
        arrivals
    }

    /// The group that was formed is complete.
    pub(crate) fn close(&self, epoch: u32, members: &[Rank]) {
        drop(self.open(GroupStatus::Group { epoch, members: members.to_vec() }));
    }

    pub(crate) fn status(&self) -> GroupStatus {
        self.lock().status.clone()
    }

    fn lock(&self) -> MutexGuard<'_, AdmissionState> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits or refuses the connections to the endpoint of a lane.
    pub(crate) async fn listen(
        self: Arc<Self>,
        endpoint: Endpoint,
        lane: usize,
        streams: Option<StreamPeers>,
    ) {
        while let Some(incoming) = endpoint.accept().await {
            let from = incoming.remote_address();
            let slot = match self.pending.decide(from.ip(), incoming.remote_address_validated()) {
                HandshakeDecision::Accept(slot) => slot,
                HandshakeDecision::RequireRetry => {
                    // Nothing is kept: the token to show again is in the answer. It fails only for a proven
                    // address.
                    let _ = incoming.retry();
                    continue;
                }
                HandshakeDecision::Refuse => {
                    incoming.refuse();
                    continue;
                }
            };
            let (admission, streams) = (Arc::clone(&self), streams.clone());
            tokio::spawn(async move {
                if let Err(refusal) = admission.receive(incoming, lane, streams.as_ref()).await {
                    tracing::info!(error = refusal.text, %from, "turned a connection away");
                    admission.note_refusal(from.ip(), &refusal);
                    // quinn keeps the state of such a connection: for three probe timeouts, and until the
                    // idle timeout if its first packet closed it, which a forged packet
                    // can do.
                    let idle = admission.idle_timeout;
                    drop(admission);
                    sleep(idle).await;
                }
                drop(slot);
            });
        }
    }

    pub(crate) fn note_refusal(&self, from: IpAddr, refusal: &AdmissionRefusal) {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).note(from, refusal);
    }

    /// The refusals, as the end of a sentence, and their kind; empty if there are none.
    pub(crate) fn refusals(&self) -> (String, BootstrapKind) {
        let refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        (refusals.to_string(), refusals.kind())
    }

    /// Admits one connection, or refuses it with a reason.
    async fn receive(
        &self,
        incoming: Incoming,
        lane: usize,
        streams: Option<&StreamPeers>,
    ) -> Result<(), AdmissionRefusal> {
        // A rank with a token knows the address of the first lane only.
        let config = Arc::new(if lane == 0 { self.server() } else { self.tls.server() });
        let stranger = |error: &ConnectionError| {
            AdmissionRefusal::of_stranger(describe_stranger(error)).of_kind(kind_of(error))
        };
        let connecting = incoming.accept_with(config).map_err(|error| stranger(&error))?;
        let connection = timeout(self.handshake_timeout, connecting).await;
        let connection = connection.map_err(|_| AdmissionRefusal::of_stranger("slow handshake"))?;
        let connection = connection.map_err(|error| stranger(&error))?;
        if let (Some(enrol_server), true) = (&self.enrol_server, tls::is_application(&connection)) {
            return self.enrol(enrol_server, &connection).await;
        }
        // Its certificate is of an authority that this rank trusts.
        if let Some(streams) = streams {
            streams.prove(connection.remote_address());
        }
        let talk = timeout(self.handshake_timeout, self.talk(&connection, lane)).await;
        let refusal = match talk {
            Ok(Ok(arrival)) => {
                let arrived = self.lock().arrived.clone();
                // Nothing waits for connections once the group is complete.
                return arrived
                    .send(arrival)
                    .await
                    .map_err(|_| AdmissionRefusal::of_member("the group is complete"));
            }
            Ok(Err(HelloRefusal { answer, code, text })) => {
                if let Some(mut answer) = answer {
                    let reject = Frame::Reject { code, text: text.clone() };
                    if answer.write_all(&reject.encode()).await.is_ok() && answer.finish().is_ok() {
                        let _ = timeout(CLOSE_TIMEOUT, answer.stopped()).await;
                    }
                }
                text
            }
            Err(_) => {
                // Its packets were lost, as far as this rank knows.
                connection.close(close_code::LATE, b"no hello");
                return Err(AdmissionRefusal::of_member("no hello"));
            }
        };
        connection.close(close_code::REJECTED, cut(&refusal).as_bytes());
        Err(AdmissionRefusal::of_member(refusal))
    }

    /// Gives a rank with a token its identity. It dials again, as a rank.
    async fn enrol(
        &self,
        enrol_server: &EnrolServer,
        connection: &Connection,
    ) -> Result<(), AdmissionRefusal> {
        let served = timeout(self.handshake_timeout, enrol_server.serve(connection)).await;
        // It may have had a token or not.
        let served = served.unwrap_or_else(|_| Err((RejectCode::Protocol, "no application".into())));
        let reason = served.as_ref().err().map_or("", |(_, text)| cut(text));
        connection.close(close_code::REJECTED, reason.as_bytes());
        let refused = |(code, text)| AdmissionRefusal::of_stranger(text).of_kind(kind_of_reject(code));
        let (rank, key) = served.map_err(refused)?;
        let from = connection.remote_address().ip().to_canonical();
        (self.config.note)(&format!("gave rank {rank} to {from}, key {key}"));
        Ok(())
    }

    async fn talk(&self, connection: &Connection, lane: usize) -> Result<AdmittedConnection, HelloRefusal> {
        let silent = |code, text: String| HelloRefusal { answer: None, code, text };
        let claims =
            tls::proven_claims(connection).map_err(|error| silent(RejectCode::Rank, error.to_string()))?;
        let purpose = tls::negotiated_purpose(connection);
        let (send, recv) =
            connection.accept_bi().await.map_err(|error| silent(RejectCode::Protocol, describe(&error)))?;
        let mut frames = FrameReader::new(recv);
        let hello = frames.next().await;
        let judged = match hello {
            Ok(Some(hello)) => self.judge(&hello, &claims, (purpose, lane), connection),
            Ok(None) => Err((RejectCode::Protocol, "the first frame was not a hello".into())),
            Err(error) => Err((RejectCode::Protocol, error.to_string())),
        };
        let (rank, purpose, epoch) = match judged {
            Ok(known) => known,
            Err((code, text)) => return Err(HelloRefusal { answer: Some(send), code, text }),
        };
        let connection = connection.clone();
        let mut joined = PeerConnection { rank, lane, connection, send, frames, advertised: Vec::new() };
        let lane_ports = self.lane_ports.clone();
        let LinkTerms { heartbeat_us, wan, .. } = LinkTerms::of(&self.config);
        let welcome = Frame::Welcome { protocol: PROTOCOL_VERSION, lane_ports, heartbeat_us, wan }.encode();
        if let Err(error) = joined.send.write_all(&welcome).await {
            return Err(silent(RejectCode::Protocol, error.to_string()));
        }
        if !matches!(purpose, Purpose::Data | Purpose::Lane) {
            joined.advertised = match joined.frames.next().await {
                Ok(Some(Frame::Advertise { addresses })) => judge_advertised(addresses),
                other => Err(format!("not its addresses: {other:?}")),
            }
            .map_err(|text| silent(RejectCode::Protocol, text))?;
        }
        let (mut claims, mut patience) = (Vec::new(), Duration::ZERO);
        if matches!(purpose, Purpose::Reform | Purpose::Rejoin) {
            match joined.frames.next().await {
                Ok(Some(Frame::Join { claims: said, patience_ms })) => {
                    (claims, patience) = (said, Duration::from_millis(patience_ms.into()));
                }
                other => return Err(silent(RejectCode::Protocol, format!("not a join: {other:?}"))),
            }
        }
        Ok(AdmittedConnection { purpose, epoch, joined, claims, patience })
    }

    /// Registers the connection of a rank. A rank whose connection has ended may connect again.
    pub(crate) fn take(&self, purpose: Purpose, lane: usize, rank: Rank, connection: &Connection) -> bool {
        let admitted = &mut self.lock().admitted;
        let key = (purpose == Purpose::Control, lane, rank);
        if admitted.get(&key).is_some_and(|earlier| earlier.close_reason().is_none()) {
            return false;
        }
        admitted.insert(key, connection.clone());
        true
    }

    /// Registers the control connection of a rank that was started again.
    pub(crate) fn replace(&self, rank: Rank, connection: &Connection) {
        self.lock().admitted.insert((true, 0, rank), connection.clone());
    }
}

/// The refusal of a rank that is not in the group of `epoch`.
pub(crate) fn left_out_text(rank: Rank, epoch: u32) -> String {
    format!("the group has continued without rank {rank} (epoch {epoch}): restart the rank")
}

struct HelloRefusal {
    /// The stream on which the refusal can be sent.
    answer: Option<SendStream>,
    code: RejectCode,
    text: String,
}
