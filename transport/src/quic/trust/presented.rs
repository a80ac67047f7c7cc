//! The identity that a rank presents in handshakes. It can be read again from its file while the
//! rank runs.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::identity::Identity;
use super::provider::{cannot_set_up, provider};
use crate::error::TransportError;

/// The identity that a rank presents now. Clones share it, so that handshakes after
/// [`Self::read_again`] use the new one.
#[derive(Clone, Debug)]
pub(crate) struct PresentedIdentity {
    file: Option<PathBuf>,
    /// The authorities that this rank trusts, settled at its start.
    trusted: Vec<CertificateDer<'static>>,
    now: Arc<RwLock<Presented>>,
}

#[derive(Debug)]
struct Presented {
    identity: Identity,
    /// For most handshakes.
    certificate: Arc<CertifiedKey>,
    /// For handshakes with ranks that know only the authority's hash.
    with_authority: Arc<CertifiedKey>,
}

impl Presented {
    fn new(identity: Identity) -> Result<Self, TransportError> {
        let certified = |authority| {
            let chain = std::iter::once(&identity.certificate).chain(authority).cloned().collect();
            CertifiedKey::from_der(chain, identity.key.clone_key(), &provider())
                .map(Arc::new)
                .map_err(cannot_set_up)
        };
        let (certificate, with_authority) = (certified(None)?, certified(identity.authorities.first())?);
        Ok(Self { identity, certificate, with_authority })
    }
}

impl PresentedIdentity {
    /// `file` is where a later identity can be read.
    pub(crate) fn new(identity: Identity, file: Option<PathBuf>) -> Result<Self, TransportError> {
        let trusted = identity.authorities.clone();
        Ok(Self { file, trusted, now: Arc::new(RwLock::new(Presented::new(identity)?)) })
    }

    pub(crate) fn now(&self) -> Identity {
        self.now.read().unwrap_or_else(PoisonError::into_inner).identity.clone()
    }

    /// Reads the file again, if there is one. Returns whether there is another identity in it,
    /// which is presented from now on.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or `fits` refuses what is in it: the earlier identity stays.
    pub(crate) fn read_again(
        &self,
        fits: impl FnOnce(&Identity) -> Result<(), TransportError>,
    ) -> Result<bool, TransportError> {
        let Some(file) = &self.file else { return Ok(false) };
        let (earlier, later) = (self.now(), Identity::read_file(file)?);
        if later.certificate == earlier.certificate {
            return Ok(false);
        }
        if later.authorities.first().is_none_or(|issuer| !self.trusted.contains(issuer)) {
            return Err(TransportError::bootstrap(format!(
                "{} is of an authority that this rank does not trust since its start: restart the rank",
                file.display()
            )));
        }
        fits(&later)?;
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = Presented::new(later)?;
        Ok(true)
    }

    /// For a server or a client; `with_authority` also shows the certificate of the authority.
    pub(crate) fn resolver(&self, with_authority: bool) -> Arc<Resolver> {
        Arc::new(Resolver { now: Arc::clone(&self.now), with_authority })
    }
}

/// Shows the current identity in handshakes.
#[derive(Debug)]
pub(crate) struct Resolver {
    now: Arc<RwLock<Presented>>,
    with_authority: bool,
}

impl Resolver {
    fn certified(&self) -> Arc<CertifiedKey> {
        let now = self.now.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(if self.with_authority { &now.with_authority } else { &now.certificate })
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }
}

impl ResolvesClientCert for Resolver {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
