//! The dials of one rank to lower ranks, and which of them have no answer yet.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{BootstrapKind, TransportError};
use crate::quic::forming::endpoint::{DialPurpose, RankEndpoint};
use crate::quic::forming::peer_connection::PeerConnection;
use crate::rank::Rank;

pub(super) struct Dials<'a> {
    endpoint: &'a RankEndpoint,
    epoch: u32,
    deadline: Instant,
    /// Ranks that have not answered on all lanes, since when they are dialled or were heard last,
    /// and where.
    open: Mutex<BTreeMap<Rank, (Instant, Vec<SocketAddr>)>>,
}

impl<'a> Dials<'a> {
    pub(super) fn new(endpoint: &'a RankEndpoint, epoch: u32, deadline: Instant) -> Self {
        Self { endpoint, epoch, deadline, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<Rank, (Instant, Vec<SocketAddr>)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The data connections of all lanes to one rank.
    pub(super) async fn lanes(
        &self,
        rank: Rank,
        addresses: &[SocketAddr],
    ) -> Result<Vec<PeerConnection>, TransportError> {
        let dial = async |addresses: &[SocketAddr], purpose| {
            let on_busy = || self.heard(rank);
            self.endpoint.dial_until_answered(rank, addresses, purpose, self.deadline, on_busy).await
        };
        self.open().insert(rank, (Instant::now(), addresses.to_vec()));
        let (joined, lane_ports) = dial(addresses, DialPurpose::data(self.epoch)).await?;
        let ip = joined.connection.remote_address().ip();
        let mut data = vec![joined];
        for (lane, port) in (1..).zip(lane_ports) {
            data.push(dial(&[SocketAddr::new(ip, port)], DialPurpose::lane(lane, self.epoch)).await?.0);
        }
        self.open().remove(&rank);
        Ok(data)
    }

    /// The rank answers, though it takes no handshake now: it is not late.
    fn heard(&self, rank: Rank) {
        if let Some((since, _)) = self.open().get_mut(&rank) {
            *since = Instant::now();
        }
    }

    /// After so long without an answer a rank is late: a quarter of an attempt.
    pub(super) fn pause(&self) -> Duration {
        self.endpoint.timing.dial / 4
    }

    /// The ranks that are late.
    pub(super) fn late(&self) -> Vec<Rank> {
        let open = self.open();
        let late = open.iter().filter(|(_, (since, _))| since.elapsed() >= self.pause());
        late.map(|(rank, _)| *rank).collect()
    }

    /// The ranks without an answer.
    pub(super) fn unanswered(&self) -> Vec<Rank> {
        self.open().keys().copied().collect()
    }

    /// The error, and what this rank alone knows about ranks without an answer.
    pub(super) fn explained(&self, error: TransportError) -> TransportError {
        let known = self.open().values().find_map(|(_, addresses)| self.endpoint.too_small(addresses));
        match (known, error) {
            (Some(known), TransportError::Bootstrap { text, .. }) => {
                BootstrapKind::SmallMtu.error(format!("{text}; {known}"))
            }
            (_, error) => error,
        }
    }
}
