//! A device that is open: memory, copies and launches, with their order and their completion.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::Pod;
use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::{Error, Result};

use super::dependencies::Lane;
use super::download::Download;
use super::event_poller::Watch;
use super::memory_pool::{CudaBuffer, Pool};
use super::options::CudaOptions;
use super::pacer::Pace;
use super::staging::Staging;
use super::status::Health;
use super::submitter::{Launch, Submitter};
use crate::driver::{Context, Event, Facts, Fault};
use crate::images::Image;

/// An open device, as operations use it.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    /// Streaming multiprocessors of the device.
    pub(crate) multiprocessors: u32,
    /// Whether there are kernels for Hopper.
    pub(crate) wgmma: bool,
    pub(crate) pace: Pace,
    gpu: Arc<Gpu>,
    watch: Watch,
}

/// What must live until the device is done with everything that was submitted.
#[derive(Debug)]
struct Gpu {
    health: Arc<Health>,
    pool: Arc<Pool>,
    staging: Arc<Staging>,
    submitter: Submitter,
}

impl OpenDevice {
    pub(crate) fn new(
        context: &Arc<Context>,
        health: Arc<Health>,
        image: &Image,
        facts: &Facts,
        options: &CudaOptions,
    ) -> Result<Self> {
        let CudaOptions { max_memory_bytes, stuck_after, graphs, .. } = *options;
        let gpu = Arc::new(Gpu {
            pool: Pool::new(context, &health, facts.memory_bytes, max_memory_bytes, stuck_after),
            staging: Staging::new(context, &health),
            submitter: Submitter::new(context, &health, &image.bytes, graphs)?,
            health,
        });
        let watch = Watch::start(&gpu.health, stuck_after)?;
        let (multiprocessors, wgmma) = (facts.multiprocessors, image.wgmma);
        Ok(Self { multiprocessors, wgmma, pace: Pace::default(), gpu, watch })
    }

    /// A buffer with unspecified contents.
    pub(crate) fn buffer(&self, label: &str, bytes: usize) -> Result<CudaBuffer> {
        self.gpu.pool.buffer(label, bytes, || {
            // Whoever has what was to be written is told of a fault.
            let _ = self.gpu.submitter.flush();
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
        let gpu = &self.gpu;
        gpu.health.check()?;
        if offset.checked_add(data.len()).is_none_or(|end| end > buffer.bytes()) {
            return Err(Error::request(
                format!("a write of {} bytes at byte {offset} of a buffer of {}", data.len(), buffer.bytes()),
                "write within the buffer",
            ));
        }
        if data.is_empty() {
            return Ok(());
        }
        let mut staging = gpu.staging.take(label, data.len())?;
        staging.contents_mut().copy_from_slice(data);
        let operation = format!("copy {label} to the device");
        let flight = gpu.submitter.copy(Lane::Up, &operation, &[], &[buffer], |stream| {
            let flight = stream.upload(staging, &buffer.block().memory, offset)?;
            let event = flight.event().clone();
            Ok((flight, event))
        })?;
        let home = gpu.staging.clone();
        self.watch.when(Lane::Up, flight.event().clone(), move |result| {
            if let (Ok(()), Ok(Some(staging))) = (result, flight.land()) {
                home.put(staging);
            }
        });
        Ok(())
    }

    /// Starts copying `range` of a buffer to the host.
    pub(crate) fn download(&self, buffer: &CudaBuffer, range: Range<usize>) -> Download {
        match self.start_download(buffer, range) {
            Ok(receiver) => Download::coming(receiver, &self.gpu.health),
            Err(error) => Download::failed(error),
        }
    }

    fn start_download(
        &self,
        buffer: &CudaBuffer,
        range: Range<usize>,
    ) -> Result<oneshot::Receiver<Result<Bytes>>> {
        let gpu = &self.gpu;
        gpu.health.check()?;
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
        let staging = gpu.staging.take("a download", range.len())?;
        let flight = gpu.submitter.copy(Lane::Down, "copy to the host", &[buffer], &[], |stream| {
            let flight = stream.download(&buffer.block().memory, range, staging)?;
            let event = flight.event().clone();
            Ok((flight, event))
        })?;
        let (home, health) = (gpu.staging.clone(), gpu.health.clone());
        self.watch.when(Lane::Down, flight.event().clone(), move |result| {
            let landed = result.and_then(|()| match flight.land() {
                Ok(Some(staging)) => Ok(home.lend(staging)),
                Ok(None) => Err(health.device_error("copy to the host", "an event did not stay happened")),
                Err(fault) => Err(health.error("copy to the host", &fault)),
            });
            // Nobody waits any more: fine.
            let _ = sender.send(landed);
        });
        Ok(receiver)
    }

    /// Launches a kernel, after those that are held back. The event is its end.
    pub(crate) fn launch<A: Pod>(
        &self,
        launch: Launch<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        self.gpu.submitter.launch(launch, arguments, reads, writes)
    }

    /// Holds a launch back until the next one; see [`Submitter::hold`].
    pub(crate) fn hold<A: Pod>(
        &self,
        launch: Launch<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        self.gpu.submitter.hold(launch, arguments, reads, writes)
    }

    /// When an event of a launch happens; nothing if the device is lost before.
    pub(crate) fn moment(&self, event: Arc<Event>) -> oneshot::Receiver<Instant> {
        let (sender, receiver) = oneshot::channel();
        self.watch.when(Lane::Compute, event, move |result| {
            if result.is_ok() {
                let _ = sender.send(Instant::now());
            }
        });
        receiver
    }

    /// Ends when everything submitted so far is done.
    pub(crate) async fn wait(&self) -> Result<()> {
        let end = |lane| {
            let (sender, receiver) = oneshot::channel();
            self.watch.when(lane, self.gpu.submitter.end(lane)?, move |result| {
                let _ = sender.send(result);
            });
            Ok(receiver)
        };
        let ends: Vec<_> = Lane::ALL.into_iter().map(end).collect::<Result<_>>()?;
        for end in ends {
            end.await.unwrap_or_else(|_| self.gpu.health.check())?;
        }
        Ok(())
    }

    /// The error for a call of the driver that failed.
    pub(crate) fn error(&self, operation: &str, fault: &Fault) -> Error {
        self.gpu.health.error(operation, fault)
    }
}

impl Drop for OpenDevice {
    /// Nobody waits here: what is in flight is waited for by the thread, which frees everything then.
    fn drop(&mut self) {
        if self.gpu.health.is_lost() {
            // A device that hangs does not give anything back, and one whose context ended has nothing left.
            std::mem::forget(self.gpu.clone());
            return;
        }
        for lane in Lane::ALL {
            let end = || self.gpu.submitter.end(lane);
            // Where what was held back is refused now, nobody is left to hear of it, but it has an end.
            if let Ok(event) = end().or_else(|_| end()) {
                let gpu = self.gpu.clone();
                self.watch.when(lane, event, move |result| {
                    if result.is_err() {
                        // As of a device that was lost before.
                        std::mem::forget(gpu);
                    }
                });
            }
        }
    }
}
