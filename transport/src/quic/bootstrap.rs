//! How ranks become a group: everyone finds rank 0, rank 0 tells everyone where the others are, and of every two
//! ranks the higher one dials the lower one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, ConnectionError, Endpoint, SendStream, TransportErrorCode};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use super::QuicConfig;
use super::control::{close_code, describe};
use super::core::COORDINATOR;
use super::door::Door;
use super::frames::FrameReader;
use super::names::rank_name;
use super::tls::{self, TlsConfigs};
use crate::error::TransportError;
use crate::transport::Rank;
use crate::wire::{Frame, MAX_WORLD, PROTOCOL_VERSION, Purpose};

/// A connection whose other side is known and welcome.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) rank: Rank,
    pub(crate) connection: Connection,
    pub(crate) send: SendStream,
    pub(crate) frames: FrameReader,
}

/// All connections of a rank.
#[derive(Debug, Default)]
pub(crate) struct Mesh {
    pub(crate) control: Vec<Joined>,
    pub(crate) data: Vec<Joined>,
}

/// Forms the group: all connections of this rank, once every rank has all of its own.
pub(crate) async fn form(
    config: &QuicConfig,
    endpoint: &Endpoint,
    tls: &TlsConfigs,
) -> Result<Mesh, TransportError> {
    let deadline = Instant::now() + config.connect_deadline;
    let (arrived, arrivals) = mpsc::channel(64);
    let door = Arc::new(Door::new(config, tls, arrived));
    tokio::spawn(Arc::clone(&door).listen(endpoint.clone()));
    if config.world == 1 {
        return Ok(Mesh::default());
    }
    let mut forming = Forming {
        config,
        endpoint,
        tls,
        deadline,
        arrivals,
        early_data: Vec::new(),
        turned_away: Some(door),
    };
    let formed =
        if config.rank == COORDINATOR { forming.as_coordinator().await } else { forming.as_member().await };
    if let Err(error) = &formed {
        // Those who wait for this rank learn why they need not.
        endpoint.close(close_code::REJECTED, cut(&error.to_string()).as_bytes());
        let _ = timeout(GOODBYE_PATIENCE, endpoint.wait_idle()).await;
    }
    formed
}

/// Checks that need no network.
pub(crate) fn check(config: &QuicConfig) -> Result<(), TransportError> {
    let QuicConfig { rank, world, identity, heartbeat, .. } = config;
    if *world == 0 || *world > MAX_WORLD {
        return Err(failed(format!("a group has 1 to {MAX_WORLD} ranks, not {world}")));
    }
    if rank.0 >= *world {
        return Err(failed(format!("rank {rank} is not in a group of {world} ranks")));
    }
    if heartbeat.is_zero() || *heartbeat > LONGEST_HEARTBEAT {
        let text = format!(
            "the period of a heartbeat is more than 0 and at most {LONGEST_HEARTBEAT:?}, not {heartbeat:?}"
        );
        return Err(failed(text));
    }
    config.link.check(config.bind, *world)?;
    identity.claims().map(|_| ())
}

/// Whether the others will take this rank for what it is, as far as it can tell by itself.
pub(crate) fn identity_fits(config: &QuicConfig) -> Result<(), TransportError> {
    let claims = config.identity.claims()?;
    if claims.job != config.job {
        return Err(failed(format!(
            "this is job {}, but the identity is of {claims}: use the files that were issued for this job",
            config.job
        )));
    }
    if let Some(complaint) = claims.out_of_date() {
        return Err(failed(complaint));
    }
    // At which address others see it, they know better.
    claims.may_be(config.rank, config.known(config.rank), None).map_err(failed)
}

/// Shows an identity that does not fit to rank 0, which remembers why this rank was turned away. Best effort.
pub(crate) async fn knock(config: &QuicConfig, endpoint: &Endpoint, tls: &TlsConfigs) {
    if config.rank == COORDINATOR {
        return;
    }
    let deadline = Instant::now() + config.connect_deadline.min(KNOCK_PATIENCE);
    let (_, arrivals) = mpsc::channel(1);
    let _ = Forming { config, endpoint, tls, deadline, arrivals, early_data: Vec::new(), turned_away: None }
        .dial_until_answered(COORDINATOR, config.coordinator, Purpose::Control)
        .await;
    endpoint.close(close_code::REJECTED, b"its identity does not fit");
    let _ = timeout(GOODBYE_PATIENCE, endpoint.wait_idle()).await;
}

struct Forming<'a> {
    config: &'a QuicConfig,
    endpoint: &'a Endpoint,
    tls: &'a TlsConfigs,
    deadline: Instant,
    arrivals: mpsc::Receiver<(Purpose, Joined)>,
    /// Data connections that came while control connections were awaited.
    early_data: Vec<Joined>,
    /// Who remembers whom it has turned away.
    turned_away: Option<Arc<Door>>,
}

impl Forming<'_> {
    async fn as_coordinator(&mut self) -> Result<Mesh, TransportError> {
        let world = self.config.world;
        let mut control: Vec<Option<Joined>> = (0..world).map(|_| None).collect();
        let missing = |control: &[Option<Joined>]| {
            (1..world).filter(|&rank| control[rank as usize].is_none()).collect::<Vec<_>>()
        };
        while !missing(&control).is_empty() {
            match timeout_at(self.deadline, self.arrivals.recv()).await {
                Ok(Some((Purpose::Control, joined))) => {
                    let rank = joined.rank.0 as usize;
                    control[rank] = Some(joined);
                }
                Ok(Some((Purpose::Data, joined))) => self.early_data.push(joined),
                Ok(None) => return Err(failed("the endpoint has been closed")),
                Err(_) => return Err(self.too_late(&missing(&control))),
            }
        }
        let mut control: Vec<Joined> = control.into_iter().flatten().collect();
        // The same socket dials and listens, so where a rank's packets come from is where it can be reached.
        let mut addresses = vec![self.config.coordinator];
        addresses.extend(control.iter().map(|member| member.connection.remote_address()));
        let table = Frame::AddressTable { addresses };
        for member in &mut control {
            self.say(member, &table).await?;
        }
        let data = self.collect_data(Vec::new()).await?;
        for member in &mut control {
            self.expect(member, &Frame::Meshed).await?;
        }
        for member in &mut control {
            self.say(member, &Frame::Start).await?;
        }
        Ok(Mesh { control, data })
    }

    async fn as_member(&mut self) -> Result<Mesh, TransportError> {
        let coordinator = self.config.coordinator;
        let mut control = self.dial_until_answered(COORDINATOR, coordinator, Purpose::Control).await?;
        // Rank 0 says who did not come, and why: that is worth more than to know it a moment earlier.
        self.deadline += LATE_NEWS;
        let addresses = match self.next_frame(&mut control).await? {
            Frame::AddressTable { addresses } if addresses.len() == self.config.world as usize => addresses,
            other => {
                return Err(failed(format!("rank 0 sent {other:?} instead of the address table")));
            }
        };
        let mut data = Vec::new();
        for rank in (0..self.config.rank.0).map(Rank) {
            // This rank reached the coordinator under the address it was given; the table may hold another one.
            let address =
                if rank == COORDINATOR { self.config.coordinator } else { addresses[rank.0 as usize] };
            data.push(self.dial_until_answered(rank, address, Purpose::Data).await?);
        }
        let data = self.collect_data(data).await?;
        self.say(&mut control, &Frame::Meshed).await?;
        self.expect(&mut control, &Frame::Start).await?;
        Ok(Mesh { control: vec![control], data })
    }

    /// Rank 0 may start later than this rank, and packets may be lost: tries again until the deadline.
    async fn dial_until_answered(
        &self,
        rank: Rank,
        address: SocketAddr,
        purpose: Purpose,
    ) -> Result<Joined, TransportError> {
        loop {
            match timeout_at(self.deadline, self.dial(rank, address, purpose)).await {
                Ok(Err(error)) if error == no_answer(rank, address) => {}
                Ok(ended) => return ended,
                Err(_) => {
                    let text = format!(
                        "rank {rank} did not answer at {address} within {:?}: is it running, and does {} get through?",
                        self.config.connect_deadline, self.config.link.carrier
                    );
                    return Err(failed(text));
                }
            }
        }
    }

    async fn dial(
        &self,
        rank: Rank,
        address: SocketAddr,
        purpose: Purpose,
    ) -> Result<Joined, TransportError> {
        let config = self.tls.client(purpose);
        let name = rank_name(rank, self.config.job);
        let connecting = self
            .endpoint
            .connect_with(config, address, &name)
            .map_err(|error| failed(format!("cannot dial rank {rank} at {address}: {error}")))?;
        let connection = match timeout(DIAL_PATIENCE, connecting).await {
            Ok(Ok(connection)) => connection,
            Err(_) => return Err(no_answer(rank, address)),
            Ok(Err(error)) if is_silence(&error) => return Err(no_answer(rank, address)),
            Ok(Err(error @ ConnectionError::TransportError(_))) => {
                let text = format!("this rank refuses rank {rank} at {address}: {}", describe(&error));
                return Err(failed(text));
            }
            Ok(Err(error)) => {
                return Err(failed(format!(
                    "rank {rank} at {address} refused the connection: {}",
                    describe(&error)
                )));
            }
        };
        let refused = |what: String| failed(format!("rank {rank} at {address} refused this rank: {what}"));
        let lost = |connection: &Connection, error: String| match connection.close_reason() {
            Some(reason) if is_silence(&reason) => no_answer(rank, address),
            reason => refused(reason.map_or(error, |reason| describe(&reason))),
        };
        let claims = tls::proven_claims(&connection)?;
        if claims.job != self.config.job {
            return Err(failed(format!(
                "whoever answers at {address} is {claims}, not rank {rank} of this job"
            )));
        }
        claims
            .may_be(rank, self.config.known(rank), Some(connection.remote_address().ip()))
            .map_err(|text| failed(format!("rank {rank} at {address} is not who it should be: {text}")))?;
        let (send, recv) =
            connection.open_bi().await.map_err(|error| lost(&connection, error.to_string()))?;
        let mut joined = Joined { rank, connection, send, frames: FrameReader::new(recv) };
        let hello = Frame::Hello {
            protocol: PROTOCOL_VERSION,
            purpose,
            job: self.config.job.0,
            epoch: self.config.epoch,
            rank: self.config.rank,
            world: self.config.world,
        };
        let written = joined.send.write_all(&hello.encode()).await;
        written.map_err(|error| lost(&joined.connection, error.to_string()))?;
        match timeout_at(self.deadline, joined.frames.next()).await {
            Ok(Ok(Some(Frame::Welcome { protocol: PROTOCOL_VERSION }))) => Ok(joined),
            Ok(Ok(Some(Frame::Reject { text, .. }))) => Err(refused(text)),
            Ok(Ok(Some(other))) => Err(failed(format!("rank {rank} answered {other:?} to a hello"))),
            Ok(Ok(None)) => Err(refused("it ended the conversation".into())),
            Ok(Err(error)) => Err(lost(&joined.connection, error.to_string())),
            Err(_) => Err(refused("it does not answer".into())),
        }
    }

    /// Waits for the data connections of all higher ranks.
    async fn collect_data(&mut self, dialled: Vec<Joined>) -> Result<Vec<Joined>, TransportError> {
        let mut data: Vec<Option<Joined>> = (0..self.config.world).map(|_| None).collect();
        for joined in dialled.into_iter().chain(std::mem::take(&mut self.early_data)) {
            let rank = joined.rank.0 as usize;
            data[rank] = Some(joined);
        }
        loop {
            let ranks = 0..self.config.world;
            let others = ranks.filter(|&rank| rank != self.config.rank.0);
            let missing: Vec<u32> = others.filter(|&rank| data[rank as usize].is_none()).collect();
            if missing.is_empty() {
                return Ok(data.into_iter().flatten().collect());
            }
            match timeout_at(self.deadline, self.arrivals.recv()).await {
                Ok(Some((Purpose::Data, joined))) => {
                    let rank = joined.rank.0 as usize;
                    data[rank] = Some(joined);
                }
                // A rank that has started anew: it comes too late for this group, and finds out by its silence.
                Ok(Some((Purpose::Control, _))) => {}
                Ok(None) => return Err(failed("the endpoint has been closed")),
                Err(_) => return Err(self.too_late(&missing)),
            }
        }
    }

    async fn say(&self, to: &mut Joined, frame: &Frame) -> Result<(), TransportError> {
        let written = timeout_at(self.deadline, to.send.write_all(&frame.encode())).await;
        match written {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(self.lost(to)),
        }
    }

    async fn next_frame(&self, from: &mut Joined) -> Result<Frame, TransportError> {
        match timeout_at(self.deadline, from.frames.next()).await {
            Ok(Ok(Some(frame))) => Ok(frame),
            Ok(Ok(None) | Err(_)) => Err(self.lost(from)),
            Err(_) => {
                let text = format!(
                    "the group was not complete within {:?}: this rank still waits for rank {}",
                    self.config.connect_deadline, from.rank
                );
                Err(failed(text))
            }
        }
    }

    async fn expect(&self, from: &mut Joined, expected: &Frame) -> Result<(), TransportError> {
        match self.next_frame(from).await? {
            frame if frame == *expected => Ok(()),
            other => Err(failed(format!("rank {} sent {other:?} instead of {expected:?}", from.rank))),
        }
    }

    fn lost(&self, joined: &Joined) -> TransportError {
        let reason =
            joined.connection.close_reason().map_or_else(|| "no answer".into(), |reason| describe(&reason));
        failed(format!("rank {} was lost before the group was complete: {reason}", joined.rank))
    }

    fn too_late(&self, missing: &[u32]) -> TransportError {
        let shown: Vec<String> = missing.iter().take(8).map(u32::to_string).collect();
        let more = missing.len() - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        failed(format!(
            "rank {}{more} did not come within {:?} (this is rank {} of {}){}",
            shown.join(", "),
            self.config.connect_deadline,
            self.config.rank,
            self.config.world,
            self.turned_away.as_ref().map(|door| door.turned_away()).unwrap_or_default()
        ))
    }
}

/// Whether packets did not get through, rather than that somebody refused something.
///
/// A handshake that is complete for this side may lack its last packets on the other, which then gives it up. A
/// refusal has a code of its own.
fn is_silence(reason: &ConnectionError) -> bool {
    match reason {
        ConnectionError::TimedOut | ConnectionError::Reset => true,
        ConnectionError::ConnectionClosed(close) => close.error_code == TransportErrorCode::APPLICATION_ERROR,
        _ => false,
    }
}

fn no_answer(rank: Rank, address: SocketAddr) -> TransportError {
    failed(format!("rank {rank} does not answer at {address}"))
}

fn failed(text: impl Into<String>) -> TransportError {
    TransportError::Bootstrap { text: text.into() }
}

/// What fits the reason of a close, which must fit one small packet.
pub(crate) fn cut(text: &str) -> &str {
    let mut end = text.len().min(700);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Multiples of it must be times that a clock can express.
const LONGEST_HEARTBEAT: Duration = Duration::from_secs(3600);

/// How long one attempt at a handshake may take before the next one.
const DIAL_PATIENCE: Duration = Duration::from_secs(4);

/// How much longer than rank 0 a rank waits for a group that does not get complete.
const LATE_NEWS: Duration = Duration::from_secs(2);

/// How long a rank that will not be let in tries to be heard.
const KNOCK_PATIENCE: Duration = Duration::from_secs(4);

/// How long to wait for the other side to have read why it is turned away.
pub(crate) const GOODBYE_PATIENCE: Duration = Duration::from_secs(1);
