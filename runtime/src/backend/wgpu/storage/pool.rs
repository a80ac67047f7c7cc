//! Idle storage buffers, which later calls of the same shapes use again.
//!
//! A buffer comes back when its last handle is dropped. It may still be in use on the device then:
//! work on one queue takes effect in the order of its submissions, so work that is submitted later
//! finds the buffer free. All commands that use a buffer are submitted before the function that
//! records them returns, so no recorded command waits for its submission meanwhile.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::memory::Lease;

/// The storage buffers of one device that are made without contents. With the idle ones it never
/// holds more bytes than were in use at one time.
#[derive(Debug, Default)]
pub(in crate::backend::wgpu) struct StoragePool(Mutex<Buffers>);

#[derive(Debug, Default)]
struct Buffers {
    /// The least recently used first.
    idle: VecDeque<Idle>,
    idle_bytes: u64,
    used_bytes: u64,
    /// Most bytes in use at one time.
    most_bytes: u64,
    /// Buffers that were made, because none was idle.
    made: u64,
    /// The device is lost or dropped: buffers are freed, not kept.
    closed: bool,
}

/// A buffer that nothing uses.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Idle {
    pub(in crate::backend::wgpu) raw: wgpu::Buffer,
    pub(in crate::backend::wgpu) lease: Lease,
}

impl StoragePool {
    /// An idle buffer of exactly `size` bytes, if there is one.
    pub(in crate::backend::wgpu) fn take(&self, size: u64) -> Option<Idle> {
        let mut buffers = self.lock();
        let at = buffers.idle.iter().rposition(|idle| idle.raw.size() == size)?;
        buffers.idle_bytes -= size;
        buffers.used(size);
        buffers.idle.remove(at)
    }

    /// Counts a buffer of `size` bytes that was made.
    pub(in crate::backend::wgpu) fn made(&self, size: u64) {
        let mut buffers = self.lock();
        buffers.made += 1;
        buffers.used(size);
    }

    /// Takes back a buffer. Frees the least recently used ones where the pool becomes too large.
    pub(in crate::backend::wgpu) fn put(&self, idle: Idle) {
        let mut freed = Vec::new();
        {
            let mut buffers = self.lock();
            let size = idle.raw.size();
            buffers.used_bytes -= size;
            if buffers.closed {
                freed.push(idle);
            } else {
                buffers.idle.push_back(idle);
                buffers.idle_bytes += size;
                while buffers.used_bytes + buffers.idle_bytes > buffers.most_bytes {
                    let Some(oldest) = buffers.idle.pop_front() else { break };
                    buffers.idle_bytes -= oldest.raw.size();
                    freed.push(oldest);
                }
            }
        }
        // Freed without the lock.
        freed.into_iter().for_each(Idle::free);
    }

    /// A buffer of `size` bytes does not come back: a caller has it.
    pub(in crate::backend::wgpu) fn gone(&self, size: u64) {
        self.lock().used_bytes -= size;
    }

    /// Frees the idle buffers. Returns whether there were any.
    pub(in crate::backend::wgpu) fn shrink(&self) -> bool {
        let idle = {
            let mut buffers = self.lock();
            buffers.most_bytes = buffers.used_bytes;
            buffers.idle_bytes = 0;
            std::mem::take(&mut buffers.idle)
        };
        let any = !idle.is_empty();
        idle.into_iter().for_each(Idle::free);
        any
    }

    /// Frees the idle buffers, and from then on every buffer that comes back.
    pub(in crate::backend::wgpu) fn close(&self) {
        self.lock().closed = true;
        self.shrink();
    }

    /// Buffers that were made because none was idle.
    pub(in crate::backend::wgpu) fn made_so_far(&self) -> u64 {
        self.lock().made
    }

    fn lock(&self) -> MutexGuard<'_, Buffers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffers {
    fn used(&mut self, size: u64) {
        self.used_bytes += size;
        self.most_bytes = self.most_bytes.max(self.used_bytes);
    }
}

impl Idle {
    /// Freed at once, though submitted work still completes. Otherwise a browser frees it by its
    /// garbage collector, which does not know the size.
    pub(in crate::backend::wgpu) fn free(self) {
        #[cfg(target_arch = "wasm32")]
        self.raw.destroy();
    }
}
