//! The tensors of a backward call: which fit one binding, and where kernels find them.

use std::ops::Range;

use kyklos_shaders::{BackwardKernel, BackwardParams, Kernel, Sums};

use super::super::device::Gpu;
use crate::backend::wgpu::attention::operands::{BiasRows, bias_tensor, in_elements, units};
use crate::backend::wgpu::running::dispatch::{Bound, Window};
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::Strided;
use crate::backend::wgpu::storage::texture;
use crate::backend::{AttendBackward, Layout, Operand};
use crate::error::Result;

/// Byte layouts of a call's tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensors {
    q: Strided,
    d_o: Strided,
    stats: Strided,
    k: Strided,
    v: Strided,
    dq: Strided,
    d_kv: Strided,
    bias: Option<Strided>,
    d_bias: Option<Strided>,
    dense: Layout,
}

/// Batch entries, query rows and keys whose tensors can be bound together.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) batch: Range<usize>,
    pub(super) rows: Range<usize>,
    pub(super) keys: Range<usize>,
}

/// The tensors of a region, as a kernel reads and writes them.
pub(super) struct Windows<'a> {
    q: Place<'a>,
    d_o: Place<'a>,
    stats: Place<'a>,
    k: Place<'a>,
    v: Place<'a>,
    /// dq, or dk and dv, or the gradient of the bias.
    sums: Vec<Window<'a>>,
    bias: Option<BiasRows<'a>>,
}

/// Where a kernel reads a tensor.
enum Place<'a> {
    Buffer(Window<'a>),
    Texture(wgpu::TextureView),
}

impl Tensors {
    pub(super) fn new(args: &AttendBackward<'_, WgpuBuffer>, kv_heads: usize) -> Self {
        let shape = args.shape;
        let keys = args.work.kv_positions.len();
        let strided = |operand: &Operand<'_, WgpuBuffer>, rows, heads| {
            Strided::new(operand.layout, args.dtype.bytes(), [shape.batch, rows, heads, shape.dim])
        };
        let row_stride = shape.heads * shape.dim;
        Self {
            q: strided(&args.q, shape.rows, shape.heads),
            d_o: strided(&args.d_o, shape.rows, shape.heads),
            stats: Strided::new(args.stats.layout, 4, [shape.batch, shape.rows, shape.heads, 4]),
            k: strided(&args.k, keys, kv_heads),
            v: strided(&args.v, keys, kv_heads),
            dq: Strided::dense_f32([shape.batch, shape.rows, shape.heads, shape.dim]),
            d_kv: Strided::new(args.kv_layout, 4, [shape.batch, keys, kv_heads, shape.dim]),
            bias: args
                .bias
                .as_ref()
                .map(|bias| bias_tensor(bias, args.dtype, shape, &args.work.kv_positions)),
            d_bias: args.d_bias.as_ref().map(|of_bias| {
                Strided::new(of_bias.layout, 4, [shape.batch, shape.rows, shape.heads, of_bias.columns])
            }),
            dense: Layout {
                offset: 0,
                batch_stride: shape.rows * row_stride,
                row_stride,
                head_stride: shape.dim,
            },
        }
    }

    /// Whether each tensor fits one window of `limit` bytes.
    pub(super) fn fit(&self, limit: u64) -> bool {
        self.of_rows().chain(self.of_keys()).all(|tensor| tensor.fits(limit))
    }

    /// Rows of one batch entry whose tensors windows of `limit` bytes hold.
    pub(super) fn rows_within(&self, limit: u64) -> usize {
        self.of_rows().map(|tensor| tensor.rows_within(limit)).min().unwrap_or(1)
    }

    /// The same for keys.
    pub(super) fn keys_within(&self, limit: u64) -> usize {
        self.of_keys().map(|tensor| tensor.rows_within(limit)).min().unwrap_or(1)
    }

    fn of_rows(&self) -> impl Iterator<Item = &Strided> {
        [&self.q, &self.d_o, &self.stats, &self.dq].into_iter().chain(&self.bias).chain(&self.d_bias)
    }

    fn of_keys(&self) -> impl Iterator<Item = &Strided> {
        [&self.k, &self.v, &self.d_kv].into_iter()
    }

    pub(super) fn windows<'a>(
        &self,
        gpu: &Gpu,
        args: &'a AttendBackward<'_, WgpuBuffer>,
        kernel: Kernel,
        Region { batch, rows, keys }: &Region,
    ) -> Result<Windows<'a>> {
        let Kernel::AttendBackward(BackwardKernel { sums, .. }) = kernel else {
            unreachable!("a backward call runs backward kernels")
        };
        let moving_keys = sums.rows_are_fixed();
        let place = |what, buffer: &'a WgpuBuffer, tensor: &Strided, of_keys: bool| -> Result<Place<'a>> {
            let range = if of_keys { keys } else { rows };
            if kernel.reads_textures() && of_keys == moving_keys {
                let texture = texture::texture(gpu, what, tensor.source(buffer), batch, range)?;
                Ok(Place::Texture(texture))
            } else {
                Ok(Place::Buffer(gpu.window(what, buffer, tensor.bytes(batch, range))?))
            }
        };
        let sum = |what, buffer: &'a WgpuBuffer| gpu.window(what, buffer, self.d_kv.bytes(batch, keys));
        Ok(Windows {
            q: place("q", args.q.buffer, &self.q, false)?,
            d_o: place("d_o", args.d_o.buffer, &self.d_o, false)?,
            stats: place("row statistics", args.stats.buffer, &self.stats, false)?,
            k: place("k", args.k.buffer, &self.k, true)?,
            v: place("v", args.v.buffer, &self.v, true)?,
            sums: match sums {
                Sums::Queries => vec![gpu.window("dq", args.dq, self.dq.bytes(batch, rows))?],
                Sums::KeysValues => vec![sum("dk", args.dk)?, sum("dv", args.dv)?],
                Sums::Keys => vec![sum("dk", args.dk)?],
                Sums::Values => vec![sum("dv", args.dv)?],
                Sums::Bias | Sums::SharedBias => args
                    .d_bias
                    .as_ref()
                    .zip(self.d_bias)
                    .map(|(of_bias, tensor)| gpu.window("dbias", of_bias.buffer, tensor.bytes(batch, rows)))
                    .transpose()?
                    .into_iter()
                    .collect(),
            },
            bias: BiasRows::new(gpu, (args.bias.as_ref(), args.dtype), self.bias, batch, rows)?,
        })
    }
}

impl Place<'_> {
    fn bound(&self) -> Bound<'_> {
        match self {
            Self::Buffer(window) => Bound::Buffer(*window),
            Self::Texture(view) => Bound::Texture(view),
        }
    }

    /// Offset and strides in units of `unit` elements; 0 in a texture.
    fn units(&self, layout: &Layout, unit: usize) -> Result<[u32; 4]> {
        match self {
            Self::Buffer(window) => units(layout, unit, *window),
            Self::Texture(_) => Ok([0; 4]),
        }
    }
}

impl<'a> Windows<'a> {
    /// What the kernel of `sums` binds, with the lists.
    pub(super) fn bound<'b>(&'b self, sums: Sums, lists: Window<'b>) -> Vec<Bound<'b>>
    where
        'a: 'b,
    {
        let mut bound = vec![self.q.bound(), self.d_o.bound(), self.k.bound()];
        if sums != Sums::Values {
            bound.push(self.v.bound());
        }
        bound.push(self.stats.bound());
        bound.extend(self.sums.iter().map(|sum| Bound::from(*sum)));
        bound.push(lists.into());
        bound.extend(self.bias.map(|bias| bias.bound()));
        bound
    }

    /// The offsets and strides among the parameters of the kernel of `sums`.
    pub(super) fn params(
        &self,
        args: &AttendBackward<'_, WgpuBuffer>,
        tensors: &Tensors,
        sums: Sums,
        unit: usize,
    ) -> Result<BackwardParams> {
        let q = self.q.units(&args.q.layout, unit)?;
        let d_o = self.d_o.units(&args.d_o.layout, unit)?;
        let k = self.k.units(&args.k.layout, unit)?;
        let v = self.v.units(&args.v.layout, unit)?;
        let stats = self.stats.units(&args.stats.layout, 4)?;
        // dk and dv have one layout and cover the same bytes of their buffers.
        let sum = match &args.d_bias {
            Some(of_bias) if sums.of_bias() => in_elements(&of_bias.layout, 4, self.sums[0])?,
            _ if sums.rows_are_fixed() => units(&tensors.dense, 4, self.sums[0])?,
            _ => units(&args.kv_layout, 4, self.sums[0])?,
        };
        let bias = self.bias.map_or(Ok([0; 4]), |bias| bias.units())?;
        Ok(BackwardParams {
            q_offset: q[0],
            q_batch: q[1],
            q_row: q[2],
            q_head: q[3],
            d_o_offset: d_o[0],
            d_o_batch: d_o[1],
            d_o_row: d_o[2],
            d_o_head: d_o[3],
            stats_offset: stats[0],
            stats_batch: stats[1],
            stats_row: stats[2],
            stats_head: stats[3],
            k_offset: k[0],
            k_batch: k[1],
            k_row: k[2],
            k_head: k[3],
            v_offset: v[0],
            v_batch: v[1],
            v_row: v[2],
            v_head: v[3],
            sum_offset: sum[0],
            sum_batch: sum[1],
            sum_row: sum[2],
            sum_head: sum[3],
            bias_offset: bias[0],
            bias_batch: bias[1],
            bias_row: bias[2],
            bias_head: bias[3],
            ..BackwardParams::default()
        })
    }
}
