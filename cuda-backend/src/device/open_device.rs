//! A device that is open: memory, copies and launches, with their order and their completion.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::Pod;
use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::{Error, Result};

use super::dependencies::StreamKind;
use super::download::Download;
use super::event_poller::EventPoller;
use super::memory_pool::{CudaBuffer, MemoryPool};
use super::options::CudaOptions;
use super::pacer::Pacer;
use super::staging::StagingPool;
use super::status::DeviceStatus;
use super::submitter::{LaunchConfig, Submitter};
use crate::driver::{Context, DeviceProperties, DriverError, Event};
use crate::images::Image;

/// An open device, as operations use it.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    /// Streaming multiprocessors of the device.
    pub(crate) multiprocessors: u32,
    /// Whether there are kernels for Hopper.
    pub(crate) wgmma: bool,
    pub(crate) pacer: Pacer,
    resources: Arc<Resources>,
    poller: EventPoller,
}

/// What must live until the device is done with everything that was submitted.
#[derive(Debug)]
struct Resources {
    status: Arc<DeviceStatus>,
    pool: Arc<MemoryPool>,
    staging: Arc<StagingPool>,
    submitter: Submitter,
}

impl OpenDevice {
    pub(crate) fn new(
        context: &Arc<Context>,
        status: Arc<DeviceStatus>,
        image: &Image,
        properties: &DeviceProperties,
        options: &CudaOptions,
    ) -> Result<Self> {
        let CudaOptions { max_memory_bytes, stuck_after, graphs, .. } = *options;
        let resources = Arc::new(Resources {
            pool: MemoryPool::new(context, &status, properties.memory_bytes, max_memory_bytes, stuck_after),
            staging: StagingPool::new(context, &status),
            submitter: Submitter::new(context, &status, &image.bytes, graphs)?,
            status,
        });
        let poller = EventPoller::start(&resources.status, stuck_after)?;
        let (multiprocessors, wgmma) = (properties.multiprocessors, image.wgmma);
        Ok(Self { multiprocessors, wgmma, pacer: Pacer::default(), resources, poller })
    }

    /// A buffer with unspecified contents.
    pub(crate) fn buffer(&self, label: &str, bytes: usize) -> Result<CudaBuffer> {
        self.resources.pool.buffer(label, bytes, || {
            // Whoever has what was to be written is told of a error.
            let _ = self.resources.submitter.flush();
        })
    }

    /// A new buffer that holds `data`.
    pub(crate) fn upload(&self, label: &str, data: &[u8]) -> Result<CudaBuffer> {
        let buffer = self.buffer(label, data.len())?;
        self.write(label, &buffer, 0, data)?;
        Ok(buffer)
    }

    /// Overwrites part of a buffer.
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
        let home = resources.staging.clone();
        self.poller.on_event(StreamKind::Upload, copy.event().clone(), move |result| {
            if let (Ok(()), Ok(Some(staging))) = (result, copy.into_staging()) {
                home.put(staging);
            }
        });
        Ok(())
    }

    /// Starts copying `range` of a buffer to the host.
    pub(crate) fn download(&self, buffer: &CudaBuffer, range: Range<usize>) -> Download {
        match self.start_download(buffer, range) {
            Ok(receiver) => Download::coming(receiver, &self.resources.status),
            Err(error) => Download::failed(error),
        }
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
                "download what the buffer has",
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
        let (home, status) = (resources.staging.clone(), resources.status.clone());
        self.poller.on_event(StreamKind::Download, copy.event().clone(), move |result| {
            let landed = result.and_then(|()| match copy.into_staging() {
                Ok(Some(staging)) => Ok(home.lend(staging)),
                Ok(None) => Err(status.device_error("copy to the host", "an event did not stay happened")),
                Err(error) => Err(status.error("copy to the host", &error)),
            });
            // Nobody waits any more: fine.
            let _ = sender.send(landed);
        });
        Ok(receiver)
    }

    /// Launches a kernel, after those that are held back. The event is its end.
    pub(crate) fn launch<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        self.resources.submitter.launch(launch, arguments, reads, writes)
    }

    /// Holds a launch back until the next one; see [`Submitter::launch_deferred`].
    pub(crate) fn launch_deferred<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        self.resources.submitter.launch_deferred(launch, arguments, reads, writes)
    }

    /// When an event of a launch happens; nothing if the device is lost before.
    pub(crate) fn completion_time(&self, event: Arc<Event>) -> oneshot::Receiver<Instant> {
        let (sender, receiver) = oneshot::channel();
        self.poller.on_event(StreamKind::Compute, event, move |result| {
            if result.is_ok() {
                let _ = sender.send(Instant::now());
            }
        });
        receiver
    }

    /// Ends when everything submitted so far is done.
    pub(crate) async fn wait(&self) -> Result<()> {
        let end = |kind| {
            let (sender, receiver) = oneshot::channel();
            self.poller.on_event(kind, self.resources.submitter.end(kind)?, move |result| {
                let _ = sender.send(result);
            });
            Ok(receiver)
        };
        let ends: Vec<_> = StreamKind::ALL.into_iter().map(end).collect::<Result<_>>()?;
        for end in ends {
            end.await.unwrap_or_else(|_| self.resources.status.check())?;
        }
        Ok(())
    }

    /// The error for a call of the driver that failed.
    pub(crate) fn error(&self, operation: &str, error: &DriverError) -> Error {
        self.resources.status.error(operation, error)
    }
}

impl Drop for OpenDevice {
    /// Nobody waits here: what is in copy is waited for by the thread, which frees everything then.
    fn drop(&mut self) {
        if self.resources.status.is_lost() {
            // A device that hangs does not give anything back, and one whose context ended has nothing left.
            std::mem::forget(self.resources.clone());
            return;
        }
        for kind in StreamKind::ALL {
            let end = || self.resources.submitter.end(kind);
            // Where what was held back is refused now, nobody is left to hear of it, but it has an end.
            if let Ok(event) = end().or_else(|_| end()) {
                let resources = self.resources.clone();
                self.poller.on_event(kind, event, move |result| {
                    if result.is_err() {
                        // As of a device that was lost before.
                        std::mem::forget(resources);
                    }
                });
            }
        }
    }
}
