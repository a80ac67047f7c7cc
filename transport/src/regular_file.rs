//! Reads files that a user names: regular ones only, and not without a bound.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file to read it. Anything else is refused at once: opening a pipe waits for a
/// writer, and a device may have no end.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for what is no regular file; those of the system.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let check = |metadata: std::fs::Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file: name one")),
    };
    // Before it is opened, and after that, because it may have been replaced.
    check(std::fs::metadata(path)?)?;
    let file = File::open(path)?;
    check(file.metadata()?)?;
    Ok(file)
}

/// All bytes of a regular file, at most `most_bytes`.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`] for a longer file; those of [`open_regular`].
pub fn read_regular(path: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    read_opened(open_regular(path)?, most_bytes)
}

/// As [`read_regular`], for text.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if it is not UTF-8; those of [`read_regular`].
pub fn read_regular_text(path: &Path, most_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_regular(path, most_bytes)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// The bytes of a file of [`open_regular`]. Its length may change while it is read.
pub(crate) fn read_opened(file: File, most_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most_bytes {
        let text = format!("it has more than {most_bytes} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(read_regular(&path, 5).unwrap(), b"12345");
        assert_eq!(read_regular_text(&path, 5).unwrap(), "12345");
        assert_eq!(read_regular(&path, 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_regular_text(&path, 5).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let none = folder.path().join("none");
        assert_eq!(read_regular(&none, 5).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(read_regular(folder.path(), 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[cfg(unix)]
    #[test]
    fn pipes_and_devices_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        for path in [&pipe, &link, Path::new("/dev/zero"), Path::new("/dev/null")] {
            assert_eq!(read_regular(path, 5).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{path:?}");
        }
        // A link to a file is as good as the file: secrets of Kubernetes are links.
        let (file, link) = (folder.path().join("file"), folder.path().join("good link"));
        std::fs::write(&file, b"1").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read_regular(&link, 5).unwrap(), b"1");
    }
}
