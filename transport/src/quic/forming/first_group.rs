//! The first group that a rank enters, also when a rank is lost while it forms.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::bootstrap::{FormError, form};
use super::config::{Awaited, QuicConfig};
use super::endpoint::{DialPurpose, RankEndpoint};
use super::other_carrier;
use super::regroup::{self, NextGroup};
use crate::error::TransportError;
use crate::rank::Rank;
use crate::transport::Regroup;

/// The group that a rank enters first. If a rank is lost while it forms, that is the next one, with
/// `who`.
pub(crate) async fn first_group(
    endpoint: &Arc<RankEndpoint>,
    who: Option<Regroup>,
) -> Result<NextGroup, TransportError> {
    endpoint.admission.open_enrolment();
    endpoint.listen();
    let is_simulated = endpoint.is_simulated;
    let formed = tokio::select! {
        biased;
        formed = form_or_regroup(endpoint, who) => formed,
        never = endpoint.warn_of_refusal() => match never {},
        never = other_carrier::refuse_all(endpoint), if !is_simulated => match never {},
    };
    if let Err(error) = &formed {
        endpoint.part(error).await;
    }
    endpoint.admission.close_enrolment();
    formed
}

async fn form_or_regroup(
    endpoint: &Arc<RankEndpoint>,
    who: Option<Regroup>,
) -> Result<NextGroup, TransportError> {
    let QuicConfig { rank, epoch, size, connect_deadline, note, waits, .. } = endpoint.config;
    // Rank 0 knows which ranks are missing.
    if rank != Rank::COORDINATOR {
        waits(Awaited::Ranks(&[Rank::COORDINATOR]));
    }
    let (error, prior) = match form(endpoint).await {
        Ok(mesh) => {
            waits(Awaited::Nothing);
            return Ok(NextGroup { epoch, members: (0..size).map(Rank).collect(), mesh });
        }
        Err(FormError::Failed(error)) => return Err(error),
        Err(FormError::Lost { error, prior }) => (error, prior),
    };
    let Some(who) = who else { return Err(error) };
    note(&format!("rank {}: {error}; the ranks form the next group", endpoint.config.rank));
    regroup::regroup(endpoint, prior, who, Instant::now() + connect_deadline).await.map_err(|next| match next
    {
        TransportError::Bootstrap { text, kind } => kind.error(format!("{error}; {text}")),
        other => other,
    })
}

/// Shows an identity that does not fit to rank 0, so that rank 0 can report why this rank is
/// missing. Best effort.
pub(crate) async fn report_bad_identity(endpoint: &RankEndpoint) {
    let config = &endpoint.config;
    if config.rank == Rank::COORDINATOR {
        return;
    }
    let deadline = Instant::now() + config.connect_deadline.min(BAD_IDENTITY_TIMEOUT);
    let (coordinator, dial_purpose) = (config.coordinator_candidates(), DialPurpose::control(config.epoch));
    let _ =
        endpoint.dial_until_answered(Rank::COORDINATOR, &coordinator, dial_purpose, deadline, || {}).await;
    endpoint.part(&TransportError::bootstrap("its identity does not fit")).await;
}

/// How long a rank with a bad identity tries to reach rank 0.
const BAD_IDENTITY_TIMEOUT: Duration = Duration::from_secs(4);
