//! Groups that form by a token: the invitation describes the group to rank 0, and rank 0 describes it to the others.

use std::path::Path;

use kyklos_transport::quic::{Enrolled, Invitation};

use crate::address::HostPort;
use crate::error::Result;
use crate::source::{Precedence, Setting, Source};

/// The contents of rank 0's invitation.
pub(crate) fn of_invitation(invitation: &Invitation, path: &Path) -> Result<Source> {
    let origin = format!("invitation {}", path.display());
    let coordinator = HostPort::parse(invitation.token().place(), &origin)?;
    Ok(Source {
        precedence: Precedence::Explicit,
        rank: Some(Setting::new(0, format!("{origin} is rank 0's"))),
        world: Some(Setting::new(invitation.world(), format!("{origin} for {} ranks", invitation.world()))),
        coordinator: Some(Setting::new(coordinator, origin)),
        ..Source::default()
    })
}

/// The settings that rank 0 sends to a rank that it enrolled.
pub(crate) fn of_enrolment(enrolled: &Enrolled, coordinator: &HostPort) -> Source {
    let Enrolled { rank, world, .. } = enrolled;
    Source {
        precedence: Precedence::Explicit,
        rank: Some(Setting::new(rank.0, format!("by its token rank {rank}"))),
        world: Some(Setting::new(*world, format!("by its token of {world} ranks"))),
        coordinator: Some(Setting::new(coordinator.clone(), "the token")),
        ..Source::default()
    }
}
