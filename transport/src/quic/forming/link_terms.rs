//! The settings of the links on which the ranks of a group must agree: a rank with other times
//! would take a healthy one for dead, or a dead one for healthy.

use std::time::Duration;

use super::config::QuicConfig;
use crate::quic::network::timing::LinkProfile;
use crate::rank::Rank;

/// What a rank says of itself when it lets another one in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkTerms {
    pub(crate) lanes: usize,
    pub(crate) heartbeat_us: u32,
    /// [`LinkProfile::Wan`].
    pub(crate) wan: bool,
}

impl LinkTerms {
    pub(crate) fn of(config: &QuicConfig) -> Self {
        Self {
            lanes: usize::from(config.link.lanes),
            heartbeat_us: u32::try_from(config.timing().heartbeat.as_micros()).unwrap_or(u32::MAX),
            wan: config.link.profile == LinkProfile::Wan,
        }
    }

    /// What differs between these terms of rank `theirs` and those of rank `ours`, with both sides.
    pub(crate) fn difference(&self, theirs: Rank, other: &Self, ours: Rank) -> Option<String> {
        let link = |terms: &Self| if terms.wan { LinkProfile::Wan } else { LinkProfile::Lan };
        let heartbeat = |terms: &Self| Duration::from_micros(terms.heartbeat_us.into());
        if self.lanes != other.lanes {
            let (lanes, others) = (self.lanes, other.lanes);
            return Some(format!(
                "rank {theirs} has {lanes} lanes to every other rank, rank {ours} has {others}: say the same number on all \
                 ranks"
            ));
        }
        // Before the heartbeat, whose default follows from it.
        if self.wan != other.wan {
            return Some(format!(
                "rank {theirs} has the times of link {}, rank {ours} those of link {}: say the same link on all ranks",
                link(self),
                link(other)
            ));
        }
        (self.heartbeat_us != other.heartbeat_us).then(|| {
            format!(
                "rank {theirs} has a heartbeat of {:?}, rank {ours} of {:?}: say the same heartbeat on all ranks",
                heartbeat(self),
                heartbeat(other)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named_with_both_sides_and_the_cause_before_its_effect() {
        let lan = LinkTerms { lanes: 1, heartbeat_us: 200_000, wan: false };
        let wan = LinkTerms { heartbeat_us: 500_000, wan: true, ..lan };
        let difference = |one: &LinkTerms, other: &LinkTerms| one.difference(Rank(0), other, Rank(1));
        assert_eq!(difference(&lan, &lan), None);
        let text = difference(&wan, &lan).unwrap();
        assert!(text.contains("rank 0 has the times of link wan, rank 1 those of link lan"), "{text}");
        let text = difference(&lan, &LinkTerms { heartbeat_us: 1_000_000, ..lan }).unwrap();
        assert!(text.contains("rank 0 has a heartbeat of 200ms, rank 1 of 1s"), "{text}");
        let text = difference(&LinkTerms { lanes: 2, ..lan }, &wan).unwrap();
        assert!(text.contains("rank 0 has 2 lanes to every other rank, rank 1 has 1"), "{text}");
        // A heartbeat that is said may be that of the other kind of link.
        assert_eq!(difference(&LinkTerms { wan: false, ..wan }, &LinkTerms { wan: false, ..wan }), None);
    }
}
