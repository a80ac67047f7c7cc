//! Pinned memory of the host for copies, kept for reuse.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use kyklos::{Error, Result};

use super::allocation::size_class;
use crate::device::status::DeviceStatus;
use crate::driver::{Context, PinnedMemory};

/// Limit for kept memory, in bytes: room for a few blocks of keys and values. Pinned memory is not
/// available to the rest of the host.
const MOST_KEPT_BYTES: usize = 2 << 30;

#[derive(Debug)]
pub(crate) struct StagingPool {
    context: Arc<Context>,
    status: Arc<DeviceStatus>,
    kept: Mutex<Vec<PinnedMemory>>,
}

impl StagingPool {
    pub(crate) fn new(context: &Arc<Context>, status: &Arc<DeviceStatus>) -> Arc<Self> {
        Arc::new(Self { context: context.clone(), status: status.clone(), kept: Mutex::default() })
    }

    /// Pinned memory with `bytes` in use and unspecified contents.
    pub(crate) fn take(&self, label: &str, bytes: usize) -> Result<PinnedMemory> {
        let refusal = || Error::OutOfMemory {
            device: format!("pinned memory for {}", self.status.device()),
            what: label.to_owned(),
            asked_bytes: bytes as u64,
            allowed_bytes: 0,
        };
        let size = size_class(bytes).ok_or_else(refusal)?;
        {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(index) = kept.iter().position(|pinned| pinned.capacity() == size) {
                return Ok(kept.swap_remove(index).using(bytes));
            }
        }
        match PinnedMemory::new(&self.context, size) {
            Ok(pinned) => Ok(pinned.using(bytes)),
            Err(error) if error.is_out_of_memory() => Err(refusal()),
            Err(error) => Err(self.status.error(&format!("allocate staging for {label}"), &error)),
        }
    }

    /// Takes memory back, which no copy uses any more.
    pub(crate) fn put(&self, pinned: PinnedMemory) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: usize = kept.iter().map(PinnedMemory::capacity).sum();
        if bytes + pinned.capacity() <= MOST_KEPT_BYTES {
            kept.push(pinned);
        }
    }

    /// The contents as `Bytes`, without a copy. The memory comes back when the last reference is
    /// dropped.
    pub(crate) fn lend(self: &Arc<Self>, pinned: PinnedMemory) -> Bytes {
        Bytes::from_owner(LentStaging { pinned: Some(pinned), pool: self.clone() })
    }
}

struct LentStaging {
    /// `None` only during drop.
    pinned: Option<PinnedMemory>,
    pool: Arc<StagingPool>,
}

impl AsRef<[u8]> for LentStaging {
    fn as_ref(&self) -> &[u8] {
        self.pinned.as_ref().map_or(&[], PinnedMemory::contents)
    }
}

impl Drop for LentStaging {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.pool.put(pinned);
        }
    }
}
