//! Attention on whatever wgpu reaches: Vulkan, Metal, DX12, and WebGPU in a browser.
//!
//! - **Errors.** What the driver reports late (uncaptured errors, a lost device) is kept and returned by the next call
//!   or by [`wait`](Backend::wait). A lost device stays lost: every call says so, and every future that waits for it
//!   ends. Open the device anew, [`WgpuBackend::new`] asks the driver for it afresh, and upload again.
//! - **Memory.** A buffer is refused beyond the device's largest, beyond [`WgpuOptions::max_memory_bytes`] together
//!   with all others, and where the driver has none left. Tensors beyond the largest *binding* (128 MiB on some
//!   software drivers and in browsers) are worked on in pieces that bind what they need.
//! - **Copies.** Downloads go through staging buffers that are pooled and mapped while the device works on; uploads go
//!   straight into the buffer where host and device share memory, and through the driver's staging elsewhere.
//! - **Threads.** Natively one thread for each device waits for submissions and resolves futures; it sleeps while
//!   nothing is in flight. In a browser callbacks come by themselves.

mod adapter;
mod attend;
mod clock;
mod codes;
mod completion;
mod decode;
mod device;
mod dispatch;
mod download;
mod health;
mod memory;
mod operands;
mod ops;
mod pieces;
mod region;
mod staging;
mod stopwatch;
mod texture;
mod tuning;
mod variant;
mod work;

use std::ops::Range;

use bytes::Bytes;
use kyklos_shaders::{AttendKernel, Pairs, Storage};

pub use adapter::{KernelChoice, WgpuOptions};
pub use download::Download;
pub use kyklos_shaders::{AttendVariant, UnknownVariant};
pub use tuning::{AdapterKey, ShapeBucket, TuningEntry, TuningKey, TuningTable};

use super::{Attend, Backend, Control, DeviceInfo, Elements, Extent, Layout, State, StateMut, StateShape};
use crate::{AttentionProblem, Dtype, Error, Result, TileShape};
use codes::Direction;
use device::Gpu;
use memory::Lease;
use pieces::Pace;
use tuning::Tuned;
use variant::Variants;

/// One device behind wgpu.
#[derive(Debug)]
pub struct WgpuBackend {
    info: DeviceInfo,
    gpu: Gpu,
    variants: Variants,
    pace: Pace,
    key: AdapterKey,
    tuned: Tuned,
}

/// Linear memory on a wgpu device.
#[derive(Debug)]
pub struct WgpuBuffer {
    raw: wgpu::Buffer,
    /// As asked for; the buffer itself is a little larger and never empty.
    bytes: usize,
    _lease: Lease,
}

/// A browser frees the memory of a buffer when it is told to, or when its garbage collector comes by, which does not
/// know how much there is to gain. What was submitted still has the use of it.
#[cfg(target_arch = "wasm32")]
impl Drop for WgpuBuffer {
    fn drop(&mut self) {
        self.raw.destroy();
    }
}

impl WgpuBackend {
    /// Ends the device and frees its memory, whatever still refers to it: for a program that lives on and wants the
    /// memory for something else, and to see what it makes of a device that is lost. Every later call fails as after a
    /// reset by the driver, and every future that waits for the device ends. What is in flight on it is done first.
    pub fn destroy(&self) {
        self.gpu.destroy();
    }

    /// The attention variant for a state of this shape, and whether it is a tuned choice. Few query rows go through
    /// other kernels, whatever this says.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has.
    pub fn attend_variant(&self, dtype: Dtype, shape: StateShape) -> Result<(AttendVariant, bool)> {
        Ok(self.chosen(dtype, checked_dim(shape.dim)?, shape))
    }

    /// Every variant that this device may be told to use for such tensors; the first is the built-in choice.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has.
    pub fn attend_choices(&self, dtype: Dtype, head_dim: usize) -> Result<Vec<AttendVariant>> {
        Ok(self.variants.choices(storage(dtype), checked_dim(head_dim)?))
    }

    /// Under which key a choice for a state of this shape is kept.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has, and for so few rows that there is nothing to choose.
    pub fn tuning_key(&self, dtype: Dtype, shape: StateShape) -> Result<TuningKey> {
        let head_dim = checked_dim(shape.dim)?;
        let bucket = ShapeBucket::of(shape).ok_or_else(|| {
            Error::request(
                format!("{} query rows have no kernels to choose from", shape.rows),
                format!("use more than {}", decode::MOST_SLOTS),
            )
        })?;
        Ok(TuningKey {
            adapter: self.key.clone(),
            kernel: self.variants.choice_name(),
            dtype: dtype.name().to_owned(),
            head_dim,
            bucket,
            sources: tuning::sources(self.variants, storage(dtype), head_dim),
        })
    }

    /// Seconds by the device's own clock from the start of the first compute pass since the last call to the end of
    /// the last one; what lies between them, such as copies, counts. `None` where the device has no such clock, was
    /// opened without [`WgpuOptions::timestamps`], or ran more passes than are kept.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub async fn device_seconds(&self) -> Result<Option<f64>> {
        self.gpu.check()?;
        match &self.gpu.stopwatch {
            Some(stopwatch) => stopwatch.seconds(&self.gpu).await,
            None => Ok(None),
        }
    }

    fn chosen(&self, dtype: Dtype, head_dim: u32, shape: StateShape) -> (AttendVariant, bool) {
        match self.tuned.get(dtype, head_dim, shape) {
            Some(variant) => (variant, true),
            None => (self.variants.built_in(storage(dtype), head_dim), false),
        }
    }

    /// The kernel for a state of this shape, or one for states of every shape.
    fn attend_kernel(
        &self,
        dtype: Dtype,
        head_dim: u32,
        shape: Option<StateShape>,
        softcap: bool,
        pairs: Pairs,
    ) -> AttendKernel {
        let chosen = match shape {
            Some(shape) => self.chosen(dtype, head_dim, shape).0,
            None => self.variants.built_in(storage(dtype), head_dim),
        };
        let variant = match chosen {
            // It reads none.
            AttendVariant::Cooperative { .. } if pairs.any() => AttendVariant::portable(head_dim),
            variant => variant,
        };
        AttendKernel { variant, storage: storage(dtype), head_dim, softcap, pairs }
    }
}

impl Backend for WgpuBackend {
    type Buffer = WgpuBuffer;
    type Download = Download;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        let pairs = operands::pairs_of(problem.bias.map(|pairs| pairs.kind));
        let shape = (!problem.fixed_order).then_some(shape);
        let tile = self.attend_kernel(problem.dtype, problem.head_dim, shape, false, pairs).tile();
        TileShape { q_rows: tile.q_rows, kv_cols: tile.kv_cols }
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<WgpuBuffer> {
        self.gpu.check()?;
        self.gpu.buffer(label, bytes)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<WgpuBuffer> {
        self.gpu.check()?;
        self.gpu.buffer_with(label, &data)
    }

    fn write(&self, buffer: &mut WgpuBuffer, offset: usize, data: &[u8]) -> Result<()> {
        self.gpu.check()?;
        if !offset.is_multiple_of(4) || !data.len().is_multiple_of(4) {
            return Err(Error::request(
                format!("a write of {} bytes at byte {offset}", data.len()),
                "write whole 32-bit words",
            ));
        }
        if !data.is_empty() {
            self.gpu.queue.write_buffer(&buffer.raw, offset as u64, data);
        }
        Ok(())
    }

    fn download(&self, buffer: &mut WgpuBuffer, range: Range<usize>) -> Download {
        Download::start(&self.gpu, buffer, range)
    }

    fn reset_state(&self, state: &mut StateMut<'_, WgpuBuffer>) -> Result<()> {
        self.gpu.check()?;
        ops::reset_state(&self.gpu, state)
    }

    async fn attend(&self, args: Attend<'_, WgpuBuffer>, control: &Control) -> Result<()> {
        self.gpu.check()?;
        attend::attend(self, args, control).await
    }

    fn merge(&self, into: &mut StateMut<'_, WgpuBuffer>, from: &State<'_, WgpuBuffer>) -> Result<()> {
        self.gpu.check()?;
        ops::merge(&self.gpu, into, from)
    }

    fn finalize(
        &self,
        state: &State<'_, WgpuBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut WgpuBuffer,
        lse: &mut WgpuBuffer,
    ) -> Result<()> {
        self.gpu.check()?;
        ops::finalize(&self.gpu, state, sinks, storage(dtype), o, lse)
    }

    fn repack(
        &self,
        from: (&WgpuBuffer, Layout),
        into: (&mut WgpuBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.gpu.check()?;
        ops::repack(&self.gpu, from, (into.0, into.1), extent)
    }

    fn convert(
        &self,
        from: Elements<&WgpuBuffer>,
        into: Elements<&mut WgpuBuffer>,
        shape: [usize; 4],
    ) -> Result<()> {
        self.gpu.check()?;
        match (from, into) {
            (
                Elements::Stored { buffer: from, first, dtype },
                Elements::Stored { buffer: into, first: into_first, dtype: into_dtype },
            ) => ops::convert(
                &self.gpu,
                (from, first, storage(dtype)),
                (into, into_first, storage(into_dtype)),
                shape.iter().product(),
            ),
            (Elements::Stored { buffer, first, dtype }, Elements::Coded { codes, scales, of }) => {
                codes::convert(
                    &self.gpu,
                    Direction::ToCodes,
                    (buffer, first, dtype),
                    (codes, scales, of),
                    shape,
                )
            }
            (Elements::Coded { codes, scales, of }, Elements::Stored { buffer, first, dtype }) => {
                codes::convert(
                    &self.gpu,
                    Direction::FromCodes,
                    (buffer, first, dtype),
                    (codes, scales, of),
                    shape,
                )
            }
            (Elements::Coded { .. }, Elements::Coded { .. }) => {
                unreachable!("plans convert to codes and back, not from codes to codes")
            }
        }
    }

    async fn wait(&self) -> Result<()> {
        self.gpu.check()?;
        // An empty submission flushes writes that nothing was submitted after.
        let done = self.gpu.submit(None);
        done.finished().await;
        self.gpu.check()
    }
}

fn storage(dtype: Dtype) -> Storage {
    match dtype {
        Dtype::F32 => Storage::F32,
        Dtype::F16 => Storage::F16,
        Dtype::Bf16 => Storage::Bf16,
    }
}

/// Bytes as the 64-bit sizes of the API.
fn wide(bytes: usize) -> u64 {
    bytes as u64
}

/// An index for a kernel. Kernels count 16-byte units in u32; what they bind is far below that.
fn narrow(what: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| {
        Error::request(format!("{what} is {value}"), "kernels count in 32 bits: use smaller pieces")
    })
}

/// Head dims are checked by the problem; a backend used alone says so itself.
fn checked_dim(dim: usize) -> Result<u32> {
    match u32::try_from(dim) {
        Ok(dim) if dim > 0 && dim.is_multiple_of(8) && dim <= kyklos_shaders::MAX_HEAD_DIM => Ok(dim),
        _ => Err(Error::request(
            format!("head dim {dim} is not supported"),
            format!("use a multiple of 8 up to {}", kyklos_shaders::MAX_HEAD_DIM),
        )),
    }
}
