//! Backends with planted faults.

use std::ops::Range;

use bytes::Bytes;
use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::{
    Attend, Backend, Control, Device, DeviceInfo, Elements, Extent, Layout, Scales, State, StateMut,
    StateShape,
};
use kyklos::{AttentionProblem, BlockWork, Dtype, Result, TOKENS_PER_SCALE, TileShape};

type Buffer = <CpuBackend as Backend>::Buffer;

/// A backend with a fault.
#[derive(Debug)]
pub struct Broken(CpuBackend, Fault);

/// The planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Adds the blocks of a running state as if their maxima were equal.
    WithoutRescale,
    /// Decodes int8 keys with wrong scales: the scales belong to other tokens.
    ScalesOfOthers,
    /// Attends without the attention bias tensor.
    NoBias,
    /// Reads the first batch entry of the attention bias tensor for all entries.
    BiasOfFirstEntry,
    /// Reads the attention bias tensor from its first head, for the query heads of any rank.
    BiasFromFirstHead,
    /// Attends to each batch entry under the mask of the next one.
    MaskOfNextEntry,
    /// Attends to all batch entries under the mask of the first one.
    MaskOfFirstEntry,
}

impl Broken {
    /// A CPU with this fault.
    pub fn device(fault: Fault) -> Device {
        Device::new(Self(CpuBackend::new(), fault))
    }

    async fn floats(&self, buffer: &mut Buffer, bytes: usize) -> Result<Vec<f32>> {
        Ok(bytemuck::pod_collect_to_vec(&self.0.download(buffer, 0..bytes).await?))
    }
}

impl Backend for Broken {
    type Buffer = Buffer;
    type Download = <CpuBackend as Backend>::Download;

    async fn attend(&self, args: Attend<'_, Buffer>, control: &Control) -> Result<()> {
        if self.1 != Fault::WithoutRescale {
            let bias = args.bias.filter(|_| self.1 != Fault::NoBias).map(|mut bias| {
                match self.1 {
                    Fault::BiasOfFirstEntry => bias.layout.batch_stride = 0,
                    Fault::BiasFromFirstHead => bias.layout.offset = 0,
                    _ => {}
                }
                bias
            });
            let mut classes = args.work.classes.clone();
            match self.1 {
                Fault::MaskOfNextEntry => classes.rotate_left(1),
                Fault::MaskOfFirstEntry => classes.truncate(1),
                _ => {}
            }
            let work = &BlockWork { classes, ..args.work.clone() };
            return self.0.attend(Attend { bias, work, ..args }, control).await;
        }
        let shape = args.state.shape;
        let (a_bytes, ml_bytes) = (shape.a_bytes(), shape.ml_bytes());
        let (mut a, mut ml) = (self.0.alloc("a", a_bytes)?, self.0.alloc("ml", ml_bytes)?);
        self.0.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape })?;
        let StateMut { a: old_a, ml: old_ml, .. } = args.state;
        let block = Attend { state: StateMut { a: &mut a, ml: &mut ml, shape }, ..args };
        self.0.attend(block, control).await?;
        self.0.wait().await?;

        let sum =
            |old: Vec<f32>, new: Vec<f32>| old.iter().zip(new).map(|(x, y)| x + y).collect::<Vec<f32>>();
        let new_a = sum(self.floats(old_a, a_bytes).await?, self.floats(&mut a, a_bytes).await?);
        let (old_ml_values, block_ml) =
            (self.floats(old_ml, ml_bytes).await?, self.floats(&mut ml, ml_bytes).await?);
        let new_ml: Vec<f32> = old_ml_values
            .chunks(2)
            .zip(block_ml.chunks(2))
            .flat_map(|(old, new)| [old[0].max(new[0]), old[1] + new[1]])
            .collect();
        self.0.write(old_a, 0, bytemuck::cast_slice(&new_a))?;
        self.0.write(old_ml, 0, bytemuck::cast_slice(&new_ml))
    }

    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        self.0.tile_shape(problem, shape)
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<Buffer> {
        self.0.alloc(label, bytes)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<Buffer> {
        self.0.upload(label, data)
    }

    fn write(&self, buffer: &mut Buffer, offset: usize, data: &[u8]) -> Result<()> {
        self.0.write(buffer, offset, data)
    }

    fn share(&self, buffer: &mut Buffer) -> Buffer {
        self.0.share(buffer)
    }

    fn download(&self, buffer: &mut Buffer, range: Range<usize>) -> Self::Download {
        self.0.download(buffer, range)
    }

    fn reset_state(&self, state: &mut StateMut<'_, Buffer>) -> Result<()> {
        self.0.reset_state(state)
    }

    fn merge(&self, into: &mut StateMut<'_, Buffer>, from: &State<'_, Buffer>) -> Result<()> {
        self.0.merge(into, from)
    }

    fn finalize(
        &self,
        state: &State<'_, Buffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        self.0.finalize(state, sinks, dtype, o, lse)
    }

    fn repack(&self, from: (&Buffer, Layout), into: (&mut Buffer, Layout), extent: Extent) -> Result<()> {
        self.0.repack(from, into, extent)
    }

    fn convert(
        &self,
        from: Elements<&Buffer>,
        into: Elements<&mut Buffer>,
        shape: [usize; 4],
        overflow: Option<&mut Buffer>,
    ) -> Result<()> {
        let [batch, tokens, heads, dim] = shape;
        match from {
            Elements::Coded { codes, scales, of: of @ Scales::Channels }
                if self.1 == Fault::ScalesOfOthers =>
            {
                let (parts, row_bytes) = (tokens.div_ceil(TOKENS_PER_SCALE), heads * dim * 4);
                let mut others = self.0.alloc("scales of others", batch * parts * row_bytes)?;
                let layout = |part: usize| Layout {
                    offset: part * row_bytes,
                    batch_stride: parts * row_bytes,
                    row_stride: row_bytes,
                    head_stride: row_bytes,
                };
                let extent = |rows| Extent { batch, rows, heads: 1, row_bytes };
                self.0.repack((scales, layout(0)), (&mut others, layout(1)), extent(parts - 1))?;
                self.0.repack((scales, layout(parts - 1)), (&mut others, layout(0)), extent(1))?;
                self.0.convert(Elements::Coded { codes, scales: &others, of }, into, shape, overflow)
            }
            from => self.0.convert(from, into, shape, overflow),
        }
    }

    async fn wait(&self) -> Result<()> {
        self.0.wait().await
    }
}
