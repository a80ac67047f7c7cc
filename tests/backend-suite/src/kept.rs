//! Right results that a process computes once: several backends and strategies are held to the same
//! ones.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kyklos_oracle::inputs::{Case, cases};

/// Values by a text that says of what they are.
pub(crate) struct Kept<T>(Mutex<BTreeMap<String, Arc<OnceLock<T>>>>);

impl<T: Clone> Kept<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// What `compute` makes of a case and of `how`, which says all else that the value depends on.
    /// Of the listed cases it is computed once. Others, such as random ones, are not kept: they
    /// would fill the memory.
    pub(crate) fn of(&self, case: Case, how: impl std::fmt::Debug, compute: impl FnOnce(Case) -> T) -> T {
        if !cases().contains(&case) {
            return compute(case);
        }
        let key = format!("{} {how:?}", case.name);
        let place = Arc::clone(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default());
        // Another thread that wants the same one waits for it.
        place.get_or_init(|| compute(case)).clone()
    }
}
