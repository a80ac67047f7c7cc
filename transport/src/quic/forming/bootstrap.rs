//! How ranks form the first group: every rank dials rank 0, rank 0 sends the addresses of all, and
//! of every two ranks the higher one dials the lower one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::admission::{AdmittedConnection, GroupStatus};
use super::endpoint::{DialError, DialPurpose, RankEndpoint};
use super::peer_connection::{AddressTable, Mesh, PeerConnection, first_closed};
use super::prior_group::{LostRank, PriorGroup};
use super::side_by_side::all;
use crate::error::TransportError;
use crate::membership::Claim;
use crate::rank::Rank;
use crate::wire::{Frame, Purpose, RejectCode};

/// Why the first group has not formed.
#[derive(Debug)]
pub(crate) enum FormError {
    /// A rank was lost: the others can form the next group.
    Lost {
        error: TransportError,
        prior: PriorGroup,
    },
    Failed(TransportError),
}

/// Forms the first group: all connections of this rank, once every rank has all of its own.
pub(crate) async fn form(endpoint: &RankEndpoint) -> Result<Mesh, FormError> {
    let config = &endpoint.config;
    let deadline = Instant::now() + config.connect_deadline;
    let members: Vec<Rank> = (0..config.size).map(Rank).collect();
    let arrivals = endpoint.admission.open(GroupStatus::First { epoch: config.epoch });
    if config.size == 1 {
        return Ok(Mesh::default());
    }
    let mut forming = Forming::new(endpoint, (config.epoch, members), deadline, arrivals);
    let formed = if config.rank == Rank::COORDINATOR {
        forming.as_coordinator().await
    } else {
        forming.as_member().await
    };
    match formed {
        Ok(mesh) => {
            endpoint.admission.close(config.epoch, &forming.members);
            Ok(mesh)
        }
        Err(error) => Err(match forming.into_prior() {
            Some(prior) => FormError::Lost { error, prior },
            None => FormError::Failed(error),
        }),
    }
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
    /// A rank whose connection has ended.
    lost: Option<LostRank>,
    /// Where the other ranks are, as far as this rank knows.
    addresses: BTreeMap<Rank, Vec<SocketAddr>>,
}

impl<'a> Forming<'a> {
    pub(crate) fn new(
        endpoint: &'a RankEndpoint,
        (epoch, members): (u32, Vec<Rank>),
        deadline: Instant,
        arrivals: mpsc::Receiver<AdmittedConnection>,
    ) -> Self {
        Self {
            endpoint,
            epoch,
            members,
            deadline,
            arrivals,
            early_data: Vec::new(),
            unreached: Vec::new(),
            lost: None,
            addresses: BTreeMap::new(),
        }
    }

    /// What this rank knows of the first group, if that group lost a rank while it formed. To the
    /// rules of the next group this rank has been in it: it never starts without this rank.
    fn into_prior(self) -> Option<PriorGroup> {
        let lost = self.lost?;
        let mut addresses = self.addresses;
        addresses.remove(&self.endpoint.config.rank);
        if self.endpoint.config.rank != Rank::COORDINATOR {
            addresses.insert(Rank::COORDINATOR, self.endpoint.config.coordinator_candidates());
        }
        let claim = Claim { epoch: self.epoch, started: true, members: self.members };
        Some(PriorGroup { claims: vec![claim], addresses, lost: lost.is_silent.then_some(lost.rank) })
    }

    /// Where the members are.
    fn remember(&mut self, table: &AddressTable) {
        self.addresses = self.members.iter().copied().zip(table.iter().cloned()).collect();
    }

    async fn as_coordinator(&mut self) -> Result<Mesh, TransportError> {
        let (mut control, replaced) = self.wait_for_ranks().await?;
        let table = self.address_table(&control);
        self.remember(&table);
        self.check_reachable(&table)?;
        for member in &mut control {
            // A rank that was started again waits for the list of a group that forms again.
            if replaced.contains(&member.rank) {
                let members = Frame::Members { epoch: self.epoch, members: self.members.clone() };
                self.say(member, &members).await?;
            }
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
        for index in 0..control.len() {
            let (before, rest) = control.split_at_mut(index);
            let Some((member, after)) = rest.split_first_mut() else { break };
            // A member may wait for one that is lost.
            tokio::select! {
                biased;
                ready = self.expect(member, &Frame::Meshed) => ready?,
                gone = first_closed(before.iter().chain(&*after)) => return Err(self.lost(gone)),
            }
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
        let dialled = self
            .endpoint
            .dial_until_answered(Rank::COORDINATOR, &coordinator, dial_purpose, self.deadline)
            .await;
        // Rank 0 has been lost, and forms the next group already.
        if let Err(DialError::Rejected(RejectCode::Busy, _)) = dialled {
            self.lost = Some(LostRank { rank: Rank::COORDINATOR, is_silent: false });
        }
        let (mut control, _) = dialled?;
        // Rank 0 reports which ranks are missing, and why. So waiting for that report is better than an
        // earlier error.
        self.deadline += MEMBER_EXTRA_WAIT;
        let table = self.hear_table(&mut control).await?;
        self.remember(&table);
        let data = self.dial_mesh(&control, &table).await?;
        self.report_meshed(control, data, table).await
    }

    /// On every other member: all data connections of this rank. It dials lower ranks, the
    /// coordinator at the address under which it has been reached.
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
            let dialled = tokio::select! {
                biased;
                dialled = all(dials) => dialled,
                _ = control.connection.closed() => return Err(self.lost(control)),
            };
            match dialled {
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
            dialled.map_err(|error| (rank, error.into()))
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
                Ok(Some(AdmittedConnection { purpose: Purpose::Rejoin, joined, .. })) => {
                    let rank = joined.rank;
                    self.lost = Some(LostRank { rank, is_silent: true });
                    return Err(TransportError::bootstrap(format!(
                        "rank {rank} was started again before the group was complete"
                    )));
                }
                // A rank that is too late for this group: it gets no answer.
                Ok(Some(_)) => {}
                Ok(None) => return Err(TransportError::bootstrap("the endpoint has been closed")),
                Err(_) => {
                    let error = self.too_late(&missing, "");
                    self.unreached = missing;
                    return Err(error);
                }
            }
        }
    }

    pub(crate) async fn say(&mut self, to: &mut PeerConnection, frame: &Frame) -> Result<(), TransportError> {
        let written = timeout_at(self.deadline, to.send.write_all(&frame.encode())).await;
        match written {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(self.lost(to)),
        }
    }

    pub(crate) async fn next_frame(&mut self, from: &mut PeerConnection) -> Result<Frame, TransportError> {
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

    async fn expect(&mut self, from: &mut PeerConnection, expected: &Frame) -> Result<(), TransportError> {
        match self.next_frame(from).await? {
            frame if frame == *expected => Ok(()),
            other => Err(TransportError::bootstrap(format!(
                "rank {} sent {other:?} instead of {expected:?}",
                from.rank
            ))),
        }
    }

    /// Notes that the connection of a rank has ended, unless the coordinator gave a reason.
    pub(crate) fn lost(&mut self, joined: &PeerConnection) -> TransportError {
        self.lost = LostRank::of(joined).or(self.lost);
        TransportError::bootstrap(format!(
            "rank {} was lost before the group was complete: {}",
            joined.rank,
            joined.end()
        ))
    }

    /// The error at the deadline; `also` is the end of its text.
    pub(crate) fn too_late(&self, missing: &[Rank], also: &str) -> TransportError {
        let shown: Vec<String> = missing.iter().take(8).map(Rank::to_string).collect();
        let more = missing.len() - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let (refusals, kind) = self.endpoint.admission.refusals();
        kind.error(format!(
            "rank {}{more} did not come within {:?} (this is rank {} of {}){also}{refusals}",
            shown.join(", "),
            self.endpoint.config.connect_deadline,
            self.endpoint.config.rank,
            self.endpoint.config.size
        ))
    }
}

/// Ranks that a rank dials side by side: round trips are long between data centres.
const DIALS_AT_ONCE: usize = 64;

/// How much longer than rank 0 a rank waits for a group that stays incomplete.
const MEMBER_EXTRA_WAIT: Duration = Duration::from_secs(2);

/// A place in a group as its rank there.
fn number(place: usize) -> Rank {
    Rank(u32::try_from(place).unwrap_or(u32::MAX))
}
