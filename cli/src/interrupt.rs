//! Ctrl-C and other signals that end a process: the other ranks are told, incomplete files are
//! removed, child processes end, and a rank tells its launcher that it ends.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use kyklos_launch::variables::LAUNCH;
use kyklos_transport::{Abort, AbortCause, Group, Progress, Transport};

use crate::activity;
use crate::failure::{Failure, Result, note};

/// What ends the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interruption {
    name: &'static str,
    /// The exit code that shells and supervisors expect: 128 and the number of the signal.
    pub(crate) exit: u8,
}

/// A path that is removed when the program is interrupted, until this is dropped.
#[derive(Debug)]
pub(crate) struct RemoveOnInterrupt {
    path: PathBuf,
}

impl RemoveOnInterrupt {
    pub(crate) fn file(path: &Path) -> Self {
        locked(&PATHS).push(path.to_owned());
        Self { path: path.to_owned() }
    }
}

impl Drop for RemoveOnInterrupt {
    fn drop(&mut self) {
        locked(&PATHS).retain(|path| *path != self.path);
    }
}

/// From now on an interruption ends the group of [`tell_on_interrupt`], removes all
/// [`RemoveOnInterrupt`] paths and ends the process.
pub(crate) fn end_on_interrupt() -> Result<()> {
    on_interrupt(|interruption| {
        // Before the group is looked up: tell_on_interrupt notes a new one before it looks here.
        let _ = INTERRUPTION.set(interruption);
        if take_leave(interruption) {
            // The main thread leaves the group.
            let until = Instant::now() + FAREWELL;
            while !AT_END.load(Ordering::SeqCst) && Instant::now() < until {
                std::thread::sleep(LOOK);
            }
        }
        end(interruption.exit, None);
    })
}

/// The group of this process now. An interruption tells the other ranks at once which rank ends;
/// one that has come while the group formed tells them now.
pub(crate) fn tell_on_interrupt(group: &Group) {
    *locked(&GROUP) = Some(std::sync::Arc::downgrade(&group.transport));
    if let Some(interruption) = INTERRUPTION.get() {
        take_leave(*interruption);
    }
}

/// Tells the other ranks that this one ends, if there are others.
fn take_leave(Interruption { name, .. }: Interruption) -> bool {
    // Ctrl-C in the terminal of kyklos launch is for all ranks at once.
    if name == CTRL_C && std::env::var_os(LAUNCH).is_some() {
        return false;
    }
    let group = locked(&GROUP).as_ref().and_then(Weak::upgrade);
    let Some(group) = group.filter(|group| group.size() > 1) else { return false };
    let cause = AbortCause::Died(format!("it was ended by {name}"));
    group.abort(Abort { culprit: group.rank(), cause, progress: Progress::default() });
    true
}

/// Whether an interruption ends this process.
pub(crate) fn is_interrupted() -> bool {
    INTERRUPTION.get().is_some()
}

/// At the end of the program: does not return if an interruption ends this process, which has its
/// own exit code and says nothing.
pub(crate) fn leave_the_end_to_an_interruption() {
    if is_interrupted() {
        AT_END.store(true, Ordering::SeqCst);
        loop {
            std::thread::park();
        }
    }
}

/// From now on an interruption calls `then` on a separate thread.
#[cfg(unix)]
pub(crate) fn on_interrupt(mut then: impl FnMut(Interruption) + Send + 'static) -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    on_signals("Ctrl-C", [SIGINT, SIGTERM, SIGHUP], move |signal| {
        then(match signal {
            SIGHUP => Interruption { name: "SIGHUP", exit: 129 },
            SIGTERM => Interruption { name: "SIGTERM", exit: 143 },
            _ => Interruption { name: CTRL_C, exit: 130 },
        });
    })
}

/// From now on an interruption calls `then` on a separate thread. At most once in a process.
#[cfg(not(unix))]
pub(crate) fn on_interrupt(mut then: impl FnMut(Interruption) + Send + 'static) -> Result<()> {
    let then = move || then(Interruption { name: CTRL_C, exit: 130 });
    ctrlc::set_handler(then).map_err(|error| Failure::run(format!("cannot handle Ctrl-C: {error}")))
}

/// From now on SIGUSR1 calls `then` on a separate thread. Only Unix has this signal.
#[cfg(unix)]
pub(crate) fn on_request(mut then: impl FnMut() + Send + 'static) -> Result<()> {
    on_signals("SIGUSR1", [signal_hook::consts::SIGUSR1], move |_| then())
}

#[cfg(not(unix))]
#[expect(clippy::unnecessary_wraps, reason = "on unix it can fail")]
pub(crate) fn on_request(_: impl FnMut() + Send + 'static) -> Result<()> {
    Ok(())
}

#[cfg(unix)]
fn on_signals<const N: usize>(
    name: &str,
    signals: [std::ffi::c_int; N],
    then: impl FnMut(std::ffi::c_int) + Send + 'static,
) -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new(signals)
        .map_err(|error| Failure::run(format!("cannot handle {name}: {error}")))?;
    std::thread::spawn(move || signals.forever().for_each(then));
    Ok(())
}

/// Removes all [`RemoveOnInterrupt`] paths, says the last line if there is one, and ends the
/// process: also if nobody reads what it writes.
pub(crate) fn end(exit: u8, last_line: Option<String>) {
    for path in locked(&PATHS).iter() {
        let _ = std::fs::remove_file(path);
    }
    let limit = if last_line.is_some() { LAST_WORDS_OF_ITS_OWN } else { LAST_WORDS };
    let (said, is_said) = mpsc::channel();
    // A stopped terminal (Ctrl-S) or a pipe that is full blocks who writes to it, and whoever waits
    // for its lock. Without the thread nothing is said.
    let _ = std::thread::Builder::new().spawn(move || {
        if let Some(line) = last_line {
            note(&line);
        }
        activity::ends();
        tell_launcher();
        let _ = said.send(());
    });
    let _ = is_said.recv_timeout(limit);
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

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    // No panic can leave what they hold half changed.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

static PATHS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static GROUP: Mutex<Option<Weak<dyn Transport>>> = Mutex::new(None);
/// What ends this process.
static INTERRUPTION: OnceLock<Interruption> = OnceLock::new();
/// The main thread has nothing more to do.
static AT_END: AtomicBool = AtomicBool::new(false);

/// What [`tell_launcher`] writes to standard error. No text begins with this character.
pub(crate) const LAST_LINE: &[u8] = b"\0ends\n";

const CTRL_C: &str = "Ctrl-C";
/// Longest time in which the main thread leaves the group: less than `kyklos launch` waits.
const FAREWELL: Duration = Duration::from_secs(2);
/// Longest time for the end of the line and of the lines to `kyklos launch`; with [`FAREWELL`] less
/// than it waits.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// The same with a line that says why the process ends: nobody has asked it to.
const LAST_WORDS_OF_ITS_OWN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);
