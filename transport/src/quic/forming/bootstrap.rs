//! How ranks form the first group: every rank dials rank 0, rank 0 sends the addresses of all, and of every two
//! ranks the higher one dials the lower one.

use std::net::SocketAddr;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::admission::{AdmittedConnection, GroupStatus};
use super::endpoint::{DialPurpose, RankEndpoint};
use super::peer_connection::{AddressTable, Mesh, PeerConnection};
use super::side_by_side::all;
use crate::error::TransportError;
use crate::quic::network::connection::describe;
use crate::rank::Rank;
use crate::wire::{Frame, Purpose};

/// Forms the first group: all connections of this rank, once every rank has all of its own.
pub(crate) async fn form(endpoint: &RankEndpoint) -> Result<Mesh, TransportError> {
    let config = &endpoint.config;
    let deadline = Instant::now() + config.connect_deadline;
    let members: Vec<Rank> = (0..config.world).map(Rank).collect();
    let arrivals =
        endpoint.admission.open(GroupStatus::Group { epoch: config.epoch, members: members.clone() });
    if config.world == 1 {
        return Ok(Mesh::default());
    }
    let mut forming = Forming {
        endpoint,
        epoch: config.epoch,
        members,
        deadline,
        arrivals,
        early_data: Vec::new(),
        unreached: Vec::new(),
    };
    let formed = if config.rank == Rank::COORDINATOR {
        forming.as_coordinator().await
    } else {
        forming.as_member().await
    };
    if let Err(error) = &formed {
        endpoint.part(error).await;
    }
    formed
}

/// Shows an identity that does not fit to rank 0, so that rank 0 can report why this rank is missing. Best effort.
pub(crate) async fn report_bad_identity(endpoint: &RankEndpoint) {
    let config = &endpoint.config;
    if config.rank == Rank::COORDINATOR {
        return;
    }
    let deadline = Instant::now() + config.connect_deadline.min(BAD_IDENTITY_TIMEOUT);
    let (coordinator, dial_purpose) = (config.coordinator_candidates(), DialPurpose::control(config.epoch));
    let _ = endpoint.dial_until_answered(Rank::COORDINATOR, &coordinator, dial_purpose, deadline).await;
    endpoint.part(&TransportError::bootstrap("its identity does not fit")).await;
}

/// A group that is being formed.
pub(crate) struct Forming<'a> {
    pub(crate) endpoint: &'a RankEndpoint,
    pub(crate) epoch: u32,
    /// By rank of this group, its rank in the first one; the first is the coordinator.
    pub(crate) members: Vec<Rank>,
    pub(crate) deadline: Instant,
    pub(crate) arrivals: mpsc::Receiver<AdmittedConnection>,
    /// Data connections, of all lanes, that arrived while this rank waited for others.
    pub(crate) early_data: Vec<(u32, PeerConnection)>,
    /// Members without a data connection to this rank when the time was up.
    pub(crate) unreached: Vec<Rank>,
}

impl Forming<'_> {
    async fn as_coordinator(&mut self) -> Result<Mesh, TransportError> {
        let mut control: Vec<Option<PeerConnection>> = self.members.iter().map(|_| None).collect();
        let missing = |control: &[Option<PeerConnection>]| {
            (1..control.len())
                .filter(|&rank| control[rank].is_none())
                .map(|rank| self.members[rank])
                .collect()
        };
        loop {
            let missing: Vec<Rank> = missing(&control);
            if missing.is_empty() {
                break;
            }
            match timeout_at(self.deadline, self.arrivals.recv()).await {
                Ok(Some(AdmittedConnection {
                    purpose: Purpose::Data | Purpose::Lane,
                    epoch,
                    joined,
                    ..
                })) => {
                    self.early_data.push((epoch, joined));
                }
                Ok(Some(AdmittedConnection { joined, .. })) => {
                    let rank = joined.rank.0 as usize;
                    control[rank] = Some(joined);
                }
                Ok(None) => return Err(TransportError::bootstrap("the endpoint has been closed")),
                Err(_) => return Err(self.too_late(&missing)),
            }
        }
        let mut control: Vec<PeerConnection> = control.into_iter().flatten().collect();
        let table = self.address_table(&control);
        self.check_reachable(&table)?;
        for member in &mut control {
            self.say_table(member, &table).await?;
        }
        let data = self.collect_mesh(&mut control).await?;
        self.start(control, data, table).await
    }

    /// Of the coordinator: the data connections, once every member has all of its own.
    async fn collect_mesh(
        &mut self,
        control: &mut [PeerConnection],
    ) -> Result<Vec<PeerConnection>, TransportError> {
        let data = self.collect_data(Vec::new(), control).await?;
        for member in control {
            self.expect(member, &Frame::Meshed).await?;
        }
        Ok(data)
    }

    /// Of the coordinator: the group exists.
    pub(crate) async fn start(
        &mut self,
        mut control: Vec<PeerConnection>,
        data: Vec<PeerConnection>,
        table: AddressTable,
    ) -> Result<Mesh, TransportError> {
        for member in &mut control {
            self.say(member, &Frame::Start).await?;
        }
        Ok(self.renumbered(control, data, table))
    }

    async fn as_member(&mut self) -> Result<Mesh, TransportError> {
        let coordinator = self.endpoint.config.coordinator_candidates();
        let dial_purpose = DialPurpose::control(self.epoch);
        let (mut control, _) = self
            .endpoint
            .dial_until_answered(Rank::COORDINATOR, &coordinator, dial_purpose, self.deadline)
            .await?;
        // Rank 0 reports which ranks are missing, and why. So waiting for that report is better than an earlier error.
        self.deadline += MEMBER_EXTRA_WAIT;
        let table = self.hear_table(&mut control).await?;
        let data = self.dial_mesh(&control, &table).await?;
        self.report_meshed(control, data, table).await
    }

    /// On every other member: all data connections of this rank. It dials lower ranks, the coordinator at the
    /// address under which it has been reached.
    pub(crate) async fn dial_mesh(
        &mut self,
        control: &PeerConnection,
        table: &[Vec<SocketAddr>],
    ) -> Result<Vec<PeerConnection>, TransportError> {
        let coordinator = vec![control.connection.remote_address()];
        let places = std::iter::once(&coordinator).chain(table.iter().skip(1));
        let below = self
            .members
            .iter()
            .copied()
            .zip(places)
            .take_while(|&(rank, _)| rank < self.endpoint.config.rank);
        let below: Vec<_> = below.collect();
        let mut data = Vec::new();
        for some in below.chunks(DIALS_AT_ONCE) {
            let dials =
                some.iter().map(|&(rank, addresses)| Box::pin(self.dial_lanes(rank, addresses))).collect();
            match all(dials).await {
                Ok(dialled) => data.extend(dialled.into_iter().flatten()),
                Err((rank, error)) => {
                    if Instant::now() >= self.deadline {
                        self.unreached = vec![rank];
                    }
                    return Err(error);
                }
            }
        }
        self.collect_data(data, std::slice::from_ref(control)).await
    }

    /// The data connections of all lanes to one rank, which an error names.
    async fn dial_lanes(
        &self,
        rank: Rank,
        addresses: &[SocketAddr],
    ) -> Result<Vec<PeerConnection>, (Rank, TransportError)> {
        let dial = async |addresses: &[SocketAddr], purpose| {
            let dialled = self.endpoint.dial_until_answered(rank, addresses, purpose, self.deadline).await;
            dialled.map_err(|error| (rank, error))
        };
        let (joined, lane_ports) = dial(addresses, DialPurpose::data(self.epoch)).await?;
        let ip = joined.connection.remote_address().ip();
        let mut data = vec![joined];
        for (lane, port) in (1..).zip(lane_ports) {
            data.push(dial(&[SocketAddr::new(ip, port)], DialPurpose::lane(lane, self.epoch)).await?.0);
        }
        Ok(data)
    }

    /// Of every other member: it is ready, and waits for the start.
    pub(crate) async fn report_meshed(
        &mut self,
        mut control: PeerConnection,
        data: Vec<PeerConnection>,
        table: AddressTable,
    ) -> Result<Mesh, TransportError> {
        self.say(&mut control, &Frame::Meshed).await?;
        self.expect(&mut control, &Frame::Start).await?;
        Ok(self.renumbered(vec![control], data, table))
    }

    /// From here on ranks have the numbers of this group.
    fn renumbered(
        &self,
        control: Vec<PeerConnection>,
        data: Vec<PeerConnection>,
        table: AddressTable,
    ) -> Mesh {
        let renumber = |joined: Vec<PeerConnection>| {
            let place = |rank: Rank| self.place(rank).unwrap_or_default();
            joined.into_iter().map(|one| PeerConnection { rank: number(place(one.rank)), ..one }).collect()
        };
        Mesh { control: renumber(control), data: renumber(data), table }
    }

    fn place(&self, rank: Rank) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
    }

    /// Waits for the data connections of all higher ranks, as long as no control connection ends.
    pub(crate) async fn collect_data(
        &mut self,
        dialled: Vec<PeerConnection>,
        control: &[PeerConnection],
    ) -> Result<Vec<PeerConnection>, TransportError> {
        let lanes = self.endpoint.lane_endpoints.len();
        let mut data: Vec<Option<PeerConnection>> = (0..self.members.len() * lanes).map(|_| None).collect();
        let early = std::mem::take(&mut self.early_data).into_iter();
        let early = early.filter(|(epoch, _)| *epoch == self.epoch).map(|(_, joined)| joined);
        for joined in dialled.into_iter().chain(early) {
            if let Some(place) = self.place(joined.rank) {
                let lane = joined.lane;
                data[place * lanes + lane] = Some(joined);
            }
        }
        loop {
            let places = self.members.iter().zip(data.chunks(lanes));
            let missing: Vec<Rank> = places
                .filter(|(rank, all)| **rank != self.endpoint.config.rank && all.iter().any(Option::is_none))
                .map(|(rank, _)| *rank)
                .collect();
            if missing.is_empty() {
                return Ok(data.into_iter().flatten().collect());
            }
            let arrived = tokio::select! {
                biased;
                arrived = timeout_at(self.deadline, self.arrivals.recv()) => arrived,
                gone = first_closed(control) => return Err(self.lost(gone)),
            };
            match arrived {
                Ok(Some(AdmittedConnection {
                    purpose: Purpose::Data | Purpose::Lane,
                    epoch,
                    joined,
                    ..
                })) if epoch == self.epoch => {
                    if let Some(place) = self.place(joined.rank) {
                        let lane = joined.lane;
                        data[place * lanes + lane] = Some(joined);
                    }
                }
                // A rank that is too late for this group: it gets no answer.
                Ok(Some(_)) => {}
                Ok(None) => return Err(TransportError::bootstrap("the endpoint has been closed")),
                Err(_) => {
                    let error = self.too_late(&missing);
                    self.unreached = missing;
                    return Err(error);
                }
            }
        }
    }

    pub(crate) async fn say(&self, to: &mut PeerConnection, frame: &Frame) -> Result<(), TransportError> {
        let written = timeout_at(self.deadline, to.send.write_all(&frame.encode())).await;
        match written {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(self.lost(to)),
        }
    }

    pub(crate) async fn next_frame(&self, from: &mut PeerConnection) -> Result<Frame, TransportError> {
        match timeout_at(self.deadline, from.frames.next()).await {
            Ok(Ok(Some(frame))) => Ok(frame),
            Ok(Ok(None) | Err(_)) => Err(self.lost(from)),
            Err(_) => {
                let text = format!(
                    "the group was not complete within {:?}: this rank still waits for rank {}",
                    self.endpoint.config.connect_deadline, from.rank
                );
                Err(TransportError::bootstrap(text))
            }
        }
    }

    async fn expect(&self, from: &mut PeerConnection, expected: &Frame) -> Result<(), TransportError> {
        match self.next_frame(from).await? {
            frame if frame == *expected => Ok(()),
            other => Err(TransportError::bootstrap(format!(
                "rank {} sent {other:?} instead of {expected:?}",
                from.rank
            ))),
        }
    }

    fn lost(&self, joined: &PeerConnection) -> TransportError {
        let reason =
            joined.connection.close_reason().map_or_else(|| "no answer".into(), |reason| describe(&reason));
        TransportError::bootstrap(format!(
            "rank {} was lost before the group was complete: {reason}",
            joined.rank
        ))
    }

    fn too_late(&self, missing: &[Rank]) -> TransportError {
        let shown: Vec<String> = missing.iter().take(8).map(Rank::to_string).collect();
        let more = missing.len() - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        TransportError::bootstrap(format!(
            "rank {}{more} did not come within {:?} (this is rank {} of {}){}",
            shown.join(", "),
            self.endpoint.config.connect_deadline,
            self.endpoint.config.rank,
            self.endpoint.config.world,
            self.endpoint.admission.refusals_text()
        ))
    }
}

/// Waits until one of the connections is closed, and returns that one.
async fn first_closed(joined: &[PeerConnection]) -> &PeerConnection {
    let mut all: Vec<_> = joined.iter().map(|one| Box::pin(one.connection.closed())).collect();
    std::future::poll_fn(|context| {
        let closed = all.iter_mut().position(|closed| closed.as_mut().poll(context).is_ready());
        closed.map_or(Poll::Pending, |at| Poll::Ready(&joined[at]))
    })
    .await
}

/// Ranks that a rank dials side by side: round trips are long between data centres.
const DIALS_AT_ONCE: usize = 64;

/// How much longer than rank 0 a rank waits for a group that stays incomplete.
const MEMBER_EXTRA_WAIT: Duration = Duration::from_secs(2);

/// How long a rank with a bad identity tries to reach rank 0.
const BAD_IDENTITY_TIMEOUT: Duration = Duration::from_secs(4);

/// A place in a group as its rank there.
fn number(place: usize) -> Rank {
    Rank(u32::try_from(place).unwrap_or(u32::MAX))
}
