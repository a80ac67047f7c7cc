//! Which applicant gets which rank. It has no network and no clock: it gets addresses and times as
//! arguments.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use rcgen::{CertificateSigningRequestParams, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use rustls::pki_types::CertificateSigningRequestDer;
use tokio::time::Instant;

use super::binding::BINDING_BYTES;
use super::invitation::Invitation;
use super::wrong_tokens::WrongTokens;
use crate::error::{BootstrapKind, TransportError};
use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::names::Subject;
use crate::quic::trust::revoked::Revoked;
use crate::quic::trust::validity::Date;
use crate::rank::Rank;
use crate::wire::{Frame, RejectCode};

/// The ranks that rank 0 has given away.
#[derive(Debug)]
pub(super) struct Register {
    invitation: Arc<Invitation>,
    revoked: Option<Revoked>,
    /// By rank, the key to which it was given.
    given: BTreeMap<Rank, Vec<u8>>,
    wrong_tokens: WrongTokens,
}

/// The connection and the time of a request for a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct EnrolRequest {
    /// The address of the applicant.
    pub(super) from: IpAddr,
    /// Keying material of the connection, for this request.
    pub(super) binding: [u8; BINDING_BYTES],
    pub(super) now: Instant,
    pub(super) date: SystemTime,
}

/// A rank that is given away, with the answer to send.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) rank: Rank,
    pub(super) key: KeyHash,
    pub(super) frame: Frame,
}

/// Why a request is refused.
pub(crate) type EnrolRefusal = (RejectCode, String);

/// What kind of refusal rank 0 answers to an application, by its code.
pub(crate) fn kind_of_reject(code: RejectCode) -> BootstrapKind {
    match code {
        RejectCode::Token => BootstrapKind::Token,
        RejectCode::Duplicate => BootstrapKind::GivenAway,
        _ => BootstrapKind::Other,
    }
}

impl Register {
    pub(super) fn new(invitation: Arc<Invitation>, revoked: Option<Revoked>) -> Self {
        Self { invitation, revoked, given: BTreeMap::new(), wrong_tokens: WrongTokens::default() }
    }

    /// The answer to a request for a rank, or for any rank, and for a certificate of the
    /// applicant's key.
    ///
    /// A second request with the same key gets the same rank again: the first answer may have been
    /// lost.
    ///
    /// # Errors
    ///
    /// Why it is refused. A peer that does not know the secret learns no more than that.
    pub(super) fn answer(
        &mut self,
        asked: Option<Rank>,
        request: &[u8],
        proof: &[u8; BINDING_BYTES],
        visit: &EnrolRequest,
    ) -> Result<Granted, EnrolRefusal> {
        if !self.wrong_tokens.may(visit.from, visit.now) {
            let text = format!(
                "too many wrong tokens came from {}: try again in a second",
                visit.from.to_canonical()
            );
            return Err((RejectCode::Busy, text));
        }
        let token = self.invitation.token();
        if !token.secret.is_proven(&visit.binding, proof) {
            self.wrong_tokens.wrong(visit.from, visit.now);
            let text = "its token has another secret than this rank 0's: copy the whole token, and use the token of the \
                        invitation with which rank 0 was started";
            return Err((RejectCode::Token, text.to_owned()));
        }
        if visit.date > self.invitation.until() {
            return Err((
                RejectCode::Token,
                format!(
                    "its token has expired on {} (the clock of rank 0 says {}): make a new invitation",
                    Date(self.invitation.until()),
                    Date(visit.date)
                ),
            ));
        }
        // Whoever had the revoked key has the token, and cannot be told from its other holders.
        if let Some(key) = self.invitation.revoked_key(self.revoked.as_ref()) {
            return Err((RejectCode::Token, revoked_text(key)));
        }
        let request = CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request));
        let key = request.ok().map(|request| request.public_key);
        let key = key.filter(|key| *key.algorithm() == PKCS_ECDSA_P256_SHA256).ok_or_else(|| {
            (
                RejectCode::Protocol,
                "it asked for something else than the signature of an ECDSA P-256 key".to_owned(),
            )
        })?;
        let rank = self.choose(asked, key.der_bytes())?;
        let validity = self.invitation.validity_from_now();
        let signed = self.invitation.authority.certify(&Subject::Rank(rank), validity, &key);
        let in_words = |error: TransportError| (RejectCode::Protocol, error.to_string());
        let certificate = signed.map_err(in_words)?;
        let hash = KeyHash::of(&certificate).map_err(in_words)?;
        self.invitation.given().note(rank, hash).map_err(in_words)?;
        self.given.insert(rank, key.der_bytes().to_vec());
        let size = self.invitation.size();
        Ok(Granted { rank, key: hash, frame: Frame::Grant { rank, size, certificate: certificate.to_vec() } })
    }

    fn choose(&self, asked: Option<Rank>, key: &[u8]) -> Result<Rank, EnrolRefusal> {
        let size = self.invitation.size();
        let refuse = |code, text: String| Err((code, text));
        if let Some((rank, _)) = self.given.iter().find(|(_, given)| *given == key)
            && asked.is_none_or(|asked| asked == *rank)
        {
            return Ok(*rank);
        }
        match asked {
            None => (1..size).map(Rank).find(|rank| !self.given.contains_key(rank)).map_or_else(
                || {
                    let text = format!(
                        "its token is used up, ranks 1 to {} have been given away: invite for more ranks; if a rank has been \
                         given to this one before, start that rank again with the identity that it got",
                        size - 1
                    );
                    refuse(RejectCode::Duplicate, text)
                },
                Ok,
            ),
            Some(Rank(0)) => refuse(
                RejectCode::Rank,
                format!("rank 0 has the invitation itself: ask for a rank from 1 to {}, or for any rank", size - 1),
            ),
            Some(rank) if rank.0 >= size => refuse(
                RejectCode::Rank,
                format!("it asked for rank {rank}, the invitation is for {size} ranks: ask for 1 to {}", size - 1),
            ),
            Some(rank) if self.given.contains_key(&rank) => refuse(
                RejectCode::Duplicate,
                format!(
                    "rank {rank} has been given to another one: ask for none and get one that is free, or start that rank \
                     again with the identity that it got"
                ),
            ),
            Some(rank) => Ok(rank),
        }
    }
}

/// Why a token lets nobody in any more.
pub(super) fn revoked_text(key: KeyHash) -> String {
    format!("its token gave the key {key}, which has been revoked: make a new invitation")
}
