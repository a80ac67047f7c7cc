//! A file before it has its name.
//!
//! On Linux it has no name at all, where the file system can do that: the kernel frees it when its
//! process is killed. Elsewhere, and for the moment in which it replaces another file, it has a
//! temporary name, which a killed process leaves behind; on Linux the next process that writes a
//! file in the same folder removes it, until the system starts anew. A lock tells which ones are in
//! use.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::interrupt::RemoveOnInterrupt;

/// An incomplete file; dropped, it is gone.
#[derive(Debug)]
pub(super) enum Unfinished {
    #[cfg(target_os = "linux")]
    Unnamed(File),
    Named {
        file: tempfile::NamedTempFile,
        _remove: RemoveOnInterrupt,
    },
}

impl Unfinished {
    /// Creates a file that will be in `folder`, with this mode less the user's umask.
    pub(super) fn create(folder: &Path, mode: u32) -> io::Result<Self> {
        if let Some(kernel) = kernel() {
            remove_stale(folder, &kernel);
        }
        #[cfg(target_os = "linux")]
        if let Ok(file) = unnamed(folder, mode) {
            return Ok(Self::Unnamed(file));
        }
        Self::named(folder, mode)
    }

    fn named(folder: &Path, mode: u32) -> io::Result<Self> {
        let prefix = prefix();
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(SUFFIX);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
        #[cfg(not(unix))]
        let _ = mode;
        for _ in 0..MOST_TRIES {
            let file = builder.tempfile_in(folder)?;
            if cfg!(not(unix)) || is_held(&file) {
                let _remove = RemoveOnInterrupt::file(file.path());
                return Ok(Self::Named { file, _remove });
            }
        }
        Err(io::Error::other("other processes remove its temporary file"))
    }

    pub(super) fn as_file(&self) -> &File {
        match self {
            #[cfg(target_os = "linux")]
            Self::Unnamed(file) => file,
            Self::Named { file, .. } => file.as_file(),
        }
    }

    /// Gives it the name `target`, which is in `folder`. A file of that name is replaced at once:
    /// whoever opens it gets the old one or this one.
    pub(super) fn persist(self, folder: &Path, target: &Path) -> io::Result<()> {
        #[cfg(not(target_os = "linux"))]
        let _ = folder;
        match self {
            #[cfg(target_os = "linux")]
            Self::Unnamed(file) => match link(&file, target) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // No call replaces a file by one without a name.
                    Self::linked(&file, folder)?.persist(folder, target)
                }
                // A result of hours must not be lost because it cannot get a name.
                Err(error) => match Self::copied(&file, folder) {
                    Ok(copy) => copy.persist(folder, target),
                    Err(_) => Err(error),
                },
                Ok(()) => Ok(()),
            },
            Self::Named { file, .. } => file.persist(target).map(drop).map_err(|error| error.error),
        }
    }

    /// The same file, which had no name, with a temporary one.
    #[cfg(target_os = "linux")]
    fn linked(file: &File, folder: &Path) -> io::Result<Self> {
        // Before it has a name: it never looks stale. Without locks here nobody removes it.
        let _ = file.try_lock();
        let mut builder = tempfile::Builder::new();
        let prefix = prefix();
        let file = builder.prefix(&prefix).suffix(SUFFIX).make_in(folder, |path| {
            let same = file.try_clone()?;
            link(file, path)?;
            Ok(same)
        })?;
        let _remove = RemoveOnInterrupt::file(file.path());
        Ok(Self::Named { file, _remove })
    }

    /// A copy, on the disk, of a file that has no name.
    #[cfg(target_os = "linux")]
    fn copied(mut file: &File, folder: &Path) -> io::Result<Self> {
        use std::io::Seek;
        use std::os::unix::fs::PermissionsExt;
        let copy = Self::named(folder, file.metadata()?.permissions().mode() & 0o777)?;
        file.rewind()?;
        io::copy(&mut file, &mut copy.as_file())?;
        copy.as_file().sync_all()?;
        Ok(copy)
    }
}

/// A file in `folder` without a name, where the file system has such files.
#[cfg(target_os = "linux")]
fn unnamed(folder: &Path, mode: u32) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags, getxattr_query, open};
    // Linux before 6.0 forgets the umask in some file systems. Rules of the folder replace it.
    let ruled = getxattr_query(folder, "system.posix_acl_default").is_ok();
    let mode = if ruled { mode } else { mode & !umask()? };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(open(folder, flags, Mode::from_raw_mode(mode))?);
    // Without /proc it could not get a name.
    std::fs::metadata(of_process(&file))?;
    Ok(file)
}

/// The umask of this process: the system call that tells it changes it, for other threads too.
#[cfg(target_os = "linux")]
fn umask() -> io::Result<u32> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let digits = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    let umask = digits.and_then(|digits| u32::from_str_radix(digits.trim(), 8).ok());
    umask.ok_or_else(|| io::Error::other("the system does not tell the umask"))
}

#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> io::Result<()> {
    use rustix::fs::{AtFlags, CWD, linkat};
    Ok(linkat(CWD, of_process(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// The path of an open file of this process.
#[cfg(target_os = "linux")]
fn of_process(file: &File) -> String {
    format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file))
}

/// Locks a new file. False if another process has taken it for a stale one before.
fn is_held(file: &tempfile::NamedTempFile) -> bool {
    match file.as_file().try_lock() {
        Err(std::fs::TryLockError::WouldBlock) => false,
        // Without locks in this file system nobody removes it.
        Ok(()) | Err(std::fs::TryLockError::Error(_)) => file.path().exists(),
    }
}

/// Removes the unfinished files of dead processes of this kernel. Another kernel with the same
/// folder may not see the locks of this one.
fn remove_stale(folder: &Path, kernel: &str) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let ours = of_kernel(kernel);
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(|name| name.starts_with(&ours) && name.ends_with(SUFFIX));
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        // The lock is held until the file is gone.
        let file = File::options().read(true).write(true).open(&path);
        if let Ok(file) = file.and_then(|file| file.try_lock().map(|()| file).map_err(io::Error::from)) {
            let _ = std::fs::remove_file(&path);
            drop(file);
        }
    }
}

/// Digits that stand for the running kernel, which all containers of a host share: names of hosts
/// may be the same on two of them, and another one in each container. `None` where the system does
/// not tell it.
fn kernel() -> Option<String> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    Some(blake3::hash(&boot).to_hex()[..16].to_owned())
}

/// How the temporary names of this process begin.
fn prefix() -> String {
    kernel().map_or_else(|| PREFIX.to_owned(), |kernel| of_kernel(&kernel))
}

fn of_kernel(kernel: &str) -> String {
    format!("{PREFIX}{kernel}-")
}

const PREFIX: &str = ".kyklos-";
const SUFFIX: &str = ".part";
const MOST_TRIES: u32 = 16;

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_gets_its_name_whole_and_replaces_what_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("result");
        for way in [Unfinished::create, Unfinished::named] {
            for text in ["first", "second"] {
                let file = way(folder.path(), 0o666).unwrap();
                file.as_file().write_all(text.as_bytes()).unwrap();
                let before = std::fs::read(&target).ok();
                file.persist(folder.path(), &target).unwrap();
                assert_ne!(before.as_deref(), Some(text.as_bytes()), "it has its name too early");
                assert_eq!(std::fs::read(&target).unwrap(), text.as_bytes());
                assert_eq!(names(folder.path()), ["result"]);
            }
            // Who may read it is as for a file of any other program.
            let other = folder.path().join("other");
            std::fs::write(&other, "").unwrap();
            let permissions = |path| std::fs::metadata(path).unwrap().permissions();
            assert_eq!(permissions(&target), permissions(&other));
            std::fs::remove_file(&other).unwrap();
            // Dropped, it is gone.
            drop(way(folder.path(), 0o666).unwrap());
            assert_eq!(names(folder.path()), ["result"]);
            std::fs::remove_file(&target).unwrap();
        }
    }

    #[test]
    fn a_file_that_can_get_no_name_is_copied() {
        use rustix::fs::{Mode, OFlags, open};
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("result");
        // Exclusive: no link is made to such a file.
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL;
        let Ok(file) = open(folder.path(), flags, Mode::from_raw_mode(0o600)) else {
            eprintln!("skipped: the file system of {} has no files without a name", folder.path().display());
            return;
        };
        let mut file = File::from(file);
        file.write_all(b"whole").unwrap();
        assert_ne!(link(&file, &target).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        Unfinished::Unnamed(file).persist(folder.path(), &target).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"whole");
        assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(folder.path()), ["result"]);
    }

    #[test]
    fn stale_files_of_this_kernel_are_removed_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let ours = of_kernel(&kernel().unwrap());
        let stale = format!("{ours}000000.part");
        let pipe = format!("{ours}pipe.part");
        assert!(std::process::Command::new("mkfifo").arg(path(&pipe)).status().unwrap().success());
        let mut kept =
            vec![format!("{}000000.part", of_kernel("another")), "result".to_owned(), ours.clone()];
        for name in kept.iter().chain([&stale]) {
            std::fs::write(path(name), b"half").unwrap();
        }
        let alive = Unfinished::named(folder.path(), 0o666).unwrap();
        let Unfinished::Named { file, .. } = &alive else { panic!("{alive:?}") };
        kept.extend([pipe, file.path().file_name().unwrap().to_str().unwrap().to_owned()]);
        kept.sort();
        // Those that other processes write stay.
        drop(Unfinished::create(folder.path(), 0o666).unwrap());
        assert_eq!(names(folder.path()), kept);
        if let Ok(file) = unnamed(folder.path(), 0o666) {
            let linked = Unfinished::linked(&file, folder.path()).unwrap();
            remove_stale(folder.path(), &kernel().unwrap());
            assert_eq!(names(folder.path()).len(), kept.len() + 1);
            drop((linked, file));
            assert_eq!(names(folder.path()), kept);
            // As a process that is killed leaves it.
            let killed = unnamed(folder.path(), 0o666).unwrap();
            let linked = Unfinished::linked(&killed, folder.path()).unwrap();
            let Unfinished::Named { file, .. } = linked else { panic!("{linked:?}") };
            drop(file.keep().unwrap());
            assert_eq!(names(folder.path()).len(), kept.len() + 1);
            drop(killed);
            remove_stale(folder.path(), &kernel().unwrap());
            assert_eq!(names(folder.path()), kept);
        }
        alive.persist(folder.path(), &path("other result")).unwrap();
        assert!(path("other result").exists());
    }
}
