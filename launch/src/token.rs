//! Groups that form by a token: the invitation describes the group to rank 0, and rank 0 describes
//! it to the others.

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
        size: Some(Setting::new(invitation.size(), format!("{origin} for {} ranks", invitation.size()))),
        coordinator: Some(Setting::new(coordinator, origin)),
        ..Source::default()
    })
}

/// The settings that rank 0 sends to a rank that it enrolled.
pub(crate) fn of_enrolment(enrolled: &Enrolled, coordinator: &HostPort) -> Source {
    let Enrolled { rank, size, .. } = enrolled;
    Source {
        precedence: Precedence::Explicit,
        rank: Some(Setting::new(rank.0, format!("by its token rank {rank}"))),
        size: Some(Setting::new(*size, format!("by its token of {size} ranks"))),
        coordinator: Some(Setting::new(coordinator.clone(), "the token")),
        ..Source::default()
    }
}
