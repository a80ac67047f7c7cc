//! The CPU backend: every core, exact f32 softmax, no S × S memory.
//!
//! Query rows lie in SIMD lanes (module `job`), keys and values are packed once for all query heads
//! that share them (module `keys`), the scheduler hands Q tiles to rayon's pool longest first
//! (module `attend`), and results depend neither on the number of threads nor on timing.
//!
//! The tiles are not multiplied by a GEMM crate. On one AVX2 core with a peak of 102 GFLOP/s and
//! tiles of 96 × 120, in one process: `gemm` 0.19 reached 75 to 78 GFLOP/s in K·Qᵀ and 90 to 92 in
//! Vᵀ·P, module `kernel` 95 to 101 and 98. Also, the operands of `kernel` stay packed, and the mask
//! and the maximum are applied to scores in registers. Only the instructions of modules `bf16` and
//! `tiles` need unsafe code.
//!
//! A row whose visible logits are all −∞ counts as a row that saw no key (o = 0, lse = −∞). This
//! follows from the finite `m` of an empty state, and does not depend on how the keys are cut into
//! blocks. A logit of +∞ or NaN makes its row NaN.

mod arithmetic;
mod attend;
mod backward;
mod bias;
mod buffer;
mod call;
mod convert;
mod few_rows;
mod job;
mod kernel;
mod keys;
mod pack;
mod panel;
mod product;
mod repack;
mod scratch;
mod state;
#[cfg(test)]
mod tests;
mod tiles;

use std::future::{Ready, ready};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

pub use self::buffer::CpuBuffer;
use super::{
    Attend, AttendBackward, Backend, Control, DeviceClass, DeviceInfo, Elements, Extent, Layout, RowStats,
    State, StateMut, StateShape,
};
use crate::error::Result;
use crate::machine::processor_name;
use kyklos_plan::{AttentionProblem, Dtype, TileShape};

/// The host's cores.
#[derive(Debug)]
pub struct CpuBackend {
    info: DeviceInfo,
    level: arithmetic::simd::Level,
    /// `None`: the pool of the process.
    pool: Option<Arc<rayon::ThreadPool>>,
    scratch: scratch::Spare<scratch::Scratch>,
    packed: scratch::Spare<keys::PackedKeys>,
    rate: attend::Rate,
    backward_rate: attend::Rate,
    backward_scratch: scratch::Spare<backward::Space>,
}

impl CpuBackend {
    /// On rayon's global pool, which all ranks of a process share.
    pub fn new() -> Self {
        Self::on(None)
    }

    /// On `pool`, which other backends may share.
    pub fn with_pool(pool: Arc<rayon::ThreadPool>) -> Self {
        Self::on(Some(pool))
    }

    fn on(pool: Option<Arc<rayon::ThreadPool>>) -> Self {
        let level = arithmetic::simd::Level::detect();
        let threads = threads(pool.as_deref());
        Self {
            info: DeviceInfo {
                backend: "cpu",
                name: processor_name(),
                driver: format!("{}, {threads} threads", level.name()),
                class: DeviceClass::Cpu,
                kernel: "rows in lanes".to_owned(),
            },
            level,
            pool,
            scratch: scratch::Spare::default(),
            packed: scratch::Spare::default(),
            rate: attend::Rate::default(),
            backward_rate: attend::Rate::default(),
            backward_scratch: scratch::Spare::default(),
        }
    }

    fn threads(&self) -> usize {
        threads(self.pool.as_deref())
    }

    fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for CpuBackend {
    type Buffer = CpuBuffer;
    type Download = Ready<Result<Bytes>>;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn tile_shape(&self, _problem: &AttentionProblem, _shape: StateShape) -> TileShape {
        call::TILE
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<CpuBuffer> {
        CpuBuffer::zeroed(label, bytes)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<CpuBuffer> {
        CpuBuffer::adopt(label, data)
    }

    fn write(&self, buffer: &mut CpuBuffer, offset: usize, data: &[u8]) -> Result<()> {
        buffer.bytes_mut()?[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn share(&self, buffer: &mut CpuBuffer) -> CpuBuffer {
        buffer.handle()
    }

    fn download(&self, buffer: &mut CpuBuffer, range: Range<usize>) -> Self::Download {
        ready(Ok(buffer.share().slice(range)))
    }

    fn reset_state(&self, state: &mut StateMut<'_, CpuBuffer>) -> Result<()> {
        state::reset(state)
    }

    async fn attend(&self, args: Attend<'_, CpuBuffer>, control: &Control) -> Result<()> {
        attend::attend(self, args, control).await
    }

    fn merge(&self, into: &mut StateMut<'_, CpuBuffer>, from: &State<'_, CpuBuffer>) -> Result<()> {
        self.install(|| state::merge(into, from))
    }

    fn finalize(
        &self,
        state: &State<'_, CpuBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut CpuBuffer,
        lse: &mut CpuBuffer,
    ) -> Result<()> {
        self.install(|| state::finalize(state, sinks, dtype, o, lse))
    }

    fn repack(
        &self,
        (from, from_layout): (&CpuBuffer, Layout),
        (into, into_layout): (&mut CpuBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        repack::repack((from.bytes(), from_layout), (into.bytes_mut()?, into_layout), extent);
        Ok(())
    }

    fn convert(
        &self,
        from: Elements<&CpuBuffer>,
        into: Elements<&mut CpuBuffer>,
        shape: [usize; 4],
        overflow: Option<&mut CpuBuffer>,
    ) -> Result<()> {
        self.install(|| convert::convert(from, into, shape, overflow))
    }

    fn supports_backward(&self, _dtype: Dtype, _head_dim: usize) -> Result<()> {
        Ok(())
    }

    fn supports_bias_gradient(&self) -> Result<()> {
        Ok(())
    }

    fn backward_tile_shape(&self, _problem: &AttentionProblem, _shape: StateShape) -> TileShape {
        backward::TILE
    }

    fn row_stats(&self, args: RowStats<'_, CpuBuffer>) -> Result<()> {
        self.install(|| backward::row_stats(args))
    }

    async fn attend_backward(&self, args: AttendBackward<'_, CpuBuffer>, control: &Control) -> Result<()> {
        backward::attend_backward(self, args, control).await
    }

    fn accumulate(
        &self,
        (from, from_layout): (&CpuBuffer, Layout),
        (into, into_layout): (&mut CpuBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        let into = bytemuck::cast_slice_mut(into.bytes_mut()?);
        backward::accumulate((from.elements(), from_layout), (into, into_layout), extent);
        Ok(())
    }

    fn clear(&self, buffer: &mut CpuBuffer) -> Result<()> {
        buffer.overwrite()?.fill(0);
        Ok(())
    }

    async fn wait(&self) -> Result<()> {
        // Every method is done when it returns.
        Ok(())
    }
}

/// The number of threads of `pool`, or of the process's pool.
fn threads(pool: Option<&rayon::ThreadPool>) -> usize {
    pool.map_or_else(rayon::current_num_threads, rayon::ThreadPool::current_num_threads)
}
