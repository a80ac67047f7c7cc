//! Signs of progress in a rank's own work: they tell a rank that computes for a long time from one
//! that is stuck.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Beats while a rank works. The code that computes holds a [`Work`] and beats at every piece; the
/// transport watches it.
///
/// A rank that holds no work is never taken for stuck: it waits for other ranks, or its caller has
/// not started an operation.
#[derive(Debug, Default)]
pub struct Pulse {
    beats: AtomicU64,
    works: AtomicU32,
}

/// Work that this rank can do without other ranks; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "the work ends when this is dropped"]
pub struct Work(Arc<Pulse>);

impl Pulse {
    /// Begins work of this rank. Several pieces of work may run at the same time.
    pub fn work(self: &Arc<Self>) -> Work {
        self.works.fetch_add(1, Ordering::Relaxed);
        self.beat();
        Work(Arc::clone(self))
    }

    /// Notes progress.
    pub fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of beats so far.
    pub fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }

    /// Whether this rank does any work now.
    pub fn works(&self) -> bool {
        self.works.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.beat();
        self.0.works.fetch_sub(1, Ordering::Relaxed);
    }
}
