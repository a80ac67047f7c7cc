//! The backend: [`CudaBackend`].

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kyklos::backend::{
    Attend, AttendBackward, Backend, Control, Device, DeviceInfo, Elements, Extent, KernelTime, Layout,
    Results, RowStats, State, StateMut, StateShape,
};
use kyklos::{AttentionProblem, Dtype, Error, Result, TileShape};

use crate::device::{CudaBuffer, CudaOptions, DeviceStatus, Download, LoadedKernels, OpenDevice};
use crate::devices::{describe, supported_driver_version};
use crate::driver::{self, Context, Unavailable};
use crate::images::{Image, Replacement};
use crate::kernels::{BACKWARD_TILE, all_kernels};
use crate::{images, ops};

/// One NVIDIA GPU.
///
/// - **Errors** name the driver's function and have its code, name and text. After an error that
///   destroys the context (an illegal address, a lost device) every call returns that error, and so
///   does every future that waits for the device. Other devices are not affected. The whole process
///   shares the context, so only a new process can use the device again.
/// - **Memory** of dropped buffers is kept for later buffers of their size, up to a quarter of the
///   device's memory.
/// - **Threads.** One thread per backend polls for completions, another one frees memory. Any
///   thread may call.
#[derive(Debug)]
pub struct CudaBackend {
    info: DeviceInfo,
    pub(crate) device: OpenDevice,
}

impl CudaBackend {
    /// Opens the device with this index in [`devices`](crate::devices), with default options.
    ///
    /// # Errors
    /// [`Error::Request`] if there is no such device or it cannot be used, or if it cannot use
    /// [`CudaOptions::replacement`]; [`Error::Device`] if the driver fails.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::with_options(ordinal, &CudaOptions::default())
    }

    /// Opens the device with this index in [`devices`](crate::devices).
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_options(ordinal: usize, options: &CudaOptions) -> Result<Self> {
        let version = supported_driver_version().map_err(refusal)?;
        let name: Arc<str> = format!("cuda:{ordinal}").into();
        let status = Arc::new(DeviceStatus::new(name));
        let failed = |operation| {
            let status = &status;
            move |error| status.error(operation, &error)
        };
        let found = driver::device_count().map_err(failed("count the devices"))?;
        if ordinal >= found {
            return Err(Error::request(
                format!("device cuda:{ordinal} does not exist, this machine has {found}"),
                format!("use a number below {found}"),
            ));
        }
        let properties = driver::properties(ordinal).map_err(failed("describe the device"))?;
        let device = describe(&properties, version);
        if let Some(why) = device.refused {
            return Err(refusal(why));
        }
        let image =
            images::image(properties.capability, version, options.cache.as_deref()).map_err(|why| {
                Error::request(format!("no kernels for {}: {}", properties.name, why.0), "or use wgpu")
            })?;
        let replacement = options.replacement.as_deref().map(Replacement::read).transpose()?;
        let kernel = kernel_words(&image, options.wgmma, replacement.as_ref())?;
        let context = Context::retain(ordinal).map_err(failed("open the device"))?;
        let (major, minor) = device.capability;
        let words = format!("{}, of compute capability {major}.{minor},", properties.name);
        let kernels = LoadedKernels::load(&context, &status, &image, replacement, &words)?;
        let wgmma = image.wgmma && options.wgmma;
        let device_info = DeviceInfo { kernel, ..device.info };
        let device = OpenDevice::new(&context, status.clone(), (kernels, wgmma), &properties, options)?;
        Ok(Self { info: device_info, device })
    }
}

impl CudaBackend {
    /// The device's index in [`devices`](crate::devices), which is also that of the driver and of
    /// PyTorch.
    pub fn ordinal(&self) -> usize {
        self.device.ordinal()
    }

    /// Loads every kernel now, not at its first use, and returns how many there are. For a test of
    /// a device: what is missing, or needs more shared memory than the device has, is an error
    /// here.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn load_kernels(&self) -> Result<usize> {
        let all = all_kernels(self.device.wgmma);
        for (name, shared_bytes) in &all {
            self.device.load_kernel(name, *shared_bytes)?;
        }
        Ok(all.len())
    }
}

impl From<CudaBackend> for Device {
    // In line it would bring the backend into each crate that calls it.
    #[inline(never)]
    fn from(backend: CudaBackend) -> Self {
        Self::new(backend)
    }
}

/// The largest head dim of a kernel.
const MAX_HEAD_DIM: usize = 256;

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Download = Download;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, _: Dtype, head_dim: usize) -> Result<()> {
        if head_dim <= MAX_HEAD_DIM {
            return Ok(());
        }
        Err(Error::request(
            format!("head dim {head_dim} on {}", self.info.name),
            format!("CUDA kernels have head dims up to {MAX_HEAD_DIM}: use another backend"),
        ))
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        // `attend` refuses a head dim without a kernel, whatever the tile shape.
        ops::tile_shape(problem, shape, self.device.wgmma).unwrap_or(TileShape { q_rows: 64, kv_cols: 64 })
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<CudaBuffer> {
        self.device.buffer(label, bytes)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<CudaBuffer> {
        self.device.upload(label, &data)
    }

    fn write(&self, buffer: &mut CudaBuffer, offset: usize, data: &[u8]) -> Result<()> {
        self.device.write("a write", buffer, offset, data)
    }

    fn share(&self, buffer: &mut CudaBuffer) -> CudaBuffer {
        buffer.share()
    }

    fn download(&self, buffer: &mut CudaBuffer, range: Range<usize>) -> Download {
        self.device.download(buffer, range)
    }

    fn reset_state(&self, state: &mut StateMut<'_, CudaBuffer>) -> Result<()> {
        ops::reset_state(&self.device, state.a, state.ml, state.shape)
    }

    async fn attend(&self, args: Attend<'_, CudaBuffer>, control: &Control) -> Result<()> {
        ops::attend(&self.device, args, control).await
    }

    async fn attend_and_finalize(
        &self,
        args: Attend<'_, CudaBuffer>,
        results: Results<'_, CudaBuffer>,
        control: &Control,
    ) -> Result<()> {
        ops::attend_and_finalize(&self.device, args, results, control).await
    }

    fn merge(&self, into: &mut StateMut<'_, CudaBuffer>, from: &State<'_, CudaBuffer>) -> Result<()> {
        ops::merge(&self.device, into.a, into.ml, from)
    }

    fn finalize(
        &self,
        state: &State<'_, CudaBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut CudaBuffer,
        lse: &mut CudaBuffer,
    ) -> Result<()> {
        ops::finalize(&self.device, state, sinks, dtype, o, lse)
    }

    fn repack(
        &self,
        from: (&CudaBuffer, Layout),
        into: (&mut CudaBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        ops::repack(&self.device, from, (into.0, into.1), extent)
    }

    fn convert(
        &self,
        from: Elements<&CudaBuffer>,
        into: Elements<&mut CudaBuffer>,
        shape: [usize; 4],
        overflow: Option<&mut CudaBuffer>,
    ) -> Result<()> {
        ops::convert(&self.device, from, into, shape, overflow)
    }

    fn supports_backward(&self, dtype: Dtype, head_dim: usize) -> Result<()> {
        ops::supports_backward(dtype, head_dim)
    }

    fn supports_bias_gradient(&self) -> Result<()> {
        Ok(())
    }

    fn backward_tile_shape(&self, _: &AttentionProblem, _: StateShape) -> TileShape {
        BACKWARD_TILE
    }

    fn row_stats(&self, args: RowStats<'_, CudaBuffer>) -> Result<()> {
        ops::row_stats(&self.device, &args)
    }

    async fn attend_backward(&self, args: AttendBackward<'_, CudaBuffer>, control: &Control) -> Result<()> {
        ops::attend_backward(&self.device, args, control).await
    }

    fn accumulate(
        &self,
        from: (&CudaBuffer, Layout),
        into: (&mut CudaBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        ops::accumulate(&self.device, from, (into.0, into.1), extent)
    }

    fn clear(&self, buffer: &mut CudaBuffer) -> Result<()> {
        ops::clear(&self.device, buffer)
    }

    async fn wait(&self) -> Result<()> {
        self.device.wait().await
    }

    fn expect_short_work(&self, on: bool) {
        self.device.status().expect_short_work(on);
    }

    fn measure_kernels(&self, on: bool) {
        self.device.measure(on);
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>> {
        let measured = self.device.measured()?;
        Ok(measured.into_iter().map(|(kernels, ms)| KernelTime { kernels, ms }).collect())
    }
}

/// How the kernels of a device multiply, where they come from, and which are replaced.
///
/// # Errors
/// [`Error::Request`] if the replacement has none of the kernels that the device uses.
fn kernel_words(image: &Image, wgmma: bool, replacement: Option<&Replacement>) -> Result<String> {
    let products = match (image.wgmma, wgmma) {
        (true, true) => "wgmma and mma.sync",
        (true, false) => "mma.sync (wgmma is off)",
        (false, _) => "mma.sync",
    };
    let words = format!("{products}, {}", image.origin);
    let Some(Replacement { name, kernels, .. }) = replacement else { return Ok(words) };
    let used = all_kernels(image.wgmma && wgmma);
    let replaced: Vec<&str> = kernels
        .iter()
        .map(String::as_str)
        .filter(|kernel| used.iter().any(|(name, _)| name == kernel))
        .collect();
    if replaced.is_empty() {
        return Err(Error::request(
            format!("{name} has {}, and the device uses none of them ({words})", some_of(kernels)),
            "name a cubin with kernels of the device",
        ));
    }
    Ok(format!("{words}; from {name}: {}", some_of(&replaced)))
}

/// The first few of these names, and how many there are besides.
fn some_of(names: &[impl AsRef<str>]) -> String {
    const FEW: usize = 3;
    let first: Vec<&str> = names.iter().take(FEW).map(AsRef::as_ref).collect();
    match (names.len(), names.len().saturating_sub(FEW)) {
        (0, _) => "no kernels".to_owned(),
        (_, 0) => first.join(", "),
        (_, more) => format!("{} and {more} more", first.join(", ")),
    }
}

fn refusal(Unavailable { why, remedy }: Unavailable) -> Error {
    Error::request(why, remedy.into_owned())
}
