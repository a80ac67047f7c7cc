//! The thread that owns a session. Python threads hand work to it and wait without the
//! interpreter's lock, so that other Python threads run, and Ctrl-C is noticed.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kyklos::{CachedCalls, Error, Result, Session};
use kyklos_transport::{Abort, AbortCause, Group, Progress, Rank};
use pyo3::prelude::*;

use crate::errors::{self, unusable};

type Work = Box<dyn FnOnce(&mut Session) + Send>;
/// One of announced calls. It gives back what tells the caller the result, to be called when the
/// session is free again if it was the last one.
type StepWork = Box<dyn FnOnce(&mut CachedCalls<'_>) -> Answer + Send>;
pub(crate) type Answer = Box<dyn FnOnce() + Send>;

/// The session of a group, on its thread.
pub(crate) struct Worker {
    group: Group,
    /// `None` once the group is closed. Held during a call.
    sender: Mutex<Option<Sender<Work>>>,
    /// Announced calls that are not all made: the thread takes no other work.
    step: Mutex<Option<Step>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Calls that failed before the thread got them, since the last one that it got.
    left_out: AtomicU64,
    /// The process that made the thread; a child after `fork` has no threads.
    process: u32,
}

/// Announced calls that the thread waits for.
struct Step {
    /// Of the group's announcements.
    number: u64,
    work: Sender<StepWork>,
    /// Ends when the session is free again.
    ended: Receiver<()>,
}

/// The thread's part of announced calls: each call as it comes, and the sender that shows that the
/// session is in use.
pub(crate) struct StepCalls {
    work: Receiver<StepWork>,
    _in_use: Sender<()>,
}

/// How often a waiting thread looks for signals.
const SIGNALS: Duration = Duration::from_millis(100);
/// How long an interrupted call may take to end. A computation ends after its current piece, of
/// about 100 ms.
const INTERRUPTED: Duration = Duration::from_secs(10);

impl Worker {
    /// Starts the thread of `session`. When the group is closed, the thread waits at most `leave`
    /// for peers that have not taken all messages.
    pub(crate) fn start(session: Session, leave: Duration) -> std::io::Result<Self> {
        let group = session.group().clone();
        let (sender, work) = channel();
        let name = format!("kyklos-{}", group.rank());
        let thread = std::thread::Builder::new().name(name).spawn(move || serve(session, &work, leave))?;
        Ok(Self {
            group,
            sender: Mutex::new(Some(sender)),
            step: Mutex::new(None),
            thread: Mutex::new(Some(thread)),
            left_out: AtomicU64::new(0),
            process: std::process::id(),
        })
    }

    /// This rank's endpoint.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// A call of this rank failed before the thread got it. It has its place in the sequence of
    /// calls, or the next one would meet the other ranks' call of that place.
    pub(crate) fn leave_out_call(&self) {
        self.left_out.fetch_add(1, Ordering::Relaxed);
        // Counted once, whichever functions the error passes.
        HANDED_OVER.set(HANDED_OVER.get() + 1);
    }

    /// The reverse of [`Self::leave_out_call`].
    pub(crate) fn take_back_call(&self) {
        let _ =
            self.left_out.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |calls| calls.checked_sub(1));
    }

    /// Does `work` with the session, and returns its value. Ctrl-C ends the group on all ranks.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Session) -> T + Send + 'static,
    ) -> PyResult<T> {
        self.hand_over(py, move |session, done: Sender<T>| {
            // The caller waits, unless it was interrupted.
            let _ = done.send(work(session));
        })
    }

    /// Begins announced calls: `work` agrees on them, sends the outcome, and if that is good makes
    /// the calls that [`Self::in_step`] hands over. The number of the announcement, for
    /// [`Self::in_step`].
    pub(crate) fn begin_step(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Session, Sender<Result<()>>, StepCalls) + Send + 'static,
    ) -> PyResult<Result<u64>> {
        let (next, calls) = channel();
        let (in_use, ended) = channel();
        let calls = StepCalls { work: calls, _in_use: in_use };
        let opened = self.hand_over(py, move |session, done| work(session, done, calls))?;
        Ok(opened.map(|()| {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            *self.step() = Some(Step { number, work: next, ended });
            number
        }))
    }

    /// Makes a call of the announcement `number`, and returns its value. `None` if all of them are
    /// made, or they were closed.
    pub(crate) fn in_step<T: Send + 'static>(
        &self,
        py: Python<'_>,
        number: u64,
        work: impl FnOnce(&mut CachedCalls<'_>) -> T + Send + 'static,
    ) -> PyResult<Option<T>> {
        let (done, result) = channel();
        let work: StepWork = Box::new(move |calls| {
            let value = work(calls);
            Box::new(move || drop(done.send(value)))
        });
        let _one_at_a_time = self.lock(py)?;
        let sent = match &*self.step() {
            Some(step) if step.number == number => step.work.send(work).is_ok(),
            _ => return Ok(None),
        };
        if sent { self.wait(py, result).map(Some) } else { Err(ended(py)) }
    }

    /// Ends the announcement `number`. If calls are missing, that ends the group.
    pub(crate) fn end_step(&self, py: Python<'_>, number: u64) {
        let step = self.step().take_if(|step| step.number == number);
        if let Some(Step { work, ended, .. }) = step {
            drop(work);
            // Until the caches are back. Nothing is ever sent.
            py.detach(move || {
                let _ = ended.recv_timeout(INTERRUPTED);
            });
        }
    }

    fn step(&self) -> MutexGuard<'_, Option<Step>> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hand_over<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Session, Sender<T>) + Send + 'static,
    ) -> PyResult<T> {
        let sender = self.lock(py)?;
        if self.step().is_some() {
            return Err(errors::of_call(
                py,
                &Error::request(
                    "another call while announced calls of this group are not all made",
                    "make them first, or close them",
                ),
            ));
        }
        let Some(open) = sender.as_ref() else {
            return Err(unusable(py, "the group is closed: form a new one"));
        };
        let (done, result) = channel();
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        HANDED_OVER.set(HANDED_OVER.get() + 1);
        let work = move |session: &mut Session| {
            for _ in 0..left_out {
                session.take_operation();
            }
            work(session, done);
        };
        if open.send(Box::new(work)).is_err() {
            return Err(ended(py));
        }
        self.wait(py, result)
    }

    /// Waits until no part of `loan` is in use: until all its senders are gone.
    pub(crate) fn wait_for_loan(&self, py: Python<'_>, loan: Receiver<()>) -> PyResult<()> {
        let wait = move || {
            let end = Instant::now() + RETURNED;
            loan.recv_timeout(end.saturating_duration_since(Instant::now()))
        };
        match py.detach(wait) {
            Err(RecvTimeoutError::Timeout) => Err(unusable(
                py,
                "another rank of this process still reads the arrays of a call that has ended here",
            )),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
        }
    }

    fn wait<T: Send + 'static>(&self, py: Python<'_>, mut result: Receiver<T>) -> PyResult<T> {
        let mut interrupted: Option<(PyErr, Instant)> = None;
        loop {
            let (answer, receiver) = py.detach(move || {
                let answer = result.recv_timeout(SIGNALS);
                (answer, result)
            });
            result = receiver;
            match (answer, &interrupted) {
                (Ok(value), None) => return Ok(value),
                (Err(RecvTimeoutError::Disconnected), None) => return Err(ended(py)),
                (Err(RecvTimeoutError::Timeout), None) => {
                    // Python runs handlers on its main thread only; elsewhere this does nothing.
                    if let Err(error) = py.check_signals() {
                        self.abort(&format!("interrupted by a signal: {error}"));
                        interrupted = Some((error, Instant::now()));
                    }
                }
                (Err(RecvTimeoutError::Timeout), Some((_, since))) if since.elapsed() < INTERRUPTED => {}
                (_, Some(_)) => break,
            }
        }
        Err(interrupted.map_or_else(|| ended(py), |(error, _)| error))
    }

    /// Ends the group on all ranks; the others name this rank and `text`.
    pub(crate) fn abort(&self, text: &str) {
        if std::process::id() != self.process {
            return;
        }
        let cause = AbortCause::Failed(text.to_owned());
        let culprit: Rank = self.group.rank();
        self.group.abort(Abort { culprit, cause, progress: Progress::default() });
    }

    /// Leaves the group in order, after the calls that other threads have begun.
    pub(crate) fn close(&self, py: Python<'_>) {
        if std::process::id() != self.process {
            return;
        }
        py.detach(|| {
            drop(self.step().take());
            drop(self.sender.lock().unwrap_or_else(PoisonError::into_inner).take());
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            // A panic of the thread has ended the group; the calls have said so.
            let _ = thread.map(JoinHandle::join);
        });
    }

    /// The sender, if no other thread is in a call.
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Option<Sender<Work>>>> {
        if std::process::id() != self.process {
            return Err(unusable(
                py,
                "the group was formed before this process was forked, and its threads are in the parent: start processes with \
                 the method \"spawn\", or form the group after the fork",
            ));
        }
        match self.sender.try_lock() {
            Ok(sender) => Ok(sender),
            Err(std::sync::TryLockError::Poisoned(sender)) => Ok(sender.into_inner()),
            // Not voted on: the other call goes on.
            Err(std::sync::TryLockError::WouldBlock) => Err(errors::of_call(
                py,
                &Error::request(
                    "another thread is in a call of this group",
                    "make the calls of a rank one after the other",
                ),
            )),
        }
    }
}

impl StepCalls {
    /// Makes all of `calls` as they come. What tells the caller the result of the last one; `None`
    /// if calls are missing.
    pub(crate) fn serve(&self, calls: &mut CachedCalls<'_>) -> Option<Answer> {
        loop {
            let answer = self.work.recv().ok()?(calls);
            if calls.remaining() == 0 {
                return Some(answer);
            }
            answer();
        }
    }
}

/// The next announcement of a group of this process.
static NUMBER: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Calls of any group that this thread has handed over.
    static HANDED_OVER: Cell<u64> = const { Cell::new(0) };
}

/// How many calls this thread has handed over to the threads of groups.
pub(crate) fn calls_of_this_thread() -> u64 {
    HANDED_OVER.get()
}

/// How long other ranks of the process may read the arrays of a call after its end on this rank.
const RETURNED: Duration = Duration::from_secs(60);

impl Drop for Worker {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // The thread is in the parent process, which closes the group.
            std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

fn serve(mut session: Session, work: &Receiver<Work>, leave: Duration) {
    while let Ok(work) = work.recv() {
        // The session aborts the group when it unwinds, so that other ranks do not wait; the caller sees a
        // closed channel.
        if catch_unwind(AssertUnwindSafe(|| work(&mut session))).is_err() {
            return;
        }
    }
    // Peers that still wait for a message report it themselves.
    let _ = session.close(leave);
}

fn ended(py: Python<'_>) -> PyErr {
    unusable(py, "the thread of the group has ended by a fault of Kyklos; its message is on standard error")
}
