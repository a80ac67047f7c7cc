//! A backend that tells what it does.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kyklos::backend::{
    Accuracy, Attend, Backend, Control, DeviceInfo, Elements, Extent, Layout, Results, State, StateMut,
    StateShape,
};
use kyklos::{AttentionProblem, BlockWork, Dtype, Result, TileShape};

/// Learns what an [`Observed`] backend does.
pub trait Observer: Debug + Send + Sync + 'static {
    /// An upload, a write or a download of so many bytes.
    fn moves(&self, _bytes: usize) {}

    /// An attend step has been submitted, into a state of this shape.
    fn attended(&self, _work: &BlockWork, _shape: StateShape) {}
}

/// Adds the bytes between host and device.
impl Observer for AtomicU64 {
    fn moves(&self, bytes: usize) {
        self.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A backend and its observer.
#[derive(Debug)]
pub struct Observed<B, O> {
    /// Does the work.
    pub backend: B,
    /// Is told of it.
    pub observer: Arc<O>,
}

impl<B: Backend, O: Observer> Backend for Observed<B, O> {
    type Buffer = B::Buffer;
    type Download = B::Download;

    fn info(&self) -> &DeviceInfo {
        self.backend.info()
    }

    fn supports(&self, dtype: Dtype, head_dim: usize) -> Result<()> {
        self.backend.supports(dtype, head_dim)
    }

    fn most_state_bytes(&self) -> Option<u64> {
        self.backend.most_state_bytes()
    }

    fn supports_fixed_order(&self) -> Result<()> {
        self.backend.supports_fixed_order()
    }

    fn accuracy(&self, dtype: Dtype) -> Accuracy {
        self.backend.accuracy(dtype)
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        self.backend.tile_shape(problem, shape)
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<B::Buffer> {
        self.backend.alloc(label, bytes)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<B::Buffer> {
        self.observer.moves(data.len());
        self.backend.upload(label, data)
    }

    fn write(&self, buffer: &mut B::Buffer, offset: usize, data: &[u8]) -> Result<()> {
        self.observer.moves(data.len());
        self.backend.write(buffer, offset, data)
    }

    fn share(&self, buffer: &mut B::Buffer) -> B::Buffer {
        self.backend.share(buffer)
    }

    fn download(&self, buffer: &mut B::Buffer, range: Range<usize>) -> B::Download {
        self.observer.moves(range.len());
        self.backend.download(buffer, range)
    }

    fn reset_state(&self, state: &mut StateMut<'_, B::Buffer>) -> Result<()> {
        self.backend.reset_state(state)
    }

    async fn attend(&self, args: Attend<'_, B::Buffer>, control: &Control) -> Result<()> {
        let (work, shape) = (args.work, args.state.shape);
        self.backend.attend(args, control).await?;
        self.observer.attended(work, shape);
        Ok(())
    }

    async fn attend_and_finalize(
        &self,
        args: Attend<'_, B::Buffer>,
        results: Results<'_, B::Buffer>,
        control: &Control,
    ) -> Result<()> {
        let (work, shape) = (args.work, args.state.shape);
        self.backend.attend_and_finalize(args, results, control).await?;
        self.observer.attended(work, shape);
        Ok(())
    }

    fn merge(&self, into: &mut StateMut<'_, B::Buffer>, from: &State<'_, B::Buffer>) -> Result<()> {
        self.backend.merge(into, from)
    }

    fn finalize(
        &self,
        state: &State<'_, B::Buffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut B::Buffer,
        lse: &mut B::Buffer,
    ) -> Result<()> {
        self.backend.finalize(state, sinks, dtype, o, lse)
    }

    fn repack(
        &self,
        from: (&B::Buffer, Layout),
        into: (&mut B::Buffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.backend.repack(from, into, extent)
    }

    fn convert(
        &self,
        from: Elements<&B::Buffer>,
        into: Elements<&mut B::Buffer>,
        shape: [usize; 4],
        overflow: Option<&mut B::Buffer>,
    ) -> Result<()> {
        self.backend.convert(from, into, shape, overflow)
    }

    async fn wait(&self) -> Result<()> {
        self.backend.wait().await
    }
}
