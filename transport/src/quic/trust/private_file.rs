//! Files that hold keys: written for their owner only, and read only if no other user can read them.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use crate::error::TransportError;

/// Writes a new file that only its owner can read. `what` it is stands in errors.
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

/// One PEM block. rcgen's own writer belongs to its certificates, and an identity that was read has only bytes.
pub(crate) fn pem_block(label: &str, der: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = format!("-----BEGIN {label}-----\n");
    for line in der.chunks(48) {
        for group in line.chunks(3) {
            let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
            let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
            for digit in 0..4 {
                let index = (bits >> (18 - 6 * digit) & 63) as usize;
                out.push(if digit > group.len() { '=' } else { char::from(ALPHABET[index]) });
            }
        }
        out.push('\n');
    }
    out.push_str(&format!("-----END {label}-----\n"));
    out
}

/// Longest file that is read.
const LONGEST_BYTES: u64 = 64 * 1024;

/// Longest list: more than ten thousand lines.
const LONGEST_LIST_BYTES: u64 = 1 << 20;
