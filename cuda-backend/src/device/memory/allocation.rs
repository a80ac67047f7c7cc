//! Device memory with the record of its accesses.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::dependencies::AccessRecord;
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

    pub(in crate::device) fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}

/// The allocated size for a request of `bytes`: at most an eighth more, so that requests of similar
/// sizes can reuse each other's memory. `None` if the size exceeds the address space.
pub(in crate::device) fn size_class(bytes: usize) -> Option<usize> {
    let step = (bytes.max(1).checked_next_power_of_two()? / 16).max(512);
    bytes.max(1).checked_next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_by_an_eighth_at_most() {
        assert_eq!(size_class(0), Some(512));
        assert_eq!(size_class(513), Some(1024));
        for bytes in [4097, 100_000, 1 << 20, (1 << 30) + 1] {
            let size = size_class(bytes).unwrap();
            assert!(size >= bytes && size <= bytes + bytes / 8 + 512, "{bytes}: {size}");
            assert_eq!(size_class(size), Some(size), "{bytes}");
        }
        assert_eq!(size_class(usize::MAX), None);
    }
}
