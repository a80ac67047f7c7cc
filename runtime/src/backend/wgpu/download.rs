//! Copies to the host.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_channel::oneshot;

use super::WgpuBuffer;
use super::device::Gpu;
use crate::{Error, Result};

/// Ends with bytes of the device on the host; may be dropped, and may outlive its backend.
pub struct Download(Pin<Box<dyn Future<Output = Result<Bytes>>>>);

impl Download {
    /// Submits the copy now, so that later work on the device does not delay it.
    pub(super) fn start(gpu: &Gpu, buffer: &WgpuBuffer, range: Range<usize>) -> Self {
        match Self::try_start(gpu, buffer, range) {
            Ok(download) => download,
            Err(error) => Self(Box::pin(std::future::ready(Err(error)))),
        }
    }

    fn try_start(gpu: &Gpu, buffer: &WgpuBuffer, range: Range<usize>) -> Result<Self> {
        gpu.check()?;
        if range.start > range.end || range.end > buffer.bytes {
            return Err(Error::request(
                format!("bytes {range:?} of a buffer of {}", buffer.bytes),
                "download what the buffer has",
            ));
        }
        if range.is_empty() {
            return Ok(Self(Box::pin(std::future::ready(Ok(Bytes::new())))));
        }
        // Copies are of whole words.
        let start = range.start / 4 * 4;
        let size = (range.end - start).next_multiple_of(4);
        let staging = gpu.staging("download", size)?;
        let mut encoder = gpu.encoder("download");
        encoder.copy_buffer_to_buffer(&buffer.raw, start as u64, &staging, 0, Some(size as u64));
        // Resolved through the mapping; the submission itself needs no one to wait for it.
        let _ = gpu.submit(Some(encoder.finish()));
        let (sender, receiver) = oneshot::channel();
        staging.map_async(wgpu::MapMode::Read, .., move |mapped| {
            // Nobody waits any more: fine.
            let _ = sender.send(mapped);
        });
        // Mapping begins behind the copy's submission: have the device looked after once more.
        let _ = gpu.submit(None);
        let (health, name) = (gpu.health.clone(), gpu.name.clone());
        let skip = range.start - start;
        let wanted = skip..skip + range.len();
        Ok(Self(Box::pin(async move {
            let failed = |native: String| Error::Device {
                device: name.to_string(),
                operation: "copy to the host".to_owned(),
                native,
            };
            match receiver.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    health.check()?;
                    return Err(failed(error.to_string()));
                }
                Err(oneshot::Canceled) => {
                    health.check()?;
                    return Err(failed("the device went away".to_owned()));
                }
            }
            let mapped = staging.get_mapped_range(..).map_err(|error| failed(error.to_string()))?;
            let bytes = Bytes::copy_from_slice(&mapped[wanted]);
            health.check()?;
            Ok(bytes)
        })))
    }
}

impl Future for Download {
    type Output = Result<Bytes>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download").finish_non_exhaustive()
    }
}
