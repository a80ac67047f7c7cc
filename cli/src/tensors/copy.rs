//! Which copy of an input file a rank reads, and digests by which ranks compare their copies.

use std::fs::Metadata;
use std::ops::Range;

use super::file::InputFile;
use super::positioned::read_exact_at;
use crate::failure::{Failure, Result};

/// A copy of a file. Ranks with the same id read the same bytes: one kernel gave them the same device, inode, length and
/// times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CopyId(pub(crate) [u8; COPY_ID_BYTES]);

/// Of the hash that identifies a copy.
pub(crate) const COPY_ID_BYTES: usize = 16;

/// A digest of one section of a tensor: enough to find ranks with other bytes, not made against ranks that lie.
pub(crate) type Digest = [u8; DIGEST_BYTES];
pub(crate) const DIGEST_BYTES: usize = 8;

/// Sections of each tensor. The ranks that read one copy divide them, so that together they read it once.
const SECTIONS: usize = 24;

/// Length and time of the last change. They tell whether somebody writes to a file while ranks read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    length: u64,
    modified: Option<std::time::SystemTime>,
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self { length: metadata.len(), modified: metadata.modified().ok() }
    }
}

impl CopyId {
    /// Of tensors that every rank generates by itself.
    pub(crate) const NONE: Self = Self([0; COPY_ID_BYTES]);

    pub(super) fn of(metadata: &Metadata) -> Self {
        let hash = blake3::hash(&origin(metadata));
        let mut id = [0; COPY_ID_BYTES];
        id.copy_from_slice(&hash.as_bytes()[..COPY_ID_BYTES]);
        Self(id)
    }
}

/// What identifies an open file among all files of all hosts. Where the system does not say so, every opened file is a copy
/// of its own.
fn origin(metadata: &Metadata) -> Vec<u8> {
    #[cfg(target_os = "linux")]
    if let Ok(boot) = std::fs::read("/proc/sys/kernel/random/boot_id") {
        use std::os::unix::fs::MetadataExt;
        let numbers = [
            i128::from(metadata.dev()),
            i128::from(metadata.ino()),
            i128::from(metadata.len()),
            i128::from(metadata.mtime()),
            i128::from(metadata.mtime_nsec()),
            i128::from(metadata.ctime()),
            i128::from(metadata.ctime_nsec()),
        ];
        return [&boot[..], bytemuck::cast_slice(&numbers)].concat();
    }
    let _ = metadata;
    use std::hash::{BuildHasher, RandomState};
    let random = [RandomState::new(), RandomState::new()].map(|state| state.hash_one(0_u64));
    bytemuck::cast_slice(&random).to_vec()
}

impl InputFile {
    /// The number of all sections of all tensors that a call uses; the sections of one tensor follow each other.
    pub(crate) fn sections(&self) -> usize {
        self.tensors().len() * SECTIONS
    }

    /// The name of the tensor of a section.
    pub(crate) fn tensor_of_section(&self, section: usize) -> &'static str {
        self.tensors().get(section / SECTIONS).map_or("?", |(name, _)| name)
    }

    /// The digest of the bytes of one section.
    pub(crate) fn digest_of_section(&self, section: usize) -> Result<Digest> {
        let Some((_, bytes)) = self.tensors().get(section / SECTIONS).cloned() else {
            return Ok([0; DIGEST_BYTES]);
        };
        let (length, part) = (bytes.end - bytes.start, section % SECTIONS);
        let bound = |part: usize| {
            let at = u128::from(length) * part as u128 / SECTIONS as u128;
            bytes.start + u64::try_from(at).unwrap_or(length)
        };
        let mut hasher = blake3::Hasher::new();
        let (mut at, end) = (bound(part), bound(part + 1));
        let mut buffer = vec![0; PIECE_BYTES.min(end - at) as usize];
        while at < end {
            let piece = &mut buffer[..PIECE_BYTES.min(end - at) as usize];
            read_exact_at(&self.file, piece, at)
                .map_err(|error| Failure::file("read", &self.path, &error))?;
            hasher.update(piece);
            at += piece.len() as u64;
        }
        let mut digest = [0; DIGEST_BYTES];
        digest.copy_from_slice(&hasher.finalize().as_bytes()[..DIGEST_BYTES]);
        Ok(digest)
    }

    /// Refuses a file that was written to since it was opened: ranks may have read other bytes.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|error| Failure::file("read", &self.path, &error))?;
        if Stamp::of(&now) == self.stamp {
            return Ok(());
        }
        Err(Failure::run(format!(
            "{} was written to while the ranks read it: start the call when the file is complete",
            self.path.display()
        )))
    }

    /// The tensors whose bytes a call uses, apart from sinks, which are part of the problem.
    fn tensors(&self) -> Vec<(&'static str, Range<u64>)> {
        let [q, k, v] = self.bytes.clone();
        let mut tensors = vec![("q", q), ("k", k), ("v", v)];
        tensors.extend(self.pairs.as_ref().map(|pairs| (pairs.name(), pairs.bytes())));
        tensors
    }
}

/// Of one read.
const PIECE_BYTES: u64 = 1 << 20;
