//! Device memory with the record of its accesses.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::dependencies::AccessRecord;
use crate::driver::DeviceMemory;

/// Device memory and the operations that use it.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) memory: DeviceMemory,
    pub(crate) accesses: Mutex<AccessRecord>,
}

impl Allocation {
    pub(crate) fn accesses(&self) -> MutexGuard<'_, AccessRecord> {
        self.accesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}
