//! Buffers through which results come to the host, kept for the next ones.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::buffer::WgpuBuffer;

/// The staging buffers of one device: those that wait for work, and those whose copy is under way.
///
/// The pool holds both, and the driver's callbacks hold only numbers: a callback that owned its own buffer would keep
/// it and the device for ever where a driver dies and calls nobody back.
#[derive(Debug, Default)]
pub(super) struct StagingPool(Mutex<Shelves>);

#[derive(Debug, Default)]
struct Shelves {
    /// Unmapped, the longest unused first.
    idle: VecDeque<WgpuBuffer>,
    in_flight: HashMap<u64, WgpuBuffer>,
    next: u64,
    /// The device is lost: nothing is kept.
    closed: bool,
}

impl StagingPool {
    /// An idle buffer of [`class_bytes`]`(bytes)`, if there is one.
    pub(super) fn take(&self, bytes: usize) -> Option<WgpuBuffer> {
        let wanted = class_bytes(bytes);
        let mut shelves = self.lock();
        // The last one used is the likeliest to be in the caches.
        let at = shelves.idle.iter().rposition(|buffer| buffer.bytes == wanted)?;
        shelves.idle.remove(at)
    }

    /// Keeps `buffer` while its copy is under way; the number is for [`Self::landed`].
    pub(super) fn fly(&self, buffer: WgpuBuffer) -> u64 {
        let mut shelves = self.lock();
        let number = shelves.next;
        shelves.next += 1;
        if !shelves.closed {
            shelves.in_flight.insert(number, buffer);
        }
        number
    }

    /// The buffer whose copy is done; `None` when the device is lost.
    pub(super) fn landed(&self, number: u64) -> Option<WgpuBuffer> {
        self.lock().in_flight.remove(&number)
    }

    /// Takes back an unmapped buffer; gives up others where the pool would become too large.
    pub(super) fn put(&self, buffer: WgpuBuffer) {
        let mut given_up = Vec::new();
        {
            let mut shelves = self.lock();
            if shelves.closed || buffer.bytes > IDLE_BYTES {
                given_up.push(buffer);
            } else {
                shelves.idle.push_back(buffer);
                while shelves.idle.iter().map(|buffer| buffer.bytes).sum::<usize>() > IDLE_BYTES {
                    given_up.extend(shelves.idle.pop_front());
                }
            }
        }
        // Freed without the lock.
        drop(given_up);
    }

    /// Gives up the idle ones: somebody needs the memory.
    pub(super) fn shrink(&self) -> bool {
        let idle = std::mem::take(&mut self.lock().idle);
        !idle.is_empty()
    }

    /// Gives up everything: the device is lost.
    pub(super) fn close(&self) {
        let (idle, in_flight) = {
            let mut shelves = self.lock();
            shelves.closed = true;
            (std::mem::take(&mut shelves.idle), std::mem::take(&mut shelves.in_flight))
        };
        drop((idle, in_flight));
    }

    fn lock(&self) -> MutexGuard<'_, Shelves> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of the staging buffer for `bytes`: four sizes to each power of two, so that at most a quarter is wasted.
pub(super) fn class_bytes(bytes: usize) -> usize {
    let bytes = bytes.max(SMALLEST_BYTES);
    let step = 1 << (bytes.ilog2() - 2);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

/// Below this, buffers cost more for being there than for their bytes.
const SMALLEST_BYTES: usize = 4096;
/// What the pool keeps at most while nothing is in flight: keys and values of two blocks of 16 Ki tokens, 8 heads of 64
/// in f16.
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
