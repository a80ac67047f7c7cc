//! Elements to 8-bit codes and back.

use std::ops::Range;

use kyklos_shaders::{CodesParams, Kernel, Storage};

use super::device::Gpu;
use super::numbers::{narrow, storage};
use crate::backend::Scales;
use crate::backend::wgpu::running::dispatch::Window;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::cut;
use crate::error::Result;
use kyklos_plan::{Dtype, TOKENS_PER_SCALE};

/// Direction of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToCodes,
    FromCodes,
}

/// Converts between elements and codes. Tokens that share scales are adjacent, so each window holds
/// whole groups of them.
pub(super) fn convert(
    gpu: &Gpu,
    direction: Direction,
    (data, first, dtype): (&WgpuBuffer, usize, Dtype),
    (codes, scales, of): (&WgpuBuffer, &WgpuBuffer, Scales),
    [batch, tokens, heads, dim]: [usize; 4],
) -> Result<()> {
    let kernel = kernel(direction, storage(dtype), of);
    let token = heads * dim;
    let lanes = (if of == Scales::Channels { token } else { dim }) / ELEMENTS;
    // Groups and scales of a part.
    let (together, groups, scale_count) = match of {
        Scales::Channels => (TOKENS_PER_SCALE, lanes, token),
        Scales::Rows => (1, heads, heads),
    };
    let parts = tokens.div_ceil(together);
    let first_token = |part: usize| part / parts * tokens + part % parts * together;
    let most_bytes = together * token * dtype.bytes().max(4);
    let at_once = (usize::try_from(gpu.window_bytes()).unwrap_or(usize::MAX) / most_bytes).max(1);
    let mut encoder = gpu.encoder("codes");
    for part in cut(0..batch * parts, at_once) {
        let elements = first_token(part.start) * token..first_token(part.end) * token;
        let bytes = |range: Range<usize>, first: usize, each: usize| {
            ((first + range.start) * each) as u64..((first + range.end) * each) as u64
        };
        let data = gpu.window("elements", data, bytes(elements.clone(), first, dtype.bytes()))?;
        let codes = gpu.window("codes", codes, bytes(elements, 0, 1))?;
        let scales =
            gpu.window("scales", scales, bytes(part.start * scale_count..part.end * scale_count, 0, 4))?;
        // Offset of element 0 of the tensor from the start of the window, in units of `unit` bytes.
        let offset = |window: &Window<'_>, start: usize, unit: usize| -> Result<u32> {
            let skipped = window.skipped_units()?.wrapping_mul(narrow("words of a unit", 16 / unit)?);
            Ok(narrow("an offset", start / unit)?.wrapping_sub(skipped))
        };
        let count = part.len() * groups;
        let grid = gpu.grid((count as u64).div_ceil(u64::from(kernel.rows_per_workgroup())))?;
        let params = CodesParams {
            data_offset: offset(&data, first * dtype.bytes(), 16)?,
            codes_offset: offset(&codes, 0, 4)?,
            scales_offset: offset(&scales, 0, 4)?,
            lanes: narrow("the channels of a token", lanes)?,
            tokens: narrow("the number of tokens", tokens)?,
            together: narrow("the tokens of a scale", together)?,
            first: narrow("what is converted", part.start * groups)?,
            count: narrow("what is converted", count)?,
            grid_width: grid.width,
            ..CodesParams::default()
        };
        let bound = match direction {
            Direction::ToCodes => [data, codes, scales],
            Direction::FromCodes => [codes, scales, data],
        };
        gpu.record(&mut encoder, kernel, bytemuck::bytes_of(&params), &bound.map(Into::into), grid)?;
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}

fn kernel(direction: Direction, storage: Storage, of: Scales) -> Kernel {
    let scales = match of {
        Scales::Channels => kyklos_shaders::Scales::Channels,
        Scales::Rows => kyklos_shaders::Scales::Rows,
    };
    match direction {
        Direction::ToCodes => Kernel::ToCodes { storage, scales },
        Direction::FromCodes => Kernel::FromCodes { storage, scales },
    }
}

/// Elements of a chunk: head dims are multiples of it.
const ELEMENTS: usize = 8;
