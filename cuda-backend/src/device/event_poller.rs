//! A thread for each backend that notices when the device is done, so that nobody's thread blocks on it.
//!
//! It asks and does not wait: a wait in the driver has no end when a kernel hangs. Its naps grow with what it waits for,
//! to a sixteenth of it, so that a piece of 100 ms costs hardly any of its time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kyklos::Result;

use super::dependencies::StreamKind;
use super::status::DeviceStatus;
use crate::driver::Event;

const SHORTEST_NAP: Duration = Duration::from_micros(10);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// What is called when an event has happened, or never will.
type Then = Box<dyn FnOnce(Result<()>) + Send>;

/// The thread, from outside.
#[derive(Debug)]
pub(crate) struct EventPoller(Arc<Shared>);

struct Shared {
    status: Arc<DeviceStatus>,
    /// A stream on which nothing happens for this long hangs.
    stuck_after: Duration,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    streams: [VecDeque<(Arc<Event>, Then)>; StreamKind::COUNT],
    closed: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("status", &self.status).finish_non_exhaustive()
    }
}

impl EventPoller {
    pub(crate) fn start(status: &Arc<DeviceStatus>, stuck_after: Duration) -> Result<Self> {
        let shared = Arc::new(Shared {
            status: status.clone(),
            stuck_after,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread = std::thread::Builder::new().name("kyklos-cuda".to_owned());
        let run = {
            let shared = shared.clone();
            move || shared.run()
        };
        thread.spawn(run).map_err(|error| status.device_error("start a thread", &error.to_string()))?;
        Ok(Self(shared))
    }

    /// Calls `then` when `event` of this kind has happened. Events of a kind come in their order.
    pub(crate) fn on_event(
        &self,
        kind: StreamKind,
        event: Arc<Event>,
        then: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        self.0.lock().streams[kind as usize].push_back((event, Box::new(then)));
        self.0.changed.notify_one();
    }

    /// Ends the thread, once everything that it has been told of has happened.
    pub(crate) fn close(&self) {
        self.0.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl Drop for EventPoller {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut since = [Instant::now(); StreamKind::COUNT];
        let mut idle_since = Instant::now();
        loop {
            let (heads, closed) = {
                let queue = self.lock();
                (
                    queue.streams.each_ref().map(|kind| kind.front().map(|(event, _)| event.clone())),
                    queue.closed,
                )
            };
            if heads.iter().all(Option::is_none) {
                if closed {
                    return;
                }
                let sleeping =
                    |queue: &mut Queue| !queue.closed && queue.streams.iter().all(VecDeque::is_empty);
                drop(self.changed.wait_while(self.lock(), sleeping).unwrap_or_else(PoisonError::into_inner));
                idle_since = Instant::now();
                since = [idle_since; StreamKind::COUNT];
                continue;
            }
            let mut landed = false;
            for (kind, head) in heads.into_iter().enumerate() {
                let Some(event) = head else {
                    since[kind] = Instant::now();
                    continue;
                };
                match event.is_complete() {
                    Ok(false) if since[kind].elapsed() < self.stuck_after => continue,
                    Ok(false) => {
                        let text = format!(
                            "nothing was done for {} s: the device hangs, or somebody else keeps it busy",
                            self.stuck_after.as_secs_f32()
                        );
                        self.status.mark_lost(self.status.device_error("wait for the device", &text));
                    }
                    Ok(true) => {}
                    Err(error) => {
                        self.status.error("wait for the device", &error);
                    }
                }
                since[kind] = Instant::now();
                landed = true;
                let then = self.lock().streams[kind].pop_front();
                if let Some((_, then)) = then {
                    then(self.status.check());
                }
            }
            if landed {
                idle_since = Instant::now();
            } else {
                std::thread::sleep((idle_since.elapsed() / 16).clamp(SHORTEST_NAP, LONGEST_NAP));
            }
        }
    }
}
