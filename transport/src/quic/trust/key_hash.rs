//! The SHA-256 of a public key: it names an authority in a token, and an identity in a list of
//! revoked keys.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{SHA256, digest};
use data_encoding::HEXLOWER;
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::error::TransportError;

/// Identifies one key. A certificate for another key has another hash, also where the subject is
/// the same.
///
/// Over the `SubjectPublicKeyInfo` in DER, as in RFC 7469.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyHash(pub(crate) [u8; KEY_HASH_BYTES]);

impl KeyHash {
    /// Of the key in a certificate.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Result<Self, TransportError> {
        let (_, parsed) = X509Certificate::from_der(certificate)
            .map_err(|_| TransportError::bootstrap("a certificate that cannot be read"))?;
        Self::of_key(parsed.public_key().raw)
    }

    fn of_key(public_key: &[u8]) -> Result<Self, TransportError> {
        let hash = digest(&SHA256, public_key);
        let bytes = hash.as_ref().try_into();
        bytes.map(Self).map_err(|_| TransportError::bootstrap("a hash of another length"))
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyHash({self})")
    }
}

impl FromStr for KeyHash {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let wrong = || {
            TransportError::bootstrap(format!(
                "the hash of a key has {} hexadecimal digits, not {text:?}",
                2 * KEY_HASH_BYTES
            ))
        };
        let bytes = HEXLOWER.decode(text.as_bytes()).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(wrong)
    }
}

/// Bytes of a SHA-256.
const KEY_HASH_BYTES: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::trust::authority::ClusterAuthority;
    use crate::quic::trust::job::JobId;
    use crate::rank::Rank;

    #[test]
    fn a_key_is_named_by_itself_and_not_by_its_certificate() {
        let authority = ClusterAuthority::new(JobId([1; 16])).unwrap();
        let [one, again] = [(); 2].map(|()| authority.issue(Rank(1)).unwrap());
        let hash = KeyHash::of(&one.certificate).unwrap();
        assert_ne!(hash, KeyHash::of(&again.certificate).unwrap());
        assert_eq!(hash.to_string().parse::<KeyHash>().unwrap(), hash);
        // The empty text, from FIPS 180-4's examples.
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(KeyHash::of_key(b"").unwrap().to_string(), empty);
        for wrong in ["", "e3b0", &empty[1..], &empty.to_uppercase(), &empty.replace('e', "g")] {
            assert!(wrong.parse::<KeyHash>().is_err(), "{wrong}");
        }
    }
}
