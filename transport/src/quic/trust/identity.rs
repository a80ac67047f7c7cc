//! The identity of a rank, in memory and in a file: its certificate, its key, and the authorities
//! that it trusts.

use std::fmt;
use std::path::Path;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::key_hash::KeyHash;
use super::names::Claims;
use super::private_file::{self, pem_block};
use crate::error::TransportError;

/// The certificates of the authorities that a rank trusts, its own certificate, and its key.
pub struct Identity {
    /// The one that issued the certificate first.
    pub(crate) authorities: Vec<CertificateDer<'static>>,
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self {
            authorities: self.authorities.clone(),
            certificate: self.certificate.clone(),
            key: self.key.clone_key(),
        }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("claims", &self.claims().ok()).finish_non_exhaustive()
    }
}

impl Identity {
    /// The rank or host, the job and the validity in the certificate.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the certificate is not one of a
    /// [`ClusterAuthority`](crate::quic::ClusterAuthority).
    pub fn claims(&self) -> Result<Claims, TransportError> {
        Claims::of(&self.certificate)
    }

    /// The name of its key, by which it can be revoked.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the certificate cannot be read.
    pub fn key_hash(&self) -> Result<KeyHash, TransportError> {
        KeyHash::of(&self.certificate)
    }

    /// Fingerprints of the authorities that it trusts, its own issuer's first.
    pub fn authorities(&self) -> Vec<String> {
        self.authorities.iter().map(|authority| fingerprint(authority)).collect()
    }

    /// Writes the identity as PEM (own certificate, authorities, key) into a new file that only its
    /// owner can read.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file exists already or cannot be written.
    pub fn write_file(&self, path: &Path) -> Result<(), TransportError> {
        private_file::write_new(path, "identity", &self.to_pem())
    }

    /// The identity as PEM: own certificate, authorities, key. It is a secret: it proves the rank
    /// to the others.
    pub fn to_pem(&self) -> String {
        let certificates = std::iter::once(&self.certificate).chain(&self.authorities);
        let mut pem: String = certificates.map(|der| pem_block("CERTIFICATE", der)).collect();
        pem.push_str(&pem_block("PRIVATE KEY", self.key.secret_der()));
        pem
    }

    /// Reads a file that [`Self::write_file`] has written.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file is missing, can be read by others than its owner,
    /// or is something else.
    pub fn read_file(path: &Path) -> Result<Self, TransportError> {
        let pem = private_file::read(path, "identity")?;
        Self::of_pem(&pem, &path.display().to_string())
    }

    /// Reads what [`Self::to_pem`] has made. `origin` names it in errors.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if it is something else.
    pub fn of_pem(pem: &[u8], origin: &str) -> Result<Self, TransportError> {
        let garbage = |what: &str| TransportError::bootstrap(format!("{origin} is not an identity: {what}"));
        let mut certificates = CertificateDer::pem_slice_iter(pem)
            .collect::<Result<Vec<CertificateDer<'static>>, _>>()
            .map_err(|_| garbage("a certificate in it is broken"))?;
        if !(2..=1 + MOST_AUTHORITIES).contains(&certificates.len()) {
            return Err(garbage(&match certificates.len().checked_sub(1) {
                None => "it holds no certificate".to_owned(),
                Some(0) => "it holds one certificate, without that of its authority".to_owned(),
                Some(many) => {
                    format!("it holds the certificates of {many} authorities, at most {MOST_AUTHORITIES}")
                }
            }));
        }
        let authorities = certificates.split_off(1);
        let certificate = certificates.remove(0);
        let key = PrivateKeyDer::from_pem_slice(pem).map_err(|_| garbage("it holds no private key"))?;
        let identity = Self { authorities, certificate, key };
        identity.claims().map_err(|error| garbage(&error.to_string()))?;
        Ok(identity)
    }
}

/// The first 16 digits of the SHA-256 of a certificate: enough to tell authorities apart, not to
/// trust one.
pub(crate) fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    let digest = rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256
        .tls13()
        .map(|suite| suite.common.hash_provider.hash(certificate));
    let bytes = digest.as_ref().map_or(&[][..], |digest| digest.as_ref());
    bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Authorities that an identity may trust: the one it has, the one it comes from or goes to, and
/// some to spare.
pub(crate) const MOST_AUTHORITIES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::trust::authority::ClusterAuthority;
    use crate::quic::trust::job::JobId;
    use crate::quic::trust::names::Subject;
    use crate::rank::Rank;

    #[test]
    fn an_identity_survives_its_file_and_keeps_rank_and_job() {
        let job = JobId::from_name("a job");
        let identity = ClusterAuthority::new(job).unwrap().issue(Rank(3)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-3.pem");
        identity.write_file(&path).unwrap();
        let read = Identity::read_file(&path).unwrap();
        let claims = read.claims().unwrap();
        assert_eq!((claims.subject, claims.job), (Subject::Rank(Rank(3)), job));
        assert_eq!(read.certificate, identity.certificate);
        assert_eq!(read.authorities, identity.authorities);
        assert_eq!(read.key, identity.key);
        assert!(identity.write_file(&path).is_err(), "an existing file must not be overwritten");
        assert!(!format!("{identity:?}").contains("key"), "Debug must not show the key");
    }

    #[cfg(unix)]
    #[test]
    fn an_identity_that_others_can_read_is_refused_with_the_remedy() {
        use std::os::unix::fs::PermissionsExt;
        let identity = ClusterAuthority::new(JobId([1; 16])).unwrap().issue(Rank(0)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity.pem");
        identity.write_file(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = Identity::read_file(&path).unwrap_err().to_string();
        assert!(error.contains("640") && error.contains("chmod 600"), "{error}");
    }

    #[test]
    fn garbage_is_not_an_identity() {
        let folder = tempfile::tempdir().unwrap();
        let identity = ClusterAuthority::new(JobId([1; 16])).unwrap().issue(Rank(0)).unwrap();
        let whole = folder.path().join("whole.pem");
        identity.write_file(&whole).unwrap();
        let whole = std::fs::read_to_string(whole).unwrap();
        let cut = &whole[..whole.len() / 2];
        for (index, text) in ["", "hello", cut, &whole.replace("PRIVATE", "PUBLIC")].iter().enumerate() {
            let path = folder.path().join(format!("{index}.pem"));
            private_file::write_new(&path, "identity", text).unwrap();
            let error = Identity::read_file(&path).unwrap_err().to_string();
            assert!(error.contains("is not an identity"), "{index}: {error}");
        }
    }

    #[test]
    fn a_file_with_too_many_authorities_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut identity = ClusterAuthority::new(JobId([1; 16])).unwrap().issue(Rank(0)).unwrap();
        identity.authorities = vec![identity.authorities[0].clone(); MOST_AUTHORITIES + 1];
        let path = folder.path().join("many.pem");
        identity.write_file(&path).unwrap();
        let error = Identity::read_file(&path).unwrap_err().to_string();
        assert!(error.contains("9 authorities"), "{error}");
    }
}
