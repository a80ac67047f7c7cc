//! The knowledge of a rank whose group has lost a rank.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::peer_connection::PeerConnection;
use crate::membership::Claim;
use crate::quic::network::connection::{is_rejection, is_silence};
use crate::rank::Rank;

/// The state of a rank's last group when it forms the next one. Ranks have their numbers of the
/// first group.
#[derive(Debug)]
pub(crate) struct PriorGroup {
    /// Empty if it was started anew.
    pub(crate) claims: Vec<Claim>,
    /// The last known addresses of the other ranks.
    pub(crate) addresses: BTreeMap<Rank, Vec<SocketAddr>>,
    /// A rank that is known to be gone.
    pub(crate) lost: Option<Rank>,
}

/// A rank that was lost while a group formed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostRank {
    pub(crate) rank: Rank,
    /// No packet comes from it any more; otherwise it has closed its connection.
    pub(crate) is_silent: bool,
}

impl LostRank {
    /// The peer of a connection that has ended; `None` if it is a coordinator that has given up,
    /// with a reason.
    pub(crate) fn of(joined: &PeerConnection) -> Option<Self> {
        let reason = joined.connection.close_reason();
        let has_given_up = joined.rank == Rank::COORDINATOR && reason.as_ref().is_some_and(is_rejection);
        let is_silent = reason.as_ref().is_none_or(is_silence);
        (!has_given_up).then_some(Self { rank: joined.rank, is_silent })
    }
}
