//! The network side of a rank, which outlives its groups: its endpoints, admission of others, and dialling them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, ConnectionError, VarInt};
use tokio::sync::mpsc::WeakSender;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::admission::Admission;
use super::config::QuicConfig;
use super::peer_connection::PeerConnection;
use crate::error::TransportError;
use crate::quic::network::connection::{CLOSE_TIMEOUT, close_code, cut, describe, describe_stranger};
use crate::quic::network::connection::{DIAL_TIMEOUT, is_busy, is_silence};
use crate::quic::network::frames::FrameReader;
use crate::quic::network::path::Path;
use crate::quic::network::refusal::{self, RefusedFlag};
use crate::quic::network::socket::LaneEndpoint;
use crate::quic::network::socket::SocketCapabilities;
use crate::quic::trust::names::rank_name;
use crate::quic::trust::tls::{self, TlsConfigs};
use crate::rank::Rank;
use crate::wire::{Frame, PROTOCOL_VERSION, Purpose, RejectCode};

/// The network side of a rank, for its whole life. Ranks have their numbers of the first group.
pub(crate) struct RankEndpoint {
    pub(crate) config: QuicConfig,
    /// By lane; the first is also for control connections, and for ranks with a token.
    pub(crate) lane_endpoints: Vec<LaneEndpoint>,
    pub(crate) path: Path,
    pub(crate) capabilities: SocketCapabilities,
    pub(crate) refused: RefusedFlag,
    pub(crate) is_simulated: bool,
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
    /// Packets did not get through, or no process listens there.
    NoAnswer,
    /// It takes no handshake now.
    Busy,
    /// It refused, with a code.
    Rejected(RejectCode, TransportError),
    /// One of both sides refused the other.
    Failed(TransportError),
}

impl RankEndpoint {
    /// Dials until there is an answer or the deadline passes: others may start later, and packets may be lost. Returns
    /// the connection, and the ports of the other's lanes beside the first.
    pub(crate) async fn dial_until_answered(
        &self,
        rank: Rank,
        address: SocketAddr,
        dial_purpose: DialPurpose,
        deadline: Instant,
    ) -> Result<(PeerConnection, Vec<u16>), TransportError> {
        let mut busy = false;
        loop {
            match timeout_at(deadline, self.dial(rank, address, dial_purpose, deadline)).await {
                Ok(Ok(joined)) => return Ok(joined),
                Ok(Err(DialError::NoAnswer)) => {}
                Ok(Err(DialError::Busy)) => {
                    busy = true;
                    // Its places become free when strangers' handshakes end.
                    let _ = timeout_at(deadline, sleep(BUSY_PAUSE)).await;
                }
                Ok(Err(DialError::Rejected(_, error) | DialError::Failed(error))) => return Err(error),
                Err(_) => {
                    let why = if busy {
                        "it takes no more handshakes now, because too many others have begun one there"
                            .to_owned()
                    } else {
                        format!("is it running, and does {} get through?", self.config.link.carrier)
                    };
                    return Err(TransportError::bootstrap(format!(
                        "rank {rank} did not answer at {address} within {:?}: {why}{}",
                        self.config.connect_deadline,
                        self.refusal_hint(address)
                    )));
                }
            }
        }
    }

    pub(crate) async fn dial(
        &self,
        rank: Rank,
        address: SocketAddr,
        DialPurpose { purpose, lane, epoch }: DialPurpose,
        deadline: Instant,
    ) -> Result<(PeerConnection, Vec<u16>), DialError> {
        let config = self.tls.client(purpose);
        let name = rank_name(rank, self.config.job);
        let fail = |text: String| DialError::Failed(TransportError::bootstrap(text));
        let connecting = self.lane_endpoints[lane]
            .connect(config, address, &name)
            .map_err(|error| fail(format!("cannot dial rank {rank} at {address}: {error}")))?;
        let connection = match timeout(DIAL_TIMEOUT, connecting).await {
            Ok(Ok(connection)) => connection,
            Err(_) => return Err(DialError::NoAnswer),
            Ok(Err(error)) if is_silence(&error) => return Err(DialError::NoAnswer),
            Ok(Err(error)) if is_busy(&error) => return Err(DialError::Busy),
            Ok(Err(error @ ConnectionError::TransportError(_))) => {
                return Err(fail(format!(
                    "this rank refuses rank {rank} at {address}: {}",
                    describe(&error)
                )));
            }
            Ok(Err(error)) => {
                return Err(fail(format!(
                    "rank {rank} at {address} refused the connection: {}",
                    describe_stranger(&error)
                )));
            }
        };
        let refused = |what: String| {
            TransportError::bootstrap(format!("rank {rank} at {address} refused this rank: {what}"))
        };
        let lost = |connection: &Connection, error: String| match connection.close_reason() {
            Some(reason) if is_silence(&reason) => DialError::NoAnswer,
            reason => DialError::Failed(refused(reason.map_or(error, |reason| describe(&reason)))),
        };
        let claims = tls::proven_claims(&connection).map_err(DialError::Failed)?;
        if claims.job != self.config.job {
            return Err(fail(format!("the peer at {address} is {claims}, not rank {rank} of this job")));
        }
        claims
            .check_rank(rank, self.config.known(rank), Some(connection.remote_address().ip()))
            .map_err(|text| fail(format!("rank {rank} at {address} is not who it should be: {text}")))?;
        let (send, recv) =
            connection.open_bi().await.map_err(|error| lost(&connection, error.to_string()))?;
        let mut joined = PeerConnection { rank, lane, connection, send, frames: FrameReader::new(recv) };
        let hello = Frame::Hello {
            protocol: PROTOCOL_VERSION,
            purpose,
            job: self.config.job.0,
            epoch,
            rank: self.config.rank,
            world: self.config.world,
        };
        let written = joined.send.write_all(&hello.encode()).await;
        written.map_err(|error| lost(&joined.connection, error.to_string()))?;
        match timeout_at(deadline, joined.frames.next()).await {
            Ok(Ok(Some(Frame::Welcome { protocol: PROTOCOL_VERSION, lane_ports }))) => {
                let (theirs, ours) = (lane_ports.len() + 1, self.lane_endpoints.len());
                if theirs != ours {
                    let text = format!(
                        "rank {rank} has {theirs} lanes to every other rank, rank {} has {ours}: say the same number on all ranks",
                        self.config.rank
                    );
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

    /// Warns once if a listener that this rank dials refuses TCP. The rank keeps dialling: anybody can send that.
    pub(crate) async fn warn_of_refusal(&self) -> Infallible {
        refusal::refusal(self.refused.clone()).await;
        let hint = self.refusal_hint(self.config.coordinator);
        (self.config.warn)(&format!("rank {} still dials{hint}", self.config.rank));
        std::future::pending().await
    }

    /// The words for a rank that was not reached, if a listener has refused TCP; otherwise empty.
    pub(crate) fn refusal_hint(&self, address: SocketAddr) -> String {
        refusal::refusal_hint(&self.refused, address)
    }

    /// Closes all connections with the reason for which this rank gives up, so that waiting ranks learn it.
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
