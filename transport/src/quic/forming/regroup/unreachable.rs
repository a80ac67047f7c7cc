//! Pairs of ranks that cannot reach each other, though both reach the coordinator: it drops one
//! rank of each pair.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{AttemptError, REJECT_TIMEOUT, Regrouping};
use crate::error::{BootstrapKind, TransportError};
use crate::membership::{Claim, next_group};
use crate::quic::forming::bootstrap::Forming;
use crate::quic::forming::peer_connection::PeerConnection;
use crate::rank::Rank;
use crate::wire::{Frame, RejectCode};

/// How much longer than the members the coordinator waits, so that their reports arrive.
pub(super) const REPORT_EXTRA_WAIT: Duration = Duration::from_secs(2);

/// How long a member that has reported a pair waits for the decision of the coordinator.
const DECISION_TIMEOUT: Duration = Duration::from_secs(4);

impl Regrouping<'_> {
    /// Of the coordinator: its data connections, once every member has all of its own. If members
    /// cannot reach each other, the attempt fails, and the next one is without one rank of each
    /// such pair, if enough ranks remain of those that `came`.
    pub(super) async fn collect_mesh(
        &mut self,
        forming: &mut Forming<'_>,
        mut control: Vec<PeerConnection>,
        came: BTreeMap<Rank, Vec<Claim>>,
    ) -> Result<(Vec<PeerConnection>, Vec<PeerConnection>), AttemptError> {
        let data = forming.collect_data(Vec::new(), &control).await?;
        let (mut answered, mut pairs, mut failed) = (Vec::new(), Vec::new(), None);
        for member in &mut control {
            match unreached_peers(forming, member).await {
                Ok(peers) => {
                    answered.push(member.rank);
                    pairs.extend(peers.iter().map(|&peer| (peer.min(member.rank), peer.max(member.rank))));
                }
                Err(error) if Instant::now() < forming.deadline => return Err(error.into()),
                Err(error) => failed = Some(error),
            }
        }
        // A rank that has reported nothing may be dead: then its peers are not to blame.
        pairs.retain(|(low, high)| low != high && answered.contains(low) && answered.contains(high));
        pairs.sort_unstable();
        pairs.dedup();
        if pairs.is_empty() {
            return failed.map_or(Ok((control, data)), |error| Err(error.into()));
        }
        let drops = drops(pairs);
        let remaining = came.into_iter().filter(|(rank, _)| !drops.contains_key(rank)).collect();
        let enough = next_group(&remaining, self.everyone(), self.endpoint.config.size);
        let mut error = TransportError::bootstrap("ranks cannot reach each other");
        for member in control {
            let Some(&peer) = drops.get(&member.rank) else { continue };
            let pair = pair_text(peer, member.rank);
            match &enough {
                Ok(_) => {
                    let text = format!(
                        "{pair}: the group continues without rank {}: repair the link and restart the rank",
                        member.rank
                    );
                    error = TransportError::bootstrap(text.clone());
                    (self.endpoint.config.warn)(&text, BootstrapKind::Other);
                    self.dropped.insert(member.rank);
                    tokio::spawn(dismiss(member, text));
                }
                Err(text) => {
                    error = TransportError::bootstrap(format!(
                        "{pair}, and without rank {} the group cannot continue: {text}",
                        member.rank
                    ));
                }
            }
        }
        Err(error.into())
    }
}

/// Of a member: reports the peers that it could not reach, and waits for the decision of the
/// coordinator.
pub(super) async fn report_unreached(
    unreached: &[Rank],
    mut control: PeerConnection,
    error: TransportError,
) -> AttemptError {
    if unreached.is_empty() {
        return AttemptError::Retry(error);
    }
    let report = Frame::Unreached { peers: unreached.to_vec() }.encode();
    let decision = timeout(DECISION_TIMEOUT, async {
        control.send.write_all(&report).await.ok()?;
        // It is the last one.
        control.send.finish().ok()?;
        control.frames.next().await.ok()?
    });
    match decision.await {
        Ok(Some(Frame::Reject { code: RejectCode::Gone, text })) => {
            AttemptError::Fatal(TransportError::bootstrap(text))
        }
        _ => AttemptError::Retry(error),
    }
}

/// The peers that a member reports; none if it is ready.
async fn unreached_peers(
    forming: &mut Forming<'_>,
    member: &mut PeerConnection,
) -> Result<Vec<Rank>, TransportError> {
    let mut peers = Vec::new();
    loop {
        match forming.next_frame(member).await {
            Ok(Frame::Meshed) => return Ok(Vec::new()),
            Ok(Frame::Unreached { peers: said })
                if said.iter().all(|peer| forming.members.contains(peer)) =>
            {
                peers = said;
            }
            Ok(other) => {
                let text = format!("rank {} sent {other:?} instead of its connections", member.rank);
                return Err(TransportError::bootstrap(text));
            }
            Err(_) if !peers.is_empty() && member.connection.close_reason().is_none() => return Ok(peers),
            Err(error) => return Err(error),
        }
    }
}

/// The ranks to drop, each with a peer that it cannot reach: first the rank in most pairs, of
/// several the highest.
fn drops(mut pairs: Vec<(Rank, Rank)>) -> BTreeMap<Rank, Rank> {
    let mut drops = BTreeMap::new();
    while !pairs.is_empty() {
        let mut counts: BTreeMap<Rank, usize> = BTreeMap::new();
        for &(low, high) in &pairs {
            *counts.entry(low).or_default() += 1;
            *counts.entry(high).or_default() += 1;
        }
        let Some((_, dropped)) = counts.into_iter().map(|(rank, count)| (count, rank)).max() else { break };
        pairs.retain(|&(low, high)| {
            let peer = if dropped == low { high } else { low };
            let is_in = dropped == low || dropped == high;
            if is_in {
                drops.entry(dropped).or_insert(peer);
            }
            !is_in
        });
    }
    drops
}

fn pair_text(peer: Rank, rank: Rank) -> String {
    let (low, high) = (peer.min(rank), peer.max(rank));
    format!("rank {low} and rank {high} cannot reach each other")
}

/// Tells a rank that it is not in the next group.
pub(super) async fn dismiss(mut rank: PeerConnection, text: String) {
    let gone = Frame::Reject { code: RejectCode::Gone, text }.encode();
    if rank.send.write_all(&gone).await.is_ok() && rank.send.finish().is_ok() {
        let _ = timeout(REJECT_TIMEOUT, rank.send.stopped()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_of_every_pair_is_dropped_and_as_few_as_possible() {
        let of = |pairs: &[(u32, u32)]| {
            let drops = drops(pairs.iter().map(|&(low, high)| (Rank(low), Rank(high))).collect());
            drops.into_iter().map(|(rank, peer)| (rank.0, peer.0)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[(1, 2)]), [(2, 1)]);
        assert_eq!(of(&[(1, 2), (1, 3), (1, 4)]), [(1, 2)]);
        assert_eq!(of(&[(1, 2), (3, 4)]), [(2, 1), (4, 3)]);
        assert_eq!(of(&[(1, 2), (2, 3)]), [(2, 1)]);
    }
}
