//! How ranks form the first group: every rank dials rank 0, rank 0 sends the addresses of all, and
//! of every two ranks the higher one dials the lower one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::admission::{AdmittedConnection, GroupStatus};
use super::endpoint::{DialError, DialPurpose, RankEndpoint};
use super::peer_connection::{AddressTable, Mesh, PeerConnection};
use super::prior_group::{LostRank, PriorGroup};
use crate::error::TransportError;
use crate::membership::Claim;
use crate::quic::network::connection::{close_code, cut, is_rejection};
use crate::rank::Rank;
use crate::wire::{Frame, RejectCode};

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
    /// Of the coordinator: by member, the lower ranks that it still dials in vain.
    pub(super) reports: BTreeMap<Rank, Vec<Rank>>,
    /// A rank whose connection has ended.
    pub(super) lost: Option<LostRank>,
    /// Where the ranks are, as far as this rank knows.
    pub(super) addresses: BTreeMap<Rank, Vec<SocketAddr>>,
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
            reports: BTreeMap::new(),
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
        // However late the last rank has come, the members have time to tell whom they do not reach.
        self.deadline = self.deadline.max(Instant::now() + self.endpoint.timing.dial);
        let data = self.collect_mesh(&mut control).await?;
        self.start(control, data, table).await
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
            .dial_until_answered(Rank::COORDINATOR, &coordinator, dial_purpose, self.deadline, || {})
            .await;
        // Rank 0 has been lost, and forms the next group already.
        if let Err(DialError::Rejected(RejectCode::Busy, _)) = dialled {
            self.lost = Some(LostRank { rank: Rank::COORDINATOR, is_silent: false });
        }
        let (mut control, _) = dialled?;
        // Rank 0 reports which ranks are missing or do not reach each other, and why. So waiting for that
        // report is better than an earlier error. Rank 0 itself waits for a last attempt.
        self.deadline += self.endpoint.timing.dial + MEMBER_EXTRA_WAIT;
        let connection = control.connection.clone();
        let meshed = async {
            let table = self.hear_table(&mut control).await?;
            self.remember(&table);
            let data = self.dial_mesh(&mut control, &table).await?;
            self.report_meshed(control, data, table).await
        };
        // Rank 0 learns why this rank gives up.
        meshed.await.inspect_err(|error| {
            connection.close(close_code::REJECTED, cut(&error.to_string()).as_bytes());
        })
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

    pub(super) fn place(&self, rank: Rank) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
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
                let rank = from.rank;
                let state = match self.members.first() == Some(&rank) {
                    true => format!(
                        "rank {rank} is there and waits for other ranks: its own error says for which"
                    ),
                    false => format!("rank {rank} has come, and has not connected to all others"),
                };
                let within = self.endpoint.config.connect_deadline;
                let text = format!("the group was not complete within {within:?}: {state}");
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
        let (rank, end) = (joined.rank, joined.end());
        TransportError::bootstrap(match joined.connection.close_reason() {
            // Its reason is the cause, and not that its connection has ended.
            Some(reason) if is_rejection(&reason) => match self.members.first() == Some(&rank) {
                true => format!("the group did not form; rank {rank} says: {end}"),
                false => format!("rank {rank} gave up: {end}"),
            },
            _ => format!("rank {rank} was lost before the group was complete: {end}"),
        })
    }
}

/// How much longer than rank 0 a rank waits for a group that stays incomplete.
const MEMBER_EXTRA_WAIT: Duration = Duration::from_secs(2);

/// A place in a group as its rank there.
fn number(place: usize) -> Rank {
    Rank(u32::try_from(place).unwrap_or(u32::MAX))
}
