//! Which kernels a device has been given and may not have run yet. An error of a device that hangs
//! names them.

use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Event, Function};

/// Launches of the compute stream that were not complete when they were last looked at, the oldest
/// first.
#[derive(Debug, Default)]
pub(super) struct UnfinishedLaunches(Mutex<Vec<Submitted>>);

/// Launches that were submitted together, and the event behind them.
#[derive(Debug)]
struct Submitted {
    functions: Vec<Arc<Function>>,
    event: Arc<Event>,
}

impl UnfinishedLaunches {
    /// Notes what was submitted.
    pub(super) fn record(&self, functions: Vec<Arc<Function>>, event: &Arc<Event>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The vector grows only as far as the device is behind: looking costs little for each launch.
        if all.len() == all.capacity() {
            forget_complete(&mut all);
            let room = all.len().max(LEAST_ROOM);
            all.reserve_exact(room);
        }
        all.push(Submitted { functions, event: event.clone() });
    }

    /// The kernels of which the device runs one now, unless it waits for something else first. None
    /// if all are complete.
    pub(super) fn running(&self) -> Vec<String> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        forget_complete(&mut all);
        let mut names = Vec::new();
        for function in all.first().into_iter().flat_map(|submitted| &submitted.functions) {
            if !names.contains(&function.name) {
                names.push(function.name.clone());
            }
        }
        names
    }
}

fn forget_complete(all: &mut Vec<Submitted>) {
    // A stream completes its events in their order. One that cannot be asked is of a device that is
    // lost.
    let complete = all.partition_point(|submitted| submitted.event.is_complete().unwrap_or(true));
    all.drain(..complete);
}

/// Submissions between two looks, at least.
const LEAST_ROOM: usize = 64;
