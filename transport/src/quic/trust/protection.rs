//! Files for their owner only, in the way of each system: modes on Unix, access lists on Windows.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// Opens a new file for writing, to which nobody but its owner has a right.
pub(super) fn create_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    system::create(&mut options, path)
}

/// Makes a folder, with those above it, to which nobody but its owner has a right. A folder that
/// exists stays as it is.
pub(super) fn create_folder(path: &Path) -> io::Result<()> {
    system::create_folder(path)
}

/// Why others can use a file, and what to do about it; none if they cannot.
pub(super) fn complaint(file: &File, path: &Path) -> io::Result<Option<String>> {
    system::complaint(file, path)
}

#[cfg(unix)]
mod system {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};

    use super::*;

    pub(super) fn create(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
        options.mode(0o600).open(path)
    }

    pub(super) fn create_folder(path: &Path) -> io::Result<()> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    pub(super) fn complaint(file: &File, _: &Path) -> io::Result<Option<String>> {
        let mode = file.metadata()?.mode() & 0o777;
        let others = mode & 0o077 != 0;
        Ok(others.then(|| format!("has mode {mode:03o}: others can use it; run chmod 600 on it")))
    }
}

#[cfg(windows)]
mod system {
    use std::ffi::OsStr;
    use std::os::windows::fs::OpenOptionsExt;

    use windows_permissions::constants::{SeObjectType, SecurityInformation};
    use windows_permissions::wrappers::{
        GetNamedSecurityInfo, GetSecurityInfo, SetNamedSecurityInfo, SetSecurityInfo,
    };
    use windows_permissions::{LocalBox, SecurityDescriptor};

    use super::super::access_list;
    use super::*;

    /// The rights to write, to read the access list, and to change it.
    const WRITE_AND_PROTECT: u32 = 0x4000_0000 | 0x0002_0000 | 0x0004_0000;

    pub(super) fn create(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
        // Nobody else can open the file until this handle is closed; by then it is protected.
        let mut file = options.access_mode(WRITE_AND_PROTECT).share_mode(0).open(path)?;
        let before = GetSecurityInfo(&file, SeObjectType::SE_FILE_OBJECT, SecurityInformation::Owner)?;
        let protection = protection(&before, "")?;
        SetSecurityInfo(
            &mut file,
            SeObjectType::SE_FILE_OBJECT,
            only_this_list(),
            None,
            None,
            protection.dacl(),
            None,
        )?;
        Ok(file)
    }

    pub(super) fn create_folder(path: &Path) -> io::Result<()> {
        if path.is_dir() {
            return Ok(());
        }
        std::fs::create_dir_all(path)?;
        let (name, kind): (&OsStr, _) = (path.as_os_str(), SeObjectType::SE_FILE_OBJECT);
        let before = GetNamedSecurityInfo(name, kind, SecurityInformation::Owner)?;
        let protection = protection(&before, "OICI")?;
        SetNamedSecurityInfo(name, kind, only_this_list(), None, None, protection.dacl(), None)
    }

    pub(super) fn complaint(file: &File, path: &Path) -> io::Result<Option<String>> {
        let parts = SecurityInformation::Owner | SecurityInformation::Dacl;
        let descriptor = GetSecurityInfo(file, SeObjectType::SE_FILE_OBJECT, parts)?.as_sddl()?;
        let other = access_list::other(&descriptor.to_string_lossy());
        Ok(other.map(|other| {
            format!(
                "gives rights to {other}: others can use it; run icacls \"{}\" /inheritance:r /grant:r \"%USERNAME%:F\"",
                path.display()
            )
        }))
    }

    /// A descriptor with the access list for the owner of `before`.
    fn protection(before: &SecurityDescriptor, flags: &str) -> io::Result<LocalBox<SecurityDescriptor>> {
        let descriptor = before.as_sddl()?;
        let text = descriptor.to_string_lossy();
        let owner = access_list::owner(&text).ok_or_else(|| {
            io::Error::other("its file system keeps no owner of files, so keys cannot be protected there")
        })?;
        access_list::of_owner(owner, flags).parse()
    }

    /// A list that replaces the whole list, inherited entries included.
    fn only_this_list() -> SecurityInformation {
        SecurityInformation::Dacl | SecurityInformation::ProtectedDacl
    }
}

#[cfg(not(any(unix, windows)))]
compile_error!("files with keys cannot be protected on this system");
