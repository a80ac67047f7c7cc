//! A device whose backend is chosen at run time.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::LocalBoxFuture;

use super::erased::AnyBackend;
use super::{
    Accuracy, Attend, AttendBackward, Backend, Control, DeviceInfo, Elements, Extent, KernelTime, Layout,
    Results, RowStats, State, StateMut, StateShape,
};
use crate::error::Result;
use kyklos_plan::{AttentionProblem, Dtype, TileShape};

/// A device of any backend. Ranks with unlike devices live in one program without code for each
/// combination; kernels stay statically dispatched underneath. Cloning gives another handle of the
/// same device.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use kyklos::backend::Device;
///
/// let devices = [Device::cpu(), Device::cpu()];
/// assert_eq!(devices[0].info().backend, "cpu");
/// assert!(!devices[0].is_same(&devices[1]));
/// assert!(devices[0].is_same(&devices[0].clone()));
/// # }
/// ```
#[derive(Clone)]
pub struct Device(Arc<dyn AnyBackend>);

/// Linear memory on a [`Device`]. It belongs to the device that made it: other devices refuse it
/// with a panic, because [`Session`](crate::Session) checks tensors before.
pub struct DeviceBuffer(Box<dyn AnyBuffer>);

/// What a value needs to be used by several threads: `Send` and `Sync`, and nothing in a browser,
/// which has one thread.
#[cfg(not(target_arch = "wasm32"))]
pub trait Threaded: Send + Sync {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: Send + Sync + ?Sized> Threaded for T {}
/// What a value needs to be used by several threads: `Send` and `Sync`, and nothing in a browser,
/// which has one thread.
#[cfg(target_arch = "wasm32")]
pub trait Threaded {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> Threaded for T {}

impl Device {
    /// A device of `backend`. Backends outside this crate become devices this way.
    ///
    /// The caller's crate then compiles all code of the backend. The backends of Kyklos are devices
    /// by [`From`], which is compiled once.
    pub fn new<B: Backend + Threaded + 'static>(backend: B) -> Self
    where
        B::Buffer: Threaded + 'static,
    {
        Self(Arc::new(backend))
    }

    /// The cores of this machine, as one device.
    #[cfg(feature = "cpu")]
    pub fn cpu() -> Self {
        super::cpu::CpuBackend::new().into()
    }

    /// The GPU number `index` of [`WgpuBackend::enumerate`](super::wgpu::WgpuBackend::enumerate).
    ///
    /// # Errors
    /// [`Error::Request`](crate::Error::Request) if there is no such device or it lacks a feature,
    /// [`Error::Device`](crate::Error::Device) if the driver fails.
    #[cfg(all(feature = "wgpu", not(target_arch = "wasm32")))]
    pub fn wgpu(index: usize) -> Result<Self> {
        Ok(super::wgpu::WgpuBackend::with_options(index, &super::wgpu::WgpuOptions::default())?.into())
    }

    /// A wgpu device that the caller has opened, see
    /// [`WgpuBackend::from_device`](super::wgpu::WgpuBackend::from_device).
    ///
    /// # Errors
    /// As [`WgpuBackend::from_device`](super::wgpu::WgpuBackend::from_device).
    #[cfg(feature = "wgpu")]
    pub fn from_wgpu(device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Self> {
        Ok(super::wgpu::WgpuBackend::from_device(device, queue)?.into())
    }

    /// The best device of this machine that the backends of this crate can use: a GPU, if there is
    /// one, else the cores. Software drivers of GPUs are never the best.
    ///
    /// # Errors
    /// As [`Self::wgpu`].
    #[cfg(all(feature = "cpu", feature = "wgpu", not(target_arch = "wasm32")))]
    pub fn best() -> Result<Self> {
        let classes: Vec<_> = super::wgpu::WgpuBackend::enumerate().iter().map(|gpu| gpu.class).collect();
        match super::DeviceClass::best(&classes).first() {
            Some(&index) if classes[index] < super::DeviceClass::Cpu => Self::wgpu(index),
            _ => Ok(Self::cpu()),
        }
    }

    /// Name, driver and kind of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    /// Whether both are handles of the same device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The backend underneath, if it is a `B`.
    pub fn backend<B: Backend + 'static>(&self) -> Option<&B> {
        (self.0.as_ref() as &dyn Any).downcast_ref()
    }
}

#[cfg(feature = "cpu")]
impl From<super::cpu::CpuBackend> for Device {
    // In line it would bring the kernels into each crate that calls it.
    #[inline(never)]
    fn from(backend: super::cpu::CpuBackend) -> Self {
        Self::new(backend)
    }
}

#[cfg(feature = "wgpu")]
impl From<super::wgpu::WgpuBackend> for Device {
    // As for the CPU.
    #[inline(never)]
    fn from(backend: super::wgpu::WgpuBackend) -> Self {
        Self::new(backend)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.0.info().name).finish()
    }
}

impl DeviceBuffer {
    /// A buffer of a backend, which is a [`Backend::Buffer`].
    pub fn new<T: fmt::Debug + Threaded + 'static>(buffer: T) -> Self {
        Self(Box::new(buffer))
    }

    /// The buffer underneath, if it is a `T`, which is a [`Backend::Buffer`].
    pub fn get<T: 'static>(&self) -> Option<&T> {
        (self.0.as_ref() as &dyn Any).downcast_ref()
    }

    /// The buffer underneath, if it is a `T`, to be changed.
    pub fn get_mut<T: 'static>(&mut self) -> Option<&mut T> {
        (self.0.as_mut() as &mut dyn Any).downcast_mut()
    }

    pub(super) fn of<B: Backend>(&self) -> &B::Buffer
    where
        B::Buffer: 'static,
    {
        self.get().expect(FOREIGN)
    }

    pub(super) fn of_mut<B: Backend>(&mut self) -> &mut B::Buffer
    where
        B::Buffer: 'static,
    {
        self.get_mut().expect(FOREIGN)
    }
}

const FOREIGN: &str = "a buffer is used on the device that made it";

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

trait AnyBuffer: Any + fmt::Debug + Threaded {}
impl<T: Any + fmt::Debug + Threaded> AnyBuffer for T {}

impl Backend for Device {
    type Buffer = DeviceBuffer;
    type Download = LocalBoxFuture<'static, Result<Bytes>>;

    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    fn supports(&self, dtype: Dtype, head_dim: usize) -> Result<()> {
        self.0.supports(dtype, head_dim)
    }

    fn most_state_bytes(&self) -> Option<u64> {
        self.0.most_state_bytes()
    }

    fn supports_fixed_order(&self) -> Result<()> {
        self.0.supports_fixed_order()
    }

    fn accuracy(&self, dtype: Dtype) -> Accuracy {
        self.0.accuracy(dtype)
    }

    fn kernel(&self, dtype: Dtype, shape: StateShape) -> String {
        self.0.kernel(dtype, shape)
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        self.0.tile_shape(problem, shape)
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<DeviceBuffer> {
        self.0.alloc(label, bytes)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<DeviceBuffer> {
        self.0.upload(label, data)
    }

    fn write(&self, buffer: &mut DeviceBuffer, offset: usize, data: &[u8]) -> Result<()> {
        self.0.write(buffer, offset, data)
    }

    fn share(&self, buffer: &mut DeviceBuffer) -> DeviceBuffer {
        self.0.share(buffer)
    }

    fn release_idle(&self) {
        self.0.release_idle();
    }

    fn download(&self, buffer: &mut DeviceBuffer, range: Range<usize>) -> Self::Download {
        self.0.download(buffer, range)
    }

    fn reset_state(&self, state: &mut StateMut<'_, DeviceBuffer>) -> Result<()> {
        self.0.reset_state(state)
    }

    async fn attend(&self, args: Attend<'_, DeviceBuffer>, control: &Control) -> Result<()> {
        self.0.attend(args, control).await
    }

    async fn attend_and_finalize(
        &self,
        args: Attend<'_, DeviceBuffer>,
        results: Results<'_, DeviceBuffer>,
        control: &Control,
    ) -> Result<()> {
        self.0.attend_and_finalize(args, results, control).await
    }

    fn merge(&self, into: &mut StateMut<'_, DeviceBuffer>, from: &State<'_, DeviceBuffer>) -> Result<()> {
        self.0.merge(into, from)
    }

    fn finalize(
        &self,
        state: &State<'_, DeviceBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut DeviceBuffer,
        lse: &mut DeviceBuffer,
    ) -> Result<()> {
        self.0.finalize(state, sinks, dtype, [o, lse])
    }

    fn repack(
        &self,
        from: (&DeviceBuffer, Layout),
        into: (&mut DeviceBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.0.repack(from, into, extent)
    }

    fn convert(
        &self,
        from: Elements<&DeviceBuffer>,
        into: Elements<&mut DeviceBuffer>,
        shape: [usize; 4],
        overflow: Option<&mut DeviceBuffer>,
    ) -> Result<()> {
        self.0.convert(from, into, shape, overflow)
    }

    fn supports_backward(&self, dtype: Dtype, head_dim: usize) -> Result<()> {
        self.0.supports_backward(dtype, head_dim)
    }

    fn supports_bias_gradient(&self) -> Result<()> {
        self.0.supports_bias_gradient()
    }

    fn backward_tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        self.0.backward_tile_shape(problem, shape)
    }

    fn row_stats(&self, args: RowStats<'_, DeviceBuffer>) -> Result<()> {
        self.0.row_stats(args)
    }

    async fn attend_backward(&self, args: AttendBackward<'_, DeviceBuffer>, control: &Control) -> Result<()> {
        self.0.attend_backward(args, control).await
    }

    fn accumulate(
        &self,
        from: (&DeviceBuffer, Layout),
        into: (&mut DeviceBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.0.accumulate(from, into, extent)
    }

    fn clear(&self, buffer: &mut DeviceBuffer) -> Result<()> {
        self.0.clear(buffer)
    }

    async fn wait(&self) -> Result<()> {
        self.0.wait().await
    }

    fn expect_short_work(&self, on: bool) {
        self.0.expect_short_work(on);
    }

    fn measure_kernels(&self, on: bool) {
        self.0.measure_kernels(on);
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>> {
        self.0.kernel_times()
    }
}
