//! Who a rank is: a certificate of the job's own authority, with the rank and the job in its name.

use std::fmt;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::TransportError;
use crate::transport::Rank;

/// 128-bit number of a job. It is a name, not a secret: what keeps strangers out is the job's authority.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct JobId(pub [u8; 16]);

impl JobId {
    /// A new number from the system's randomness.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the system has no randomness to give.
    pub fn random() -> Result<Self, TransportError> {
        let mut bytes = [0; 16];
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        provider.secure_random.fill(&mut bytes).map_err(|_| bootstrap("no randomness for a job number"))?;
        Ok(Self(bytes))
    }

    /// The number that stands for a launcher's own name of the job, the same on every rank.
    pub fn from_name(name: &str) -> Self {
        Self(xxh3_128(name.as_bytes()).to_be_bytes())
    }

    /// What message headers carry of it.
    pub(crate) fn low(self) -> u64 {
        let [_, _, _, _, _, _, _, _, low @ ..] = self.0;
        u64::from_le_bytes(low)
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({self})")
    }
}

impl FromStr for JobId {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let wrong = || bootstrap(format!("a job number has 32 hexadecimal digits, not {text:?}"));
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        u128::from_str_radix(text, 16).map(|number| Self(number.to_be_bytes())).map_err(|_| wrong())
    }
}

/// Issues the identities of one job. Lives as long as the process that starts the ranks; its key is never written.
pub struct ClusterAuthority {
    job: JobId,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for ClusterAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterAuthority").field("job", &self.job).finish_non_exhaustive()
    }
}

impl ClusterAuthority {
    /// A new authority (ECDSA P-256) for the job.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if keys cannot be made.
    pub fn new(job: JobId) -> Result<Self, TransportError> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("kyklos job {job}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        set_validity(&mut params);
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(cannot_issue)?;
        let certificate = params.self_signed(&key).map_err(cannot_issue)?.der().clone();
        Ok(Self { job, certificate, issuer: Issuer::new(params, key) })
    }

    /// The identity of one rank, valid for [`VALID_DAYS`] days.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if keys cannot be made.
    pub fn issue(&self, rank: Rank) -> Result<Identity, TransportError> {
        self.issue_named(rank_name(rank, self.job), rank)
    }

    /// An identity of any name. Only tests have a use for one that is not of this job.
    pub(super) fn issue_named(&self, name: String, rank: Rank) -> Result<Identity, TransportError> {
        let mut params = CertificateParams::new(vec![name]).map_err(cannot_issue)?;
        params.distinguished_name.push(DnType::CommonName, format!("kyklos rank {rank}"));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params);
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(cannot_issue)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(cannot_issue)?.der().clone();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok(Identity { authority: self.certificate.clone(), certificate, key })
    }
}

/// Days for which an identity is valid.
pub const VALID_DAYS: u64 = 7;

/// What a rank proves itself with: the authority's certificate, its own, and its key.
pub struct Identity {
    pub(crate) authority: CertificateDer<'static>,
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self {
            authority: self.authority.clone(),
            certificate: self.certificate.clone(),
            key: self.key.clone_key(),
        }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, job) = self.rank_and_job().map_or((None, None), |(rank, job)| (Some(rank), Some(job)));
        f.debug_struct("Identity").field("rank", &rank).field("job", &job).finish_non_exhaustive()
    }
}

impl Identity {
    /// The rank and the job in the certificate's name.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the name is not one of [`ClusterAuthority::issue`].
    pub fn rank_and_job(&self) -> Result<(Rank, JobId), TransportError> {
        rank_and_job_of(&self.certificate)
    }

    /// Writes the identity as PEM (own certificate, authority, key) into a new file that only its owner can read.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file exists already or cannot be written.
    pub fn write_file(&self, path: &Path) -> Result<(), TransportError> {
        let cannot = |error| bootstrap(format!("cannot write the identity {}: {error}", path.display()));
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path).map_err(cannot)?;
        let pem = [
            pem_block("CERTIFICATE", &self.certificate),
            pem_block("CERTIFICATE", &self.authority),
            pem_block("PRIVATE KEY", self.key.secret_der()),
        ];
        file.write_all(pem.concat().as_bytes()).and_then(|()| file.sync_all()).map_err(cannot)
    }

    /// Reads what [`Self::write_file`] wrote.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file is missing, can be read by others than its owner (unix), or is
    /// something else.
    pub fn read_file(path: &Path) -> Result<Self, TransportError> {
        let shown = path.display();
        let cannot = |error| bootstrap(format!("cannot read the identity {shown}: {error}"));
        let file = std::fs::File::open(path).map_err(cannot)?;
        let metadata = file.metadata().map_err(cannot)?;
        #[cfg(unix)]
        {
            let mode = std::os::unix::fs::MetadataExt::mode(&metadata) & 0o777;
            if mode & 0o077 != 0 {
                let text = format!(
                    "the identity {shown} has mode {mode:03o}: others can use it; run chmod 600 on it"
                );
                return Err(bootstrap(text));
            }
        }
        if metadata.len() > LONGEST_FILE_BYTES {
            return Err(bootstrap(format!("{shown} is too long for an identity: {} bytes", metadata.len())));
        }
        let mut pem = Vec::new();
        std::io::Read::read_to_end(&mut std::io::Read::take(file, LONGEST_FILE_BYTES), &mut pem)
            .map_err(cannot)?;
        let garbage = |what: &str| bootstrap(format!("{shown} is not an identity: {what}"));
        let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map_err(|_| garbage("a certificate in it is broken"))?;
        let [certificate, authority] = <[_; 2]>::try_from(certificates)
            .map_err(|found| garbage(&format!("it holds {} certificates instead of 2", found.len())))?;
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|_| garbage("it holds no private key"))?;
        let identity = Self { authority, certificate, key };
        identity.rank_and_job().map_err(|error| garbage(&error.to_string()))?;
        Ok(identity)
    }
}

/// The DNS name of a rank of a job.
pub(crate) fn rank_name(rank: Rank, job: JobId) -> String {
    format!("rank-{rank}.{job}.kyklos.internal")
}

/// The rank and the job in the name of a certificate whose chain has been verified.
pub(crate) fn rank_and_job_of(certificate: &CertificateDer<'_>) -> Result<(Rank, JobId), TransportError> {
    let unreadable = || bootstrap("a certificate that cannot be read");
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| unreadable())?;
    let names = parsed.subject_alternative_name().map_err(|_| unreadable())?.ok_or_else(unreadable)?;
    let [GeneralName::DNSName(name)] = names.value.general_names.as_slice() else {
        return Err(bootstrap("a certificate that does not have exactly one DNS name"));
    };
    parse_rank_name(name)
        .ok_or_else(|| bootstrap(format!("a certificate whose name is not a rank's: {name:?}")))
}

fn parse_rank_name(name: &str) -> Option<(Rank, JobId)> {
    let (rank, rest) = name.strip_prefix("rank-")?.split_once('.')?;
    let parsed = (Rank(rank.parse().ok()?), rest.strip_suffix(".kyklos.internal")?.parse().ok()?);
    // Only the spelling that is issued: no leading zeros, no capitals.
    (rank_name(parsed.0, parsed.1) == name).then_some(parsed)
}

fn set_validity(params: &mut CertificateParams) {
    let now = SystemTime::now();
    // Clocks of a cluster differ; an hour of grace keeps a fast one from refusing.
    params.not_before = (now - Duration::from_secs(3600)).into();
    params.not_after = (now + Duration::from_secs(VALID_DAYS * 24 * 3600)).into();
}

/// One PEM block. rcgen's own writer belongs to its certificates, and an identity that was read has only bytes.
fn pem_block(label: &str, der: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = format!("-----BEGIN {label}-----\n");
    for line in der.chunks(48) {
        for group in line.chunks(3) {
            let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
            let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
            for digit in 0..4 {
                let index = (bits >> (18 - 6 * digit) & 63) as usize;
                out.push(if digit > group.len() { '=' } else { char::from(ALPHABET[index]) });
            }
        }
        out.push('\n');
    }
    out.push_str(&format!("-----END {label}-----\n"));
    out
}

fn bootstrap(text: impl Into<String>) -> TransportError {
    TransportError::Bootstrap { text: text.into() }
}

fn cannot_issue(error: rcgen::Error) -> TransportError {
    bootstrap(format!("cannot make a certificate: {error}"))
}

/// Longest identity file that is read.
const LONGEST_FILE_BYTES: u64 = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_its_file_and_keeps_rank_and_job() {
        let job = JobId::from_name("a job");
        let identity = ClusterAuthority::new(job).unwrap().issue(Rank(3)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-3.pem");
        identity.write_file(&path).unwrap();
        let read = Identity::read_file(&path).unwrap();
        assert_eq!(read.rank_and_job().unwrap(), (Rank(3), job));
        assert_eq!(read.certificate, identity.certificate);
        assert_eq!(read.authority, identity.authority);
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
            let mut options = std::fs::OpenOptions::new();
            options.write(true).create_new(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            options.open(&path).unwrap().write_all(text.as_bytes()).unwrap();
            let error = Identity::read_file(&path).unwrap_err().to_string();
            assert!(error.contains("is not an identity"), "{index}: {error}");
        }
    }

    #[test]
    fn only_the_issued_spelling_of_a_name_is_a_rank() {
        let job = "0123456789abcdef0123456789abcdef";
        let good = format!("rank-12.{job}.kyklos.internal");
        assert_eq!(parse_rank_name(&good), Some((Rank(12), job.parse().unwrap())));
        for bad in [
            format!("rank-012.{job}.kyklos.internal"),
            format!("rank-+1.{job}.kyklos.internal"),
            format!("rank-1.{}.kyklos.internal", job.to_uppercase()),
            format!("rank-1.{job}.kyklos.internal.example"),
            format!("rank-99999999999.{job}.kyklos.internal"),
            format!("rank-1.{job}"),
            String::new(),
        ] {
            assert_eq!(parse_rank_name(&bad), None, "{bad}");
        }
    }
}
