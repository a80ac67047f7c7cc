//! Ctrl-C and termination: incomplete files are removed, child processes end, and a rank tells its
//! launcher that it ends.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use kyklos_launch::variables::LAUNCH;

use crate::failure::{Failure, Result};

/// A path that is removed when the program is interrupted, until this is dropped.
#[derive(Debug)]
pub(crate) struct RemoveOnInterrupt {
    path: PathBuf,
}

impl RemoveOnInterrupt {
    pub(crate) fn file(path: &Path) -> Self {
        paths().push(path.to_owned());
        Self { path: path.to_owned() }
    }
}

impl Drop for RemoveOnInterrupt {
    fn drop(&mut self) {
        paths().retain(|path| *path != self.path);
    }
}

/// From now on an interruption removes all [`RemoveOnInterrupt`] paths and ends the process.
pub(crate) fn end_on_interrupt() -> Result<()> {
    on_interrupt(|| end(EXIT_INTERRUPTED))
}

/// From now on an interruption calls `then` on a separate thread. At most once in a process.
pub(crate) fn on_interrupt(then: impl FnMut() + Send + 'static) -> Result<()> {
    ctrlc::set_handler(then).map_err(|error| Failure::run(format!("cannot handle Ctrl-C: {error}")))
}

/// From now on SIGUSR1 calls `then` on a separate thread. Only Unix has this signal.
#[cfg(unix)]
pub(crate) fn on_request(mut then: impl FnMut() + Send + 'static) -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGUSR1])
        .map_err(|error| Failure::run(format!("cannot handle SIGUSR1: {error}")))?;
    std::thread::spawn(move || signals.forever().for_each(|_| then()));
    Ok(())
}

#[cfg(not(unix))]
#[expect(clippy::unnecessary_wraps, reason = "on unix it can fail")]
pub(crate) fn on_request(_: impl FnMut() + Send + 'static) -> Result<()> {
    Ok(())
}

/// Removes all [`RemoveOnInterrupt`] paths and ends the process.
pub(crate) fn end(exit: u8) {
    for path in paths().iter() {
        let _ = std::fs::remove_file(path);
    }
    tell_launcher();
    std::process::exit(i32::from(exit));
}

/// Tells `kyklos launch` that this process ends by itself, if it has started this process. On Unix
/// the system tells it.
///
/// On Windows the exit code alone does not say so: who kills a process chooses its exit code, 0
/// too.
pub(crate) fn tell_launcher() {
    if cfg!(not(unix)) && std::env::var_os(LAUNCH).is_some() {
        let _ = std::io::stderr().lock().write_all(LAST_LINE);
    }
}

fn paths() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    // No panic can leave the list half changed.
    PATHS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

static PATHS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// What [`tell_launcher`] writes to standard error. No text begins with this character.
pub(crate) const LAST_LINE: &[u8] = b"\0ends\n";

/// The exit code that shells use for a process that Ctrl-C ended.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;
