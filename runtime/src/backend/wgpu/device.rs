//! The device: submission, allocation and failures.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::numbers::wide;
use crate::backend::wgpu::running::completion;
use crate::backend::wgpu::running::completion::{Done, Poller};
use crate::backend::wgpu::running::health::Health;
use crate::backend::wgpu::running::pipeline::Pipelines;
use crate::backend::wgpu::running::stopwatch::Stopwatch;
use crate::backend::wgpu::storage::buffer::{HeldMemory, WgpuBuffer};
use crate::backend::wgpu::storage::memory::{Budget, Lease};
use crate::backend::wgpu::storage::pool::{Idle, StoragePool};
use crate::backend::wgpu::storage::staging::{StagingPool, class_bytes};
use crate::error::{Error, Result};

/// Who opened a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpenedBy {
    Us,
    /// The callbacks of the device stay as they are.
    Caller,
}

/// A device with its queue.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) name: Arc<str>,
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) limits: wgpu::Limits,
    pub(super) health: Arc<Health>,
    pub(super) pipelines: Pipelines,
    pub(super) staging: Arc<StagingPool>,
    pub(super) storage: Arc<StoragePool>,
    /// Uniform buffers of recorded commands, kept until the commands are submitted: in a browser a
    /// dropped buffer is freed at once.
    recorded: Mutex<Vec<WgpuBuffer>>,
    budget: Budget,
    /// Whether host and device share memory, so that buffers are filled in place.
    shared_memory: bool,
    /// Read-locked to submit, write-locked to destroy the device.
    submitting: RwLock<()>,
    /// `Some` where the device was opened with timestamps.
    pub(super) stopwatch: Option<Stopwatch>,
    poller: Poller,
}

impl Gpu {
    pub(super) fn new(
        name: Arc<str>,
        device: wgpu::Device,
        queue: wgpu::Queue,
        budget: Budget,
        opened_by: OpenedBy,
    ) -> Self {
        let health = Arc::new(Health::new(name.clone()));
        #[cfg_attr(
            target_arch = "wasm32",
            expect(
                clippy::arc_with_non_send_sync,
                reason = "natively it is shared with the poller's thread"
            )
        )]
        let (staging, storage) = (Arc::new(StagingPool::default()), Arc::new(StoragePool::default()));
        if opened_by == OpenedBy::Us {
            device.set_device_lost_callback({
                let health = health.clone();
                move |reason, text| health.lost("use the device", format!("{reason:?}: {text}"))
            });
            device.on_uncaptured_error(Arc::new({
                let health = health.clone();
                move |error: wgpu::Error| health.failed("use the device", error.to_string())
            }));
        }
        Self {
            poller: Poller::start(&device, &health),
            limits: device.limits(),
            stopwatch: Stopwatch::new(&device, &queue),
            pipelines: Pipelines::default(),
            staging,
            storage,
            recorded: Mutex::default(),
            budget,
            shared_memory: device.features().contains(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS),
            submitting: RwLock::default(),
            name,
            device,
            queue,
            health,
        }
    }

    /// Returns the failure since the last call, if there is one.
    pub(super) fn check(&self) -> Result<()> {
        self.health.check().inspect_err(|_| self.let_go())
    }

    /// Frees the idle buffers of a lost device, which would keep it alive.
    fn let_go(&self) {
        if self.health.is_lost() {
            self.staging.close();
            self.storage.close();
        }
    }

    pub(super) fn submit(&self, commands: Option<wgpu::CommandBuffer>) -> Done {
        let _submitting = self.submitting.read().unwrap_or_else(PoisonError::into_inner);
        let index = self.queue.submit(commands);
        let recorded = std::mem::take(&mut *self.recorded.lock().unwrap_or_else(PoisonError::into_inner));
        drop(recorded);
        let done = completion::done(&self.queue, self.health.loss());
        self.poller.submitted(index);
        done
    }

    /// Ends the device. Every future that waits for it ends at once; its memory is freed when the
    /// work in flight is done.
    pub(super) fn destroy(&self) {
        // First, so that no new work starts.
        self.health.lost("use the device", "WgpuBackend::destroy ended it".to_owned());
        {
            // Submitting runs callbacks, which read mapped memory; a destroyed device frees it under them.
            let _alone = self.submitting.write().unwrap_or_else(PoisonError::into_inner);
            self.device.destroy();
        }
        self.staging.close();
        self.storage.close();
        self.poller.close();
    }

    /// A buffer for storage and copies.
    pub(super) fn buffer(&self, label: &str, bytes: usize) -> Result<WgpuBuffer> {
        let size = rounded(bytes);
        if let Some(Idle { raw, lease }) = self.storage.take(size) {
            let memory = Arc::new(HeldMemory::owned(raw.clone(), lease, Some(self.storage.clone())));
            return Ok(WgpuBuffer { raw, bytes, memory });
        }
        let (raw, lease) = self.create_raw(label, bytes, STORAGE, false)?;
        self.storage.made(size);
        let memory = Arc::new(HeldMemory::owned(raw.clone(), lease, Some(self.storage.clone())));
        Ok(WgpuBuffer { raw, bytes, memory })
    }

    /// A buffer for storage and copies that holds `data`.
    pub(super) fn buffer_with(&self, label: &str, data: &[u8]) -> Result<WgpuBuffer> {
        // A buffer that can be mapped is filled in place; others are filled through a copy on the device.
        let mappable =
            if self.shared_memory { wgpu::BufferUsages::MAP_WRITE } else { wgpu::BufferUsages::empty() };
        let buffer = self.create(label, data.len(), STORAGE | mappable, true)?;
        self.fill(&buffer.raw, data)?;
        Ok(buffer)
    }

    /// A buffer for query results, which can be copied from.
    pub(super) fn query_results(&self, label: &str, bytes: usize) -> Result<WgpuBuffer> {
        self.create(label, bytes, wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC, false)
    }

    /// A uniform buffer that holds `data`, for the commands that are submitted next.
    pub(super) fn uniform(&self, label: &str, data: &[u8]) -> Result<wgpu::Buffer> {
        let buffer =
            self.create(label, data.len(), wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST, true)?;
        self.fill(&buffer.raw, data)?;
        let raw = buffer.raw.clone();
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        Ok(raw)
    }

    /// A buffer of at least `bytes` bytes to read results from. The pool takes it back.
    pub(super) fn staging_buffer(&self, label: &str, bytes: usize) -> Result<WgpuBuffer> {
        if let Some(buffer) = self.staging.take(bytes) {
            return Ok(buffer);
        }
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        self.create(label, class_bytes(bytes), usage, false)
    }

    /// A caller's buffer of `bytes` bytes.
    pub(super) fn adopt(&self, raw: wgpu::Buffer, bytes: usize) -> Result<WgpuBuffer> {
        let refuse = |why: String, remedy: &str| Err(Error::request(why, remedy));
        let needed = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        if !raw.usage().contains(needed) {
            return refuse(
                format!("a buffer with the usages {:?}", raw.usage()),
                "create it with STORAGE and COPY_SRC",
            );
        }
        if raw.size() < wide(bytes) {
            return refuse(
                format!("a buffer of {} bytes for a tensor of {bytes}", raw.size()),
                "give a buffer that holds all elements",
            );
        }
        if !raw.size().is_multiple_of(16) {
            return refuse(
                format!("a buffer of {} bytes", raw.size()),
                "create it with a multiple of 16 bytes: kernels read 16 bytes at a time",
            );
        }
        Ok(WgpuBuffer { raw, bytes, memory: Arc::new(HeldMemory::of_caller()) })
    }

    pub(super) fn out_of_memory(&self, what: &str, asked: u64, allowed: u64) -> Error {
        Error::OutOfMemory {
            device: self.name.to_string(),
            what: what.to_owned(),
            asked_bytes: asked,
            allowed_bytes: allowed,
        }
    }

    pub(super) fn error(&self, operation: &str, native: impl ToString) -> Error {
        self.health.error(operation, native)
    }

    fn create(
        &self,
        label: &str,
        bytes: usize,
        usage: wgpu::BufferUsages,
        to_fill: bool,
    ) -> Result<WgpuBuffer> {
        let (raw, lease) = self.create_raw(label, bytes, usage, to_fill)?;
        let memory = Arc::new(HeldMemory::owned(raw.clone(), lease, None));
        Ok(WgpuBuffer { raw, bytes, memory })
    }

    fn create_raw(
        &self,
        label: &str,
        bytes: usize,
        usage: wgpu::BufferUsages,
        to_fill: bool,
    ) -> Result<(wgpu::Buffer, Lease)> {
        let size = rounded(bytes);
        if size > self.limits.max_buffer_size {
            return Err(self.out_of_memory(label, wide(bytes), self.limits.max_buffer_size));
        }
        let take = || self.budget.take(size);
        let lease = take().or_else(|left| if self.shrink() { take() } else { Err(left) });
        let lease = lease.map_err(|left| self.out_of_memory(label, wide(bytes), left))?;
        let raw = |size| {
            self.within_memory(|device| {
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some(label),
                    size,
                    usage,
                    mapped_at_creation: to_fill && FILLED_WHERE_IT_IS,
                })
            })
        };
        let raw = raw(size).or_else(|| if self.shrink() { raw(size) } else { None });
        let raw = raw.ok_or_else(|| self.out_of_memory(label, wide(bytes), self.largest_bytes(size)))?;
        Ok((raw, lease))
    }

    /// Frees the buffers that nothing uses. Returns whether there were any.
    pub(super) fn shrink(&self) -> bool {
        let staging = self.staging.shrink();
        self.storage.shrink() || staging
    }

    /// The result of `create`; `None` when the driver has no memory for it.
    pub(super) fn within_memory<T>(&self, create: impl FnOnce(&wgpu::Device) -> T) -> Option<T> {
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let made = create(&self.device);
        // Natively the answer is ready at once. In a browser a failure surfaces when the buffer is used.
        match futures_util::FutureExt::now_or_never(scope.pop()) {
            Some(Some(_)) => None,
            _ => Some(made),
        }
    }

    /// Most bytes that the driver gives in one buffer, below `refused`, a size that the driver
    /// refused. No driver reports the number, so this function finds it by halving.
    pub(super) fn largest_bytes(&self, refused: u64) -> u64 {
        let sizes = std::iter::successors(Some(refused / 32 * 16), |size| Some(size / 32 * 16));
        let mut sizes = sizes.take_while(|size| *size > 0);
        let given = sizes.find(|size| {
            let descriptor = wgpu::BufferDescriptor {
                label: None,
                size: *size,
                usage: STORAGE,
                mapped_at_creation: false,
            };
            self.within_memory(|device| device.create_buffer(&descriptor)).is_some()
        });
        given.unwrap_or(0)
    }

    /// Fills a buffer that was created to be filled.
    fn fill(&self, buffer: &wgpu::Buffer, data: &[u8]) -> Result<()> {
        if !FILLED_WHERE_IT_IS {
            let (words, rest) = data.split_at(data.len() / 4 * 4);
            if !words.is_empty() {
                self.queue.write_buffer(buffer, 0, words);
            }
            if !rest.is_empty() {
                let mut last = [0; 4];
                last[..rest.len()].copy_from_slice(rest);
                self.queue.write_buffer(buffer, wide(words.len()), &last);
            }
            return Ok(());
        }
        if !data.is_empty() {
            let mut mapped =
                buffer.get_mapped_range_mut(..).map_err(|error| self.error("fill a new buffer", error))?;
            mapped.slice(..data.len()).copy_from_slice(data);
        }
        buffer.unmap();
        Ok(())
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.let_go();
        self.storage.close();
    }
}

/// Size of a buffer for `bytes` bytes: kernels bind whole 16-byte units, and no binding may be
/// empty.
fn rounded(bytes: usize) -> u64 {
    wide(bytes).max(1).checked_next_multiple_of(16).unwrap_or(u64::MAX)
}

const STORAGE: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);
/// Whether new buffers are mapped to be filled. In a browser wgpu keeps one more copy of the bytes
/// that are written to mapped memory, and panics where the browser has no memory to map.
const FILLED_WHERE_IT_IS: bool = !cfg!(target_arch = "wasm32");
