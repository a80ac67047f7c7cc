//! The keys that a token has given, over all runs of rank 0 with its invitation. A holder of the
//! token is anonymous: once one of these keys is revoked, nobody gets a rank by the token any more.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{BootstrapKind, TransportError};
use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::private_file;
use crate::quic::trust::revoked::{self, Revoked};
use crate::rank::Rank;

/// The keys, in memory and, if the invitation is a file, in a list beside it. The list has the form
/// of a list of revoked keys.
#[derive(Debug, Default)]
pub(super) struct GivenKeys {
    path: Option<PathBuf>,
    keys: BTreeSet<KeyHash>,
}

impl GivenKeys {
    /// Reads the list beside an invitation. Without such a list no key has been given. Its name has
    /// the first digits of the authority's hash, so that another invitation at the same path
    /// has another list.
    pub(super) fn beside(invitation: &Path, authority: &KeyHash) -> Result<Self, TransportError> {
        let path = invitation.with_file_name(format!("given-{authority:.16}"));
        let keys = match path.try_exists() {
            Ok(false) => BTreeSet::new(),
            _ => revoked::parse(private_file::read_list(&path, WHAT)?, WHAT, &path)?,
        };
        Ok(Self { path: Some(path), keys })
    }

    /// Checks that keys can be noted: a rank 0 that cannot do that must not give any.
    pub(super) fn check(&self) -> Result<(), TransportError> {
        self.append("")
    }

    /// Notes a key before it is given. The list is on the disk when this returns.
    pub(super) fn note(&mut self, rank: Rank, key: KeyHash) -> Result<(), TransportError> {
        // The same key may ask again: its first answer may have been lost.
        if self.keys.contains(&key) {
            return Ok(());
        }
        if self.keys.len() >= MOST_KEYS {
            let text = format!("its token has given {MOST_KEYS} keys: make a new invitation");
            return Err(BootstrapKind::Invitation.error(text));
        }
        self.append(&format!("{key}  rank {rank}, by token\n"))?;
        self.keys.insert(key);
        Ok(())
    }

    /// A given key that the list of revoked keys has.
    pub(super) fn revoked(&self, revoked: &Revoked) -> Option<KeyHash> {
        self.keys.iter().copied().find(|key| revoked.has_key(key))
    }

    /// Adds a line in one write, so that a process that is killed leaves no part of it.
    fn append(&self, line: &str) -> Result<(), TransportError> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let appended = options.open(path).and_then(|mut file| {
            file.write_all(line.as_bytes())?;
            file.sync_all()
        });
        appended.map_err(|error| {
            TransportError::bootstrap(format!("cannot write the {WHAT} {}: {error}", path.display()))
        })
    }
}

const WHAT: &str = "list of keys that the token has given";

/// Their lines fit the longest list that is read: each has less than 100 bytes.
pub(super) const MOST_KEYS: usize = 10_000;
