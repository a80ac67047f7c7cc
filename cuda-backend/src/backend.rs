//! The backend: [`CudaBackend`], and what it can be told.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::backend::{
    Attend, Backend, Control, DeviceInfo, Elements, Extent, Layout, State, StateMut, StateShape,
};
use kyklos::{AttentionProblem, Dtype, Error, Result, TileShape};

use crate::device::event_poller::Watch;
use crate::device::gpu::Gpu;
use crate::device::memory_pool::CudaBuffer;
use crate::device::pacer::Pace;
use crate::device::status::Health;
use crate::devices::{Unavailable, describe, ready};
use crate::driver::{self, Context};
use crate::images;
use crate::ops::{attend, convert, state as ops};

/// What a backend can be told.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Bytes that all buffers together may have; without it, all that the device has.
    pub max_memory_bytes: Option<u64>,
    /// Folder in which compiled kernels are kept, where they are compiled at run time; without it they are not kept.
    pub cache: Option<PathBuf>,
    /// A device that does nothing for this long is given up. It must be longer than the longest kernel, and than what
    /// others do on the same device.
    pub stuck_after: Duration,
    /// Whether launches that come together again and again are submitted as one, as CUDA graphs. Without, profilers and
    /// debuggers see each by itself.
    pub graphs: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { max_memory_bytes: None, cache: None, stuck_after: Duration::from_secs(120), graphs: true }
    }
}

/// One NVIDIA GPU.
///
/// - **Errors** keep the driver's call, number, name and text. After one that ends a context (an illegal address, a lost
///   device) every call says so, and every future that waits for the device ends; other devices go on. The context is that
///   of the whole process: it takes a new process to use the device again.
/// - **Memory** of buffers that are dropped is kept for the next ones of their size, up to a quarter of the device.
/// - **Threads.** One for each backend notices when the device is done. Any thread may call.
#[derive(Debug)]
pub struct CudaBackend {
    info: DeviceInfo,
    pub(crate) multiprocessors: u32,
    /// Whether there are kernels for Hopper.
    pub(crate) wgmma: bool,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) watch: Watch,
    pub(crate) pace: Pace,
}

impl CudaBackend {
    /// Opens the device with this number in [`devices`](crate::devices).
    ///
    /// # Errors
    /// [`Error::Request`] where there is no such device, or it cannot be used; [`Error::Device`].
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::with_options(ordinal, &CudaOptions::default())
    }

    /// As [`Self::new`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_options(ordinal: usize, options: &CudaOptions) -> Result<Self> {
        let version = ready().map_err(refusal)?;
        let name: Arc<str> = format!("cuda:{ordinal}").into();
        let health = Arc::new(Health::new(name));
        let fault = |operation| {
            let health = &health;
            move |fault| health.error(operation, &fault)
        };
        let found = driver::device_count().map_err(fault("count the devices"))?;
        if ordinal >= found {
            return Err(Error::request(
                format!("device cuda:{ordinal} does not exist, this machine has {found}"),
                format!("use a number below {found}"),
            ));
        }
        let facts = driver::facts(ordinal).map_err(fault("describe the device"))?;
        let device = describe(&facts, version);
        if let Some(why) = device.refused {
            return Err(refusal(why));
        }
        let image = images::image(facts.capability, options.cache.as_deref()).map_err(|why| {
            Error::request(format!("no kernels for {}: {}", facts.name, why.0), "or use wgpu")
        })?;
        let context = Context::retain(ordinal).map_err(fault("open the device"))?;
        let gpu = Gpu::open(&context, health.clone(), &image.bytes, facts.memory_bytes, options)?;
        let watch = Watch::start(&health, options.stuck_after)?;
        let products = if image.wgmma { "wgmma and mma.sync" } else { "mma.sync" };
        let info = DeviceInfo { kernel: format!("{products}, {}", image.origin), ..device.info };
        let (multiprocessors, wgmma) = (facts.multiprocessors, image.wgmma);
        Ok(Self { info, multiprocessors, wgmma, gpu, watch, pace: Pace::default() })
    }
}

impl Drop for CudaBackend {
    /// Nobody waits here: what is in flight is waited for by the thread, which frees everything then.
    fn drop(&mut self) {
        let gpu = self.gpu.clone();
        if gpu.health.is_lost() {
            // A device that hangs does not give anything back, and one whose context ended has nothing left.
            std::mem::forget(gpu);
            return;
        }
        gpu.keep_until_done(&self.watch);
    }
}

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Download = Download;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        // A head dim without a kernel is refused by `attend`, whatever the tiles.
        attend::tile_shape(problem, shape, self.wgmma).unwrap_or(TileShape { q_rows: 64, kv_cols: 64 })
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<CudaBuffer> {
        self.gpu.buffer(label, bytes)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<CudaBuffer> {
        self.gpu.upload(&self.watch, label, &data)
    }

    fn write(&self, buffer: &mut CudaBuffer, offset: usize, data: &[u8]) -> Result<()> {
        self.gpu.write(&self.watch, "a write", buffer, offset, data)
    }

    fn download(&self, buffer: &mut CudaBuffer, range: Range<usize>) -> Download {
        match self.gpu.download(&self.watch, buffer, range) {
            Ok(receiver) => Download(Copying::Coming(receiver, self.gpu.health.clone())),
            Err(error) => Download(Copying::Failed(error)),
        }
    }

    fn reset_state(&self, state: &mut StateMut<'_, CudaBuffer>) -> Result<()> {
        ops::reset_state(self, state.a, state.ml, state.shape)
    }

    async fn attend(&self, args: Attend<'_, CudaBuffer>, control: &Control) -> Result<()> {
        attend::attend(self, args, control).await
    }

    fn merge(&self, into: &mut StateMut<'_, CudaBuffer>, from: &State<'_, CudaBuffer>) -> Result<()> {
        ops::merge(self, into.a, into.ml, from)
    }

    fn finalize(
        &self,
        state: &State<'_, CudaBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut CudaBuffer,
        lse: &mut CudaBuffer,
    ) -> Result<()> {
        ops::finalize(self, state, sinks, dtype, o, lse)
    }

    fn repack(
        &self,
        from: (&CudaBuffer, Layout),
        into: (&mut CudaBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        ops::repack(self, from, (into.0, into.1), extent)
    }

    fn convert(
        &self,
        from: Elements<&CudaBuffer>,
        into: Elements<&mut CudaBuffer>,
        shape: [usize; 4],
    ) -> Result<()> {
        convert::convert(self, from, into, shape)
    }

    async fn wait(&self) -> Result<()> {
        for end in self.gpu.all_done(&self.watch)? {
            end.await.unwrap_or_else(|_| self.gpu.health.check())?;
        }
        Ok(())
    }
}

/// Ends with bytes of the device on the host; may be dropped, and may outlive its backend. The bytes lie in pinned
/// memory, which goes back to the backend with the last of them.
pub struct Download(Copying);

enum Copying {
    Coming(oneshot::Receiver<Result<Bytes>>, Arc<Health>),
    Failed(Error),
}

impl Future for Download {
    type Output = Result<Bytes>;

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Copying::Failed(error) => Poll::Ready(Err(error.clone())),
            Copying::Coming(receiver, health) => Pin::new(receiver).poll(context).map(|got| {
                got.unwrap_or_else(|_| {
                    health.check()?;
                    Err(health.device_error("copy to the host", "nobody looks after the device any more"))
                })
            }),
        }
    }
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download").finish_non_exhaustive()
    }
}

fn refusal(Unavailable { why, remedy }: Unavailable) -> Error {
    Error::request(why, remedy)
}

/// A number for a kernel.
pub(crate) fn narrow(what: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| {
        Error::request(format!("{what} is {value}"), "kernels count in 32 bits: use smaller pieces")
    })
}
