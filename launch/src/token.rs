//! Groups that come together by a token: the invitation says it to rank 0, and rank 0 to everybody else.

use std::path::Path;

use kyklos_transport::quic::{Enrolled, Invitation};

use super::source::{HostPort, Nearness, Said, Source};
use crate::failure::Result;

/// Of the one who invites.
pub(crate) fn invited(invitation: &Invitation, path: &Path) -> Result<Source> {
    let words = format!("--invite {}", path.display());
    let place = HostPort::parse(invitation.token().place(), &words)?;
    Ok(Source {
        nearness: Nearness::Given,
        rank: Some(Said::new(0, format!("{words} is rank 0's"))),
        world: Some(Said::new(invitation.world(), format!("{words} for {} ranks", invitation.world()))),
        coordinator: Some(Said::new(place, words)),
        ..Source::default()
    })
}

/// Of one who was let in.
pub(crate) fn enrolled(got: &Enrolled, place: &HostPort) -> Source {
    let Enrolled { rank, world, .. } = got;
    Source {
        nearness: Nearness::Given,
        rank: Some(Said::new(rank.0, format!("by its token rank {rank}"))),
        world: Some(Said::new(*world, format!("by its token of {world} ranks"))),
        coordinator: Some(Said::new(place.clone(), "the token")),
        ..Source::default()
    }
}
