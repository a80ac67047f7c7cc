//! How survivors form the next group (`membership.rs` decides which ranks may belong to it).
//!
//! Every rank repeatedly dials every lower rank that it knows, and follows the lowest rank that it
//! reaches. A rank that reaches none waits for the missing ranks for a limited time. Then it names
//! the members of the next group; the connections from the other ranks become their control
//! connections. If an attempt fails on one rank, it ends on all ranks, because its connections end,
//! and the next attempt begins. A rank remembers every group for which it was ready.

mod gather;
mod unreachable;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use self::gather::Attempt;
use self::unreachable::{REPORT_EXTRA_WAIT, dismiss, report_unreached};
use super::admission::{GroupStatus, left_out_text};
use super::bootstrap::Forming;
use super::config::Awaited;
use super::endpoint::RankEndpoint;
use super::peer_connection::Mesh;
use super::prior_group::PriorGroup;
use crate::error::TransportError;
use crate::membership::{Claim, MOST_CLAIMS};
use crate::rank::Rank;
use crate::transport::Regroup;
use crate::wire::Frame;

/// A group that has been formed again.
#[derive(Debug)]
pub(crate) struct NextGroup {
    pub(crate) epoch: u32,
    pub(crate) members: Vec<Rank>,
    pub(crate) mesh: Mesh,
}

/// Forms the next group, by `until` at the latest.
pub(crate) async fn regroup(
    endpoint: &Arc<RankEndpoint>,
    prior: PriorGroup,
    who: Regroup,
    until: Instant,
) -> Result<NextGroup, TransportError> {
    endpoint.read_again()?;
    let floor = prior.claims.iter().map(|claim| claim.epoch).max().unwrap_or(0);
    let settled = Instant::now()
        + match who {
            Regroup::Survivors => endpoint.timing.settle,
            Regroup::Everyone { within } => within,
        };
    let mut regrouping = Regrouping {
        endpoint,
        prior,
        who,
        until,
        settled,
        floor,
        refused: Arc::default(),
        dropped: BTreeSet::new(),
    };
    loop {
        (endpoint.config.waits)(Awaited::NextGroup);
        match regrouping.attempt().await {
            Ok(next) => {
                (endpoint.config.waits)(Awaited::Nothing);
                endpoint.admission.close(next.epoch, &next.members);
                return Ok(next);
            }
            Err(AttemptError::Fatal(error)) => return Err(error),
            Err(AttemptError::Retry(error)) => {
                tracing::debug!(rank = %endpoint.config.rank, %error, "forming a group again did not succeed yet");
                if Instant::now() + PAUSE >= until {
                    return Err(error);
                }
                sleep(PAUSE).await;
                // Ranks that were present may have lost their connection, and are waited for a little.
                regrouping.settled = regrouping.settled.max(Instant::now() + endpoint.timing.settle_again);
            }
        }
    }
}

/// Why an attempt has failed.
enum AttemptError {
    Retry(TransportError),
    Fatal(TransportError),
}

impl From<TransportError> for AttemptError {
    fn from(error: TransportError) -> Self {
        Self::Retry(error)
    }
}

struct Regrouping<'a> {
    endpoint: &'a Arc<RankEndpoint>,
    prior: PriorGroup,
    who: Regroup,
    until: Instant,
    /// From then on the group is formed of the ranks that are present.
    settled: Instant,
    /// The highest known epoch.
    floor: u32,
    /// The last refusal between this rank and a lower one.
    refused: Arc<Mutex<Option<String>>>,
    /// Of the coordinator: ranks that cannot reach a member of the next group.
    dropped: BTreeSet<Rank>,
}

impl Regrouping<'_> {
    fn everyone(&self) -> bool {
        self.who != Regroup::Survivors
    }

    /// The lowest epoch that the next group may have. The first group may still form for a rank
    /// that knows none.
    fn next_epoch(&self) -> u32 {
        let knows_none = self.prior.claims.is_empty() && self.floor == 0;
        if knows_none { 0 } else { self.floor.saturating_add(1) }
    }

    fn me(&self) -> Rank {
        self.endpoint.config.rank
    }

    async fn attempt(&mut self) -> Result<NextGroup, AttemptError> {
        let arrivals = self
            .endpoint
            .admission
            .open(GroupStatus::Between { from_epoch: self.next_epoch(), everyone: self.everyone() });
        let mut attempt = Attempt {
            arrivals,
            early_data: Vec::new(),
            below: BTreeMap::new(),
            above: BTreeMap::new(),
            dials: JoinSet::new(),
            asked_above: false,
        };
        for (&rank, addresses) in self.prior.addresses.range(..self.me()) {
            if self.may_lead(rank) {
                attempt.dials.spawn(self.dial(rank, addresses.clone()));
            }
        }
        match self.gather(&mut attempt).await? {
            None => self.lead(attempt).await,
            Some((epoch, members)) => self.follow(attempt, epoch, members).await,
        }
    }

    /// Of the lowest rank.
    async fn lead(&mut self, mut attempt: Attempt) -> Result<NextGroup, AttemptError> {
        let members = self.next_members(&attempt).map_err(TransportError::bootstrap)?;
        attempt.dials.abort_all();
        let heard = attempt.above.values().map(|(.., epoch)| *epoch).max().unwrap_or(0).max(self.floor);
        let epoch = heard.checked_add(1).ok_or_else(|| TransportError::bootstrap("no epoch is left"))?;
        self.floor = epoch;
        let came = self.came(&attempt);
        let mut control = Vec::new();
        for (rank, (joined, ..)) in attempt.above {
            if members.contains(&rank) {
                control.push(joined);
            } else {
                tokio::spawn(dismiss(joined, left_out_text(rank, epoch)));
            }
        }
        if members.first() != Some(&self.me()) {
            return Err(AttemptError::Fatal(TransportError::bootstrap(left_out_text(self.me(), epoch))));
        }
        let deadline = self.until.min(Instant::now() + self.endpoint.timing.attempt + REPORT_EXTRA_WAIT);
        let mut forming = Forming::new(self.endpoint, (epoch, members.clone()), deadline, attempt.arrivals);
        forming.early_data = attempt.early_data;
        let table = forming.address_table(&control);
        for member in &mut control {
            forming.say(member, &Frame::Members { epoch, members: members.clone() }).await?;
            forming.say_table(member, &table).await?;
        }
        let (control, data) = self.collect_mesh(&mut forming, control, came).await?;
        self.add_claim(epoch, &members)?;
        let mesh = forming.start(control, data, table).await?;
        Ok(NextGroup { epoch, members, mesh })
    }

    /// Of every other rank.
    async fn follow(
        &mut self,
        attempt: Attempt,
        epoch: u32,
        members: Vec<Rank>,
    ) -> Result<NextGroup, AttemptError> {
        self.floor = epoch;
        let Some((_, mut control)) = attempt.below.into_iter().next() else {
            return Err(TransportError::bootstrap("nobody to follow").into());
        };
        let deadline = self.until.min(Instant::now() + self.endpoint.timing.attempt);
        let mut forming = Forming::new(self.endpoint, (epoch, members.clone()), deadline, attempt.arrivals);
        forming.early_data = attempt.early_data;
        let table = forming.hear_table(&mut control).await?;
        let data = match forming.dial_mesh(&mut control, &table).await {
            Ok(data) => data,
            Err(error) => return Err(report_unreached(&forming.unreached, control, error).await),
        };
        self.add_claim(epoch, &members)?;
        let mesh = forming.report_meshed(control, data, table).await?;
        Ok(NextGroup { epoch, members, mesh })
    }

    /// From now on this rank may belong to the group, whether or not it learns that the group has
    /// started.
    fn add_claim(&mut self, epoch: u32, members: &[Rank]) -> Result<(), AttemptError> {
        if self.prior.claims.len() >= MOST_CLAIMS {
            let text = format!(
                "{MOST_CLAIMS} attempts to form a group again failed at their last step: restart the job"
            );
            return Err(AttemptError::Fatal(TransportError::bootstrap(text)));
        }
        self.prior.claims.push(Claim { epoch, started: false, members: members.to_vec() });
        Ok(())
    }
}

/// Between two attempts, and between two dials of one rank.
const PAUSE: Duration = Duration::from_millis(200);

/// How long to wait until a rank has read that it is not in the group.
const REJECT_TIMEOUT: Duration = Duration::from_secs(1);
