//! Device memory of one backend: counted against a limit, and kept for reuse.
//!
//! Memory of a dropped buffer is kept for the next buffer of its size: freeing memory makes the driver wait for the whole
//! device, and a ring asks for the same sizes again and again. Kept memory is freed when an allocation fails without that,
//! and when more than a quarter of the device's memory is kept: other processes need memory too.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kyklos::{Error, Result};

use super::dependencies::AccessRecord;
use super::status::DeviceStatus;
use crate::driver::{Context, DeviceMemory, DriverError};

/// The device memory of one backend.
#[derive(Debug)]
pub(crate) struct MemoryPool {
    context: Arc<Context>,
    status: Arc<DeviceStatus>,
    max_bytes: u64,
    max_kept_bytes: u64,
    /// The longest time that an allocation waits for memory that the device still uses.
    stuck_after: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes of all buffers.
    used_bytes: u64,
    /// Memory of dropped buffers, the one that was dropped first at the beginning.
    kept: Vec<Allocation>,
}

impl State {
    fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(Allocation::bytes).sum()
    }
}

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

    fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}

/// Linear memory on a CUDA device.
#[derive(Debug)]
pub struct CudaBuffer {
    /// `None` only during drop.
    allocation: Option<Arc<Allocation>>,
    /// The requested size. The allocation is up to an eighth larger.
    bytes: usize,
    home: Arc<dyn TakeBack>,
}

/// Where memory goes when its last handle is dropped. The device may still use it.
pub(crate) trait TakeBack: std::fmt::Debug + Send + Sync {
    fn take_back(&self, allocation: Allocation);
}

impl CudaBuffer {
    pub(crate) fn new(allocation: Allocation, bytes: usize, home: Arc<dyn TakeBack>) -> Self {
        Self { allocation: Some(Arc::new(allocation)), bytes, home }
    }

    pub(crate) fn allocation(&self) -> &Allocation {
        self.allocation.as_ref().expect("taken by drop only")
    }

    pub(crate) fn address(&self) -> u64 {
        self.allocation().memory.address()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Another handle of the same memory.
    pub(crate) fn share(&self) -> Self {
        Self { allocation: self.allocation.clone(), bytes: self.bytes, home: self.home.clone() }
    }

    /// Never frees the memory: the device may use it as long as the process lives.
    fn leak(mut self) {
        std::mem::forget(self.allocation.take());
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        // The last handle of the memory returns it.
        if let Some(allocation) = self.allocation.take().and_then(Arc::into_inner) {
            self.home.take_back(allocation);
        }
    }
}

/// Buffers that a device uses. Unless they are released, their memory is never freed.
#[derive(Debug)]
pub(crate) struct InUse(Vec<CudaBuffer>);

impl InUse {
    pub(crate) fn new(buffers: &[&CudaBuffer]) -> Self {
        Self(buffers.iter().map(|buffer| buffer.share()).collect())
    }

    /// The device does not use them any more.
    pub(crate) fn release(mut self) {
        self.0.clear();
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.drain(..).for_each(CudaBuffer::leak);
    }
}

impl MemoryPool {
    pub(crate) fn new(
        context: &Arc<Context>,
        status: &Arc<DeviceStatus>,
        device_bytes: usize,
        max_bytes: Option<u64>,
        stuck_after: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            status: status.clone(),
            max_bytes: max_bytes.unwrap_or(u64::MAX),
            max_kept_bytes: device_bytes as u64 / 4,
            stuck_after,
            state: Mutex::default(),
        })
    }

    /// A buffer with unspecified contents. If memory is short, `flush` is called to submit the deferred launches: memory that
    /// they use cannot become idle before.
    pub(crate) fn buffer(
        self: &Arc<Self>,
        label: &str,
        bytes: usize,
        flush: impl Fn(),
    ) -> Result<CudaBuffer> {
        self.status.check()?;
        let refuse = |allowed_bytes| Error::OutOfMemory {
            device: self.status.device().to_owned(),
            what: label.to_owned(),
            asked_bytes: bytes as u64,
            allowed_bytes,
        };
        let failed = |error: DriverError| self.status.error(&format!("allocate {label}"), &error);
        let mut state = self.lock();
        let left = self.max_bytes - state.used_bytes;
        let size = size_class(bytes).filter(|size| *size as u64 <= left);
        let kept = size.map(|size| take_idle(&mut state, size)).transpose().map_err(failed)?.flatten();
        let allocation = match kept {
            Some(allocation) => allocation,
            None => {
                let free = self.context.free_bytes().map_err(failed)? as u64;
                let allowed = left.min(free + state.kept_bytes());
                let size = size.filter(|size| *size as u64 <= allowed).ok_or_else(|| refuse(allowed))?;
                match self.allocate_or_reclaim(&mut state, size, free, flush).map_err(failed)? {
                    Some(allocation) => allocation,
                    // The driver had less memory than it reported, or in pieces that are too small.
                    None => return Err(refuse(self.context.free_bytes().map_err(failed)? as u64)),
                }
            }
        };
        allocation.accesses().clear_failure();
        state.used_bytes += allocation.bytes();
        Ok(CudaBuffer::new(allocation, bytes, self.clone()))
    }

    /// `size` bytes: newly allocated; or kept, even if the device still uses them; or newly allocated after kept memory of other
    /// sizes was freed. `None` if all of that fails.
    fn allocate_or_reclaim(
        &self,
        state: &mut State,
        size: usize,
        free: u64,
        flush: impl Fn(),
    ) -> Result<Option<Allocation>, DriverError> {
        if size as u64 <= free
            && let Some(allocation) = self.allocate(size)?
        {
            return Ok(Some(allocation));
        }
        flush();
        if let Some(index) = state.kept.iter().position(|allocation| allocation.memory.bytes() == size) {
            return Ok(Some(state.kept.remove(index)));
        }
        // The only place where a caller waits for the device: all memory is in use by it.
        let start = Instant::now();
        while !state.kept.is_empty() && start.elapsed() < self.stuck_after {
            let mut still = Vec::new();
            for allocation in state.kept.drain(..) {
                if !allocation.accesses().is_idle()? {
                    still.push(allocation);
                }
            }
            state.kept = still;
            if let Some(allocation) = self.allocate(size)? {
                return Ok(Some(allocation));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        self.allocate(size)
    }

    fn allocate(&self, size: usize) -> Result<Option<Allocation>, DriverError> {
        match DeviceMemory::new(&self.context, size) {
            Ok(memory) => Ok(Some(Allocation { memory, accesses: Mutex::default() })),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TakeBack for MemoryPool {
    fn take_back(&self, allocation: Allocation) {
        let mut state = self.lock();
        state.used_bytes -= allocation.bytes();
        state.kept.push(allocation);
        while state.kept_bytes() > self.max_kept_bytes {
            // If the device is lost, memory does not become idle and is not freed.
            let idle = |allocation: &Allocation| allocation.accesses().is_idle().unwrap_or(false);
            let Some(index) = state.kept.iter().position(idle) else { break };
            drop(state.kept.remove(index));
        }
    }
}

/// Takes kept memory of this size that the device no longer uses.
fn take_idle(state: &mut State, size: usize) -> Result<Option<Allocation>, DriverError> {
    for (index, allocation) in state.kept.iter().enumerate() {
        if allocation.memory.bytes() == size && allocation.accesses().is_idle()? {
            return Ok(Some(state.kept.remove(index)));
        }
    }
    Ok(None)
}

/// The allocated size for a request of `bytes`: at most an eighth more, so that requests of similar sizes can reuse each other's
/// memory. `None` if the size exceeds the address space.
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
