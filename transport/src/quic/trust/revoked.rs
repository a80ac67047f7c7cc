//! Revoked identities: certificates that are refused before they expire.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::CertificateDer;

use super::key_hash::KeyHash;
use super::private_file;
use crate::error::{BootstrapKind, TransportError};

/// A list of keys, in a file that is read again whenever a group forms again. Clones share what was
/// read.
///
/// A line begins with a [`KeyHash`]; the rest is a comment. Lines that are empty or begin with `#`
/// are ignored.
#[derive(Clone, Debug)]
pub struct Revoked {
    path: PathBuf,
    keys: Arc<RwLock<BTreeSet<KeyHash>>>,
}

impl Revoked {
    /// Reads the list.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if it cannot be read, or a line begins with something else: a
    /// list of which a part is skipped would admit a revoked identity.
    pub fn read_file(path: &Path) -> Result<Self, TransportError> {
        let keys = Arc::new(RwLock::new(read(path)?));
        Ok(Self { path: path.to_owned(), keys })
    }

    /// Whether no key is in the list.
    pub fn is_empty(&self) -> bool {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Reads the file again. If that fails, the earlier contents stay.
    pub(crate) fn read_again(&self) -> Result<(), TransportError> {
        let keys = read(&self.path)?;
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(())
    }

    /// Whether the key of a certificate is in the list. One that cannot be read might be.
    pub(crate) fn has(&self, certificate: &CertificateDer<'_>) -> bool {
        KeyHash::of(certificate).map_or(true, |key| self.has_key(&key))
    }

    /// Whether a key is in the list.
    pub(crate) fn has_key(&self, key: &KeyHash) -> bool {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).contains(key)
    }
}

fn read(path: &Path) -> Result<BTreeSet<KeyHash>, TransportError> {
    parse(private_file::read_list(path, WHAT)?, WHAT, path)
}

/// Reads a list of keys. Errors name it by `what`.
pub(crate) fn parse(bytes: Vec<u8>, what: &str, path: &Path) -> Result<BTreeSet<KeyHash>, TransportError> {
    let wrong = |text: String| BootstrapKind::KeyList.error(text);
    let text =
        String::from_utf8(bytes).map_err(|_| wrong(format!("the {what} {} is not text", path.display())))?;
    let mut keys = BTreeSet::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let Some(first) = line.split_whitespace().next().filter(|_| !line.starts_with('#')) else { continue };
        keys.insert(first.parse().map_err(|_| {
            let shown: String = first.chars().take(LONGEST_SHOWN).collect();
            wrong(format!(
                "the {what} {}, line {number}, begins with {shown:?}: begin each line with the 64 hexadecimal digits of a key \
                 hash",
                path.display()
            ))
        })?);
    }
    Ok(keys)
}

const WHAT: &str = "list of revoked keys";

/// Characters of a wrong line that an error quotes.
const LONGEST_SHOWN: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::trust::authority::ClusterAuthority;
    use crate::quic::trust::job::JobId;
    use crate::rank::Rank;

    #[test]
    fn a_list_holds_its_keys_and_is_read_again() {
        let authority = ClusterAuthority::new(JobId([1; 16])).unwrap();
        let [one, two, three] = [1, 2, 3].map(|rank| authority.issue(Rank(rank)).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("revoked");
        let hash = |identity: &crate::quic::Identity| identity.key_hash().unwrap();
        std::fs::write(&path, "# nobody yet\n").unwrap();
        assert!(Revoked::read_file(&path).unwrap().is_empty());
        let text = format!("# lost laptops\n\n{}  rank 1, since Monday\r\n  {}", hash(&one), hash(&two));
        std::fs::write(&path, &text).unwrap();
        let revoked = Revoked::read_file(&path).unwrap();
        let held =
            |revoked: &Revoked| [&one, &two, &three].map(|identity| revoked.has(&identity.certificate));
        assert_eq!(held(&revoked), [true, true, false]);
        let clone = revoked.clone();
        std::fs::write(&path, hash(&three).to_string()).unwrap();
        clone.read_again().unwrap();
        assert_eq!(held(&revoked), [false, false, true]);
        // If the list becomes unreadable, the keys that were read before stay revoked.
        std::fs::write(&path, "rank 2").unwrap();
        assert!(clone.read_again().is_err());
        assert_eq!(held(&revoked), [false, false, true]);
        assert!(revoked.has(&CertificateDer::from(vec![1, 2, 3])), "what cannot be read is not let in");
    }

    #[test]
    fn a_list_of_which_a_line_cannot_be_read_is_refused_with_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("revoked");
        let good = "0".repeat(64);
        for (text, words) in [
            (format!("{good}\nrank 3\n"), "line 2, begins with \"rank\""),
            (good.to_uppercase().replace('0', "A"), "line 1"),
            (good[1..].to_owned(), "line 1"),
            (format!("{good}0"), "line 1"),
            ("-----BEGIN CERTIFICATE-----".to_owned(), "line 1, begins with \"-----BEGIN\""),
        ] {
            std::fs::write(&path, &text).unwrap();
            let error = Revoked::read_file(&path).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("key hash"), "{error}");
        }
        std::fs::write(&path, [0xff; 9]).unwrap();
        assert!(Revoked::read_file(&path).unwrap_err().to_string().contains("not text"));
        std::fs::write(&path, vec![b'\n'; (1 << 20) + 1]).unwrap();
        assert!(Revoked::read_file(&path).unwrap_err().to_string().contains("more than 1048576 bytes"));
        assert!(Revoked::read_file(&folder.path().join("none")).is_err());
        // An empty list revokes nothing.
        std::fs::write(&path, "").unwrap();
        Revoked::read_file(&path).unwrap();
    }
}
