//! Whether a rank gets on with its own work: what tells a rank that computes for long from one that is stuck.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Beats while a rank works. Whoever computes holds a [`Work`] and beats at every piece; the transport looks at it.
///
/// A rank that holds no work waits for others, or is its caller's business: it is never taken for stuck.
#[derive(Debug, Default)]
pub struct Pulse {
    beats: AtomicU64,
    works: AtomicU32,
}

/// Work that this rank does by itself, whatever others do; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "the work ends when this is dropped"]
pub struct Work(Arc<Pulse>);

impl Pulse {
    /// Begins work of this rank. Several pieces of work may be under way at once.
    pub fn work(self: &Arc<Self>) -> Work {
        self.works.fetch_add(1, Ordering::Relaxed);
        self.beat();
        Work(Arc::clone(self))
    }

    /// Something has been done.
    pub fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// How often it has beaten.
    pub fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }

    /// Whether work is under way.
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
