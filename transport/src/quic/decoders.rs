//! Decoders of this module that have no other public name, for the fuzz targets in `fuzz/` and
//! the bounded run of `tests/decoders.rs`. Each takes any bytes: it must not panic, and a decoded
//! value must encode to the same bytes. Not an interface.

use std::path::Path;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

pub use super::join::decoders::{application, certificate_of_mine, grant, request_of_mine};
use super::network::interface;
use super::trust::revoked;
use super::{ClusterAuthority, JobId, Validity};
use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::names::{Claims, HostNames, Subject, any_rank_name, rank_name};
use crate::rank::Rank;

/// A certificate in DER, as a peer shows it, before it is verified.
pub fn certificate(der: &[u8]) {
    let certificate = CertificateDer::from(der);
    let hash = KeyHash::of(&certificate);
    let Ok(claims) = Claims::of(&certificate) else { return };
    assert!(hash.is_ok(), "its names can be read, its key cannot");
    // It is for one rank or one host, in the only spelling that is issued.
    let name = match &claims.subject {
        Subject::Rank(rank) => rank_name(*rank, claims.job),
        Subject::Host(host) => {
            assert_eq!(HostNames::new(host.to_string().split(',')).ok().as_ref(), Some(host));
            any_rank_name(claims.job)
        }
    };
    assert!(der.windows(name.len()).any(|window| window == name.as_bytes()), "{name} is not in it");
    let said = [Some(claims.to_string()), claims.validity.complaint(SystemTime::now())];
    assert!(!said.iter().flatten().any(|text| text.contains(char::is_control)), "{said:?}");
}

/// The file of revoked keys.
pub fn revoked(bytes: &[u8]) {
    let of = |bytes: &[u8]| revoked::parse(bytes.to_vec(), "list of revoked keys", Path::new("F"));
    match of(bytes) {
        Ok(keys) => {
            let text: String = keys.iter().map(|key| format!("{key} as it was\n")).collect();
            assert_eq!(of(text.as_bytes()).ok(), Some(keys));
        }
        Err(error) => assert!(error.to_string().len() < 1000, "{error}"),
    }
}

/// Texts that an operator writes: hashes of keys, numbers of jobs, names of hosts.
pub fn names(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(hash) = text.parse::<KeyHash>() {
        assert_eq!(hash.to_string(), text);
    }
    match text.parse::<JobId>() {
        Ok(job) => {
            assert_eq!(job.to_string(), text.to_ascii_lowercase());
            assert_eq!(JobId::of_text(&text), job);
        }
        Err(_) => assert_eq!(JobId::of_text(&text), JobId::from_name(&text)),
    }
    if let Ok(host) = HostNames::new(text.split(',')) {
        assert!(text.split(',').all(|name| host.is(name)), "{host}");
        assert_eq!(HostNames::new(host.to_string().split(',')).ok(), Some(host));
    }
}

/// The tables in which the system tells of interfaces, after the 16 bytes of an address.
pub fn routes(bytes: &[u8]) {
    let (ip, table) =
        bytes.split_first_chunk::<16>().map_or((0, bytes), |(ip, rest)| (u128::from_be_bytes(*ip), rest));
    interface::tables(&String::from_utf8_lossy(table), ip);
}

/// Certificates to begin with: of a rank, and of a host with names of every kind. Their keys are
/// new each time.
pub fn certificates() -> Vec<Vec<u8>> {
    let authority = ClusterAuthority::new(JobId::from_name("fuzz")).expect("an authority");
    let host = HostNames::new(["node1.example", "10.0.0.1", "fd00::1"]).expect("names");
    [Subject::Rank(Rank(3)), Subject::Host(host)]
        .map(|subject| authority.issue_to(&subject, Validity::days(1)).expect("an identity"))
        .map(|identity| identity.certificate.to_vec())
        .into()
}
