//! Files that hold keys: written for their owner only, and read only if no other user can read
//! them.

use std::io::{self, Write};
use std::path::Path;

use super::protection;
use crate::error::TransportError;
use crate::regular_file::{open_regular, read_opened, read_regular};

/// Writes a new file that only its owner can read. Errors name the file by `what`.
pub(crate) fn write_new(path: &Path, what: &str, text: &str) -> Result<(), TransportError> {
    let cannot =
        |error| TransportError::bootstrap(format!("cannot write the {what} {}: {error}", path.display()));
    let mut file = protection::create_file(path).map_err(cannot)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(cannot)
}

/// Reads a file with a key; refuses it if other users can read it.
pub(crate) fn read(path: &Path, what: &str) -> Result<Vec<u8>, TransportError> {
    let cannot = |error| cannot_read(path, what, &error);
    let file = open_regular(path).map_err(cannot)?;
    if let Some(why) = protection::complaint(&file, path).map_err(cannot)? {
        return Err(TransportError::bootstrap(format!("the {what} {} {why}", path.display())));
    }
    read_opened(file, LONGEST_BYTES).map_err(cannot)
}

/// Reads a file without secrets.
pub(crate) fn read_public(path: &Path, what: &str) -> Result<Vec<u8>, TransportError> {
    read_up_to(path, what, LONGEST_BYTES)
}

/// Reads a list without secrets, which may be longer.
pub(crate) fn read_list(path: &Path, what: &str) -> Result<Vec<u8>, TransportError> {
    read_up_to(path, what, LONGEST_LIST_BYTES)
}

fn read_up_to(path: &Path, what: &str, most_bytes: u64) -> Result<Vec<u8>, TransportError> {
    read_regular(path, most_bytes).map_err(|error| cannot_read(path, what, &error))
}

fn cannot_read(path: &Path, what: &str, error: &io::Error) -> TransportError {
    TransportError::bootstrap(format!("cannot read the {what} {}: {error}", path.display()))
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

#[cfg(all(test, windows))]
mod tests {
    use windows_permissions::constants::{SeObjectType, SecurityInformation};
    use windows_permissions::wrappers::SetNamedSecurityInfo;
    use windows_permissions::{LocalBox, SecurityDescriptor};

    use super::*;

    #[test]
    fn a_key_file_is_for_its_owner_only_and_refused_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pem");
        write_new(&path, "identity", "a key").unwrap();
        assert_eq!(read(&path, "identity").unwrap(), b"a key");
        assert!(write_new(&path, "identity", "another").is_err(), "an existing file must not be overwritten");
        let open: LocalBox<SecurityDescriptor> = "D:P(A;;FA;;;SY)(A;;FA;;;WD)".parse().unwrap();
        let (kind, list) = (SeObjectType::SE_FILE_OBJECT, SecurityInformation::Dacl);
        SetNamedSecurityInfo(path.as_os_str(), kind, list, None, None, open.dacl(), None).unwrap();
        let error = read(&path, "identity").unwrap_err().to_string();
        assert!(error.contains("gives rights to WD") && error.contains("icacls"), "{error}");
    }
}
