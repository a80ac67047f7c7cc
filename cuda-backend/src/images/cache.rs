//! Files of compiled kernels. A damaged or incomplete file counts as absent.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use kyklos_transport::regular_file::read_regular;

/// A file begins with the BLAKE3 hash of the rest.
const HASH_BYTES: usize = 32;

/// Far more than the kernels of one architecture take.
const MOST_BYTES: u64 = 1 << 30;

/// The contents of a file, unless it is absent or its hash does not match.
pub(crate) fn read(path: &Path) -> Option<Vec<u8>> {
    let mut file = read_regular(path, MOST_BYTES).ok()?;
    if file.len() < HASH_BYTES {
        return None;
    }
    let bytes = file.split_off(HASH_BYTES);
    (blake3::hash(&bytes).as_bytes() == file.as_slice()).then_some(bytes)
}

/// Writes a file. A process that reads it at the same time finds the old contents or all of the new
/// ones.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let unfinished = path.with_extension(format!("{}-{count}", std::process::id()));
    let write = || {
        let mut file = fs::File::create_new(&unfinished)?;
        file.write_all(blake3::hash(bytes).as_bytes())?;
        file.write_all(bytes)?;
        fs::rename(&unfinished, path)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&unfinished);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_counts_as_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.cuda");
        assert_eq!(read(&path), None);
        write(&path, b"machine code").unwrap();
        assert_eq!(read(&path).unwrap(), b"machine code");
        write(&path, b"newer").unwrap();
        assert_eq!(read(&path).unwrap(), b"newer");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no unfinished file is left");
        let whole = fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole[..7], &[]] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read(&path), None);
        }
        let mut flipped = whole;
        flipped[HASH_BYTES] ^= 1;
        fs::write(&path, flipped).unwrap();
        assert_eq!(read(&path), None);
    }
}
