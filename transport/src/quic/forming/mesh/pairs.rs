//! Pairs of ranks that do not reach each other while the first group forms. A member tells the
//! coordinator which ranks it dials in vain, long before the time is up, so that the error of
//! every rank names the pair and the address.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::error::TransportError;
use crate::quic::forming::bootstrap::Forming;
use crate::quic::forming::peer_connection::PeerConnection;
use crate::quic::forming::refusals::{UNREACHED_REMEDY, at_text, unreached_text};
use crate::quic::network::connection::is_rejection;
use crate::rank::Rank;
use crate::wire::Frame;

impl Forming<'_> {
    /// Of the coordinator: the member has all its connections. Until then it may report.
    pub(super) async fn expect_meshed(&mut self, member: &mut PeerConnection) -> Result<(), TransportError> {
        loop {
            match self.next_frame(member).await? {
                Frame::Meshed => {
                    self.reports.remove(&member.rank);
                    return Ok(());
                }
                Frame::Unreached { peers } => self.note_report(member.rank, peers),
                other => {
                    let text = format!("rank {} sent {other:?} instead of {:?}", member.rank, Frame::Meshed);
                    return Err(TransportError::bootstrap(text));
                }
            }
        }
    }

    /// Of the coordinator: takes the reports that have arrived.
    pub(super) async fn hear_reports(&mut self, control: &mut [PeerConnection]) {
        for member in control {
            // A member has a report for each of its peers, and takes back each of them, at the most.
            for _ in 0..2 * self.members.len() {
                match timeout(Duration::ZERO, member.frames.next()).await {
                    Ok(Ok(Some(Frame::Unreached { peers }))) => self.note_report(member.rank, peers),
                    Ok(Ok(Some(Frame::Meshed))) => drop(self.reports.remove(&member.rank)),
                    _ => break,
                }
            }
        }
    }

    /// A member dials lower members only.
    fn note_report(&mut self, from: Rank, mut peers: Vec<Rank>) {
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|peer| *peer < from && self.members.contains(peer));
        self.reports.insert(from, peers);
    }

    /// Of the coordinator: the error, with the pairs that have been reported. They are the cause if
    /// the time is up; before that, the error is. A rank that is gone is no pair's fault; one that
    /// gave up may be.
    pub(super) fn name_pairs(&self, control: &[PeerConnection], error: TransportError) -> TransportError {
        let reason =
            |rank| control.iter().find(|one| one.rank == rank).and_then(|one| one.connection.close_reason());
        let gave_up = |rank| reason(rank).as_ref().is_some_and(is_rejection);
        let lost = self.lost.map(|lost| lost.rank);
        let is_gone = |rank| !gave_up(rank) && (lost == Some(rank) || reason(rank).is_some());
        let is_late = Instant::now() >= self.deadline;
        let mut reports = self.reports.clone();
        for &from in &self.unreached {
            reports.entry(from).or_default().push(self.endpoint.config.rank);
        }
        let mut pairs = in_turn(&reports);
        pairs.retain(|&(from, to)| !is_gone(from) && !is_gone(to));
        let said = error.to_string();
        if pairs.iter().all(|&(from, to)| said.contains(&self.pair_text(from, to))) {
            return error;
        }
        match lost {
            None if is_late => {
                let (refusals, kind) = self.endpoint.admission.refusals();
                kind.error(self.pairs_text(&pairs) + &refusals)
            }
            Some(rank) if is_late && gave_up(rank) => {
                error.bootstrap_kind().error(format!("{}; {error}", self.pairs_text(&pairs)))
            }
            _ => {
                let silent = shown(&pairs, |from, to| {
                    format!(
                        "rank {from} has had no answer from rank {to}{} yet",
                        at_text(self.addresses_of(to))
                    )
                });
                error.bootstrap_kind().error(format!("{error}; {silent}"))
            }
        }
    }

    /// Pairs that have not met until the deadline, each with the rank that dials first, and what to
    /// do.
    pub(super) fn pairs_text(&self, pairs: &[(Rank, Rank)]) -> String {
        let config = &self.endpoint.config;
        format!(
            "{} within {:?}: let {} through {UNREACHED_REMEDY}",
            shown(pairs, |from, to| self.pair_text(from, to)),
            config.connect_deadline,
            config.link.carrier
        )
    }

    fn pair_text(&self, from: Rank, to: Rank) -> String {
        unreached_text(from, to, self.addresses_of(to), self.endpoint.lane_endpoints.len())
    }

    fn addresses_of(&self, rank: Rank) -> &[SocketAddr] {
        self.addresses.get(&rank).map_or(&[], Vec::as_slice)
    }
}

/// The pairs of each member in turn: no member can hide the pairs of the others.
fn in_turn(reports: &BTreeMap<Rank, Vec<Rank>>) -> Vec<(Rank, Rank)> {
    let of_one = |(&from, peers): (&Rank, &Vec<Rank>)| -> Vec<_> {
        peers.iter().enumerate().map(|(turn, &to)| (turn, from, to)).collect()
    };
    let mut pairs: Vec<_> = reports.iter().flat_map(of_one).collect();
    pairs.sort_unstable();
    pairs.into_iter().map(|(_, from, to)| (from, to)).collect()
}

/// The texts of the first pairs, and how many more there are.
fn shown(pairs: &[(Rank, Rank)], text_of: impl Fn(Rank, Rank) -> String) -> String {
    let (mut text, mut count) = (String::new(), 0);
    for &(from, to) in pairs.iter().take(MOST_SHOWN) {
        let next = text_of(from, to);
        if count > 0 && text.len() + next.len() > MOST_BYTES {
            break;
        }
        let and = if count > 0 { ", " } else { "" };
        let _ = write!(text, "{and}{next}");
        count += 1;
    }
    match pairs.len() - count {
        0 => {}
        more => {
            let _ = write!(text, " and {more} more");
        }
    }
    text
}

/// The text goes into the close of a connection, with what to do behind the pairs.
const MOST_SHOWN: usize = 4;
const MOST_BYTES: usize = 400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_has_a_pair_before_any_has_two() {
        let of = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect::<Vec<_>>();
        let reports = [(Rank(5), of(&[0, 1, 2, 3, 4])), (Rank(6), of(&[2])), (Rank(7), of(&[2, 3]))];
        let pairs = in_turn(&BTreeMap::from(reports));
        let of_first: Vec<_> = pairs.iter().map(|(from, to)| (from.0, to.0)).take(5).collect();
        assert_eq!(of_first, [(5, 0), (6, 2), (7, 2), (5, 1), (7, 3)]);
    }

    #[test]
    fn the_pairs_leave_room_in_the_reason_of_a_close_for_what_to_do() {
        let pairs: Vec<_> = (1..9).map(|rank| (Rank(1000 + rank), Rank(rank))).collect();
        let long: SocketAddr = "[fd00:1111:2222:3333:4444:5555:6666:7777]:29600".parse().unwrap();
        let text = shown(&pairs, |from, to| unreached_text(from, to, &[long; 9], 2));
        assert!(text.len() < MOST_BYTES + 20, "{text}");
        assert!(text.starts_with("rank 1001 did not reach at least one lane of rank 1 at [fd00:"), "{text}");
        assert!(text.contains(":29600 and 7 more"), "{text}");
        assert!(text.ends_with(" more"), "{text}");
        assert_eq!(shown(&pairs[..1], |from, to| format!("{from} {to}")), "1001 1");
    }
}
