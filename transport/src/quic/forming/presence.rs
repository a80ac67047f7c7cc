//! Of the coordinator of the first group: waits until all ranks are present. A rank that is lost
//! may come again.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::timeout_at;

use super::admission::AdmittedConnection;
use super::bootstrap::Forming;
use super::config::Awaited;
use super::peer_connection::{PeerConnection, first_closed};
use crate::error::{BootstrapKind, TransportError};
use crate::quic::network::connection::close_code;
use crate::rank::Rank;
use crate::wire::Purpose;

impl Forming<'_> {
    /// The members other than this rank.
    pub(crate) fn others(&self) -> Vec<Rank> {
        let me = self.endpoint.config.rank;
        self.members.iter().copied().filter(|rank| *rank != me).collect()
    }

    /// Waits for a control connection of every other rank. Returns them by rank, and the ranks that
    /// have taken the place of lost processes.
    ///
    /// A rank that is lost meanwhile is waited for as one that has not started. But if all others
    /// have come, it counts as lost.
    pub(crate) async fn wait_for_ranks(
        &mut self,
    ) -> Result<(Vec<PeerConnection>, BTreeSet<Rank>), TransportError> {
        let mut control: BTreeMap<Rank, PeerConnection> = BTreeMap::new();
        let mut replaced = BTreeSet::new();
        let mut ended: BTreeMap<Rank, PeerConnection> = BTreeMap::new();
        loop {
            let mut missing = self.others();
            missing.retain(|rank| !control.contains_key(rank));
            if missing.is_empty() {
                (self.endpoint.config.waits)(Awaited::OthersOf(Rank::COORDINATOR));
                return Ok((control.into_values().collect(), replaced));
            }
            (self.endpoint.config.waits)(Awaited::Ranks(&missing));
            if missing.iter().all(|rank| ended.contains_key(rank))
                && let Some((_, lost)) = ended.pop_first()
            {
                return Err(self.lost(&lost));
            }
            let arrived = tokio::select! {
                biased;
                arrived = timeout_at(self.deadline, self.arrivals.recv()) => arrived,
                gone = first_closed(control.values()) => {
                    let rank = gone.rank;
                    (self.endpoint.config.note)(&format!("rank {rank} was lost while the group forms: {}", gone.end()));
                    replaced.remove(&rank);
                    ended.extend(control.remove(&rank).map(|gone| (rank, gone)));
                    continue;
                }
            };
            match arrived {
                Ok(Some(AdmittedConnection {
                    purpose: Purpose::Data | Purpose::Lane,
                    epoch,
                    joined,
                    ..
                })) => self.early_data.push((epoch, joined)),
                Ok(Some(AdmittedConnection { joined, claims, .. })) if !claims.is_empty() => {
                    let text = "rank 0 was started anew and knows no earlier group: start it with rejoin";
                    joined.connection.close(close_code::REJECTED, text.as_bytes());
                }
                Ok(Some(AdmittedConnection { purpose, joined, .. })) => {
                    let rank = joined.rank;
                    ended.remove(&rank);
                    match purpose {
                        Purpose::Rejoin => replaced.insert(rank),
                        _ => replaced.remove(&rank),
                    };
                    if let Some(earlier) = control.insert(rank, joined) {
                        let text =
                            format!("rank {rank} was started again, to take the place of this process");
                        earlier.connection.close(close_code::REJECTED, text.as_bytes());
                    }
                }
                Ok(None) => return Err(TransportError::bootstrap("the endpoint has been closed")),
                Err(_) => {
                    let lost: Vec<String> = ended
                        .values()
                        .map(|gone| format!("; rank {} was lost: {}", gone.rank, gone.end()))
                        .collect();
                    return Err(self.too_late(&missing, &lost.concat()));
                }
            }
        }
    }

    /// The error at the deadline; `lost` is a part of its text.
    fn too_late(&self, missing: &[Rank], lost: &str) -> TransportError {
        let shown: Vec<String> = missing.iter().take(8).map(Rank::to_string).collect();
        let more = missing.len() - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let config = &self.endpoint.config;
        let (refusals, kind) = self.endpoint.admission.refusals();
        // Where the missing ranks are is not known, but where this one is.
        let small = self.endpoint.own_mtu_too_small();
        let kind = if small.is_some() { BootstrapKind::SmallMtu } else { kind };
        let small = small.map_or(String::new(), |small| format!("; {small}"));
        kind.error(format!(
            "rank {}{more} did not come within {:?} (this is rank {} of {}){lost}{refusals}{small}",
            shown.join(", "),
            config.connect_deadline,
            config.rank,
            config.size
        ))
    }
}
