//! The short operations: every operation but `attend`, each submitted at once.

use kyklos_shaders::{
    ConvertParams, FinalizeParams, Kernel, MergeParams, RepackParams, ResetParams, Storage,
};

use super::device::Gpu;
use super::numbers::{checked_dim, narrow};
use crate::backend::wgpu::running::dispatch::{Bound, Window};
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::{Strided, cut};
use crate::backend::{Extent, Layout, State, StateMut, StateShape};
use crate::error::{Error, Result};

pub(super) fn reset_state(gpu: &Gpu, state: &mut StateMut<'_, WgpuBuffer>) -> Result<()> {
    let row_heads = row_heads(state.shape);
    if row_heads == 0 {
        return Ok(());
    }
    let kernel = Kernel::ResetState;
    let grid = gpu.grid((row_heads as u64).div_ceil(u64::from(kernel.rows_per_workgroup())))?;
    let params = ResetParams {
        row_heads: narrow("rows times heads", row_heads)?,
        grid_width: grid.width,
        ..ResetParams::default()
    };
    let ml = gpu.whole("state ml", state.ml)?;
    let mut encoder = gpu.encoder("reset state");
    encoder.clear_buffer(&state.a.raw, 0, Some(state.shape.a_bytes() as u64));
    gpu.record(&mut encoder, kernel, bytemuck::bytes_of(&params), &[ml.into()], grid)?;
    gpu.submit(Some(encoder.finish()));
    Ok(())
}

pub(super) fn merge(
    gpu: &Gpu,
    into: &mut StateMut<'_, WgpuBuffer>,
    from: &State<'_, WgpuBuffer>,
) -> Result<()> {
    let shape = into.shape;
    let row_heads = row_heads(shape);
    let head_dim = checked_dim(shape.dim)?;
    let kernel = Kernel::Merge { head_dim };
    let mut encoder = gpu.encoder("merge");
    for part in cut(0..row_heads, row_heads_within(gpu, shape.dim)) {
        let grid = gpu.grid((part.len() as u64).div_ceil(u64::from(kernel.rows_per_workgroup())))?;
        let bytes = (part.start * shape.dim * 4) as u64..(part.end * shape.dim * 4) as u64;
        let into_a = gpu.window("state a", into.a, bytes.clone())?;
        let from_a = gpu.window("state a", from.a, bytes)?;
        let params = MergeParams {
            first: narrow("rows times heads", part.start)?,
            end: narrow("rows times heads", part.end)?,
            rows: narrow("the number of rows", shape.rows)?,
            heads: narrow("the number of heads", shape.heads)?,
            grid_width: grid.width,
            into_skipped: into_a.skipped_units()?,
            from_skipped: from_a.skipped_units()?,
            ..MergeParams::default()
        };
        let into_ml = gpu.whole("state ml", into.ml)?;
        let from_ml = gpu.whole("state ml", from.ml)?;
        gpu.record(
            &mut encoder,
            kernel,
            bytemuck::bytes_of(&params),
            &[into_a, into_ml, from_a, from_ml].map(Into::into),
            grid,
        )?;
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}

pub(super) fn finalize(
    gpu: &Gpu,
    state: &State<'_, WgpuBuffer>,
    sinks: &[f32],
    storage: Storage,
    o: &WgpuBuffer,
    lse: &WgpuBuffer,
) -> Result<()> {
    let shape = state.shape;
    let row_heads = row_heads(shape);
    let head_dim = checked_dim(shape.dim)?;
    let kernel = Kernel::Finalize { storage, head_dim, sinks: !sinks.is_empty() };
    let sinks = match sinks {
        [] => None,
        sinks => Some(gpu.buffer_with("sinks", bytemuck::cast_slice(sinks))?),
    };
    let o_row_bytes = shape.dim * 16 / storage.unit_elements() as usize;
    let mut encoder = gpu.encoder("finalize");
    for part in cut(0..row_heads, row_heads_within(gpu, shape.dim)) {
        let grid = gpu.grid((part.len() as u64).div_ceil(u64::from(kernel.rows_per_workgroup())))?;
        let bytes = |row_bytes: usize| (part.start * row_bytes) as u64..(part.end * row_bytes) as u64;
        let a = gpu.window("state a", state.a, bytes(shape.dim * 4))?;
        let o = gpu.window("o", o, bytes(o_row_bytes))?;
        let params = FinalizeParams {
            first: narrow("rows times heads", part.start)?,
            end: narrow("rows times heads", part.end)?,
            rows: narrow("the number of rows", shape.rows)?,
            heads: narrow("the number of heads", shape.heads)?,
            grid_width: grid.width,
            a_skipped: a.skipped_units()?,
            o_skipped: o.skipped_units()?,
            ..FinalizeParams::default()
        };
        let ml = gpu.whole("state ml", state.ml)?;
        let lse = gpu.whole("lse", lse)?;
        let mut bound: Vec<Bound<'_>> = [a, ml, o, lse].map(Into::into).to_vec();
        if let Some(sinks) = &sinks {
            bound.push(gpu.whole("sinks", sinks)?.into());
        }
        gpu.record(&mut encoder, kernel, bytemuck::bytes_of(&params), &bound, grid)?;
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}

pub(super) fn repack(
    gpu: &Gpu,
    (from, from_layout): (&WgpuBuffer, Layout),
    (into, into_layout): (&WgpuBuffer, Layout),
    extent: Extent,
) -> Result<()> {
    let bytes = extent.batch * extent.rows * extent.heads * extent.row_bytes;
    if bytes == 0 {
        return Ok(());
    }
    let words = repack_words(&from_layout, &into_layout, extent)?;
    if is_dense(&from_layout, extent) && is_dense(&into_layout, extent) {
        let mut encoder = gpu.encoder("repack");
        encoder.copy_buffer_to_buffer(
            &from.raw,
            from_layout.offset as u64,
            &into.raw,
            into_layout.offset as u64,
            Some(bytes as u64),
        );
        gpu.submit(Some(encoder.finish()));
        return Ok(());
    }
    strided(gpu, Kernel::Repack { words }, words, (from, from_layout), (into, into_layout), extent)
}

/// Fills a buffer with zeros.
pub(super) fn clear(gpu: &Gpu, buffer: &WgpuBuffer) {
    let mut encoder = gpu.encoder("clear");
    encoder.clear_buffer(&buffer.raw, 0, None);
    gpu.submit(Some(encoder.finish()));
}

/// Adds f32 rows.
pub(super) fn accumulate(
    gpu: &Gpu,
    (from, from_layout): (&WgpuBuffer, Layout),
    (into, into_layout): (&WgpuBuffer, Layout),
    extent: Extent,
) -> Result<()> {
    if extent.batch * extent.rows * extent.heads * extent.row_bytes == 0 {
        return Ok(());
    }
    let words = repack_words(&from_layout, &into_layout, extent)?;
    strided(gpu, Kernel::Accumulate { words }, words, (from, from_layout), (into, into_layout), extent)
}

/// Runs a kernel on units of two strided layouts.
fn strided(
    gpu: &Gpu,
    kernel: Kernel,
    words: u32,
    (from, from_layout): (&WgpuBuffer, Layout),
    (into, into_layout): (&WgpuBuffer, Layout),
    extent: Extent,
) -> Result<()> {
    let mut encoder = gpu.encoder("strided rows");
    let unit = 4 * words as usize;
    let shape = [extent.batch, extent.rows, extent.heads, extent.row_bytes];
    let sides = [&from_layout, &into_layout].map(|layout| Strided::new(*layout, 1, shape));
    let limit = gpu.window_bytes();
    let batch_step = if sides.iter().all(|side| side.fits(limit)) { extent.batch } else { 1 };
    let row_step = sides[0].rows_within(limit).min(sides[1].rows_within(limit));
    for batch in cut(0..extent.batch, batch_step) {
        for rows in cut(0..extent.rows, row_step) {
            let source = gpu.window("the source of a copy", from, sides[0].bytes(&batch, &rows))?;
            let target = gpu.window("the target of a copy", into, sides[1].bytes(&batch, &rows))?;
            let units = batch.len() * rows.len() * extent.heads * (extent.row_bytes / unit);
            let grid = gpu.grid((units as u64).div_ceil(u64::from(kernel.rows_per_workgroup())))?;
            let skipped =
                |window: Window<'_>| -> Result<u32> { Ok(window.skipped_units()?.wrapping_mul(4 / words)) };
            let start = |layout: &Layout| {
                layout.offset + batch.start * layout.batch_stride + rows.start * layout.row_stride
            };
            let in_units = |bytes: usize| narrow("an offset or a stride", bytes / unit);
            let params = RepackParams {
                from_offset: in_units(start(&from_layout))?.wrapping_sub(skipped(source)?),
                from_batch: in_units(from_layout.batch_stride)?,
                from_row: in_units(from_layout.row_stride)?,
                from_head: in_units(from_layout.head_stride)?,
                into_offset: in_units(start(&into_layout))?.wrapping_sub(skipped(target)?),
                into_batch: in_units(into_layout.batch_stride)?,
                into_row: in_units(into_layout.row_stride)?,
                into_head: in_units(into_layout.head_stride)?,
                row_units: in_units(extent.row_bytes)?,
                heads: narrow("the number of heads", extent.heads)?,
                rows: narrow("the number of rows", rows.len())?,
                units: narrow("what is copied", units)?,
                grid_width: grid.width,
                ..RepackParams::default()
            };
            gpu.record(
                &mut encoder,
                kernel,
                bytemuck::bytes_of(&params),
                &[source.into(), target.into()],
                grid,
            )?;
        }
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}

pub(super) fn convert(
    gpu: &Gpu,
    (from, from_first, from_storage): (&WgpuBuffer, usize, Storage),
    (into, into_first, into_storage): (&WgpuBuffer, usize, Storage),
    elements: usize,
    overflow: Option<&WgpuBuffer>,
) -> Result<()> {
    let overflow = overflow.filter(|_| (from_storage, into_storage) == (Storage::F32, Storage::F16));
    let kernel = Kernel::Convert { from: from_storage, into: into_storage, reports: overflow.is_some() };
    let report = overflow.map(|word| gpu.window("a report", word, 0..4)).transpose()?;
    let together = Storage::CONVERTED_TOGETHER as usize;
    let at_once = usize::try_from(gpu.window_bytes()).unwrap_or(usize::MAX) / 4 / together;
    let mut encoder = gpu.encoder("convert");
    for part in cut(0..elements / together, at_once) {
        let grid = gpu.grid((part.len() as u64).div_ceil(u64::from(kernel.rows_per_workgroup())))?;
        let bytes = |storage: Storage, first: usize| {
            let bytes =
                |eights: usize| (first + eights * together) as u64 * 16 / u64::from(storage.unit_elements());
            bytes(part.start)..bytes(part.end)
        };
        let (source_bytes, target_bytes) = (bytes(from_storage, from_first), bytes(into_storage, into_first));
        let source = gpu.window("the source of a conversion", from, source_bytes.clone())?;
        let target = gpu.window("the target of a conversion", into, target_bytes.clone())?;
        let offset = |bytes: u64, skipped: u32| -> Result<u32> {
            let units = usize::try_from(bytes / 16).unwrap_or(usize::MAX);
            Ok(narrow("an offset", units)?.wrapping_sub(skipped))
        };
        let params = ConvertParams {
            from_offset: offset(source_bytes.start, source.skipped_units()?)?,
            into_offset: offset(target_bytes.start, target.skipped_units()?)?,
            count: narrow("what is converted", part.len())?,
            grid_width: grid.width,
        };
        let bindings: Vec<_> = [source, target].into_iter().chain(report).map(Into::into).collect();
        gpu.record(&mut encoder, kernel, bytemuck::bytes_of(&params), &bindings, grid)?;
    }
    gpu.submit(Some(encoder.finish()));
    Ok(())
}

fn row_heads(shape: StateShape) -> usize {
    shape.batch * shape.rows * shape.heads
}

/// How many row-heads of f32 one binding holds, whole workgroups of them.
pub(super) fn row_heads_within(gpu: &Gpu, dim: usize) -> usize {
    let rows = usize::try_from(gpu.window_bytes()).unwrap_or(usize::MAX) / (dim * 4);
    (rows / 64 * 64).max(64)
}

/// The widest unit, in 32-bit words, to which all offsets, strides and rows are aligned.
fn repack_words(from: &Layout, into: &Layout, extent: Extent) -> Result<u32> {
    let all = [
        from.offset,
        from.batch_stride,
        from.row_stride,
        from.head_stride,
        into.offset,
        into.batch_stride,
        into.row_stride,
        into.head_stride,
        extent.row_bytes,
    ];
    let aligned = |unit| all.iter().all(|bytes: &usize| bytes.is_multiple_of(unit));
    if aligned(16) {
        Ok(4)
    } else if aligned(4) {
        Ok(1)
    } else {
        Err(Error::request(
            format!("a copy of {extent:?} from {from:?} into {into:?}"),
            "keep rows, offsets and strides on 4-byte boundaries",
        ))
    }
}

/// Whether the bytes of `extent` are adjacent in this layout.
fn is_dense(layout: &Layout, extent: Extent) -> bool {
    let rows_bytes = extent.heads * extent.row_bytes;
    (extent.heads == 1 || layout.head_stride == extent.row_bytes)
        && (extent.rows == 1 || layout.row_stride == rows_bytes)
        && (extent.batch == 1 || layout.batch_stride == extent.rows * rows_bytes)
}
