//! Files that hold keys: written for their owner only, and read only if no other user can read them.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use crate::error::TransportError;

/// Writes a new file that only its owner can read. Errors name the file by `what`.
pub(crate) fn write_new(path: &Path, what: &str, text: &str) -> Result<(), TransportError> {
    let cannot =
        |error| TransportError::bootstrap(format!("cannot write the {what} {}: {error}", path.display()));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path).map_err(cannot)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(cannot)
}

/// Reads a file with a key; refuses it if other users can read it.
pub(crate) fn read(path: &Path, what: &str) -> Result<Vec<u8>, TransportError> {
    let file = open(path, what)?;
    #[cfg(unix)]
    {
        let cannot =
            |error| TransportError::bootstrap(format!("cannot read the {what} {}: {error}", path.display()));
        let mode = std::os::unix::fs::MetadataExt::mode(&file.metadata().map_err(cannot)?) & 0o777;
        if mode & 0o077 != 0 {
            let shown = path.display();
            let text =
                format!("the {what} {shown} has mode {mode:03o}: others can use it; run chmod 600 on it");
            return Err(TransportError::bootstrap(text));
        }
    }
    take(file, path, what, LONGEST_BYTES)
}

/// Reads a file without secrets.
pub(crate) fn read_public(path: &Path, what: &str) -> Result<Vec<u8>, TransportError> {
    take(open(path, what)?, path, what, LONGEST_BYTES)
}

/// Reads a list without secrets, which may be longer.
pub(crate) fn read_list(path: &Path, what: &str) -> Result<Vec<u8>, TransportError> {
    take(open(path, what)?, path, what, LONGEST_LIST_BYTES)
}

fn open(path: &Path, what: &str) -> Result<File, TransportError> {
    File::open(path).map_err(|error| {
        TransportError::bootstrap(format!("cannot read the {what} {}: {error}", path.display()))
    })
}

fn take(file: File, path: &Path, what: &str, most: u64) -> Result<Vec<u8>, TransportError> {
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| {
        TransportError::bootstrap(format!("cannot read the {what} {}: {error}", path.display()))
    })?;
    if bytes.len() as u64 > most {
        let text = format!("{} has more than {most} bytes: that is no {what}", path.display());
        return Err(TransportError::bootstrap(text));
    }
    Ok(bytes)
}

/// One PEM block with Unix line ends.
pub(crate) fn pem_block(label: &str, der: &[u8]) -> String {
    let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new(label, der), config)
}

/// Longest file that is read.
const LONGEST_BYTES: u64 = 64 * 1024;

/// Longest list: more than ten thousand lines.
const LONGEST_LIST_BYTES: u64 = 1 << 20;
