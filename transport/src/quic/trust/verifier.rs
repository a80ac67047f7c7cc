//! Certificate verification with refusals that both sides can read: the certificate, the reason,
//! and its validity.
//!
//! All decisions but one (the list of revoked keys) are webpki's; its texts are replaced. A refusal
//! travels to the refused side as the reason of the connection's end.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};

use super::identity::Identity;
use super::names::Claims;
use super::provider::cannot_set_up;
use super::revoked::Revoked;
use crate::error::{BootstrapKind, TransportError};

/// Verifies the certificate of a rank that this rank dials.
#[derive(Debug)]
pub(crate) struct ServerVerifier {
    inner: Arc<WebPkiServerVerifier>,
    own: OwnIdentity,
}

/// The identity of this rank, for the text of refusals, and its list of revoked keys.
#[derive(Debug)]
struct OwnIdentity {
    claims: Claims,
    trusted: String,
    revoked: Option<Revoked>,
}

impl OwnIdentity {
    fn of(identity: &Identity, revoked: Option<&Revoked>) -> Result<Self, TransportError> {
        let revoked = revoked.cloned();
        Ok(Self { claims: identity.claims()?, trusted: identity.authorities().join(" and "), revoked })
    }

    /// Refuses a verified certificate whose key is revoked.
    fn check_not_revoked(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        if !self.revoked.as_ref().is_some_and(|revoked| revoked.has(certificate)) {
            return Ok(());
        }
        let whose =
            Claims::of(certificate).map_or_else(|_| "somebody".to_owned(), |claims| claims.to_string());
        Err(Error::General(format!(
            "the certificate of {whose} has been revoked, by the list of {}: issue a new certificate",
            self.claims
        )))
    }
}

/// Verifies the certificate of a rank that dials this rank.
#[derive(Debug)]
pub(crate) struct ClientVerifier {
    inner: Arc<dyn ClientCertVerifier>,
    mandatory: bool,
    own: OwnIdentity,
}

impl ServerVerifier {
    pub(crate) fn new(
        identity: &Identity,
        revoked: Option<&Revoked>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, TransportError> {
        let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(identity)?), provider)
            .build()
            .map_err(cannot_set_up)?;
        Ok(Self { inner, own: OwnIdentity::of(identity, revoked)? })
    }
}

impl ClientVerifier {
    pub(crate) fn new(
        identity: &Identity,
        revoked: Option<&Revoked>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, TransportError> {
        let inner = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(identity)?), provider)
            .build()
            .map_err(cannot_set_up)?;
        Ok(Self { inner, mandatory: true, own: OwnIdentity::of(identity, revoked)? })
    }

    /// Accepts peers without a certificate too. A certificate that is shown must still be valid.
    pub(crate) fn or_without_certificate(self) -> Self {
        Self { mandatory: false, ..self }
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.inner
            .verify_server_cert(certificate, intermediates, server_name, ocsp_response, now)
            .map_err(|error| in_words(error, certificate, &self.own))
            .and_then(|verified| self.own.check_not_revoked(certificate).map(|()| verified))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A rank has one certificate: with a hint it might not show it, and the refusal could not name it.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.inner
            .verify_client_cert(certificate, intermediates, now)
            .map_err(|error| in_words(error, certificate, &self.own))
            .and_then(|verified| self.own.check_not_revoked(certificate).map(|()| verified))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// The refusal of a certificate that does not hold now. That of a wrong clock has an alert of its
/// own ([`CLOCK_ALERT`](crate::quic::network::connection::CLOCK_ALERT)), by which both sides know
/// it.
pub(crate) fn out_of_date(text: String, kind: BootstrapKind) -> Error {
    match kind {
        BootstrapKind::Clock => CertificateError::Other(OtherError(Arc::new(Words(text)))).into(),
        _ => Error::General(text),
    }
}

/// A text that also its debug format shows as it is: rustls prints no other one of such an error.
struct Words(String);

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Words {}

/// The text of a refusal. The names in the certificate are not proven.
fn in_words(error: Error, certificate: &CertificateDer<'_>, own: &OwnIdentity) -> Error {
    let Error::InvalidCertificate(why) = &error else {
        return error;
    };
    let Ok(claims) = Claims::of(certificate) else {
        return Error::General(format!("{NOT_OF_THIS_CLUSTER} ({error})"));
    };
    Error::General(match why {
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => match claims.out_of_date() {
            Some((text, kind)) => return out_of_date(text, kind),
            None => format!("the authority of the certificate of {claims} does not hold now: {why}"),
        },
        CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
            "the certificate of {claims} is of another authority, {} trusts {}: issue all certificates from one authority, \
             or issue certificates that trust both",
            own.claims, own.trusted
        ),
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!("{} looked for a rank of its own job, and found the certificate of {claims}", own.claims)
        }
        _ => format!("the certificate of {claims} is refused: {why}"),
    })
}

fn roots(identity: &Identity) -> Result<RootCertStore, TransportError> {
    let mut roots = RootCertStore::empty();
    for authority in &identity.authorities {
        roots.add(authority.clone()).map_err(cannot_set_up)?;
    }
    Ok(roots)
}

const NOT_OF_THIS_CLUSTER: &str = "a certificate that is not of a kyklos authority";
