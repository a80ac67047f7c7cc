//! A file that gets its name when it is complete.

mod unfinished;

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use self::unfinished::Unfinished;
use crate::failure::{Failure, Result};

/// An incomplete file; dropped, it is removed.
#[derive(Debug)]
pub(crate) struct NewFile {
    target: PathBuf,
    file: Unfinished,
}

impl NewFile {
    /// Creates the file that will replace `target`. The user's umask decides who reads it, as for
    /// any other program.
    pub(crate) fn create(target: &Path) -> Result<Self> {
        Self::with_mode(target, 0o666)
    }

    /// As [`Self::create`], for this user alone.
    pub(crate) fn create_private(target: &Path) -> Result<Self> {
        Self::with_mode(target, 0o600)
    }

    fn with_mode(target: &Path, mode: u32) -> Result<Self> {
        let file = Unfinished::create(folder_of(target), mode);
        let file = file.map_err(|error| cannot_create(target, &error))?;
        Ok(Self { target: target.to_owned(), file })
    }

    pub(crate) fn as_file(&self) -> &File {
        self.file.as_file()
    }

    /// The failure of an operation on the file.
    pub(crate) fn cannot_write(&self, error: &io::Error) -> Failure {
        Failure::file("write", &self.target, error)
    }

    /// Waits until the bytes are on the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.as_file().sync_all().map_err(|error| self.cannot_write(&error))
    }

    /// Gives the complete file its final name, which then also survives a loss of power.
    pub(crate) fn commit(self) -> Result<()> {
        self.sync()?;
        let Self { target, file } = self;
        file.persist(folder_of(&target), &target).map_err(|error| Failure::file("write", &target, &error))?;
        // Windows opens no folders as files, and keeps names by itself.
        #[cfg(unix)]
        File::open(folder_of(&target))
            .and_then(|folder| folder.sync_all())
            .map_err(|error| Failure::file("write", &target, &error))?;
        Ok(())
    }
}

/// Refuses a name that no finished file can replace; `option` names it.
pub(crate) fn check_name(option: &str, path: &Path, example: &str) -> Result<()> {
    if path.is_dir() || path.file_name().is_none() {
        return Err(Failure::request(
            format!("{option} {} is no file name", path.display()),
            format!("name a file, such as {example}"),
        ));
    }
    Ok(())
}

/// Refuses a file that cannot be made where it should be; `option` names it. For files that are
/// written at the end of a run.
pub(crate) fn check_writable(option: &str, path: &Path, example: &str) -> Result<()> {
    check_name(option, path, example)?;
    let made = match std::fs::metadata(path) {
        // Also a pipe, which must not be opened before somebody reads it.
        Ok(there) if !there.is_file() => Ok(()),
        Ok(_) => OpenOptions::new().write(true).open(path).map(drop).map_err(|error| {
            Failure::refused_here(format!("cannot write {}: {error}: name another file", path.display()))
        }),
        Err(_) => NewFile::create(path).map(drop),
    };
    made.map_err(|failure| Failure { text: format!("{option}: {}", failure.text), ..failure })
}

/// Why no file can be made in the folder of `target`, without the temporary name. What the user can
/// change is a refusal: nothing has run.
fn cannot_create(target: &Path, error: &io::Error) -> Failure {
    let why = match error.kind() {
        io::ErrorKind::NotFound => "its folder does not exist: make it, or name a file in another one",
        io::ErrorKind::PermissionDenied => "its folder is closed to this user: name a file in another one",
        io::ErrorKind::ReadOnlyFilesystem => "its folder is read-only: name a file in another one",
        io::ErrorKind::NotADirectory => "a part of its path is no folder: name a file in a folder",
        _ => {
            let why = error
                .get_ref()
                .and_then(Error::source)
                .map_or_else(|| error.to_string(), ToString::to_string);
            return Failure::run(format!("cannot write {}: {why}", target.display()));
        }
    };
    Failure::refused_here(format!("cannot write {}: {why}", target.display()))
}

/// Refuses to replace what is not a regular file: a pipe or a device.
pub(crate) fn check_replaced(option: &str, path: &Path) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(Failure::request(
            format!("{option} would replace {}, which is not a regular file", path.display()),
            "name another file",
        ));
    }
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}
