//! The device, its memory and its health.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::completion::{self, Done, Poller};
use super::dispatch::Pipelines;
use super::stopwatch::Stopwatch;
use super::{WgpuBuffer, wide};
use crate::{Error, Result};

/// A device with its queue.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) name: Arc<str>,
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) limits: wgpu::Limits,
    pub(super) health: Arc<Health>,
    pub(super) pipelines: Pipelines,
    /// Where the device was opened with its clock.
    pub(super) stopwatch: Option<Stopwatch>,
    poller: Poller,
}

impl Gpu {
    pub(super) fn new(name: Arc<str>, device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let health = Arc::new(Health { device: name.clone(), state: Mutex::default() });
        device.set_device_lost_callback({
            let health = health.clone();
            move |reason, text| health.lost("use the device", format!("{reason:?}: {text}"))
        });
        device.on_uncaptured_error(Arc::new({
            let health = health.clone();
            move |error: wgpu::Error| health.failed("use the device", error.to_string())
        }));
        Self {
            poller: Poller::start(&device, &health),
            limits: device.limits(),
            stopwatch: Stopwatch::new(&device, &queue),
            pipelines: Pipelines::default(),
            name,
            device,
            queue,
            health,
        }
    }

    /// What went wrong since the last call, if anything.
    pub(super) fn check(&self) -> Result<()> {
        self.health.check()
    }

    pub(super) fn submit(&self, commands: Option<wgpu::CommandBuffer>) -> Done {
        let index = self.queue.submit(commands);
        let done = completion::done(&self.queue);
        self.poller.submitted(index);
        done
    }

    /// A buffer for storage and copies.
    pub(super) fn buffer(&self, label: &str, bytes: usize) -> Result<WgpuBuffer> {
        self.create(label, bytes, STORAGE, false)
    }

    /// A buffer for storage and copies that holds `data`.
    pub(super) fn buffer_with(&self, label: &str, data: &[u8]) -> Result<WgpuBuffer> {
        let buffer = self.create(label, data.len(), STORAGE, true)?;
        self.fill(&buffer.raw, data)?;
        Ok(buffer)
    }

    /// A uniform buffer that holds `data`.
    pub(super) fn uniform(&self, label: &str, data: &[u8]) -> Result<wgpu::Buffer> {
        let buffer = self.create(label, data.len(), wgpu::BufferUsages::UNIFORM, true)?;
        self.fill(&buffer.raw, data)?;
        Ok(buffer.raw)
    }

    /// A buffer to read results from.
    pub(super) fn staging(&self, label: &str, bytes: usize) -> Result<wgpu::Buffer> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        Ok(self.create(label, bytes, usage, false)?.raw)
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
        Error::Device {
            device: self.name.to_string(),
            operation: operation.to_owned(),
            native: native.to_string(),
        }
    }

    fn create(
        &self,
        label: &str,
        bytes: usize,
        usage: wgpu::BufferUsages,
        mapped: bool,
    ) -> Result<WgpuBuffer> {
        // Whole 16-byte units, which is what kernels bind; and nothing may be bound that is empty.
        let size = wide(bytes).max(1).checked_next_multiple_of(16).unwrap_or(u64::MAX);
        if size > self.limits.max_buffer_size {
            return Err(self.out_of_memory(label, wide(bytes), self.limits.max_buffer_size));
        }
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let raw = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size,
            usage,
            mapped_at_creation: mapped,
        });
        // Natively the answer is there at once. In a browser a failure shows when the buffer is used.
        let answer = futures_util::FutureExt::now_or_never(scope.pop());
        if let Some(Some(_)) = answer {
            return Err(self.out_of_memory(label, wide(bytes), 0));
        }
        Ok(WgpuBuffer { raw, bytes })
    }

    /// Fills a buffer that was created mapped.
    fn fill(&self, buffer: &wgpu::Buffer, data: &[u8]) -> Result<()> {
        if !data.is_empty() {
            let mut mapped =
                buffer.get_mapped_range_mut(..).map_err(|error| self.error("fill a new buffer", error))?;
            mapped.slice(..data.len()).copy_from_slice(data);
        }
        buffer.unmap();
        Ok(())
    }
}

const STORAGE: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);

/// What the driver said behind our back.
#[derive(Debug)]
pub(super) struct Health {
    device: Arc<str>,
    state: Mutex<Ailment>,
}

#[derive(Debug, Default)]
struct Ailment {
    /// Ended the device: every later call fails.
    lost: Option<Error>,
    /// To be told once.
    failed: Option<Error>,
}

impl Health {
    pub(super) fn lost(&self, operation: &str, native: String) {
        let error = self.error(operation, native);
        self.lock().lost.get_or_insert(error);
    }

    fn failed(&self, operation: &str, native: String) {
        let error = self.error(operation, native);
        self.lock().failed.get_or_insert(error);
    }

    pub(super) fn check(&self) -> Result<()> {
        let mut state = self.lock();
        match state.failed.take().or_else(|| state.lost.clone()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn error(&self, operation: &str, native: String) -> Error {
        Error::Device { device: self.device.to_string(), operation: operation.to_owned(), native }
    }

    fn lock(&self) -> MutexGuard<'_, Ailment> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
