//! Pairs of ranks that do not reach each other while the first group forms. A member tells the
//! coordinator which ranks it dials in vain, long before the time is up, so that the error of
//! every rank names the pair and the address.

use std::fmt::Write as _;
use std::time::Duration;

use tokio::time::timeout;

use crate::error::TransportError;
use crate::quic::forming::bootstrap::Forming;
use crate::quic::forming::peer_connection::PeerConnection;
use crate::quic::forming::refusals::{UNREACHED_REMEDY, unreached_text};
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
        peers.retain(|peer| *peer < from && self.members.contains(peer));
        self.reports.insert(from, peers);
    }

    /// Of the coordinator: the error, with the pairs that have been reported. A rank that is gone
    /// is no pair's fault; one that gave up may be.
    pub(super) fn name_pairs(&self, control: &[PeerConnection], error: TransportError) -> TransportError {
        let lost = self.lost.map(|lost| lost.rank);
        let gave_up = lost.is_some_and(|lost| {
            let reason =
                control.iter().find(|one| one.rank == lost).and_then(|one| one.connection.close_reason());
            reason.as_ref().is_some_and(is_rejection)
        });
        let pairs = self.reports.iter().flat_map(|(&from, peers)| peers.iter().map(move |&to| (from, to)));
        let is_open = |&(from, to): &(Rank, Rank)| gave_up || (Some(from) != lost && Some(to) != lost);
        let pairs: Vec<(Rank, Rank)> = pairs.filter(is_open).collect();
        if pairs.is_empty() {
            return error;
        }
        let has_said = |&(from, to): &(Rank, Rank)| error.to_string().contains(&self.pair_text(from, to));
        let is_said = pairs.iter().all(has_said);
        let text = self.pairs_text(pairs);
        error.bootstrap_kind().error(match lost {
            None => text,
            Some(_) if is_said => return error,
            Some(_) if gave_up => format!("{text}; {error}"),
            Some(_) => format!("{error}; {text}"),
        })
    }

    /// Pairs, each with the rank that dials first, and what to do.
    pub(super) fn pairs_text(&self, pairs: Vec<(Rank, Rank)>) -> String {
        let mut text = String::new();
        for &(from, to) in pairs.iter().take(MOST_SHOWN) {
            let and = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{and}{}", self.pair_text(from, to));
        }
        match pairs.len().saturating_sub(MOST_SHOWN) {
            0 => {}
            more => {
                let _ = write!(text, " and {more} more");
            }
        }
        let config = &self.endpoint.config;
        format!(
            "{text} within {:?}: let {} through {UNREACHED_REMEDY}",
            config.connect_deadline, config.link.carrier
        )
    }

    fn pair_text(&self, from: Rank, to: Rank) -> String {
        unreached_text(from, to, self.addresses.get(&to).map_or(&[], Vec::as_slice))
    }
}

/// The text goes into the close of a connection.
const MOST_SHOWN: usize = 4;
