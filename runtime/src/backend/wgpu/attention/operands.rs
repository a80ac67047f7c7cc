//! The tensors of a call in the layout that kernels read.

use std::ops::Range;

use crate::backend::wgpu::device::Gpu;
use crate::backend::wgpu::numbers::narrow;
use crate::backend::wgpu::running::dispatch::{Bound, Window};
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::Strided;
use crate::backend::wgpu::storage::texture;
use crate::backend::{Attend, BiasInput, Layout, Operand, StateShape};
use crate::error::{Error, Result};
use kyklos_plan::{BiasKind, Dtype};

/// Byte layouts of a call's tensors.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Operands {
    pub(in crate::backend::wgpu) q: Strided,
    pub(in crate::backend::wgpu) k: Strided,
    pub(in crate::backend::wgpu) v: Strided,
    pub(in crate::backend::wgpu) a: Strided,
    pub(in crate::backend::wgpu) ml: Strided,
    pub(in crate::backend::wgpu) bias: Option<Strided>,
}

impl Operands {
    pub(in crate::backend::wgpu) fn new(args: &Attend<'_, WgpuBuffer>) -> Self {
        let shape = args.state.shape;
        let kv_heads = 1 + args.kv_head_of.iter().max().copied().unwrap_or(0) as usize;
        let strided = |operand: &Operand<'_, WgpuBuffer>, rows, heads| {
            Strided::new(operand.layout, args.dtype.bytes(), [shape.batch, rows, heads, shape.dim])
        };
        let keys = args.work.kv_positions.len();
        Self {
            q: strided(&args.q, shape.rows, shape.heads),
            k: strided(&args.k, keys, kv_heads),
            v: strided(&args.v, keys, kv_heads),
            a: Strided::dense_f32([shape.batch, shape.rows, shape.heads, shape.dim]),
            ml: Strided::dense_f32([shape.batch, shape.heads, shape.rows, 2]),
            bias: args
                .bias
                .as_ref()
                .map(|bias| bias_tensor(bias, args.dtype, shape, &args.work.kv_positions)),
        }
    }

    /// Whether each tensor fits one window of `limit` bytes.
    pub(in crate::backend::wgpu) fn fit(&self, limit: u64) -> bool {
        let mut tensors = [&self.q, &self.k, &self.v, &self.a].into_iter().chain(&self.bias);
        tensors.all(|tensor| tensor.fits(limit))
    }

    /// Query rows of one batch entry whose tensors windows of `limit` bytes hold, at least one.
    pub(in crate::backend::wgpu) fn q_rows_within(&self, limit: u64) -> usize {
        let tensors = [&self.q, &self.a].into_iter().chain(&self.bias);
        tensors.map(|tensor| tensor.rows_within(limit)).min().unwrap_or(1)
    }
}

/// The rows of an attention bias tensor that a region reads.
#[derive(Clone, Copy)]
pub(in crate::backend::wgpu) struct BiasRows<'a> {
    window: Window<'a>,
    layout: Layout,
    element_bytes: usize,
}

impl<'a> BiasRows<'a> {
    pub(in crate::backend::wgpu) fn new(
        gpu: &Gpu,
        (bias, dtype): (Option<&BiasInput<'a, WgpuBuffer>>, Dtype),
        tensor: Option<Strided>,
        batch: &Range<usize>,
        rows: &Range<usize>,
    ) -> Result<Option<Self>> {
        let Some((bias, tensor)) = bias.zip(tensor) else { return Ok(None) };
        let window = gpu.window("bias", bias.buffer, tensor.bytes(batch, rows))?;
        Ok(Some(Self { window, layout: bias.layout, element_bytes: bias_bytes(bias.kind, dtype) }))
    }

    pub(in crate::backend::wgpu) fn bound(&self) -> Bound<'a> {
        Bound::Buffer(self.window)
    }

    /// Offset and strides in the units of the kernel.
    pub(in crate::backend::wgpu) fn units(&self) -> Result<[u32; 4]> {
        in_elements(&self.layout, self.element_bytes, self.window)
    }
}

/// Offset and strides of a layout in its elements of `element_bytes`, the offset relative to a
/// window.
pub(in crate::backend::wgpu) fn in_elements(
    layout: &Layout,
    element_bytes: usize,
    window: Window<'_>,
) -> Result<[u32; 4]> {
    let Layout { offset, batch_stride, row_stride, head_stride } = *layout;
    let [offset, batch, row, head] = [offset, batch_stride, row_stride, head_stride]
        .map(|elements| narrow("an offset or a stride of the bias", elements));
    let per_unit = narrow("the elements of 16 bytes", 16 / element_bytes)?;
    Ok([offset?.wrapping_sub(window.skipped_units()?.wrapping_mul(per_unit)), batch?, row?, head?])
}

/// The rows of a mask or bias tensor that a call reads; columns go up to the largest key position
/// of the block.
pub(in crate::backend::wgpu) fn bias_tensor(
    bias: &BiasInput<'_, WgpuBuffer>,
    dtype: Dtype,
    shape: StateShape,
    kv_positions: &[u32],
) -> Strided {
    let keys = kv_positions.iter().max().map_or(0, |last| *last as usize + 1);
    let elements = match bias.kind {
        BiasKind::Mask => keys.div_ceil(32),
        BiasKind::Additive => keys,
    };
    let extents = [shape.batch, shape.rows, shape.heads, elements];
    Strided::new(bias.layout, bias_bytes(bias.kind, dtype), extents)
}

/// Bytes of the elements of a mask or bias tensor.
fn bias_bytes(kind: BiasKind, dtype: Dtype) -> usize {
    match kind {
        BiasKind::Mask => 4,
        BiasKind::Additive => dtype.bytes(),
    }
}

/// The kind of mask or bias tensor that a call's kernel reads.
pub(in crate::backend::wgpu) fn bias_kind(args: &Attend<'_, WgpuBuffer>) -> kyklos_shaders::BiasInput {
    bias_of(args.bias.as_ref().map(|bias| bias.kind))
}

/// The name that kernels use for a kind of attention bias tensor.
pub(in crate::backend::wgpu) fn bias_of(kind: Option<BiasKind>) -> kyklos_shaders::BiasInput {
    match kind {
        None => kyklos_shaders::BiasInput::None,
        Some(BiasKind::Mask) => kyklos_shaders::BiasInput::Visible,
        Some(BiasKind::Additive) => kyklos_shaders::BiasInput::Bias,
    }
}

/// Keys and values of a region, as a kernel reads them.
pub(in crate::backend::wgpu) enum KeysValues<'a> {
    Buffers {
        k: Window<'a>,
        v: Window<'a>,
    },
    Textures {
        k: wgpu::TextureView,
        v: wgpu::TextureView,
        /// Rows of texels for each batch entry.
        keys: usize,
    },
}

impl<'a> KeysValues<'a> {
    pub(in crate::backend::wgpu) fn new(
        gpu: &Gpu,
        args: &Attend<'a, WgpuBuffer>,
        operands: &Operands,
        batch: &Range<usize>,
        keys: &Range<usize>,
        as_textures: bool,
    ) -> Result<Self> {
        if as_textures {
            let texture = |label, operand: &Operand<'_, WgpuBuffer>, tensor: &Strided| {
                texture::texture(gpu, label, tensor.source(operand.buffer), batch, keys)
            };
            let (k, v) = (texture("k", &args.k, &operands.k)?, texture("v", &args.v, &operands.v)?);
            return Ok(Self::Textures { k, v, keys: keys.len() });
        }
        Ok(Self::Buffers {
            k: gpu.window("k", args.k.buffer, operands.k.bytes(batch, keys))?,
            v: gpu.window("v", args.v.buffer, operands.v.bytes(batch, keys))?,
        })
    }

    pub(in crate::backend::wgpu) fn bound(&self) -> [Bound<'_>; 2] {
        match self {
            Self::Buffers { k, v } => [Bound::Buffer(*k), Bound::Buffer(*v)],
            Self::Textures { k, v, .. } => [Bound::Texture(k), Bound::Texture(v)],
        }
    }

    /// Offset and strides of both, for 16-byte units of `unit` elements.
    pub(in crate::backend::wgpu) fn units(
        &self,
        args: &Attend<'_, WgpuBuffer>,
        unit: usize,
    ) -> Result<[[u32; 4]; 2]> {
        match self {
            Self::Buffers { k, v } => {
                Ok([units(&args.k.layout, unit, *k)?, units(&args.v.layout, unit, *v)?])
            }
            Self::Textures { keys, .. } => Ok([[0, narrow("the number of keys", *keys)?, 0, 0]; 2]),
        }
    }
}

/// Offset and strides of a layout in 16-byte units, the offset relative to a window.
pub(in crate::backend::wgpu) fn units(layout: &Layout, unit: usize, window: Window<'_>) -> Result<[u32; 4]> {
    let mut units = [0; 4];
    let elements = [layout.offset, layout.batch_stride, layout.row_stride, layout.head_stride];
    for (units, elements) in units.iter_mut().zip(elements) {
        if !elements.is_multiple_of(unit) {
            return Err(Error::request(
                format!("{layout:?} does not keep heads on 16-byte boundaries"),
                format!("use offsets and strides that are multiples of {unit} elements"),
            ));
        }
        *units = narrow("an offset or a stride", elements / unit)?;
    }
    units[0] = units[0].wrapping_sub(window.skipped_units()?);
    Ok(units)
}

/// The factors on q and on the product of q and k, and with a softcap the factor on the tanh.
pub(in crate::backend::wgpu) fn factors(scale: f32, softcap: Option<f32>) -> (f32, f32, f32) {
    let (factor, cap) = softcap.map_or((scale, 0.0), |cap| (scale / cap, cap));
    if factor.abs() <= 1.0 { (factor, 1.0, cap) } else { (1.0, factor, cap) }
}
