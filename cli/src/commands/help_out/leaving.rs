//! Leaving in order: the owner is told, and computes the share itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kyklos_transport::{Abort, AbortCause, Group, Progress, Rank};

use crate::failure::Result;
use crate::interrupt;

/// Whether this helper has been asked to leave, and the group that it then leaves.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaving {
    asked: Arc<AtomicBool>,
    group: Arc<Mutex<Option<Group>>>,
}

impl Leaving {
    /// From now on Ctrl-C and SIGTERM ask this helper to leave. Without a group the process ends;
    /// in any case when it is asked again after a moment. Wrappers send the first one twice.
    pub(super) fn on_interrupt() -> Result<Self> {
        let leaving = Self::default();
        let asked = leaving.clone();
        let mut first = None;
        interrupt::on_interrupt(move |interruption| {
            let since = first.get_or_insert_with(Instant::now).elapsed();
            if asked.asked.swap(true, Ordering::SeqCst) {
                if since > MOMENT {
                    interrupt::end(interruption.exit, None);
                }
                return;
            }
            let group = asked.group.lock().unwrap_or_else(PoisonError::into_inner).clone();
            match group {
                Some(group) => leave(&group),
                None => interrupt::end(0, None),
            }
        })?;
        Ok(leaving)
    }

    pub(super) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// The group of this helper now.
    pub(super) fn group(&self, group: Option<&Group>) {
        *self.group.lock().unwrap_or_else(PoisonError::into_inner) = group.cloned();
        // Who was asked before there was a group has ended, but for a moment.
        if let (true, Some(group)) = (self.is_asked(), group) {
            leave(group);
        }
    }
}

fn leave(group: &Group) {
    group.abort(Abort {
        culprit: Rank(1),
        cause: AbortCause::Failed("the helper was stopped on its machine".to_owned()),
        progress: Progress::default(),
    });
}

const MOMENT: Duration = Duration::from_millis(500);
