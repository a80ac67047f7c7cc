//! The helper's side.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kyklos_helpers::{HelperEvent, HelperOptions, Knock, help};
use kyklos_transport::{Abort, AbortCause, Group, Progress, Rank, TransportError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::devices::Chosen;
use crate::errors;

/// What the thread of a helper tells.
enum Told {
    Event(HelperEvent),
    /// The owner is not there, or gone.
    Away(String),
    /// The owner lets it go, and once is enough.
    Let,
    /// It is no use to go on.
    Ended(kyklos::Error),
}

/// Helps the owner whose token this is on a device of this machine, until a signal comes; with
/// `once`, until the owner lets it go. `tell` gets lines for people.
#[pyfunction]
pub(crate) fn help_out(
    py: Python<'_>,
    token: &str,
    device: &str,
    memory_bytes: Option<u64>,
    once: bool,
    tell: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let device = Chosen::of(device, 0).and_then(|chosen| py.detach(|| chosen.open()));
    let device = device.map_err(|error| errors::of_call(py, &error))?;
    let mut knock = Knock::new(token).map_err(|error| errors::of_call(py, &error))?;
    let place = knock.place().to_owned();
    let (sender, receiver) = channel();
    // Only this thread receives; the lock lets it do so without the interpreter.
    let receiver = Mutex::new(receiver);
    let current: Arc<Mutex<Option<Group>>> = Arc::default();
    let of_thread = Arc::clone(&current);
    let stopped = Arc::new(AtomicBool::new(false));
    let is_stopped = Arc::clone(&stopped);
    let run = move || {
        let events = sender.clone();
        let on_event = Arc::new(move |event: &HelperEvent| drop(events.send(Told::Event(event.clone()))));
        let options = HelperOptions { memory_bytes, on_event };
        loop {
            let ended = knock.enter(PATIENCE, &[]).and_then(|group| {
                *of_thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(group.clone());
                if is_stopped.load(Ordering::SeqCst) {
                    return pollster::block_on(group.close(LEAVING)).map_err(kyklos::Error::from);
                }
                help(group, &device, &options)
            });
            let told = match ended {
                _ if is_stopped.load(Ordering::SeqCst) => return,
                Ok(()) if once => {
                    drop(sender.send(Told::Let));
                    return;
                }
                Ok(()) => Told::Away("the owner needs no help now".to_owned()),
                Err(kyklos::Error::Transport(TransportError::Aborted { abort, .. })) => {
                    Told::Away(format!("the owner is gone: {}", abort.cause.text()))
                }
                Err(error) if Knock::may_try_again(&error) => {
                    Told::Away(format!("waiting for the owner: {error}"))
                }
                Err(error) => Told::Ended(error),
            };
            let is_end = matches!(told, Told::Ended(_));
            if sender.send(told).is_err() || is_end {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    };
    std::thread::Builder::new().name("helper".to_owned()).spawn(run).map_err(|error| {
        PyRuntimeError::new_err(format!("the thread of a helper does not start: {error}"))
    })?;
    tell.call1((format!("looking for the owner at {place}"),))?;
    let mut last = String::new();
    let ended = loop {
        match py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK)) {
            Ok(Told::Event(HelperEvent::Served { .. })) | Err(RecvTimeoutError::Timeout) => {}
            Ok(Told::Event(HelperEvent::Joined)) => {
                last.clear();
                tell.call1(("joined the owner",))?;
            }
            Ok(Told::Event(HelperEvent::Refused(text))) => drop(tell.call1((format!("refused: {text}"),))?),
            Ok(Told::Event(_)) => {}
            // Once, however often it is tried.
            Ok(Told::Away(text)) if text == last => {}
            Ok(Told::Away(text)) => {
                tell.call1((text.as_str(),))?;
                last = text;
            }
            Ok(Told::Let) => break Ok(()),
            Ok(Told::Ended(error)) => break Err(errors::of_call(py, &error)),
            Err(RecvTimeoutError::Disconnected) => {
                break Err(PyRuntimeError::new_err("the thread of the helper has failed"));
            }
        }
        if let Err(signal) = py.check_signals() {
            break Err(signal);
        }
    };
    stopped.store(true, Ordering::SeqCst);
    let group = current.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(group) = group {
        // The owner learns of it at once, and computes the share itself.
        group.abort(Abort {
            culprit: Rank(1),
            cause: AbortCause::Failed("the helper was stopped on its machine".to_owned()),
            progress: Progress::default(),
        });
        drop(py.detach(|| pollster::block_on(group.close(LEAVING))));
    }
    ended
}

const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(100);
const LEAVING: Duration = Duration::from_secs(2);
