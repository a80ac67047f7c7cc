//! A thread for each device that frees memory, and whatever else may wait for the device until it
//! is freed.
//!
//! Freeing memory makes the driver wait for the whole device, for ever if it hangs. So no thread
//! that anybody waits for frees memory: not a rank's, not the one that polls the events of the
//! device, and none that works for another device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::allocation::Allocation;
use crate::device::status::DeviceStatus;
use crate::driver::Context;

const SHORTEST_SLEEP: Duration = Duration::from_micros(10);
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

/// Gives memory to the thread, which starts with the first. The thread ends when this is dropped
/// and all is freed.
#[derive(Debug)]
pub(in crate::device) struct Reclaimer {
    context: Arc<Context>,
    status: Arc<DeviceStatus>,
    /// Memory that another device uses for longer than this is never freed: one that hangs or is
    /// lost may have it.
    at_most: Duration,
    pool: Option<Weak<dyn Reclaimable>>,
    /// `None`: the system has no more threads.
    jobs: OnceLock<Option<Sender<Option<Job>>>>,
    /// Bytes that are not freed yet.
    bytes: Arc<AtomicU64>,
}

/// What the thread frees beside memory.
pub(in crate::device) trait Reclaimable: std::fmt::Debug + Send + Sync {
    /// Frees what is too much to keep and idle. Whether there is more that will be idle.
    fn free_surplus(&self) -> bool;
}

/// Submits deferred launches of a device, and keeps what they need.
pub(in crate::device) type Submit = Box<dyn Fn() + Send>;

/// Memory to be freed when no device uses it any more.
struct Job {
    allocation: Allocation,
    /// Of deferred launches that may read it.
    submit: Option<Submit>,
    since: Instant,
    bytes: Arc<AtomicU64>,
}

impl Reclaimer {
    /// The thread also frees what `pool` has too much of.
    pub(in crate::device) fn new(
        context: &Arc<Context>,
        status: &Arc<DeviceStatus>,
        at_most: Duration,
        pool: Option<Weak<dyn Reclaimable>>,
    ) -> Self {
        let (context, status) = (context.clone(), status.clone());
        Self { context, status, at_most, pool, jobs: OnceLock::new(), bytes: Arc::default() }
    }

    /// Bytes that are being freed.
    pub(in crate::device) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// Frees memory when no device uses it any more; never, if nobody will know. Does not wait.
    /// Deferred launches that use it are submitted by `submit` before.
    pub(in crate::device) fn free(&self, allocation: Allocation, submit: Option<Submit>) {
        let bytes = self.bytes.clone();
        let job = Job { allocation, submit, since: Instant::now(), bytes };
        job.bytes.fetch_add(job.allocation.bytes(), Ordering::AcqRel);
        if let Some(job) = self.send(Some(job)) {
            job.leak(&self.status);
        }
    }

    /// Lets the thread look at what the pool keeps. Does not wait.
    pub(in crate::device) fn look_at_pool(&self) {
        self.send(None);
    }

    /// Returns what cannot be given to the thread.
    fn send(&self, job: Option<Job>) -> Option<Job> {
        match self.jobs.get_or_init(|| self.start()) {
            Some(jobs) => jobs.send(job).err().and_then(|mpsc::SendError(job)| job),
            None => job,
        }
    }

    fn start(&self) -> Option<Sender<Option<Job>>> {
        let (sender, receiver) = mpsc::channel();
        let (context, status, at_most) = (self.context.clone(), self.status.clone(), self.at_most);
        let pool = self.pool.clone();
        let thread = std::thread::Builder::new().name(format!("kyklos-free:{}", context.ordinal()));
        let run = move || {
            run(&receiver, &status, at_most, pool.as_ref());
            drop(context);
        };
        thread.spawn(run).ok().map(|_| sender)
    }
}

/// What becomes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    Wait,
    Free,
    Leak,
}

impl Job {
    fn now(&self, status: &DeviceStatus, at_most: Duration) -> Now {
        // A device that hangs may still access the memory, and a destroyed context has freed it.
        if status.is_lost() {
            return Now::Leak;
        }
        let is_deferred = self.allocation.accesses().is_deferred();
        if let Some(submit) = self.submit.as_ref().filter(|_| is_deferred) {
            submit();
        }
        let mut accesses = self.allocation.accesses();
        match accesses.is_idle() {
            Ok(true) => Now::Free,
            Ok(false) if self.since.elapsed() > at_most && accesses.is_used_elsewhere() => Now::Leak,
            Ok(false) => Now::Wait,
            Err(_) => Now::Leak,
        }
    }

    fn free(self) {
        let Self { allocation, submit, bytes, .. } = self;
        let freed = allocation.bytes();
        // A destructor of a caller may panic, and others rely on this thread.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(allocation)));
        bytes.fetch_sub(freed, Ordering::AcqRel);
        drop(submit);
    }

    fn leak(self, status: &DeviceStatus) {
        self.bytes.fetch_sub(self.allocation.bytes(), Ordering::AcqRel);
        std::mem::forget(self.allocation);
        // It may have the last handle of the device: to close a lost one may take for ever.
        if status.is_lost() {
            std::mem::forget(self.submit);
        }
    }
}

fn run(
    jobs: &Receiver<Option<Job>>,
    status: &DeviceStatus,
    at_most: Duration,
    pool: Option<&Weak<dyn Reclaimable>>,
) {
    let mut waiting: Vec<Job> = Vec::new();
    let mut since = Instant::now();
    loop {
        let has_too_much = pool.and_then(Weak::upgrade).is_some_and(|pool| pool.free_surplus());
        if waiting.is_empty() && !has_too_much {
            let Ok(job) = jobs.recv() else { return };
            waiting.extend(job);
            since = Instant::now();
        }
        waiting.extend(jobs.try_iter().flatten());
        let before = waiting.len();
        for job in std::mem::take(&mut waiting) {
            match job.now(status, at_most) {
                Now::Wait => waiting.push(job),
                Now::Free => job.free(),
                Now::Leak => job.leak(status),
            }
        }
        if waiting.len() < before {
            since = Instant::now();
        } else {
            std::thread::sleep((since.elapsed() / 16).clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
        }
    }
}
