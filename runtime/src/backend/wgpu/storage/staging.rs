//! A pool of staging buffers, through which results are copied to the host.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::buffer::WgpuBuffer;

/// The staging buffers of one device: idle ones, and those whose copy is in flight.
///
/// The pool owns both, and the driver's callbacks hold only numbers: a callback that owned its
/// buffer would keep it and the device for ever when a driver dies and never calls back.
#[derive(Debug, Default)]
pub(in crate::backend::wgpu) struct StagingPool(Mutex<Buffers>);

#[derive(Debug, Default)]
struct Buffers {
    /// Unmapped buffers, the least recently used first.
    idle: VecDeque<WgpuBuffer>,
    in_flight: HashMap<u64, WgpuBuffer>,
    next: u64,
    /// The device is lost: buffers are freed, not kept.
    closed: bool,
}

impl StagingPool {
    /// An idle buffer of [`class_bytes`]`(bytes)`, if there is one.
    pub(in crate::backend::wgpu) fn take(&self, bytes: usize) -> Option<WgpuBuffer> {
        let wanted = class_bytes(bytes);
        let mut buffers = self.lock();
        // The most recently used buffer is most likely to be in a cache.
        let at = buffers.idle.iter().rposition(|buffer| buffer.bytes == wanted)?;
        buffers.idle.remove(at)
    }

    /// Keeps `buffer` while its copy is in flight. Returns its number for [`Self::copied`].
    pub(in crate::backend::wgpu) fn start_copy(&self, buffer: WgpuBuffer) -> u64 {
        let mut buffers = self.lock();
        let number = buffers.next;
        buffers.next += 1;
        if !buffers.closed {
            buffers.in_flight.insert(number, buffer);
        }
        number
    }

    /// The buffer whose copy is done; `None` when the device is lost.
    pub(in crate::backend::wgpu) fn copied(&self, number: u64) -> Option<WgpuBuffer> {
        self.lock().in_flight.remove(&number)
    }

    /// Takes back an unmapped buffer. Frees the least recently used ones where the pool becomes too
    /// large.
    pub(in crate::backend::wgpu) fn put(&self, buffer: WgpuBuffer) {
        let mut freed = Vec::new();
        {
            let mut buffers = self.lock();
            if buffers.closed || buffer.bytes > IDLE_BYTES {
                freed.push(buffer);
            } else {
                buffers.idle.push_back(buffer);
                while buffers.idle.iter().map(|buffer| buffer.bytes).sum::<usize>() > IDLE_BYTES {
                    freed.extend(buffers.idle.pop_front());
                }
            }
        }
        // Freed without the lock.
        drop(freed);
    }

    /// Frees the idle buffers, because an allocation failed. Returns whether there were any.
    pub(in crate::backend::wgpu) fn shrink(&self) -> bool {
        let idle = std::mem::take(&mut self.lock().idle);
        !idle.is_empty()
    }

    /// Frees all buffers, because the device is lost.
    pub(in crate::backend::wgpu) fn close(&self) {
        let (idle, in_flight) = {
            let mut buffers = self.lock();
            buffers.closed = true;
            (std::mem::take(&mut buffers.idle), std::mem::take(&mut buffers.in_flight))
        };
        drop((idle, in_flight));
    }

    fn lock(&self) -> MutexGuard<'_, Buffers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Size of the staging buffer for `bytes` bytes. There are four sizes between two powers of two, so
/// at most a quarter is wasted.
pub(in crate::backend::wgpu) fn class_bytes(bytes: usize) -> usize {
    let bytes = bytes.max(SMALLEST_BYTES);
    let step = 1 << (bytes.ilog2() - 2);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

/// Smallest staging buffer, in bytes: a smaller one costs as much.
const SMALLEST_BYTES: usize = 4096;
/// Most bytes of idle buffers: keys and values of two blocks of 16 Ki tokens, 8 heads of 64 in f16.
const IDLE_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::class_bytes;

    #[test]
    fn classes_are_few_and_waste_at_most_a_quarter() {
        let mut classes = std::collections::BTreeSet::new();
        for bytes in (1..1 << 20).step_by(97) {
            let class = class_bytes(bytes);
            assert!(class >= bytes && class.is_multiple_of(4));
            assert!(class == 4096 || class * 4 <= bytes * 5, "{bytes} in {class}");
            assert_eq!(class_bytes(class), class);
            classes.insert(class);
        }
        assert!(classes.len() <= 4 * 8 + 1, "{classes:?}");
    }
}
