//! A thread for each backend that notices when the device is done, so that nobody's thread blocks on it.
//!
//! It asks and does not wait: a wait in the driver has no end when a kernel hangs. Its naps grow with what it waits for,
//! to a sixteenth of it, so that a piece of 100 ms costs hardly any of its time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kyklos::Result;

use super::dependencies::Lane;
use super::status::Health;
use crate::driver::Event;

const SHORTEST_NAP: Duration = Duration::from_micros(10);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// What is called when an event has happened, or never will.
type Then = Box<dyn FnOnce(Result<()>) + Send>;

/// The thread, from outside.
#[derive(Debug)]
pub(crate) struct Watch(Arc<Shared>);

struct Shared {
    health: Arc<Health>,
    /// A stream on which nothing happens for this long hangs.
    stuck_after: Duration,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    lanes: [VecDeque<(Arc<Event>, Then)>; Lane::COUNT],
    closed: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("health", &self.health).finish_non_exhaustive()
    }
}

impl Watch {
    pub(crate) fn start(health: &Arc<Health>, stuck_after: Duration) -> Result<Self> {
        let shared = Arc::new(Shared {
            health: health.clone(),
            stuck_after,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread = std::thread::Builder::new().name("kyklos-cuda".to_owned());
        let run = {
            let shared = shared.clone();
            move || shared.run()
        };
        thread.spawn(run).map_err(|error| health.device_error("start a thread", &error.to_string()))?;
        Ok(Self(shared))
    }

    /// Calls `then` when `event` of this lane has happened. Events of a lane come in their order.
    pub(crate) fn when(&self, lane: Lane, event: Arc<Event>, then: impl FnOnce(Result<()>) + Send + 'static) {
        self.0.lock().lanes[lane as usize].push_back((event, Box::new(then)));
        self.0.changed.notify_one();
    }

    /// Ends the thread, once everything that it has been told of has happened.
    pub(crate) fn close(&self) {
        self.0.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut since = [Instant::now(); Lane::COUNT];
        let mut idle_since = Instant::now();
        loop {
            let (heads, closed) = {
                let queue = self.lock();
                (
                    queue.lanes.each_ref().map(|lane| lane.front().map(|(event, _)| event.clone())),
                    queue.closed,
                )
            };
            if heads.iter().all(Option::is_none) {
                if closed {
                    return;
                }
                let sleeping =
                    |queue: &mut Queue| !queue.closed && queue.lanes.iter().all(VecDeque::is_empty);
                drop(self.changed.wait_while(self.lock(), sleeping).unwrap_or_else(PoisonError::into_inner));
                idle_since = Instant::now();
                since = [idle_since; Lane::COUNT];
                continue;
            }
            let mut landed = false;
            for (lane, head) in heads.into_iter().enumerate() {
                let Some(event) = head else {
                    since[lane] = Instant::now();
                    continue;
                };
                match event.happened() {
                    Ok(false) if since[lane].elapsed() < self.stuck_after => continue,
                    Ok(false) => {
                        let text = format!(
                            "nothing was done for {} s: the device hangs, or somebody else keeps it busy",
                            self.stuck_after.as_secs_f32()
                        );
                        self.health.lost(self.health.device_error("wait for the device", &text));
                    }
                    Ok(true) => {}
                    Err(fault) => {
                        self.health.error("wait for the device", &fault);
                    }
                }
                since[lane] = Instant::now();
                landed = true;
                let then = self.lock().lanes[lane].pop_front();
                if let Some((_, then)) = then {
                    then(self.health.check());
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
