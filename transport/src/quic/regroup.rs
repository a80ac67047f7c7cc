//! How those who are left become a group again (`membership.rs` says who may).
//!
//! Everyone dials every lower rank that it knows of, again and again, and follows the lowest one that it reaches. Who
//! reaches none waits until all have come that should, or for a while; then it says who is in the next group, and the
//! connections on which the others came are their control connections. An attempt that fails anywhere ends on all
//! ranks, because its connections do, and the next one begins; what a rank was ready for, it remembers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::bootstrap::{Forming, Joined, Mesh, failed, identity_fits};
use super::door::{Arrival, Era, gone_on_without};
use super::frames::FrameError;
use super::seat::{Errand, Seat, Undialled};
use crate::error::TransportError;
use crate::membership::{Claim, MOST_CLAIMS, last_started, next_group};
use crate::reform::Regroup;
use crate::transport::Rank;
use crate::wire::{Frame, Purpose, RejectCode};

/// What a rank knows when it comes to form a group again. Ranks are those of the first group.
#[derive(Debug)]
pub(crate) struct Past {
    /// Empty if it was started anew.
    pub(crate) claims: Vec<Claim>,
    /// Where the others were.
    pub(crate) addresses: BTreeMap<Rank, SocketAddr>,
    /// A rank that will not come, as far as is known.
    pub(crate) lost: Option<Rank>,
}

/// A group that has been formed again.
#[derive(Debug)]
pub(crate) struct Next {
    pub(crate) epoch: u32,
    pub(crate) members: Vec<Rank>,
    pub(crate) mesh: Mesh,
}

/// Forms the next group, by `until` at the latest.
pub(crate) async fn regroup(
    seat: &Arc<Seat>,
    past: Past,
    who: Regroup,
    until: Instant,
) -> Result<Next, TransportError> {
    if let Some(revoked) = &seat.config.revoked {
        revoked.read_again()?;
        identity_fits(&seat.config)?;
    }
    let floor = past.claims.iter().map(|claim| claim.epoch).max().unwrap_or(0);
    let settled = Instant::now()
        + match who {
            Regroup::Survivors => seat.config.heartbeat * SETTLE_TICKS,
            Regroup::Everyone { within } => within,
        };
    let mut party = Party { seat, past, who, until, settled, floor, refused: Arc::default() };
    loop {
        match party.attempt().await {
            Ok(next) => {
                seat.door.close(next.epoch, &next.members);
                return Ok(next);
            }
            Err(Ended::ForGood(error)) => return Err(error),
            Err(Ended::Again(error)) => {
                tracing::debug!(rank = %seat.config.rank, %error, "forming a group again did not succeed yet");
                if Instant::now() + PAUSE >= until {
                    return Err(error);
                }
                sleep(PAUSE).await;
                // Who was there may be gone by now, and is waited for a little.
                party.settled = party.settled.max(Instant::now() + seat.config.heartbeat * AGAIN_TICKS);
            }
        }
    }
}

/// Why an attempt came to nothing.
enum Ended {
    Again(TransportError),
    ForGood(TransportError),
}

impl From<TransportError> for Ended {
    fn from(error: TransportError) -> Self {
        Self::Again(error)
    }
}

struct Party<'a> {
    seat: &'a Arc<Seat>,
    past: Past,
    who: Regroup,
    until: Instant,
    /// From when on those who have come will do.
    settled: Instant,
    /// The highest epoch that was heard of.
    floor: u32,
    /// Why a lower rank, or this one, did not take the other for what it is.
    refused: Arc<Mutex<Option<String>>>,
}

/// Connections of one attempt.
struct Attempt {
    arrivals: mpsc::Receiver<Arrival>,
    early_data: Vec<(u32, Joined)>,
    /// Lower ranks that were reached.
    below: BTreeMap<Rank, Joined>,
    /// Higher ranks that came.
    above: BTreeMap<Rank, (Joined, Vec<Claim>, u32)>,
    dials: JoinSet<(Rank, Result<Joined, TransportError>)>,
    /// Higher ranks are asked whether they have gone on.
    asked_above: bool,
}

impl Party<'_> {
    fn everyone(&self) -> bool {
        self.who != Regroup::Survivors
    }

    fn me(&self) -> Rank {
        self.seat.config.rank
    }

    async fn attempt(&mut self) -> Result<Next, Ended> {
        let arrivals = self.seat.door.open(Era::Between { epoch: self.floor, everyone: self.everyone() });
        let mut attempt = Attempt {
            arrivals,
            early_data: Vec::new(),
            below: BTreeMap::new(),
            above: BTreeMap::new(),
            dials: JoinSet::new(),
            asked_above: false,
        };
        for (&rank, &address) in self.past.addresses.range(..self.me()) {
            if self.may_lead(rank) {
                attempt.dials.spawn(self.dial(rank, address));
            }
        }
        match self.gather(&mut attempt).await? {
            None => self.lead(attempt).await,
            Some((epoch, members, addresses)) => self.follow(attempt, epoch, members, &addresses).await,
        }
    }

    /// Whether to follow a lower rank: among survivors only one that was in the last group that this rank knows.
    fn may_lead(&self, rank: Rank) -> bool {
        let last = self.past.claims.iter().rfind(|claim| claim.started);
        self.everyone() || last.is_none_or(|last| last.members.contains(&rank))
    }

    /// Dials a rank until it answers or says that the group has gone on.
    fn dial(
        &self,
        rank: Rank,
        address: SocketAddr,
    ) -> impl Future<Output = (Rank, Result<Joined, TransportError>)> + Send + 'static {
        let (seat, until, floor) = (Arc::clone(self.seat), self.until, self.floor);
        let (claims, settled, refused) = (self.past.claims.clone(), self.settled, Arc::clone(&self.refused));
        let purpose = if self.everyone() { Purpose::Rejoin } else { Purpose::Reform };
        async move {
            loop {
                match seat.dial(rank, address, Errand { purpose, lane: 0, epoch: floor }, until).await {
                    Ok((mut joined, _)) => {
                        let patience = settled.saturating_duration_since(Instant::now()).as_millis();
                        let patience_ms = u32::try_from(patience).unwrap_or(u32::MAX);
                        let join = Frame::Join { claims: claims.clone(), patience_ms }.encode();
                        if joined.send.write_all(&join).await.is_ok() {
                            return (rank, Ok(joined));
                        }
                    }
                    Err(Undialled::Rejected(RejectCode::Gone, error)) => return (rank, Err(error)),
                    Err(Undialled::Failed(error)) => {
                        *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
                    }
                    Err(_) => {}
                }
                sleep(PAUSE).await;
            }
        }
    }

    /// Waits for the others. Ends with the group that a lower rank says, or with nothing when this rank is to say it.
    async fn gather(
        &mut self,
        attempt: &mut Attempt,
    ) -> Result<Option<(u32, Vec<Rank>, Vec<SocketAddr>)>, Ended> {
        let mut settled = Instant::now() >= self.settled;
        loop {
            attempt.above.retain(|_, (joined, ..)| joined.connection.close_reason().is_none());
            if attempt.below.is_empty() && (settled || self.all_are_here(attempt)) {
                match self.next_members(attempt) {
                    Ok(_) => return Ok(None),
                    // They may have gone on without this rank, and can say so.
                    Err(_) if settled => self.ask_above(attempt),
                    Err(_) => {}
                }
            }
            let Attempt { arrivals, below, dials, .. } = attempt;
            tokio::select! {
                biased;
                arrived = arrivals.recv() => match arrived {
                    Some(Arrival { purpose: Purpose::Data | Purpose::Lane, epoch, joined, .. }) => {
                        attempt.early_data.push((epoch, joined));
                    }
                    Some(Arrival { epoch, joined, claims, patience, .. }) => {
                        // Who was started anew does not know how long it is waited for.
                        if !claims.is_empty() && self.past.claims.is_empty() {
                            self.settled = self.settled.min(Instant::now() + patience);
                        }
                        attempt.above.insert(joined.rank, (joined, claims, epoch));
                    }
                    None => return Err(Ended::ForGood(failed("the endpoint has been closed"))),
                },
                Some(Ok((rank, dialled))) = dials.join_next(), if !dials.is_empty() => match dialled {
                    Ok(joined) => {
                        below.insert(rank, joined);
                    }
                    Err(error) => return Err(Ended::ForGood(error)),
                },
                (rank, frame) = next_of(below) => match frame {
                    Ok(Some(Frame::Members { epoch, members, addresses }))
                        if epoch > self.floor
                            && members.len() == addresses.len()
                            && members.first() == Some(&rank)
                            && members.is_sorted_by(|a, b| a < b)
                            && members.contains(&self.me()) =>
                    {
                        attempt.below.retain(|&lower, _| lower == rank);
                        return Ok(Some((epoch, members, addresses)));
                    }
                    Ok(Some(Frame::Reject { code: RejectCode::Gone, text })) => {
                        return Err(Ended::ForGood(failed(text)));
                    }
                    other => {
                        let text = format!("rank {rank} was lost while a group was formed again: {other:?}");
                        return Err(failed(text).into());
                    }
                },
                () = sleep_until(self.settled), if !settled => settled = true,
                () = sleep_until(self.until) => return Err(Ended::ForGood(self.too_late(attempt))),
            }
        }
    }

    /// Everyone who came, this rank among them.
    fn came(&self, attempt: &Attempt) -> BTreeMap<Rank, Vec<Claim>> {
        let above = attempt.above.iter().map(|(&rank, (_, claims, _))| (rank, claims.clone()));
        above.chain([(self.me(), self.past.claims.clone())]).collect()
    }

    fn next_members(&self, attempt: &Attempt) -> Result<Vec<Rank>, String> {
        next_group(&self.came(attempt), self.everyone())
    }

    /// Nobody else is to be expected.
    fn all_are_here(&self, attempt: &Attempt) -> bool {
        let came = self.came(attempt);
        match self.who {
            Regroup::Everyone { .. } => {
                (0..self.seat.config.world).all(|rank| came.contains_key(&Rank(rank)))
            }
            Regroup::Survivors => last_started(&came).is_some_and(|last| {
                last.members.iter().all(|rank| Some(*rank) == self.past.lost || came.contains_key(rank))
            }),
        }
    }

    fn ask_above(&self, attempt: &mut Attempt) {
        if std::mem::replace(&mut attempt.asked_above, true) || self.past.claims.is_empty() {
            return;
        }
        for (&rank, &address) in self.past.addresses.range(self.me()..) {
            if !attempt.above.contains_key(&rank) {
                attempt.dials.spawn(self.dial(rank, address));
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
        failed(format!("rank {} could not form a group again: {why}{refused}", self.me()))
    }

    /// Of the lowest rank.
    async fn lead(&mut self, mut attempt: Attempt) -> Result<Next, Ended> {
        let members = self.next_members(&attempt).map_err(failed)?;
        attempt.dials.abort_all();
        let heard = attempt.above.values().map(|(.., epoch)| *epoch).max().unwrap_or(0).max(self.floor);
        let epoch = heard.checked_add(1).ok_or_else(|| failed("no epoch is left"))?;
        self.floor = epoch;
        let mut control = Vec::new();
        for (rank, (mut joined, ..)) in attempt.above {
            if members.contains(&rank) {
                control.push(joined);
            } else {
                let gone =
                    Frame::Reject { code: RejectCode::Gone, text: gone_on_without(rank, epoch) }.encode();
                tokio::spawn(async move {
                    if joined.send.write_all(&gone).await.is_ok() && joined.send.finish().is_ok() {
                        let _ = timeout(FAREWELL, joined.send.stopped()).await;
                    }
                });
            }
        }
        if members.first() != Some(&self.me()) {
            return Err(Ended::ForGood(failed(gone_on_without(self.me(), epoch))));
        }
        let mut forming = Forming {
            seat: self.seat,
            epoch,
            members: members.clone(),
            deadline: self.until.min(Instant::now() + LONGEST_ATTEMPT),
            arrivals: attempt.arrivals,
            early_data: attempt.early_data,
        };
        let addresses = forming.addresses(&control);
        for member in &mut control {
            let table = Frame::Members { epoch, members: members.clone(), addresses: addresses.clone() };
            forming.say(member, &table).await?;
        }
        let data = forming.mesh_above(&mut control).await?;
        self.be_ready_for(epoch, &members)?;
        let mesh = forming.start(control, data).await?;
        Ok(Next { epoch, members, mesh })
    }

    /// Of every other rank.
    async fn follow(
        &mut self,
        attempt: Attempt,
        epoch: u32,
        members: Vec<Rank>,
        addresses: &[SocketAddr],
    ) -> Result<Next, Ended> {
        self.floor = epoch;
        let Some((_, control)) = attempt.below.into_iter().next() else {
            return Err(failed("nobody to follow").into());
        };
        let mut forming = Forming {
            seat: self.seat,
            epoch,
            members: members.clone(),
            deadline: self.until.min(Instant::now() + LONGEST_ATTEMPT),
            arrivals: attempt.arrivals,
            early_data: attempt.early_data,
        };
        let leader = control.connection.remote_address();
        let data = forming.mesh_below(&control, leader, addresses).await?;
        self.be_ready_for(epoch, &members)?;
        let mesh = forming.get_ready(control, data).await?;
        Ok(Next { epoch, members, mesh })
    }

    /// From now on this rank may belong to the group, whether or not it hears that it has started.
    fn be_ready_for(&mut self, epoch: u32, members: &[Rank]) -> Result<(), Ended> {
        if self.past.claims.len() >= MOST_CLAIMS {
            let text = format!(
                "{MOST_CLAIMS} attempts to form a group again failed at their last step: start the job anew"
            );
            return Err(Ended::ForGood(failed(text)));
        }
        self.past.claims.push(Claim { epoch, started: false, members: members.to_vec() });
        Ok(())
    }
}

/// The next frame of the lowest rank that was reached, and of none while none was.
async fn next_of(below: &mut BTreeMap<Rank, Joined>) -> (Rank, Result<Option<Frame>, FrameError>) {
    match below.first_entry() {
        Some(mut lowest) => (*lowest.key(), lowest.get_mut().frames.next().await),
        None => std::future::pending().await,
    }
}

/// Heartbeats for which survivors are waited for that may have something else to do, or have not noticed yet: more than
/// those after which one that is silent counts as dead.
const SETTLE_TICKS: u32 = 24;

/// The same for an attempt after the first one.
const AGAIN_TICKS: u32 = 8;

/// Between two attempts, and between two calls at a door.
const PAUSE: Duration = Duration::from_millis(200);

/// From who is in the group to its start.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(10);

/// For a rank to read that it is not in the group.
const FAREWELL: Duration = Duration::from_secs(1);
