//! An open device: buffers, copies and launches.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::Pod;
use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::{Error, Result};

use super::dependencies::StreamKind;
use super::event_poller::EventPoller;
use super::loaded_kernels::LoadedKernels;
use super::options::CudaOptions;
use super::pacer::Pacer;
use super::status::DeviceStatus;
use super::submitter::{Deferred, LaunchConfig, Submitter};
use crate::device::memory::download::Download;
use crate::device::memory::memory_pool::{CudaBuffer, MemoryPool};
use crate::device::memory::staging::StagingPool;
use crate::driver::{Context, DeviceProperties, DriverError, Event};

/// Most threads, and most shared memory of all blocks, of a multiprocessor of any architecture.
const MOST_THREADS: u32 = 2048;
const MOST_SHARED_BYTES: u32 = 228 << 10;

/// An open device, as the operations of the backend use it. On drop its resources live until the
/// device is idle.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    /// Streaming multiprocessors of the device.
    pub(crate) multiprocessors: u32,
    /// Whether calls get the kernels for Hopper.
    pub(crate) wgmma: bool,
    pub(crate) pacer: Pacer,
    pub(super) resources: Arc<Resources>,
    pub(super) poller: EventPoller,
}

/// What must live until everything that was submitted is done.
#[derive(Debug)]
pub(super) struct Resources {
    pub(super) context: Arc<Context>,
    pub(super) status: Arc<DeviceStatus>,
    pub(super) pool: Arc<MemoryPool>,
    staging: Arc<StagingPool>,
    pub(super) submitter: Submitter,
}

impl OpenDevice {
    pub(crate) fn new(
        context: &Arc<Context>,
        status: Arc<DeviceStatus>,
        (kernels, wgmma): (LoadedKernels, bool),
        properties: &DeviceProperties,
        options: &CudaOptions,
    ) -> Result<Self> {
        let CudaOptions { max_memory_bytes, stuck_after, graphs, .. } = *options;
        let resources = Arc::new(Resources {
            context: context.clone(),
            pool: MemoryPool::new(context, &status, properties.memory_bytes, max_memory_bytes, stuck_after),
            staging: StagingPool::new(context, &status),
            submitter: Submitter::new(context, &status, kernels, (graphs, stuck_after))?,
            status,
        });
        let unfinished = Arc::downgrade(&resources.submitter.unfinished);
        let poller = EventPoller::start(context.ordinal(), &resources.status, stuck_after, unfinished)?;
        let multiprocessors = properties.multiprocessors;
        Ok(Self { multiprocessors, wgmma, pacer: Pacer::default(), resources, poller })
    }

    /// The device's index.
    pub(crate) fn ordinal(&self) -> usize {
        self.resources.context.ordinal()
    }

    /// Blocks of so many threads and bytes of shared memory that fill the device: at most so many
    /// run at a time on any architecture.
    pub(crate) fn resident_blocks(&self, threads: u32, shared_bytes: u32) -> u32 {
        let by_threads = MOST_THREADS / threads.max(1);
        let by_memory = MOST_SHARED_BYTES / shared_bytes.max(1);
        self.multiprocessors * by_threads.min(by_memory).max(1)
    }

    /// Whether the device still works, and its name.
    pub(crate) fn status(&self) -> &Arc<DeviceStatus> {
        &self.resources.status
    }

    /// A buffer with unspecified contents.
    pub(crate) fn buffer(&self, label: &str, bytes: usize) -> Result<CudaBuffer> {
        self.resources.pool.buffer(label, bytes, || {
            // An error is kept: it is returned by every later operation on the buffers that the launches were
            // to write.
            let _ = self.resources.submitter.flush();
        })
    }

    /// A new buffer that holds `data`.
    pub(crate) fn upload(&self, label: &str, data: &[u8]) -> Result<CudaBuffer> {
        let buffer = self.buffer(label, data.len())?;
        self.write(label, &buffer, 0, data)?;
        Ok(buffer)
    }

    /// Copies `data` to byte `offset` of a buffer. `data` may be freed when this returns.
    pub(crate) fn write(&self, label: &str, buffer: &CudaBuffer, offset: usize, data: &[u8]) -> Result<()> {
        let resources = &self.resources;
        resources.status.check()?;
        if offset.checked_add(data.len()).is_none_or(|end| end > buffer.bytes()) {
            return Err(Error::request(
                format!("a write of {} bytes at byte {offset} of a buffer of {}", data.len(), buffer.bytes()),
                "write within the buffer",
            ));
        }
        if data.is_empty() {
            return Ok(());
        }
        let mut staging = resources.staging.take(label, data.len())?;
        staging.contents_mut().copy_from_slice(data);
        let operation = format!("copy {label} to the device");
        let copy = resources.submitter.copy(StreamKind::Upload, &operation, &[], &[buffer], |stream| {
            let copy = stream.upload(staging, &buffer.allocation().memory, offset)?;
            let event = copy.event().clone();
            Ok((copy, event))
        })?;
        let pool = resources.staging.clone();
        self.poller.on_event(StreamKind::Upload, copy.event().clone(), move |result| {
            if let (Ok(()), Ok(Some(staging))) = (result, copy.into_staging()) {
                pool.put(staging);
            }
        });
        Ok(())
    }

    /// Starts a copy of bytes `range` of a buffer to the host.
    pub(crate) fn download(&self, buffer: &CudaBuffer, range: Range<usize>) -> Download {
        match self.start_download(buffer, range) {
            Ok(receiver) => Download::pending(receiver, &self.resources.status),
            Err(error) => Download::failed(error),
        }
    }

    /// Ends when everything that writes these buffers so far is done.
    pub(crate) fn written(&self, buffers: &[&CudaBuffer]) -> Result<oneshot::Receiver<Result<()>>> {
        let submitter = &self.resources.submitter;
        let event = submitter.copy(StreamKind::Download, "wait for a message", buffers, &[], |stream| {
            let event = Arc::new(stream.record()?);
            Ok((event.clone(), event))
        })?;
        let (sender, receiver) = oneshot::channel();
        self.poller.on_event(StreamKind::Download, event, move |result| {
            // The receiver may be dropped: then nobody waits.
            let _ = sender.send(result);
        });
        Ok(receiver)
    }

    fn start_download(
        &self,
        buffer: &CudaBuffer,
        range: Range<usize>,
    ) -> Result<oneshot::Receiver<Result<Bytes>>> {
        let resources = &self.resources;
        resources.status.check()?;
        if range.start > range.end || range.end > buffer.bytes() {
            return Err(Error::request(
                format!("bytes {range:?} of a buffer of {}", buffer.bytes()),
                "stay within the size of the buffer",
            ));
        }
        let (sender, receiver) = oneshot::channel();
        if range.is_empty() {
            let _ = sender.send(Ok(Bytes::new()));
            return Ok(receiver);
        }
        let staging = resources.staging.take("a download", range.len())?;
        let copy =
            resources.submitter.copy(StreamKind::Download, "copy to the host", &[buffer], &[], |stream| {
                let copy = stream.download(&buffer.allocation().memory, range, staging)?;
                let event = copy.event().clone();
                Ok((copy, event))
            })?;
        let (pool, status) = (resources.staging.clone(), resources.status.clone());
        self.poller.on_event(StreamKind::Download, copy.event().clone(), move |result| {
            let downloaded = result.and_then(|()| match copy.into_staging() {
                Ok(Some(staging)) => Ok(pool.lend(staging)),
                Ok(None) => Err(status
                    .device_error("copy to the host", "an event that was complete is not complete any more")),
                Err(error) => Err(status.error("copy to the host", &error)),
            });
            // The receiver may be dropped: then the result is not wanted.
            let _ = sender.send(downloaded);
        });
        Ok(receiver)
    }

    /// Launches a kernel; see [`Submitter::launch`].
    pub(crate) fn launch<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        self.resources.submitter.launch(launch, arguments, reads, writes)
    }

    /// Launches a kernel in place of a deferred launch; see [`Submitter::launch_instead_of`].
    pub(crate) fn launch_instead_of<A: Pod>(
        &self,
        unwanted: Option<&Deferred>,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        self.resources.submitter.launch_instead_of(unwanted, launch, arguments, reads, writes)
    }

    /// A launch, if it is deferred; see [`Submitter::deferred`].
    pub(crate) fn deferred<A: Pod>(&self, kernel: &'static str, arguments: &A) -> Option<Deferred> {
        self.resources.submitter.deferred(kernel, arguments)
    }

    /// Launches a kernel together with the next one; see [`Submitter::launch_deferred`].
    pub(crate) fn launch_deferred<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        self.resources.submitter.launch_deferred(launch, arguments, reads, writes)
    }

    /// The time at which the event of a launch is complete. The sender is dropped if the device is
    /// lost before.
    pub(crate) fn completion_time(&self, event: Arc<Event>) -> oneshot::Receiver<Instant> {
        let (sender, receiver) = oneshot::channel();
        self.poller.on_event(StreamKind::Compute, event, move |result| {
            if result.is_ok() {
                let _ = sender.send(Instant::now());
            }
        });
        receiver
    }

    /// Returns when everything submitted so far is done.
    pub(crate) async fn wait(&self) -> Result<()> {
        let start = |kind| {
            let (sender, receiver) = oneshot::channel();
            self.poller.on_event(kind, self.resources.submitter.end(kind)?, move |result| {
                let _ = sender.send(result);
            });
            Ok(receiver)
        };
        let ends: Vec<_> = StreamKind::ALL.into_iter().map(start).collect::<Result<_>>()?;
        for end in ends {
            end.await.unwrap_or_else(|_| self.resources.status.check())?;
        }
        Ok(())
    }

    /// Loads a kernel that no launch has used yet.
    pub(crate) fn load_kernel(&self, name: &str, shared_bytes: u32) -> Result<()> {
        self.resources.submitter.kernels.function(name, shared_bytes).map(drop)
    }

    /// Starts or stops measuring launches; see [`Submitter::measure`].
    pub(crate) fn measure(&self, on: bool) {
        self.resources.submitter.measure(on);
    }

    /// See [`Submitter::measured`].
    pub(crate) fn measured(&self) -> Result<Vec<(Vec<String>, f64)>> {
        self.resources.submitter.measured()
    }

    /// The error of an operation whose call of the driver failed.
    pub(crate) fn error(&self, operation: &str, error: &DriverError) -> Error {
        self.resources.status.error(operation, error)
    }
}

impl Drop for OpenDevice {
    /// Does not block: the polling thread waits for everything that was submitted, and frees the
    /// resources then.
    fn drop(&mut self) {
        if self.resources.status.is_lost() {
            // A device that hangs may still access its resources, and a destroyed context has freed them.
            std::mem::forget(self.resources.clone());
            return;
        }
        for kind in StreamKind::ALL {
            let end = || self.resources.submitter.end(kind);
            // If the deferred launches fail now, the error has no receiver. The second call then gives the
            // event.
            if let Ok(event) = end().or_else(|_| end()) {
                let resources = self.resources.clone();
                self.poller.on_event(kind, event, move |result| {
                    if result.is_err() {
                        // As above: the device is lost.
                        std::mem::forget(resources);
                    }
                });
            }
        }
    }
}
