//! Refusal of an operation by one rank for all.

use std::time::Duration;

use kyklos_transport::{RefusalReason, Transport, TransportError, Vote};

use crate::failure::Failure;

/// Refuses the operation on all ranks. Returns the failure that all ranks report.
pub(crate) fn refuse(transport: &dyn Transport, failure: Failure) -> Failure {
    let vote = Vote::Refuse { reason: RefusalReason::from_code(failure.exit), text: failure.text.clone() };
    match pollster::block_on(transport.agree(vote, REFUSE)) {
        Err(refused @ TransportError::Refused { .. }) => refused.into(),
        // The vote failed too: this rank still knows its own reason.
        _ => failure,
    }
}

/// How long a vote waits for the votes of the others, which may still read their inputs.
pub(crate) const REFUSE: Duration = Duration::from_secs(600);
