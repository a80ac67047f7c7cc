//! The side of rank 0: gives identities to ranks with a token, while its group is not complete.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use quinn::Connection;
use quinn::crypto::rustls::QuicServerConfig;
use tokio::time::{Instant, timeout};

use super::binding::binding;
use super::invitation::Invitation;
use super::register::{EnrolRefusal, EnrolRequest, Granted, Register, revoked_text};
use crate::error::TransportError;
use crate::quic::network::connection::{CLOSE_TIMEOUT, describe};
use crate::quic::network::frames::FrameReader;
use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::presented::PresentedIdentity;
use crate::quic::trust::revoked::Revoked;
use crate::quic::trust::tls;
use crate::rank::Rank;
use crate::wire::{Frame, RejectCode};

/// Open from the start of the group's forming until it is complete.
pub(crate) struct EnrolServer {
    invitation: Arc<Invitation>,
    tls: Arc<QuicServerConfig>,
    register: Mutex<Option<Register>>,
    revoked: Option<Revoked>,
}

impl std::fmt::Debug for EnrolServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnrolServer").field("invitation", &self.invitation).finish_non_exhaustive()
    }
}

impl EnrolServer {
    /// A closed server: it gives no identities before [`Self::open`].
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the keys that it gives cannot be noted.
    pub(crate) fn new(
        invitation: Arc<Invitation>,
        identity: &PresentedIdentity,
        revoked: Option<&Revoked>,
    ) -> Result<Self, TransportError> {
        let tls = Arc::new(tls::inviting_server(identity, revoked)?);
        invitation.given().check()?;
        Ok(Self { invitation, tls, register: Mutex::new(None), revoked: revoked.cloned() })
    }

    pub(crate) fn open(&self) {
        *self.lock() = Some(Register::new(Arc::clone(&self.invitation), self.revoked.clone()));
    }

    /// Why this server gives no identities, if a key that its token gave has been revoked.
    pub(crate) fn complaint(&self) -> Option<String> {
        self.invitation.revoked_key(self.revoked.as_ref()).map(revoked_text)
    }

    pub(crate) fn close(&self) {
        *self.lock() = None;
    }

    /// What the endpoint runs while enrolment is open: a handshake without a certificate, which is
    /// enough for nothing else.
    pub(crate) fn tls(&self) -> Option<Arc<QuicServerConfig>> {
        self.lock().is_some().then(|| Arc::clone(&self.tls))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Register>> {
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers one applicant.
    ///
    /// # Errors
    ///
    /// Why it got no identity; the applicant has been told, if it could be reached.
    pub(crate) async fn serve(&self, connection: &Connection) -> Result<(Rank, KeyHash), EnrolRefusal> {
        let ended = |error| (RejectCode::Protocol, describe(&error));
        let (mut send, recv) = connection.accept_bi().await.map_err(ended)?;
        let answer = match FrameReader::new(recv).next().await {
            Ok(Some(Frame::Apply { rank, request, proof })) => {
                self.answer(connection, rank, &request, &proof)
            }
            Ok(_) => Err((RejectCode::Protocol, "the first frame was no application".into())),
            Err(error) => Err((RejectCode::Protocol, error.to_string())),
        };
        let (frame, result) = match answer {
            Ok(Granted { rank, key, frame }) => (frame, Ok((rank, key))),
            Err((code, text)) => (Frame::Reject { code, text: text.clone() }, Err((code, text))),
        };
        if send.write_all(&frame.encode()).await.is_ok() && send.finish().is_ok() {
            // A rank that has its answer closes the connection; a close from here might overtake the answer.
            let _ = timeout(CLOSE_TIMEOUT, connection.closed()).await;
        }
        result
    }

    fn answer(
        &self,
        connection: &Connection,
        asked: Option<Rank>,
        request: &[u8],
        proof: &[u8; 32],
    ) -> Result<Granted, EnrolRefusal> {
        let binding = binding(connection, asked, request);
        let binding = binding.ok_or((RejectCode::Protocol, "TLS has no keying material".to_owned()))?;
        let from = connection.remote_address().ip();
        let visit = EnrolRequest { from, binding, now: Instant::now(), date: SystemTime::now() };
        match &mut *self.lock() {
            Some(register) => register.answer(asked, request, proof, &visit),
            None => Err((RejectCode::Gone, "the group is complete".into())),
        }
    }
}
