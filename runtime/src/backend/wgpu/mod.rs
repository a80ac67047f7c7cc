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
mod texture;
mod variant;
mod work;

use std::ops::Range;

use bytes::Bytes;
use kyklos_shaders::{AttendKernel, AttendVariant, Pairs, Storage};

pub use adapter::{KernelChoice, WgpuOptions};
pub use download::Download;

use super::{Attend, Backend, Control, DeviceInfo, Extent, Layout, State, StateMut};
use crate::{AttentionProblem, Dtype, Error, Result, TileShape};
use device::Gpu;
use memory::Lease;
use pieces::Pace;
use variant::Variants;

/// One device behind wgpu.
#[derive(Debug)]
pub struct WgpuBackend {
    info: DeviceInfo,
    gpu: Gpu,
    variants: Variants,
    pace: Pace,
}

/// Linear memory on a wgpu device.
#[derive(Debug)]
pub struct WgpuBuffer {
    raw: wgpu::Buffer,
    /// As asked for; the buffer itself is a little larger and never empty.
    bytes: usize,
    _lease: Lease,
}

impl WgpuBackend {
    /// Ends the device and frees its memory, whatever still refers to it: for a program that lives on and wants the
    /// memory for something else, and to see what it makes of a device that is lost. Every later call fails as after a
    /// reset by the driver, and every future that waits for the device ends. What is in flight on it is done first.
    pub fn destroy(&self) {
        self.gpu.destroy();
    }

    fn attend_kernel(&self, dtype: Dtype, head_dim: u32, softcap: bool, pairs: Pairs) -> AttendKernel {
        let storage = storage(dtype);
        let variant = match self.variants.of(storage, head_dim) {
            // It reads none.
            AttendVariant::Cooperative { .. } if pairs.any() => AttendVariant::Portable,
            variant => variant,
        };
        AttendKernel { variant, storage, head_dim, softcap, pairs }
    }
}

impl Backend for WgpuBackend {
    type Buffer = WgpuBuffer;
    type Download = Download;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn tile_shape(&self, problem: &AttentionProblem) -> TileShape {
        let pairs = operands::pairs_of(problem.pairs.map(|pairs| pairs.kind));
        let tile = self.attend_kernel(problem.dtype, problem.head_dim, false, pairs).tile();
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
