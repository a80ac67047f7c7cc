//! A rank's end of the thread of its communicator.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_channel::oneshot;
use kyklos_transport::{Progress, Tag};

use super::exchange::{Exchange, Outcome, Shared, Transfer};
use super::islands::NcclIsland;
use super::observer::NcclObserver;
use super::thread::{Setup, start};

/// The owner of the thread. Dropping it does not block: the thread then ends by itself.
#[derive(Debug)]
pub(super) struct Worker(Arc<Shared>);

impl Worker {
    /// Starts the thread, which makes the communicator. The outcome is that of making it.
    pub(super) fn start(setup: Setup) -> Result<(Self, Outcome), std::io::Error> {
        let shared = Arc::new(Shared::default());
        let outcome = start(shared.clone(), setup)?;
        Ok((Self(shared), outcome))
    }

    /// Posts an exchange. The first outcome: it is in the stream, and operations of the backend
    /// that are submitted from then on wait for its messages. The second: they have moved.
    pub(super) fn post(&self, tag: Tag, sends: Vec<Transfer>, recvs: Vec<Transfer>) -> [Outcome; 2] {
        let ((submitted, first), (moved, second)) = (oneshot::channel(), oneshot::channel());
        let exchange =
            Exchange { tag, sends, recvs, posted: Instant::now(), submitted: Some(submitted), moved };
        self.0.posted.fetch_add(1, Ordering::Relaxed);
        let mut queue = self.0.lock();
        match queue.failure.clone() {
            Some(failure) => drop(exchange.fail(&failure)),
            None => queue.exchanges.push_back(exchange),
        }
        drop(queue);
        self.0.changed.notify_one();
        [first, second]
    }

    /// Tells what the thread does, also after this is dropped.
    pub(super) fn observe(&self, island: NcclIsland) -> NcclObserver {
        NcclObserver::new(self.0.clone(), island)
    }

    /// Notes which step this rank has reached, for the abort by which other ranks learn of a
    /// failure here.
    pub(super) fn report_progress(&self, progress: Progress) {
        self.0.report_progress(progress);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_one();
    }
}
