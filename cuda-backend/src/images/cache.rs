//! Files of compiled kernels: whole or not there.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A hash of what follows stands at the beginning.
const HASH_BYTES: usize = 32;

/// What was kept, unless there is nothing, or it is not what was written.
pub(crate) fn read(path: &Path) -> Option<Vec<u8>> {
    let mut file = fs::read(path).ok()?;
    if file.len() < HASH_BYTES {
        return None;
    }
    let bytes = file.split_off(HASH_BYTES);
    (blake3::hash(&bytes).as_bytes() == file.as_slice()).then_some(bytes)
}

/// Keeps `bytes`. Who reads at the same time finds what was there before, or all of it.
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
    fn what_is_not_what_was_written_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.cuda");
        assert_eq!(read(&path), None);
        write(&path, b"machine code").unwrap();
        assert_eq!(read(&path).unwrap(), b"machine code");
        write(&path, b"newer").unwrap();
        assert_eq!(read(&path).unwrap(), b"newer");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing unfinished stays");
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
