//! Verifies rank 0 by the hash of its authority's key. The token contains nothing else about rank
//! 0.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::names::{Claims, Subject, rank_name};
use crate::quic::trust::verifier::out_of_date;
use crate::rank::Rank;

/// Accepts only rank 0 of the authority with this key: another member must not collect proofs.
#[derive(Debug)]
pub(super) struct PinnedVerifier {
    pub(super) authority: KeyHash,
    pub(super) provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let is_pinned = |certificate: &&CertificateDer<'_>| {
            KeyHash::of(certificate).is_ok_and(|hash| hash == self.authority)
        };
        let authority = intermediates.iter().find(is_pinned).ok_or_else(|| refused(OF_ANOTHER))?;
        let claims = Claims::of(certificate).map_err(|error| refused(error.to_string()))?;
        if claims.subject != Subject::Rank(Rank(0)) {
            return Err(refused(format!("the peer is {claims}, and only rank 0 gives identities")));
        }
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider));
        let verifier = verifier.build().map_err(|error| refused(error.to_string()))?;
        // The token does not name its job; the authority has only one job.
        let name = ServerName::try_from(rank_name(Rank(0), claims.job))
            .map_err(|error| refused(error.to_string()))?;
        verifier.verify_server_cert(certificate, &[], &name, ocsp_response, now).map_err(
            |error| match error {
                Error::InvalidCertificate(
                    CertificateError::UnknownIssuer | CertificateError::BadSignature,
                ) => refused(OF_ANOTHER),
                error => match claims.out_of_date() {
                    Some((text, kind)) => out_of_date(text, kind),
                    None => refused(error.to_string()),
                },
            },
        )
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn refused(text: impl Into<String>) -> Error {
    Error::General(text.into())
}

/// What the verifier says of an authority that is not the token's.
pub(super) const OF_ANOTHER: &str = "the peer is not of the authority that the token names: was rank 0 started with the invitation of \
                          this token?";
