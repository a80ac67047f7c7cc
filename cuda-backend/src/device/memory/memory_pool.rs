//! Device memory of one backend: counted against a limit, and kept for reuse.
//!
//! Memory of a dropped buffer is kept for the next buffer of its size: freeing memory makes the
//! driver wait for the whole device, and a ring asks for the same sizes again and again. Kept
//! memory is freed when an allocation fails without that, and, as soon as it is idle, when more
//! than a quarter of the device's memory is kept: other processes need memory too. A thread
//! of its own frees it ([`Reclaimer`]).
//!
//! A thread of another device drops what it has copied from: that neither waits for this device nor
//! calls its driver.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kyklos::{Error, Result};

use super::allocation::{Allocation, size_class};
use super::reclaimer::{Reclaimable, Reclaimer};
use crate::device::status::DeviceStatus;
use crate::driver::{Context, DeviceMemory, DriverError};

/// The device memory of one backend.
#[derive(Debug)]
pub(crate) struct MemoryPool {
    // Before the reclaimer, whose thread has it longer: releasing the last one may wait for the device.
    context: Arc<Context>,
    status: Arc<DeviceStatus>,
    max_bytes: u64,
    max_kept_bytes: u64,
    /// The longest time that an allocation waits for memory that the device still uses.
    stuck_after: Duration,
    /// Bytes of all buffers that ranks of this device have.
    used_bytes: AtomicU64,
    /// Bytes that only messages have, on their way to another device.
    message_bytes: AtomicU64,
    /// Memory of dropped buffers that is not among the kept yet. Locked for moments only: no call
    /// of the driver, no wait.
    returned: Mutex<Vec<Allocation>>,
    /// Memory of dropped buffers, the one that was dropped first at the beginning.
    kept: Mutex<Vec<Allocation>>,
    /// Drops memory of callers. Their destructors may take long, and delay each other only.
    callers: Reclaimer,
    reclaimer: Reclaimer,
}

fn bytes_of(kept: &[Allocation]) -> u64 {
    kept.iter().map(Allocation::bytes).sum()
}

/// Linear memory on a CUDA device.
#[derive(Debug)]
pub struct CudaBuffer {
    /// `None` only during drop.
    shared: Option<Arc<Shared>>,
    /// The requested size. The allocation is up to an eighth larger.
    bytes: usize,
    holder: Holder,
}

/// What all handles of a buffer share. The last one takes it apart, so that the others drop nothing
/// else.
#[derive(Debug)]
struct Shared {
    allocation: Allocation,
    home: Arc<dyn TakeBack>,
    /// Handles of [`Holder::Rank`].
    ranks: AtomicUsize,
    /// Never freed: a device may use it as long as the process lives.
    leaks: AtomicBool,
}

/// Who has a handle of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// A rank of the device. What it has counts against the limit of the device.
    Rank,
    /// A message to a rank of another device, whose threads may drop it.
    Message,
}

/// Where memory goes when its last handle is dropped. The device may still use it.
pub(crate) trait TakeBack: std::fmt::Debug + Send + Sync {
    /// No rank has the memory any more. Messages may.
    fn left_by_ranks(&self, bytes: u64);

    /// No message has the memory any more either, and it is not taken back.
    fn left_by_messages(&self, bytes: u64);

    /// The last handle was dropped, perhaps that of a message on a thread of another device, which
    /// must not wait for this one.
    fn take_back(self: Arc<Self>, allocation: Allocation);
}

impl CudaBuffer {
    pub(crate) fn new(allocation: Allocation, bytes: usize, home: Arc<dyn TakeBack>) -> Self {
        let shared = Shared { allocation, home, ranks: AtomicUsize::new(1), leaks: AtomicBool::new(false) };
        Self { shared: Some(Arc::new(shared)), bytes, holder: Holder::Rank }
    }

    fn shared(&self) -> &Arc<Shared> {
        self.shared.as_ref().expect("taken by drop only")
    }

    pub(crate) fn allocation(&self) -> &Allocation {
        &self.shared().allocation
    }

    pub(crate) fn address(&self) -> u64 {
        self.allocation().memory.address()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Another handle of the same memory.
    pub(crate) fn share(&self) -> Self {
        if self.holder == Holder::Rank {
            self.shared().ranks.fetch_add(1, Ordering::Relaxed);
        }
        Self { shared: self.shared.clone(), bytes: self.bytes, holder: self.holder }
    }

    /// Another handle, for a message to another device.
    pub(crate) fn for_message(&self) -> Self {
        Self { shared: self.shared.clone(), bytes: self.bytes, holder: Holder::Message }
    }

    /// Never frees the memory. What a rank of its device has of it then counts against the limit
    /// for ever.
    fn leak(self) {
        self.shared().leaks.store(true, Ordering::Release);
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        let Some(shared) = self.shared.take() else { return };
        let is_freed = !shared.leaks.load(Ordering::Acquire);
        if self.holder == Holder::Rank && is_freed && shared.ranks.fetch_sub(1, Ordering::AcqRel) == 1 {
            shared.home.left_by_ranks(shared.allocation.bytes());
        }
        // The last handle of the memory returns it.
        if let Some(Shared { allocation, home, leaks, ranks }) = Arc::into_inner(shared) {
            if leaks.into_inner() {
                if ranks.into_inner() == 0 {
                    home.left_by_messages(allocation.bytes());
                }
                std::mem::forget(allocation);
            } else {
                home.take_back(allocation);
            }
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
        // Longer than it takes to find that the other device hangs.
        let at_most = 2 * stuck_after;
        Arc::new_cyclic(|pool: &Weak<Self>| Self {
            context: context.clone(),
            status: status.clone(),
            max_bytes: max_bytes.unwrap_or(u64::MAX),
            max_kept_bytes: device_bytes as u64 / 4,
            stuck_after,
            used_bytes: AtomicU64::new(0),
            message_bytes: AtomicU64::new(0),
            returned: Mutex::default(),
            kept: Mutex::default(),
            reclaimer: Reclaimer::new(context, status, at_most, Some(pool.clone())),
            callers: Reclaimer::new(context, status, at_most, None),
        })
    }

    /// Drops memory of callers when no device uses it any more.
    pub(in crate::device) fn callers(&self) -> &Reclaimer {
        &self.callers
    }

    /// A buffer with unspecified contents. If memory is short, `flush` is called to submit the
    /// deferred launches: memory that they use cannot become idle before.
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
        let left = self.max_bytes.saturating_sub(self.used_bytes.load(Ordering::Acquire));
        let size = size_class(bytes).filter(|size| *size as u64 <= left);
        let (idle, kept_bytes) = {
            let mut kept = self.kept();
            let idle = size.map(|size| take_idle(&mut kept, size)).transpose().map_err(failed)?.flatten();
            (idle, bytes_of(&kept))
        };
        let allocation = match idle {
            Some(allocation) => allocation,
            None => {
                // Asked before the driver is: what is freed meanwhile counts twice and not never.
                let soon = self.reclaimer.bytes() + self.message_bytes.load(Ordering::Acquire);
                let free = self.context.free_bytes().map_err(failed)? as u64;
                let allowed = left.min(free + kept_bytes + soon);
                let size = size.filter(|size| *size as u64 <= allowed).ok_or_else(|| refuse(allowed))?;
                match self.allocate_or_reclaim(size, free, flush).map_err(failed)? {
                    Some(allocation) => allocation,
                    // The driver had less memory than it reported, or in pieces that are too small; or
                    // another device still uses it.
                    None => {
                        self.status.check()?;
                        return Err(refuse(self.context.free_bytes().map_err(failed)? as u64));
                    }
                }
            }
        };
        allocation.accesses().clear_failure();
        self.used_bytes.fetch_add(allocation.bytes(), Ordering::AcqRel);
        Ok(CudaBuffer::new(allocation, bytes, self.clone()))
    }

    /// `size` bytes: newly allocated; or kept, even if this device still uses them; or newly
    /// allocated after kept memory of other sizes was freed. `None` if all of that fails.
    fn allocate_or_reclaim(
        &self,
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
        // The only place where a caller waits for the device: all memory is in use by it, by copies to
        // other devices, or by messages. Others allocate meanwhile.
        let start = Instant::now();
        loop {
            let (own, elsewhere) = {
                let mut kept = self.kept();
                // This device must not wait for another one, which may hang: memory that one still copies
                // from is no use yet.
                let fits = |allocation: &Allocation| {
                    allocation.memory.bytes() == size && !allocation.accesses().is_used_elsewhere()
                };
                if let Some(index) = kept.iter().position(fits) {
                    return Ok(Some(kept.remove(index)));
                }
                let mut index = 0;
                while index < kept.len() {
                    let is_idle = kept[index].accesses().is_idle()?;
                    if is_idle {
                        self.reclaimer.free(kept.remove(index), None);
                    } else {
                        index += 1;
                    }
                }
                let own = kept.iter().any(|allocation| !allocation.accesses().is_used_elsewhere());
                (own, !kept.is_empty())
            };
            if let Some(allocation) = self.allocate(size)? {
                return Ok(Some(allocation));
            }
            let at_most = if own || self.reclaimer.bytes() > 0 {
                self.stuck_after
            } else if elsewhere || self.message_bytes.load(Ordering::Acquire) > 0 {
                MESSAGES_WITHIN.min(self.stuck_after)
            } else {
                Duration::ZERO
            };
            if start.elapsed() >= at_most || self.status.is_lost() {
                return self.allocate(size);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn allocate(&self, size: usize) -> Result<Option<Allocation>, DriverError> {
        match DeviceMemory::new(&self.context, size) {
            Ok(memory) => Ok(Some(Allocation { memory, accesses: Mutex::default() })),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The memory of dropped buffers.
    fn kept(&self) -> MutexGuard<'_, Vec<Allocation>> {
        let mut kept = lock(&self.kept);
        kept.append(&mut lock(&self.returned));
        kept
    }
}

impl Reclaimable for MemoryPool {
    fn free_surplus(&self) -> bool {
        let mut kept = self.kept();
        while bytes_of(&kept) > self.max_kept_bytes {
            // The thread waits for other devices, with a bound: one that is lost never tells that it is done.
            let idle = |allocation: &Allocation| {
                let mut accesses = allocation.accesses();
                !matches!(accesses.is_idle(), Ok(false)) || accesses.is_used_elsewhere()
            };
            let Some(index) = kept.iter().position(idle) else { return !self.status.is_lost() };
            self.reclaimer.free(kept.remove(index), None);
        }
        false
    }
}

impl TakeBack for MemoryPool {
    fn left_by_ranks(&self, bytes: u64) {
        self.message_bytes.fetch_add(bytes, Ordering::AcqRel);
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    fn left_by_messages(&self, bytes: u64) {
        self.message_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    fn take_back(self: Arc<Self>, allocation: Allocation) {
        let bytes = allocation.bytes();
        lock(&self.returned).push(allocation);
        self.message_bytes.fetch_sub(bytes, Ordering::AcqRel);
        // Whoever has the lock may wait for the device.
        let fits = self
            .kept
            .try_lock()
            .is_ok_and(|kept| bytes_of(&kept) + bytes_of(&lock(&self.returned)) <= self.max_kept_bytes);
        if !fits {
            self.reclaimer.look_at_pool();
        }
    }
}

impl Drop for MemoryPool {
    /// Does not wait: copies to other devices may still be under way, and this may be a thread of
    /// one of those.
    fn drop(&mut self) {
        let kept = std::mem::take(&mut *self.kept());
        for allocation in kept {
            self.reclaimer.free(allocation, None);
        }
    }
}

/// The longest wait for messages that the other ranks have not taken yet, or whose copies are not
/// done: their devices may hang. The thread that waits may also be the one that would take them,
/// because any thread may poll the futures of a rank: an allocation cannot tell. Then it waits in
/// vain for this long, and is refused as it would have been at once.
const MESSAGES_WITHIN: Duration = Duration::from_secs(2);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes kept memory of this size that no device uses any more.
fn take_idle(kept: &mut Vec<Allocation>, size: usize) -> Result<Option<Allocation>, DriverError> {
    for (index, allocation) in kept.iter().enumerate() {
        if allocation.memory.bytes() == size && allocation.accesses().is_idle()? {
            return Ok(Some(kept.remove(index)));
        }
    }
    Ok(None)
}
