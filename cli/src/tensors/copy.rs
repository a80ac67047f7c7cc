//! Which copy of an input file a rank reads, and whether the file changes meanwhile.

use std::fs::Metadata;

/// A copy of a file. Ranks with the same id read the same bytes: one kernel gave them the same
/// device, inode, length and times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CopyId(pub(crate) [u8; COPY_ID_BYTES]);

/// Of the hash that identifies a copy.
pub(crate) const COPY_ID_BYTES: usize = 16;

/// Length and time of the last change. They tell whether somebody writes to a file while ranks read
/// it.
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

/// What identifies an open file among all files of all hosts. Where the system does not say so,
/// every opened file is a copy of its own.
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
