//! Copies to the host.
//!
//! A download is two copies. The device copies into a staging buffer at once, so that later
//! submissions do not change the bytes; the host copies out of it. The second copy is made in the
//! driver's callback, natively mostly on the thread that polls the device: the rank's own thread is
//! not blocked, and a dropped download also returns its staging buffer.
//!
//! Both copies are needed. If memory is shared, the buffer itself could be mapped. But then the
//! device could not use it until the bytes are no longer needed, and the device computes on the
//! same block that is sent. To hand out the mapped staging buffer instead of a copy is unsound:
//! `wgpu::Device::destroy` frees the memory of mapped buffers while views of them exist (wgpu 30;
//! `release_gpu_resources` in wgpu-core).

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_channel::oneshot;

use super::buffer::WgpuBuffer;
use crate::backend::wgpu::device::Gpu;
use crate::error::{Error, Result};

/// Ends with the bytes in host memory. May be dropped early, and may outlive its backend.
pub struct Download(Pin<Box<dyn Future<Output = Result<Bytes>>>>);

impl Download {
    /// Submits the copy now, so that later work on the device does not delay it.
    pub(in crate::backend::wgpu) fn start(gpu: &Gpu, buffer: &WgpuBuffer, range: Range<usize>) -> Self {
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
                "stay within the size of the buffer",
            ));
        }
        if range.is_empty() {
            return Ok(Self(Box::pin(std::future::ready(Ok(Bytes::new())))));
        }
        // The API copies whole 32-bit words.
        let start = range.start / 4 * 4;
        let size = (range.end - start).next_multiple_of(4);
        let skip = range.start - start;
        let wanted = skip..skip + range.len();

        let staging = gpu.staging_buffer("download", size)?;
        let mut encoder = gpu.encoder("download");
        encoder.copy_buffer_to_buffer(&buffer.raw, start as u64, &staging.raw, 0, Some(size as u64));
        // The mapping resolves the future; nothing waits for the submission itself.
        let _ = gpu.submit(Some(encoder.finish()));
        let (sender, receiver) = oneshot::channel();
        let raw = staging.raw.clone();
        let (pool, number) = (gpu.staging.clone(), gpu.staging.start_copy(staging));
        raw.map_async(wgpu::MapMode::Read, ..size as u64, move |mapped| {
            let Some(staging) = pool.copied(number) else {
                return; // the device is lost, which ends the future
            };
            let bytes = match mapped {
                // The download was dropped: its bytes are not needed.
                Ok(()) if sender.is_canceled() => None,
                Ok(()) => Some(read(&staging.raw, size, wanted)),
                // Not returned to the pool: its state is unknown.
                Err(error) => {
                    let _ = sender.send(Err(error.to_string()));
                    return;
                }
            };
            staging.raw.unmap();
            pool.put(staging);
            if let Some(bytes) = bytes {
                let _ = sender.send(bytes);
            }
        });
        // Mapping begins after the copy's submission: this makes the poll thread poll the device once more.
        let _ = gpu.submit(None);
        let health = gpu.health.clone();
        Ok(Self(Box::pin(async move {
            let got = health.loss().or(receiver).await;
            health.check()?;
            let native = match got {
                Some(Ok(bytes)) => return Ok(bytes),
                Some(Err(native)) => native,
                None => "the device was lost".to_owned(),
            };
            Err(health.error("copy to the host", native))
        })))
    }
}

fn read(staging: &wgpu::Buffer, size: usize, wanted: Range<usize>) -> Result<Bytes, String> {
    let view = staging.get_mapped_range(..size as u64).map_err(|error| error.to_string())?;
    Ok(Bytes::copy_from_slice(&view[wanted]))
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
