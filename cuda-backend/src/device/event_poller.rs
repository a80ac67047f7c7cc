//! A thread per backend that polls events, so that no other thread blocks on the device.
//!
//! It polls because a blocking wait in the driver never returns when a kernel hangs. It sleeps
//! between polls for a sixteenth of the time that it has waited so far, from 10 µs to 1 ms: an
//! event is noticed late by at most a small part of its own duration.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kyklos::Result;
use kyklos::backend::ShortWork;

use super::dependencies::StreamKind;
use super::status::DeviceStatus;
use super::unfinished_launches::UnfinishedLaunches;
use crate::driver::Event;

const SHORTEST_SLEEP: Duration = Duration::from_micros(10);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Called with `Ok` when an event is complete, with the error when the device is lost.
type Callback = Box<dyn FnOnce(Result<()>) + Send>;
/// Called when an event is complete.
type Note = Box<dyn FnOnce() + Send>;

/// The owner of the polling thread. Dropping it ends the thread once its queues are empty.
#[derive(Debug)]
pub(crate) struct EventPoller(PollerHandle);

/// A handle of the polling thread that does not keep it running.
#[derive(Clone, Debug)]
pub(crate) struct PollerHandle(Arc<Shared>);

struct Shared {
    status: Arc<DeviceStatus>,
    /// A stream that completes no event for this long hangs.
    stuck_after: Duration,
    /// For the error of a device that hangs. Gone when the backend's resources are.
    unfinished: Weak<UnfinishedLaunches>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    streams: [VecDeque<(Arc<Event>, Callback)>; StreamKind::COUNT],
    /// Of streams that are not the backend's, in any order.
    others: Vec<(Arc<Event>, Instant, Note)>,
    closed: bool,
    /// Whether the thread has ended.
    ended: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("status", &self.status).finish_non_exhaustive()
    }
}

impl EventPoller {
    pub(super) fn start(
        ordinal: usize,
        status: &Arc<DeviceStatus>,
        stuck_after: Duration,
        unfinished: Weak<UnfinishedLaunches>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            status: status.clone(),
            stuck_after,
            unfinished,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread = std::thread::Builder::new().name(format!("kyklos-cuda:{ordinal}"));
        let run = {
            let shared = shared.clone();
            move || shared.run()
        };
        thread.spawn(run).map_err(|error| status.device_error("start a thread", &error.to_string()))?;
        Ok(Self(PollerHandle(shared)))
    }

    pub(crate) fn handle(&self) -> PollerHandle {
        self.0.clone()
    }

    /// Calls `callback` on the polling thread when `event` is complete. Events of a stream must be
    /// given in stream order.
    pub(crate) fn on_event(
        &self,
        kind: StreamKind,
        event: Arc<Event>,
        callback: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        self.0.on_event(kind, event, callback);
    }
}

impl PollerHandle {
    /// As [`EventPoller::on_event`]. The thread ends after everything that the backend has
    /// submitted is done; from then on the callback is called at once.
    pub(crate) fn on_event(
        &self,
        kind: StreamKind,
        event: Arc<Event>,
        callback: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        let mut queue = self.0.lock();
        if queue.ended {
            drop(queue);
            return callback(self.0.status.check());
        }
        queue.streams[kind as usize].push_back((event, Box::new(callback)));
        self.0.changed.notify_one();
    }

    /// Calls `callback` on the polling thread when `event`, of a stream that is not the backend's,
    /// is complete. If the device is lost before, it is not called. The backend is open.
    pub(crate) fn on_event_of_another_stream(
        &self,
        event: Arc<Event>,
        callback: impl FnOnce() + Send + 'static,
    ) {
        self.0.lock().others.push((event, Instant::now(), Box::new(callback)));
        self.0.changed.notify_one();
    }
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.streams.iter().all(VecDeque::is_empty) && self.others.is_empty()
    }
}

impl Drop for EventPoller {
    fn drop(&mut self) {
        let Self(PollerHandle(shared)) = self;
        shared.lock().closed = true;
        shared.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the device has completed nothing since `since`, for so long that it counts as lost
    /// from now on.
    fn is_late(&self, since: &mut Instant, after: Duration) -> bool {
        // The device may wait for another rank. NCCL's thread ends that after the deadline of the message.
        if self.status.awaits_messages() {
            *since = Instant::now();
        }
        if since.elapsed() < after {
            return false;
        }
        let running = self.unfinished.upgrade().map(|unfinished| unfinished.running()).unwrap_or_default();
        let kernels = match &running[..] {
            [] => String::new(),
            [kernel] => format!(", in {kernel}"),
            several => format!(", in one of {}", several.join(", ")),
        };
        let text = format!(
            "the device completed nothing for {} s{kernels}: it hangs, or another process keeps it busy",
            after.as_secs_f32()
        );
        self.status.mark_lost(self.status.device_error("wait for the device", &text));
        true
    }

    /// Whether a stream of the backend that has completed nothing since `since` hangs.
    fn is_stuck(&self, since: &mut Instant) -> bool {
        match self.status.short_work_since() {
            // What was submitted before is done: whoever measures has waited for it.
            Some(began) if ShortWork::AT_MOST < self.stuck_after => {
                *since = began.max(*since);
                self.is_late(since, ShortWork::AT_MOST)
            }
            _ => self.is_late(since, self.stuck_after),
        }
    }

    /// Whether one of the events of other streams is complete.
    fn poll_others(&self) -> bool {
        let others = std::mem::take(&mut self.lock().others);
        let before = others.len();
        let mut left = Vec::new();
        for (event, mut since, callback) in others {
            match event.is_complete() {
                Ok(true) => callback(),
                // One that hangs may never complete it. A write of another device that waits for it ends
                // before, with an error that names this one.
                Ok(false) if self.status.is_lost() || self.is_late(&mut since, 2 * self.stuck_after) => {}
                Ok(false) => left.push((event, since, callback)),
                Err(error) => {
                    self.status.error("wait for a message", &error);
                }
            }
        }
        let progressed = left.len() < before;
        self.lock().others.append(&mut left);
        progressed
    }

    fn run(&self) {
        let mut since = [Instant::now(); StreamKind::COUNT];
        let mut idle_since = Instant::now();
        loop {
            let heads = {
                let mut queue = self.lock();
                queue.ended = queue.closed && queue.is_empty();
                if queue.ended {
                    return;
                }
                let heads = queue.streams.each_ref().map(|kind| kind.front().map(|(event, _)| event.clone()));
                (!queue.is_empty()).then_some(heads)
            };
            let Some(heads) = heads else {
                let sleeping = |queue: &mut Queue| !queue.closed && queue.is_empty();
                drop(self.changed.wait_while(self.lock(), sleeping).unwrap_or_else(PoisonError::into_inner));
                idle_since = Instant::now();
                since = [idle_since; StreamKind::COUNT];
                continue;
            };
            let mut progressed = self.poll_others();
            for (kind, head) in heads.into_iter().enumerate() {
                let Some(event) = head else {
                    since[kind] = Instant::now();
                    continue;
                };
                match event.is_complete() {
                    Ok(false) if !self.is_stuck(&mut since[kind]) => continue,
                    Ok(_) => {}
                    Err(error) => {
                        self.status.error("wait for the device", &error);
                    }
                }
                since[kind] = Instant::now();
                progressed = true;
                let next = self.lock().streams[kind].pop_front();
                if let Some((_, callback)) = next {
                    callback(self.status.check());
                }
            }
            if progressed {
                idle_since = Instant::now();
            } else {
                std::thread::sleep((idle_since.elapsed() / 16).clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
            }
        }
    }
}
