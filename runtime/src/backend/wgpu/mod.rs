//! The backend on wgpu: Vulkan, Metal, DX12, and WebGPU in a browser.
//!
//! - **Errors.** Failures that the driver reports late (uncaptured errors, a lost device) are
//!   returned by the next call or by [`wait`](Backend::wait). A lost device stays lost: every call
//!   fails, and every future that waits for it ends. Open the device again, [`WgpuBackend::new`]
//!   asks the driver for a new one, and upload again.
//! - **Memory.** A buffer is refused when it exceeds the device's largest buffer, when all buffers
//!   together exceed [`WgpuOptions::max_memory_bytes`], and when the driver has no memory left.
//!   Tensors beyond the largest *binding* (128 MiB on some software drivers and in browsers) are
//!   processed in regions that fit one. The m and l of a running state, and log-sum-exps, are bound
//!   whole: a larger state is refused before data moves ([`Backend::most_state_bytes`]).
//! - **Copies.** Downloads go through staging buffers that are pooled and mapped while the device
//!   works on; uploads go straight into the buffer where host and device share memory, and through
//!   the driver's staging elsewhere.
//! - **Threads.** Natively one thread for each device waits for submissions and resolves futures;
//!   it sleeps while nothing is in flight. A browser runs callbacks by itself.

mod adapters;
mod attention;
mod backend;
mod backward;
mod codes;
mod device;
mod matrix_units;
mod numbers;
mod ops;
#[cfg(not(target_arch = "wasm32"))]
mod probe;
mod running;
mod storage;
mod subgroups;
mod tuning;
mod variant;

use std::ops::Range;

use bytes::Bytes;

pub use adapters::adapter::WgpuOptions;
pub use backend::WgpuBackend;
pub use kyklos_shaders::{AttendVariant, Kernel, UnknownVariant};
#[cfg(not(target_arch = "wasm32"))]
pub use probe::Probe;
#[cfg(not(target_arch = "wasm32"))]
pub use running::completion::WAITING_THREAD;
pub use storage::buffer::WgpuBuffer;
pub use storage::download::Download;
pub use tuning::{AdapterKey, ShapeBucket, TuningEntry, TuningKey, TuningTable};
pub use variant::KernelChoice;

use super::{
    Attend, AttendBackward, Backend, Control, DeviceInfo, Elements, Extent, Layout, RowStats, State,
    StateMut, StateShape,
};
use crate::error::{Error, Result};
use codes::Direction;
use kyklos_plan::{AttentionProblem, Dtype, TileShape};
use numbers::storage;

impl Backend for WgpuBackend {
    type Buffer = WgpuBuffer;
    type Download = Download;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, _: Dtype, head_dim: usize) -> Result<()> {
        numbers::checked_dim(head_dim).map(|_| ())
    }

    /// Kernels bind them whole.
    fn most_state_bytes(&self) -> Option<u64> {
        Some(self.gpu.limits.max_storage_buffer_binding_size / 16 * 16)
    }

    fn kernel(&self, dtype: Dtype, shape: StateShape) -> String {
        match self.attend_variant(dtype, shape) {
            Ok((variant, true)) => format!("{} (tuned)", variant.name()),
            Ok((variant @ AttendVariant::Cooperative(_), false)) => variant.name(),
            _ => self.info.kernel.clone(),
        }
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        let bias = attention::operands::bias_of(problem.bias.map(|bias| bias.kind));
        let shape = (!problem.fixed_order).then_some(shape);
        let tile = self.attend_kernel(problem.dtype, problem.head_dim, shape, false, bias).tile();
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

    fn share(&self, buffer: &mut WgpuBuffer) -> WgpuBuffer {
        buffer.clone()
    }

    fn download(&self, buffer: &mut WgpuBuffer, range: Range<usize>) -> Download {
        Download::start(&self.gpu, buffer, range)
    }

    fn release_idle(&self) {
        self.gpu.shrink();
    }

    fn reset_state(&self, state: &mut StateMut<'_, WgpuBuffer>) -> Result<()> {
        self.gpu.check()?;
        ops::reset_state(&self.gpu, state)
    }

    async fn attend(&self, args: Attend<'_, WgpuBuffer>, control: &Control) -> Result<()> {
        self.gpu.check()?;
        attention::attend::attend(self, args, control).await
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
        overflow: Option<&mut WgpuBuffer>,
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
                overflow.as_deref(),
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

    fn supports_backward(&self, _: Dtype, head_dim: usize) -> Result<()> {
        numbers::checked_dim(head_dim).map(|_| ())
    }

    fn supports_bias_gradient(&self) -> Result<()> {
        Ok(())
    }

    fn backward_tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        let bias = attention::operands::bias_of(problem.bias.map(|bias| bias.kind));
        let variant = self.backward_variant(problem.dtype, problem.head_dim, shape, bias);
        backward::tile_shape(variant, problem.head_dim)
    }

    fn row_stats(&self, args: RowStats<'_, WgpuBuffer>) -> Result<()> {
        self.gpu.check()?;
        backward::row_stats(&self.gpu, &args)
    }

    async fn attend_backward(&self, args: AttendBackward<'_, WgpuBuffer>, control: &Control) -> Result<()> {
        self.gpu.check()?;
        backward::attend_backward(self, args, control).await
    }

    fn accumulate(
        &self,
        from: (&WgpuBuffer, Layout),
        into: (&mut WgpuBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.gpu.check()?;
        ops::accumulate(&self.gpu, from, (into.0, into.1), extent)
    }

    fn clear(&self, buffer: &mut WgpuBuffer) -> Result<()> {
        self.gpu.check()?;
        ops::clear(&self.gpu, buffer);
        Ok(())
    }

    async fn wait(&self) -> Result<()> {
        self.gpu.check()?;
        // An empty submission flushes writes without a later submission.
        // In a browser, errors and completions arrive in separate tasks, and the error of an earlier
        // command may come after the completion. It has come when one more submission is complete.
        let submissions = if cfg!(target_arch = "wasm32") { 2 } else { 1 };
        for _ in 0..submissions {
            self.gpu.submit(None).finished().await;
        }
        self.gpu.check()
    }
}
