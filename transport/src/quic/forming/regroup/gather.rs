//! The ranks that are present when a group is formed again, and how long the others are waited for.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::{AttemptError, PAUSE, Regrouping};
use crate::error::TransportError;
use crate::membership::{Claim, last_started, next_group};
use crate::quic::forming::admission::AdmittedConnection;
use crate::quic::forming::endpoint::{DialError, DialPurpose};
use crate::quic::forming::peer_connection::PeerConnection;
use crate::quic::network::frames::FrameError;
use crate::rank::Rank;
use crate::transport::Regroup;
use crate::wire::{Frame, Purpose, RejectCode};

/// Connections of one attempt.
pub(super) struct Attempt {
    pub(super) arrivals: mpsc::Receiver<AdmittedConnection>,
    pub(super) early_data: Vec<(u32, PeerConnection)>,
    /// Lower ranks that were reached.
    pub(super) below: BTreeMap<Rank, PeerConnection>,
    /// Higher ranks that have connected.
    pub(super) above: BTreeMap<Rank, (PeerConnection, Vec<Claim>, u32)>,
    pub(super) dials: JoinSet<(Rank, Result<PeerConnection, TransportError>)>,
    /// Higher ranks have been asked whether they have continued without this rank.
    pub(super) asked_above: bool,
}

impl Attempt {
    /// A higher rank has connected. Of two connections of a rank counts the one that knows the
    /// later group, else the later one.
    fn take(&mut self, joined: PeerConnection, claims: Vec<Claim>, epoch: u32) {
        if self.above.get(&joined.rank).is_none_or(|(.., known)| *known <= epoch) {
            self.above.insert(joined.rank, (joined, claims, epoch));
        }
    }
}

impl Regrouping<'_> {
    /// Whether to follow a lower rank: among survivors only one that was in the last group that
    /// this rank knows.
    pub(super) fn may_lead(&self, rank: Rank) -> bool {
        let last = self.prior.claims.iter().rfind(|claim| claim.started);
        self.everyone() || last.is_none_or(|last| last.members.contains(&rank))
    }

    /// Dials a rank until it answers or reports that the group has continued.
    pub(super) fn dial(
        &self,
        rank: Rank,
        addresses: Vec<SocketAddr>,
    ) -> impl Future<Output = (Rank, Result<PeerConnection, TransportError>)> + Send + 'static {
        let (endpoint, until, floor) = (Arc::clone(self.endpoint), self.until, self.floor);
        let (claims, settled, refused) = (self.prior.claims.clone(), self.settled, Arc::clone(&self.refused));
        let purpose = if self.everyone() { Purpose::Rejoin } else { Purpose::Reform };
        async move {
            loop {
                match endpoint
                    .dial(rank, &addresses, DialPurpose { purpose, lane: 0, epoch: floor }, until)
                    .await
                {
                    Ok((mut joined, _)) => {
                        let patience = settled.saturating_duration_since(Instant::now()).as_millis();
                        let patience_ms = u32::try_from(patience).unwrap_or(u32::MAX);
                        let join = Frame::Join { claims: claims.clone(), patience_ms }.encode();
                        if joined.send.write_all(&join).await.is_ok() {
                            return (rank, Ok(joined));
                        }
                    }
                    Err(DialError::Rejected(RejectCode::Gone, error)) => return (rank, Err(error)),
                    Err(DialError::Failed(error)) => {
                        *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
                    }
                    Err(_) => {}
                }
                sleep(PAUSE).await;
            }
        }
    }

    /// Waits for the other ranks. Returns the group that a lower rank has named, or `None` when
    /// this rank is to name it.
    pub(super) async fn gather(
        &mut self,
        attempt: &mut Attempt,
    ) -> Result<Option<(u32, Vec<Rank>)>, AttemptError> {
        let mut settled = Instant::now() >= self.settled;
        loop {
            attempt.above.retain(|_, (joined, ..)| joined.connection.close_reason().is_none());
            if attempt.below.is_empty() && (settled || self.all_are_here(attempt)) {
                match self.next_members(attempt) {
                    Ok(_) => return Ok(None),
                    // The other ranks may have continued without this rank, and can report that.
                    Err(_) if settled => self.ask_above(attempt),
                    Err(_) => {}
                }
            }
            let Attempt { arrivals, below, dials, .. } = attempt;
            tokio::select! {
                biased;
                arrived = arrivals.recv() => match arrived {
                    Some(AdmittedConnection { purpose: Purpose::Data | Purpose::Lane, epoch, joined, .. }) => {
                        attempt.early_data.push((epoch, joined));
                    }
                    Some(AdmittedConnection { epoch, joined, claims, patience, .. }) => {
                        // A restarted rank does not know how long the others wait.
                        if !claims.is_empty() && self.prior.claims.is_empty() {
                            self.settled = self.settled.min(Instant::now() + patience);
                        }
                        attempt.take(joined, claims, epoch);
                    }
                    None => return Err(AttemptError::Fatal(TransportError::bootstrap("the endpoint has been closed"))),
                },
                Some(Ok((rank, dialled))) = dials.join_next(), if !dials.is_empty() => match dialled {
                    Ok(joined) => {
                        below.insert(rank, joined);
                    }
                    Err(error) => return Err(AttemptError::Fatal(error)),
                },
                (rank, frame) = next_of(below) => match frame {
                    Ok(Some(Frame::Members { epoch, members }))
                        if epoch >= self.next_epoch()
                            && members.first() == Some(&rank)
                            && members.is_sorted_by(|a, b| a < b)
                            && members.contains(&self.me()) =>
                    {
                        attempt.below.retain(|&lower, _| lower == rank);
                        return Ok(Some((epoch, members)));
                    }
                    Ok(Some(Frame::Reject { code: RejectCode::Gone, text })) => {
                        return Err(AttemptError::Fatal(TransportError::bootstrap(text)));
                    }
                    other => {
                        let text = format!("rank {rank} was lost while a group was formed again: {other:?}");
                        return Err(TransportError::bootstrap(text).into());
                    }
                },
                () = sleep_until(self.settled), if !settled => settled = true,
                () = sleep_until(self.until) => return Err(AttemptError::Fatal(self.too_late(attempt))),
            }
        }
    }

    /// The ranks that are present with their claims, this rank among them.
    pub(super) fn came(&self, attempt: &Attempt) -> BTreeMap<Rank, Vec<Claim>> {
        let above = attempt.above.iter().filter(|(rank, _)| !self.dropped.contains(rank));
        let above = above.map(|(&rank, (_, claims, _))| (rank, claims.clone()));
        above.chain([(self.me(), self.prior.claims.clone())]).collect()
    }

    pub(super) fn next_members(&self, attempt: &Attempt) -> Result<Vec<Rank>, String> {
        next_group(&self.came(attempt), self.everyone(), self.endpoint.config.size)
    }

    /// Whether all expected ranks have joined.
    fn all_are_here(&self, attempt: &Attempt) -> bool {
        let came = self.came(attempt);
        match self.who {
            Regroup::Everyone { .. } => {
                let is_here = |rank: &Rank| came.contains_key(rank) || self.dropped.contains(rank);
                (0..self.endpoint.config.size).all(|rank| is_here(&Rank(rank)))
            }
            Regroup::Survivors => last_started(&came).is_some_and(|last| {
                let is_gone = |rank: &Rank| Some(*rank) == self.prior.lost || self.dropped.contains(rank);
                last.members.iter().all(|rank| is_gone(rank) || came.contains_key(rank))
            }),
        }
    }

    fn ask_above(&self, attempt: &mut Attempt) {
        if std::mem::replace(&mut attempt.asked_above, true) || self.prior.claims.is_empty() {
            return;
        }
        for (&rank, addresses) in self.prior.addresses.range(self.me()..) {
            if !attempt.above.contains_key(&rank) {
                attempt.dials.spawn(self.dial(rank, addresses.clone()));
            }
        }
    }

    fn too_late(&self, attempt: &Attempt) -> TransportError {
        let followed = attempt
            .below
            .keys()
            .next()
            .map(|rank| format!("rank {rank} did not say who is in the next group"));
        let why = followed.unwrap_or_else(|| match self.next_members(attempt) {
            Ok(_) => "time was up".to_owned(),
            Err(text) => text,
        });
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = refused.as_ref().map_or(String::new(), |text| format!("; {text}"));
        let hint = self.endpoint.refusal_hint(&self.endpoint.config.coordinator_candidates());
        TransportError::bootstrap(format!(
            "rank {} could not form a group again: {why}{refused}{hint}",
            self.me()
        ))
    }
}

/// The next frame of the lowest rank that was reached; waits forever if no rank was reached.
async fn next_of(below: &mut BTreeMap<Rank, PeerConnection>) -> (Rank, Result<Option<Frame>, FrameError>) {
    match below.first_entry() {
        Some(mut lowest) => (*lowest.key(), lowest.get_mut().frames.next().await),
        None => std::future::pending().await,
    }
}
