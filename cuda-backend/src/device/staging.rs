//! Pinned memory of the host for copies, kept for the next one of its size.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use kyklos::{Error, Result};

use super::memory_pool::size_class;
use super::status::Health;
use crate::driver::{Context, Pinned};

/// What is kept at most: a few blocks that travel. Pinned memory is the host's, which has other uses for it.
const MOST_KEPT_BYTES: usize = 2 << 30;

#[derive(Debug)]
pub(crate) struct Staging {
    context: Arc<Context>,
    health: Arc<Health>,
    kept: Mutex<Vec<Pinned>>,
}

impl Staging {
    pub(crate) fn new(context: &Arc<Context>, health: &Arc<Health>) -> Arc<Self> {
        Arc::new(Self { context: context.clone(), health: health.clone(), kept: Mutex::default() })
    }

    /// Staging of which `bytes` are used.
    pub(crate) fn take(&self, label: &str, bytes: usize) -> Result<Pinned> {
        let refusal = || Error::OutOfMemory {
            device: format!("pinned memory for {}", self.health.device()),
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
        match Pinned::new(&self.context, size) {
            Ok(pinned) => Ok(pinned.using(bytes)),
            Err(fault) if fault.is_out_of_memory() => Err(refusal()),
            Err(fault) => Err(self.health.error(&format!("allocate staging for {label}"), &fault)),
        }
    }

    /// Takes it back.
    pub(crate) fn put(&self, pinned: Pinned) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: usize = kept.iter().map(Pinned::capacity).sum();
        if bytes + pinned.capacity() <= MOST_KEPT_BYTES {
            kept.push(pinned);
        }
    }

    /// Its contents, without a copy. It comes back when nobody needs them any more.
    pub(crate) fn lend(self: &Arc<Self>, pinned: Pinned) -> Bytes {
        Bytes::from_owner(Lent { pinned: Some(pinned), home: self.clone() })
    }
}

struct Lent {
    /// Until it is dropped.
    pinned: Option<Pinned>,
    home: Arc<Staging>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.pinned.as_ref().map_or(&[], Pinned::contents)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.home.put(pinned);
        }
    }
}
