//! A rank that enrols with a token, without the network: its request, and the check of the answer.

use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::binding::BINDING_BYTES;
use super::token::Token;
use crate::quic::trust::identity::Identity;
use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::names::Subject;
use crate::rank::{MAX_RANKS, Rank};
use crate::wire::Frame;

/// The identity that a rank has got.
#[derive(Clone, Debug)]
pub struct Enrolled {
    /// Its identity, with a key that was made here.
    pub identity: Identity,
    /// Which rank it is.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
}

/// An applicant has made its own private key, which stays here.
#[derive(Debug)]
pub(super) struct Applicant {
    token: Token,
    asked: Option<Rank>,
    key: KeyPair,
    request: Vec<u8>,
}

impl Applicant {
    /// An applicant for this rank, or for any.
    pub(super) fn new(token: Token, asked: Option<Rank>) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        // Rank 0 decides which names it gets.
        let request = CertificateParams::default().serialize_request(&key)?.der().to_vec();
        Ok(Self { token, asked, key, request })
    }

    /// The request to which the proof is bound, besides the connection.
    pub(super) fn words(&self) -> (Option<Rank>, &[u8]) {
        (self.asked, &self.request)
    }

    /// The request on the connection with this `binding`.
    pub(super) fn apply(&self, binding: &[u8; BINDING_BYTES]) -> Frame {
        let proof = self.token.secret.prove(binding);
        Frame::Apply { rank: self.asked, request: self.request.clone(), proof }
    }

    /// Checks the rank and certificate given by a peer that showed this `chain`.
    pub(super) fn accept(
        &self,
        chain: &[CertificateDer<'_>],
        (rank, size): (Rank, u32),
        certificate: Vec<u8>,
    ) -> Result<Enrolled, String> {
        let is_pinned = |certificate: &&CertificateDer<'_>| {
            KeyHash::of(certificate).is_ok_and(|hash| hash == self.token.authority)
        };
        let authority =
            chain.iter().find(is_pinned).ok_or("it did not show the certificate of its authority")?;
        let certificate = CertificateDer::from(certificate);
        let (_, parsed) =
            X509Certificate::from_der(&certificate).map_err(|_| "its certificate cannot be read")?;
        if parsed.public_key().subject_public_key.data.as_ref() != self.key.public_key_raw() {
            return Err("the certificate that it gave is of another key".into());
        }
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.serialize_der()));
        let identity = Identity { authorities: vec![authority.clone().into_owned()], certificate, key };
        let claims = identity.claims().map_err(|error| error.to_string())?;
        let fits = (2..=MAX_RANKS).contains(&size)
            && (1..size).contains(&rank.0)
            && self.asked.is_none_or(|asked| asked == rank);
        if claims.subject != Subject::Rank(rank) || !fits {
            return Err(format!("it gave rank {rank} of {size} with the certificate of {claims}"));
        }
        Ok(Enrolled { identity, rank, size })
    }
}
