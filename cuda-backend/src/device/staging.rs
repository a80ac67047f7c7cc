//! PinnedMemory memory of the host for copies, kept for the next one of its size.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use kyklos::{Error, Result};

use super::memory_pool::size_class;
use super::status::DeviceStatus;
use crate::driver::{Context, PinnedMemory};

/// What is kept at most: a few blocks that travel. PinnedMemory memory is the host's, which has other uses for it.
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

    /// StagingPool of which `bytes` are used.
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

    /// Takes it back.
    pub(crate) fn put(&self, pinned: PinnedMemory) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: usize = kept.iter().map(PinnedMemory::capacity).sum();
        if bytes + pinned.capacity() <= MOST_KEPT_BYTES {
            kept.push(pinned);
        }
    }

    /// Its contents, without a copy. It comes back when nobody needs them any more.
    pub(crate) fn lend(self: &Arc<Self>, pinned: PinnedMemory) -> Bytes {
        Bytes::from_owner(LentStaging { pinned: Some(pinned), home: self.clone() })
    }
}

struct LentStaging {
    /// Until it is dropped.
    pinned: Option<PinnedMemory>,
    home: Arc<StagingPool>,
}

impl AsRef<[u8]> for LentStaging {
    fn as_ref(&self) -> &[u8] {
        self.pinned.as_ref().map_or(&[], PinnedMemory::contents)
    }
}

impl Drop for LentStaging {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.home.put(pinned);
        }
    }
}
