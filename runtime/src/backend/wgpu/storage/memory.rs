//! The limit on the memory of a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::DeviceClass;
use crate::machine::memory_bytes;

/// Counts the bytes of all buffers of one backend, and refuses more than a limit.
///
/// The driver does not refuse in time: software drivers take memory when it is first written, so
/// every allocation succeeds and a kernel crashes later. (The budgets that Vulkan drivers report do
/// not count memory that was never written either, and a query costs 70 µs for each buffer on Mesa
/// 26.2.)
#[derive(Clone, Debug)]
pub(in crate::backend::wgpu) struct Budget {
    most_bytes: u64,
    held_bytes: Arc<AtomicU64>,
}

/// Bytes of a budget; returned to it on drop.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Lease {
    bytes: u64,
    held_bytes: Arc<AtomicU64>,
}

impl Budget {
    /// A limit of `most_bytes`; by default the host's memory for devices that compute in it, and
    /// none for others.
    pub(in crate::backend::wgpu) fn new(most_bytes: Option<u64>, class: DeviceClass) -> Self {
        let known = match class {
            DeviceClass::SoftwareGpu => memory_bytes(),
            _ => None,
        };
        Self { most_bytes: most_bytes.or(known).unwrap_or(u64::MAX), held_bytes: Arc::default() }
    }

    /// Takes `bytes` bytes out of the budget.
    ///
    /// # Errors
    /// The number of bytes left, if it is less than `bytes`.
    pub(in crate::backend::wgpu) fn take(&self, bytes: u64) -> Result<Lease, u64> {
        let add = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.most_bytes);
        match self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Lease { bytes, held_bytes: self.held_bytes.clone() }),
            Err(held) => Err(self.most_bytes.saturating_sub(held)),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_says_what_is_left_and_gets_back_what_is_dropped() {
        let budget = Budget::new(Some(100), DeviceClass::DiscreteGpu);
        let first = budget.take(60).expect("60 of 100");
        assert_eq!(budget.take(41).expect_err("101 of 100"), 40);
        assert_eq!(budget.take(u64::MAX).expect_err("overflow"), 40);
        drop(first);
        assert!(budget.take(100).is_ok());
    }
}
