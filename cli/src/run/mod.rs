//! Runs of a plan on the ranks of this process.

pub(crate) mod alone;
pub(crate) mod plans;
pub(crate) mod resident;
pub(crate) mod threads;
pub(crate) mod timed;

use std::sync::Arc;

use kyklos::{NoObserver, RunOptions, SystemClock};

/// Options for runs that nobody watches.
pub(crate) fn quiet() -> RunOptions {
    RunOptions {
        clock: Arc::new(SystemClock::new()),
        observer: Arc::new(NoObserver),
        trace: false,
        poison: false,
    }
}
