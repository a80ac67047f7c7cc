//! The data connections of a group that forms: of every two ranks the higher one dials the lower
//! one.

mod dials;
mod pairs;

use std::net::SocketAddr;
use std::pin::pin;

use tokio::time::{Instant, interval_at, timeout_at};

use self::dials::Dials;
use super::admission::AdmittedConnection;
use super::bootstrap::Forming;
use super::peer_connection::{PeerConnection, first_closed};
use super::prior_group::LostRank;
use super::side_by_side::all;
use crate::error::TransportError;
use crate::rank::Rank;
use crate::wire::{Frame, Purpose};

impl Forming<'_> {
    /// Of the coordinator of the first group: its data connections, once every member has all of
    /// its own.
    pub(super) async fn collect_mesh(
        &mut self,
        control: &mut [PeerConnection],
    ) -> Result<Vec<PeerConnection>, TransportError> {
        match self.all_meshed(control).await {
            Ok(data) => Ok(data),
            Err(error) => {
                self.hear_reports(control).await;
                Err(self.name_pairs(control, error))
            }
        }
    }

    async fn all_meshed(
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
                ready = self.expect_meshed(member) => ready?,
                gone = first_closed(before.iter().chain(&*after)) => return Err(self.lost(gone)),
            }
        }
        Ok(data)
    }

    /// On every other member: all data connections of this rank. It dials lower ranks, the
    /// coordinator at the address under which it has been reached, and tells the coordinator which
    /// of them do not answer.
    pub(crate) async fn dial_mesh(
        &mut self,
        control: &mut PeerConnection,
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
        let dials = Dials::new(self.endpoint, self.epoch, self.deadline);
        let pause = dials.pause();
        let mut look = interval_at(Instant::now() + pause, pause);
        let (mut data, mut said) = (Vec::new(), Vec::new());
        for some in below.chunks(DIALS_AT_ONCE) {
            let each = some.iter().map(|&(rank, addresses)| Box::pin(dials.lanes(rank, addresses))).collect();
            let mut dialling = pin!(all(each));
            let dialled = loop {
                tokio::select! {
                    biased;
                    dialled = &mut dialling => break dialled,
                    _ = control.connection.closed() => return Err(dials.explained(self.lost(control))),
                    _ = look.tick() => self.report(control, dials.late(), &mut said).await?,
                }
            };
            match dialled {
                Ok(dialled) => data.extend(dialled.into_iter().flatten()),
                Err(error) => {
                    if Instant::now() >= self.deadline {
                        self.unreached = dials.unanswered();
                    }
                    return Err(error);
                }
            }
        }
        self.report(control, Vec::new(), &mut said).await?;
        self.collect_data(data, std::slice::from_ref(control)).await
    }

    /// Tells the coordinator which ranks do not answer, if that is not what was `said` before.
    async fn report(
        &mut self,
        control: &mut PeerConnection,
        peers: Vec<Rank>,
        said: &mut Vec<Rank>,
    ) -> Result<(), TransportError> {
        if *said != peers {
            said.clone_from(&peers);
            self.say(control, &Frame::Unreached { peers }).await?;
        }
        Ok(())
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
                    let me = self.endpoint.config.rank;
                    let pairs: Vec<_> = missing.iter().map(|&from| (from, me)).collect();
                    let (refusals, kind) = self.endpoint.admission.refusals();
                    let error = kind.error(self.pairs_text(&pairs) + &refusals);
                    self.unreached = missing;
                    return Err(error);
                }
            }
        }
    }
}

/// Ranks that a rank dials side by side: round trips are long between data centres.
const DIALS_AT_ONCE: usize = 64;
