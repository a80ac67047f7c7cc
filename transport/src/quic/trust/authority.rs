//! The authority of a cluster: on disk for as long as the cluster, or in memory for as long as one
//! job.

use std::fmt;
use std::path::Path;
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::identity::{Identity, MOST_AUTHORITIES, fingerprint};
use super::job::JobId;
use super::names::{Subject, is_job_name, names_of};
use super::private_file::{self, pem_block};
use super::protection;
use super::validity::{Date, SET_THE_CLOCK, Validity};
use crate::error::{BootstrapKind, TransportError};
use crate::rank::Rank;

/// Issues the identities of one job.
pub struct ClusterAuthority {
    job: JobId,
    job_name: Option<String>,
    validity: Validity,
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate first, then those of authorities that identities are to trust as well.
    trusted: Vec<CertificateDer<'static>>,
}

impl fmt::Debug for ClusterAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterAuthority").field("job", &self.job).finish_non_exhaustive()
    }
}

impl ClusterAuthority {
    /// A new authority (ECDSA P-256) for one job, whose key is never written.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if keys cannot be made.
    pub fn new(job: JobId) -> Result<Self, TransportError> {
        let (certificate, key) = make(&format!("kyklos job {job}"), VALID_DAYS + 1)?;
        Self::of(certificate, key, job, None)
    }

    /// A new one for the job of this name alone.
    pub(crate) fn of_job(job: &str, days: u32) -> Result<Self, TransportError> {
        check_job_name(job)?;
        let (certificate, key) = make(&format!("kyklos job {job}"), days)?;
        Self::of(certificate, key, JobId::from_name(job), Some(job.to_owned()))
    }

    /// An authority from its certificate and key.
    pub(crate) fn of_keys(
        certificate: CertificateDer<'static>,
        key: &PrivateKeyDer<'_>,
        job: JobId,
        job_name: Option<String>,
    ) -> Result<Self, TransportError> {
        let key = KeyPair::try_from(key).map_err(cannot_issue)?;
        if !belong_together(&certificate, &key) {
            return Err(TransportError::bootstrap("the key of the authority is not that of its certificate"));
        }
        Self::of(certificate, key, job, job_name)
    }

    /// Makes an authority for a cluster in a folder: `authority.pem`, and `authority.key` that only
    /// its owner can read. Returns when it ends.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if there is one already, or files cannot be written.
    pub fn create(folder: &Path, days: u32) -> Result<Validity, TransportError> {
        let (pem, key_file) = (folder.join(CERTIFICATE_FILE), folder.join(KEY_FILE));
        if let Some(there) = [&pem, &key_file].into_iter().find(|path| path.exists()) {
            return Err(TransportError::bootstrap(format!(
                "{} exists: an authority is never overwritten, because what it has issued would be worthless; name \
                 another folder",
                there.display()
            )));
        }
        let cannot = |error| {
            TransportError::bootstrap(format!("cannot make the folder {}: {error}", folder.display()))
        };
        protection::create_folder(folder).map_err(cannot)?;
        // A number tells two authorities of one cluster apart.
        let number = JobId::random()?.low();
        let (certificate, key) = make(&format!("kyklos authority {number:016x}"), days)?;
        private_file::write_new(&key_file, "authority's key", &key.serialize_pem())?;
        std::fs::write(&pem, pem_block("CERTIFICATE", &certificate))
            .map_err(|error| TransportError::bootstrap(format!("cannot write {}: {error}", pem.display())))?;
        validity_of(&certificate)
    }

    /// The authority in a folder, as the one that issues for the job of this name.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if there is none, its key can be read by others, or it does
    /// not hold now.
    pub fn read(folder: &Path, job: &str) -> Result<Self, TransportError> {
        check_job_name(job)?;
        let pem = folder.join(CERTIFICATE_FILE);
        if !pem.exists() {
            let text = format!("there is no authority in {}: make a new authority", folder.display());
            return Err(BootstrapKind::Authority.error(text));
        }
        let certificate = read_certificate(&pem)?;
        let key_file = folder.join(KEY_FILE);
        let text = private_file::read(&key_file, "authority's key")?;
        let text = String::from_utf8_lossy(&text);
        let key = KeyPair::from_pem(&text)
            .map_err(|_| TransportError::bootstrap(format!("{} holds no private key", key_file.display())))?;
        if !belong_together(&certificate, &key) {
            let text = format!("{} is not the key of {}", key_file.display(), pem.display());
            return Err(TransportError::bootstrap(text));
        }
        let authority = Self::of(certificate, key, JobId::from_name(job), Some(job.to_owned()))?;
        match authority.validity.complaint(SystemTime::now()) {
            Some(complaint) => {
                let (remedy, kind) = match SystemTime::now() < authority.validity.from {
                    true => (SET_THE_CLOCK, BootstrapKind::Clock),
                    false => ("make a new authority", BootstrapKind::Authority),
                };
                Err(kind.error(format!("the authority {} {complaint}: {remedy}", pem.display())))
            }
            None => Ok(authority),
        }
    }

    /// Fingerprint and validity of the authority whose certificate alone is in a file.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file holds no authority's certificate.
    pub fn describe(path: &Path) -> Result<(String, Validity), TransportError> {
        let certificate = read_certificate(path)?;
        Ok((fingerprint(&certificate), validity_of(&certificate)?))
    }

    /// Lets identities trust those of another authority as well: for the time in which a cluster
    /// changes from one to the other.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file holds no authority's certificate.
    pub fn also_trust(&mut self, path: &Path) -> Result<(), TransportError> {
        let other = read_certificate(path)?;
        if !self.trusted.contains(&other) {
            self.trusted.push(other);
        }
        if self.trusted.len() > MOST_AUTHORITIES {
            let text = format!("{} trusted authorities: use at most {MOST_AUTHORITIES}", self.trusted.len());
            return Err(TransportError::bootstrap(text));
        }
        Ok(())
    }

    /// The identity of one rank, valid for [`VALID_DAYS`] days.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if keys cannot be made.
    pub fn issue(&self, rank: Rank) -> Result<Identity, TransportError> {
        self.issue_to(&Subject::Rank(rank), Validity::days(VALID_DAYS))
    }

    /// The identity of a rank or a host.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if keys cannot be made, or the authority ends before the
    /// identity would.
    pub fn issue_to(&self, subject: &Subject, validity: Validity) -> Result<Identity, TransportError> {
        if validity.until > self.validity.until {
            return Err(TransportError::bootstrap(format!(
                "the identity would end on {}, the authority ends on {}: use fewer days, or a new \
                 authority",
                Date(validity.until),
                Date(self.validity.until)
            )));
        }
        self.issue_at(subject, self.job, validity)
    }

    /// An identity of any job. Only tests use other jobs than the authority's.
    pub(crate) fn issue_at(
        &self,
        subject: &Subject,
        job: JobId,
        validity: Validity,
    ) -> Result<Identity, TransportError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(cannot_issue)?;
        let certificate = self.sign(subject, job, validity, &key)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok(Identity { authorities: self.trusted.clone(), certificate, key })
    }

    /// A certificate for a key that another rank has made.
    pub(crate) fn certify(
        &self,
        subject: &Subject,
        validity: Validity,
        key: &impl PublicKeyData,
    ) -> Result<CertificateDer<'static>, TransportError> {
        self.sign(subject, self.job, validity, key)
    }

    fn sign(
        &self,
        subject: &Subject,
        job: JobId,
        validity: Validity,
        key: &impl PublicKeyData,
    ) -> Result<CertificateDer<'static>, TransportError> {
        let mut params = CertificateParams::new(names_of(subject, job)).map_err(cannot_issue)?;
        params.distinguished_name.push(DnType::CommonName, format!("kyklos {subject}"));
        if let Some(name) = &self.job_name {
            params.distinguished_name.push(DnType::OrganizationName, name.as_str());
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.not_before = validity.from.into();
        params.not_after = validity.until.into();
        Ok(params.signed_by(key, &self.issuer).map_err(cannot_issue)?.der().clone())
    }

    pub(crate) fn job(&self) -> JobId {
        self.job
    }

    pub(crate) fn validity(&self) -> Validity {
        self.validity
    }

    pub(crate) fn certificate(&self) -> &CertificateDer<'static> {
        &self.trusted[0]
    }

    /// Its key in PKCS #8, to be kept.
    pub(crate) fn key_der(&self) -> Vec<u8> {
        self.issuer.key().serialize_der()
    }

    fn of(
        certificate: CertificateDer<'static>,
        key: KeyPair,
        job: JobId,
        job_name: Option<String>,
    ) -> Result<Self, TransportError> {
        let validity = validity_of(&certificate)?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(cannot_issue)?;
        Ok(Self { job, job_name, validity, issuer, trusted: vec![certificate] })
    }
}

fn make(name: &str, days: u32) -> Result<(CertificateDer<'static>, KeyPair), TransportError> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let validity = Validity::days(days);
    params.not_before = validity.from.into();
    params.not_after = validity.until.into();
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(cannot_issue)?;
    Ok((params.self_signed(&key).map_err(cannot_issue)?.der().clone(), key))
}

fn check_job_name(job: &str) -> Result<(), TransportError> {
    if job.parse::<JobId>().is_ok() {
        // It would be an identity of the job whose number this is, whatever that job's name.
        return Err(TransportError::bootstrap(format!(
            "{job:?} reads like the number of a job: use a name that is not 32 hexadecimal digits"
        )));
    }
    if is_job_name(job) {
        return Ok(());
    }
    Err(TransportError::bootstrap(format!(
        "{job:?} is no name of a job: use up to 64 letters, digits and . _ - : / @ +"
    )))
}

fn belong_together(certificate: &CertificateDer<'_>, key: &KeyPair) -> bool {
    X509Certificate::from_der(certificate)
        .is_ok_and(|(_, parsed)| parsed.public_key().subject_public_key.data.as_ref() == key.public_key_raw())
}

fn read_certificate(path: &Path) -> Result<CertificateDer<'static>, TransportError> {
    let pem = private_file::read_public(path, "authority")?;
    let certificate = CertificateDer::from_pem_slice(&pem).map_err(|_| unreadable(path))?;
    let (_, parsed) = X509Certificate::from_der(&certificate).map_err(|_| unreadable(path))?;
    if !parsed.is_ca() {
        return Err(TransportError::bootstrap(format!(
            "{} is not the certificate of an authority",
            path.display()
        )));
    }
    Ok(certificate)
}

fn validity_of(certificate: &CertificateDer<'_>) -> Result<Validity, TransportError> {
    let (_, parsed) = X509Certificate::from_der(certificate)
        .map_err(|_| TransportError::bootstrap("an authority whose certificate cannot be read"))?;
    Ok(Validity::of_asn1(parsed.validity()))
}

fn unreadable(path: &Path) -> TransportError {
    TransportError::bootstrap(format!("{} holds no certificate that can be read", path.display()))
}

fn cannot_issue(error: rcgen::Error) -> TransportError {
    TransportError::bootstrap(format!("cannot make a certificate: {error}"))
}

/// Days for which an identity is valid that a launcher makes for one job.
pub const VALID_DAYS: u32 = 7;

/// The authority's certificate, in its folder.
const CERTIFICATE_FILE: &str = "authority.pem";
/// The authority's private key, in its folder.
const KEY_FILE: &str = "authority.key";

#[cfg(test)]
mod tests {
    use super::super::names::HostNames;
    use super::*;

    #[test]
    fn an_authority_in_a_folder_issues_for_jobs_by_name_and_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("deep/authority");
        let validity = ClusterAuthority::create(&folder, 100).unwrap();
        assert_eq!(validity.days_left(SystemTime::now()), 99);
        let again = ClusterAuthority::create(&folder, 100).unwrap_err().to_string();
        assert!(again.contains("never overwritten"), "{again}");
        let authority = ClusterAuthority::read(&folder, "train").unwrap();
        let host = Subject::Host(HostNames::new(["node1", "10.0.0.1"]).unwrap());
        for subject in [Subject::Rank(Rank(3)), host] {
            let claims = authority.issue_to(&subject, Validity::days(30)).unwrap().claims().unwrap();
            assert_eq!((claims.subject, claims.job), (subject, JobId::from_name("train")));
            assert_eq!(claims.job_name.as_deref(), Some("train"));
            assert_eq!(claims.validity.days_left(SystemTime::now()), 29);
        }
        let long = authority.issue_to(&Subject::Rank(Rank(0)), Validity::days(101)).unwrap_err().to_string();
        assert!(long.contains("the authority ends on"), "{long}");
        for wrong in ["", "a b", "a\n", &"a".repeat(65)] {
            assert!(ClusterAuthority::read(&folder, wrong).is_err(), "{wrong:?}");
        }
        // It would be an identity of the job `train` too.
        let alias = JobId::from_name("train").to_string();
        for alias in [alias.to_uppercase(), alias] {
            let error = ClusterAuthority::read(&folder, &alias).unwrap_err().to_string();
            assert!(error.contains("reads like the number of a job"), "{error}");
        }
    }

    #[test]
    fn what_is_no_authority_is_refused_with_the_remedy() {
        let root = tempfile::tempdir().unwrap();
        let refusal =
            |name: &str| ClusterAuthority::read(&root.path().join(name), "train").unwrap_err().to_string();
        assert!(refusal("nothing").contains("make a new authority"));
        let (a, b) = (root.path().join("a"), root.path().join("b"));
        ClusterAuthority::create(&a, 10).unwrap();
        ClusterAuthority::create(&b, 10).unwrap();
        std::fs::remove_file(b.join(KEY_FILE)).unwrap();
        std::fs::copy(a.join(KEY_FILE), b.join(KEY_FILE)).unwrap();
        assert!(refusal("b").contains("is not the key of"));
        let mut authority = ClusterAuthority::read(&a, "train").unwrap();
        let leaf = root.path().join("leaf.pem");
        authority.issue(Rank(0)).unwrap().write_file(&leaf).unwrap();
        let error = authority.also_trust(&leaf).unwrap_err().to_string();
        assert!(error.contains("not the certificate of an authority"), "{error}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(a.join(KEY_FILE)).unwrap().permissions().mode() & 0o777, 0o600);
            std::fs::set_permissions(a.join(KEY_FILE), std::fs::Permissions::from_mode(0o644)).unwrap();
            assert!(refusal("a").contains("chmod 600"));
        }
    }
}
