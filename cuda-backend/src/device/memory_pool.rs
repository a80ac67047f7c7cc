//! DeviceMemory of the device, counted and kept.
//!
//! What a buffer gives back is kept for the next one of its size: freeing memory makes the driver wait for the whole
//! device, and a ring asks for the same sizes over and over. It is given back when there is no other memory left, and beyond
//! a quarter of the device, for others want memory too.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kyklos::{Error, Result};

use super::dependencies::AccessRecord;
use super::status::DeviceStatus;
use crate::driver::{Context, DeviceMemory, DriverError};

/// The memory of one backend.
#[derive(Debug)]
pub(crate) struct MemoryPool {
    context: Arc<Context>,
    status: Arc<DeviceStatus>,
    most_bytes: u64,
    most_kept_bytes: u64,
    stuck_after: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// LaunchBatch by buffers.
    held_bytes: u64,
    /// What was given back longest ago comes first.
    kept: Vec<Allocation>,
}

impl State {
    fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(Allocation::bytes).sum()
    }
}

/// DeviceMemory, and what was done with it.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) memory: DeviceMemory,
    pub(crate) accesses: Mutex<AccessRecord>,
}

impl Allocation {
    pub(crate) fn accesses(&self) -> MutexGuard<'_, AccessRecord> {
        self.accesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}

/// Linear memory on a CUDA device.
#[derive(Debug)]
pub struct CudaBuffer {
    /// Until it is dropped.
    allocation: Option<Allocation>,
    /// As asked for; the memory itself is a little larger.
    bytes: usize,
    pool: Arc<MemoryPool>,
}

impl CudaBuffer {
    pub(crate) fn allocation(&self) -> &Allocation {
        self.allocation.as_ref().expect("taken by drop only")
    }

    pub(crate) fn address(&self) -> u64 {
        self.allocation().memory.address()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take() {
            self.pool.keep(allocation);
        }
    }
}

impl MemoryPool {
    pub(crate) fn new(
        context: &Arc<Context>,
        status: &Arc<DeviceStatus>,
        device_bytes: usize,
        most_bytes: Option<u64>,
        stuck_after: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            status: status.clone(),
            most_bytes: most_bytes.unwrap_or(u64::MAX),
            most_kept_bytes: device_bytes as u64 / 4,
            stuck_after,
            state: Mutex::default(),
        })
    }

    /// A buffer with unspecified contents. `submit_batch` submits what is held back, for nothing that is can come to an end.
    pub(crate) fn buffer(
        self: &Arc<Self>,
        label: &str,
        bytes: usize,
        submit_batch: impl Fn(),
    ) -> Result<CudaBuffer> {
        self.status.check()?;
        let refusal = |allowed_bytes| Error::OutOfMemory {
            device: self.status.device().to_owned(),
            what: label.to_owned(),
            asked_bytes: bytes as u64,
            allowed_bytes,
        };
        let error = |error: DriverError| self.status.error(&format!("allocate {label}"), &error);
        let mut state = self.lock();
        let left = self.most_bytes - state.held_bytes;
        let size = size_class(bytes).filter(|size| *size as u64 <= left);
        let kept = size.map(|size| idle(&mut state, size)).transpose().map_err(error)?.flatten();
        let allocation = match kept {
            Some(allocation) => allocation,
            None => {
                let free = self.context.free_bytes().map_err(error)? as u64;
                let allowed = left.min(free + state.kept_bytes());
                let size = size.filter(|size| *size as u64 <= allowed).ok_or_else(|| refusal(allowed))?;
                match self.make(&mut state, size, free, submit_batch).map_err(error)? {
                    Some(allocation) => allocation,
                    // The driver had less than it said, or in pieces.
                    None => return Err(refusal(self.context.free_bytes().map_err(error)? as u64)),
                }
            }
        };
        allocation.accesses().clear_failure();
        state.held_bytes += allocation.bytes();
        Ok(CudaBuffer { allocation: Some(allocation), bytes, pool: self.clone() })
    }

    /// `size` new bytes, or kept ones that the device still uses, or new ones in the place of kept ones of other sizes.
    fn make(
        &self,
        state: &mut State,
        size: usize,
        free: u64,
        submit_batch: impl Fn(),
    ) -> Result<Option<Allocation>, DriverError> {
        if size as u64 <= free
            && let Some(allocation) = self.fresh(size)?
        {
            return Ok(Some(allocation));
        }
        submit_batch();
        if let Some(index) = state.kept.iter().position(|allocation| allocation.memory.bytes() == size) {
            return Ok(Some(state.kept.remove(index)));
        }
        // The one place where a caller waits for the device: there is no memory but what it is still using.
        let start = Instant::now();
        while !state.kept.is_empty() && start.elapsed() < self.stuck_after {
            let mut still = Vec::new();
            for allocation in state.kept.drain(..) {
                if !allocation.accesses().idle()? {
                    still.push(allocation);
                }
            }
            state.kept = still;
            if let Some(allocation) = self.fresh(size)? {
                return Ok(Some(allocation));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        self.fresh(size)
    }

    fn fresh(&self, size: usize) -> Result<Option<Allocation>, DriverError> {
        match DeviceMemory::new(&self.context, size) {
            Ok(memory) => Ok(Some(Allocation { memory, accesses: Mutex::default() })),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn keep(&self, allocation: Allocation) {
        let mut state = self.lock();
        state.held_bytes -= allocation.bytes();
        state.kept.push(allocation);
        while state.kept_bytes() > self.most_kept_bytes {
            // Of a broken device nothing is freed.
            let idle = |allocation: &Allocation| allocation.accesses().idle().unwrap_or(false);
            let Some(index) = state.kept.iter().position(idle) else { break };
            drop(state.kept.remove(index));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kept memory of this size that the device is done with.
fn idle(state: &mut State, size: usize) -> Result<Option<Allocation>, DriverError> {
    for (index, allocation) in state.kept.iter().enumerate() {
        if allocation.memory.bytes() == size && allocation.accesses().idle()? {
            return Ok(Some(state.kept.remove(index)));
        }
    }
    Ok(None)
}

/// What is allocated for so many bytes: an eighth more at most, so that sizes which are nearly the same serve each
/// other. Nothing beyond what an address space has.
pub(crate) fn size_class(bytes: usize) -> Option<usize> {
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
