//! Identities with Ed25519 keys.
//!
//! The product's ECDSA signatures have a random length of 70 to 72 bytes, so the packets of a
//! handshake have random lengths too. In the simulation a seed must give exactly the same packets.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use kyklos_transport::quic::{Identity, JobId};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ED25519, SerialNumber,
};

/// The job of all simulated worlds.
pub(crate) const JOB: JobId = JobId([7; 16]);

/// Most ranks of a world that a seed draws.
pub(crate) const MOST_RANKS: u32 = 5;

/// The identity of a rank. It is made once per process, since keys do not change the lengths of
/// packets.
pub(crate) fn identity(rank: u32) -> Identity {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    let authority = AUTHORITY.get_or_init(Authority::new);
    let mut issued = authority.issued.lock().unwrap_or_else(PoisonError::into_inner);
    issued.entry(rank).or_insert_with(|| authority.issue(rank)).clone()
}

struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
    issued: Mutex<BTreeMap<u32, Identity>>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let mut params = draft(Vec::new(), 1);
        params.distinguished_name.push(DnType::CommonName, "simulation");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::from_ca_cert_pem(&certificate, key).unwrap();
        Self { certificate, issuer, issued: Mutex::default() }
    }

    fn issue(&self, rank: u32) -> Identity {
        let mut params = draft(vec![format!("rank-{rank}.{JOB}.kyklos.internal")], 2 + u64::from(rank));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity.pem");
        std::fs::write(&path, certificate + &self.certificate + &key.serialize_pem()).unwrap();
        #[cfg(unix)]
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        Identity::read_file(&path).unwrap()
    }
}

fn draft(names: Vec<String>, serial: u64) -> CertificateParams {
    let mut params = CertificateParams::new(names).unwrap();
    params.serial_number = Some(SerialNumber::from(serial));
    params.distinguished_name = rcgen::DistinguishedName::new();
    let day = std::time::Duration::from_secs(24 * 3600);
    params.not_before = (std::time::SystemTime::now() - day).into();
    params.not_after = (std::time::SystemTime::now() + day).into();
    params
}
