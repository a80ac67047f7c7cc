//! The tensors of a call as kernels see them.

use std::ops::Range;

use super::device::Gpu;
use super::dispatch::{Bound, Window};
use super::region::Strided;
use super::{WgpuBuffer, narrow, texture};
use crate::backend::{Attend, Layout, Operand};
use crate::{Error, Result};

/// Where the elements of a call's tensors are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub(super) q: Strided,
    pub(super) k: Strided,
    pub(super) v: Strided,
    pub(super) a: Strided,
    pub(super) ml: Strided,
}

impl Operands {
    pub(super) fn new(args: &Attend<'_, WgpuBuffer>) -> Self {
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
        }
    }

    /// Whether one window of `limit` bytes holds each of those with rows of their own.
    pub(super) fn fit(&self, limit: u64) -> bool {
        [&self.q, &self.k, &self.v, &self.a].iter().all(|tensor| tensor.fits(limit))
    }
}

/// Keys and values of a region, as a kernel reads them.
pub(super) enum KeysValues<'a> {
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
    pub(super) fn new(
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

    pub(super) fn bound(&self) -> [Bound<'_>; 2] {
        match self {
            Self::Buffers { k, v } => [Bound::Buffer(*k), Bound::Buffer(*v)],
            Self::Textures { k, v, .. } => [Bound::Texture(k), Bound::Texture(v)],
        }
    }

    /// Offset and strides of both, for 16-byte units of `unit` elements.
    pub(super) fn units(&self, args: &Attend<'_, WgpuBuffer>, unit: usize) -> Result<[[u32; 4]; 2]> {
        match self {
            Self::Buffers { k, v } => {
                Ok([units(&args.k.layout, unit, *k)?, units(&args.v.layout, unit, *v)?])
            }
            Self::Textures { keys, .. } => Ok([[0, narrow("the number of keys", *keys)?, 0, 0]; 2]),
        }
    }
}

/// Offset and strides of a layout in 16-byte units, the offset relative to a window.
pub(super) fn units(layout: &Layout, unit: usize, window: Window<'_>) -> Result<[u32; 4]> {
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

/// The factor on q, and with softcap what the tanh is multiplied by: both for logits in base-2 units.
pub(super) fn factors(args: &Attend<'_, WgpuBuffer>) -> (f32, f32) {
    match args.softcap {
        Some(cap) => (args.scale / cap, cap * std::f32::consts::LOG2_E),
        None => (args.scale * std::f32::consts::LOG2_E, 0.0),
    }
}
