//! Keys and values as textures, for the broadcast kernels, and what backward kernels loop over:
//! software drivers read a texel in a few instructions, where a storage buffer costs them a loop
//! over lanes and components.
//!
//! A texel is a 16-byte unit; x counts the units of all heads of a row, y the keys of all batch
//! entries of a region.

use std::ops::Range;

use super::region::Source;
use crate::backend::wgpu::device::Gpu;
use crate::backend::wgpu::numbers::narrow;
use crate::backend::wgpu::ops;
use crate::backend::{Extent, Layout};
use crate::error::{Error, Result};

/// A copy of a region of a tensor. If a row is no whole number of texels, its last one is filled
/// up.
pub(in crate::backend::wgpu) fn texture(
    gpu: &Gpu,
    label: &str,
    source: Source<'_>,
    batch: &Range<usize>,
    keys: &Range<usize>,
) -> Result<wgpu::TextureView> {
    let row_bytes = source.heads * source.head_bytes;
    let size = wgpu::Extent3d {
        width: narrow("a row of texels", row_bytes / TEXEL)?,
        height: narrow("a column of texels", batch.len() * keys.len())?,
        depth_or_array_layers: 1,
    };
    let most = gpu.limits.max_texture_dimension_2d;
    if size.width > most {
        let most_bytes = u64::from(most) * TEXEL as u64;
        return Err(gpu.out_of_memory(&format!("a row of {label}"), row_bytes as u64, most_bytes));
    }
    let descriptor = wgpu::TextureDescriptor {
        label: Some(label),
        size,
        mip_level_count: 1,
        sample_count: 1,
        dimension: wgpu::TextureDimension::D2,
        format: wgpu::TextureFormat::Rgba32Uint,
        usage: wgpu::TextureUsages::STORAGE_BINDING | wgpu::TextureUsages::COPY_DST,
        view_formats: &[],
    };
    let texture = gpu.within_memory(|device| device.create_texture(&descriptor)).ok_or_else(|| {
        let bytes = row_bytes as u64 * u64::from(size.height);
        gpu.out_of_memory(label, bytes, gpu.largest_bytes(bytes))
    })?;
    if source.layout.row_stride.is_multiple_of(ROW_ALIGNMENT) || keys.len() == 1 {
        copy(gpu, label, source, batch, keys, &texture)?;
    } else {
        // A copy needs an aligned row stride: other rows are packed into a buffer first.
        let row_stride = row_bytes.next_multiple_of(ROW_ALIGNMENT);
        let aligned = Layout {
            offset: 0,
            batch_stride: keys.len() * row_stride,
            row_stride,
            head_stride: source.head_bytes,
        };
        let buffer = gpu.buffer(label, batch.len() * aligned.batch_stride)?;
        let from = Layout { offset: at(&source.layout, batch.start, keys.start, 0), ..source.layout };
        let extent = Extent {
            batch: batch.len(),
            rows: keys.len(),
            heads: source.heads,
            row_bytes: source.head_bytes,
        };
        ops::repack(gpu, (source.buffer, from), (&buffer, aligned), extent)?;
        let source = Source { buffer: &buffer, layout: aligned, ..source };
        copy(gpu, label, source, &(0..batch.len()), &(0..keys.len()), &texture)?;
    }
    Ok(texture.create_view(&wgpu::TextureViewDescriptor { label: Some(label), ..Default::default() }))
}

/// Copies whole rows where heads are adjacent, else head by head.
fn copy(
    gpu: &Gpu,
    label: &str,
    source: Source<'_>,
    batch: &Range<usize>,
    keys: &Range<usize>,
    texture: &wgpu::Texture,
) -> Result<()> {
    let adjacent = source.heads == 1 || source.layout.head_stride == source.head_bytes;
    let (parts, part_bytes) =
        if adjacent { (1, source.heads * source.head_bytes) } else { (source.heads, source.head_bytes) };
    let rows = narrow("the number of keys", keys.len())?;
    let mut encoder = gpu.encoder(label);
    for (b, y) in batch.clone().zip((0..).step_by(keys.len())) {
        for part in 0..parts {
            let offset = at(&source.layout, b, keys.start, part);
            if !offset.is_multiple_of(TEXEL) {
                return Err(Error::request(
                    format!("{:?} (in bytes) does not keep heads on 16-byte boundaries", source.layout),
                    "use offsets and strides that are multiples of 16 bytes",
                ));
            }
            encoder.copy_buffer_to_texture(
                wgpu::TexelCopyBufferInfo {
                    buffer: &source.buffer.raw,
                    layout: wgpu::TexelCopyBufferLayout {
                        offset: offset as u64,
                        bytes_per_row: (rows > 1)
                            .then(|| narrow("a row stride", source.layout.row_stride))
                            .transpose()?,
                        rows_per_image: None,
                    },
                },
                wgpu::TexelCopyTextureInfo {
                    texture,
                    mip_level: 0,
                    origin: wgpu::Origin3d {
                        x: narrow("a head", part * part_bytes / TEXEL)?,
                        y: narrow("a row", y)?,
                        z: 0,
                    },
                    aspect: wgpu::TextureAspect::All,
                },
                wgpu::Extent3d {
                    width: narrow("a row", part_bytes.div_ceil(TEXEL))?,
                    height: rows,
                    depth_or_array_layers: 1,
                },
            );
        }
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}

fn at(layout: &Layout, batch: usize, row: usize, head: usize) -> usize {
    layout.offset + batch * layout.batch_stride + row * layout.row_stride + head * layout.head_stride
}

const TEXEL: usize = 16;
/// Alignment of row strides that the API requires, in bytes.
const ROW_ALIGNMENT: usize = wgpu::COPY_BYTES_PER_ROW_ALIGNMENT as usize;
