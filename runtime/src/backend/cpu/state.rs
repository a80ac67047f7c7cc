//! Running states: reset, merge, finalize. Rows are independent, so all of them are parallel over
//! rows.

use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::CpuBuffer;
use crate::backend::cpu::arithmetic::halves::narrow_bf16;
use crate::backend::cpu::arithmetic::scalar::{exp, ln};
use crate::backend::{EMPTY_M, State, StateMut, StateShape};
use crate::error::Result;
use kyklos_plan::Dtype;

/// Makes every row empty: it has seen no key.
pub(super) fn reset(state: &mut StateMut<'_, CpuBuffer>) -> Result<()> {
    let shape = state.shape;
    floats(state.a, shape.a_bytes())?.fill(0.0);
    for ml in floats(state.ml, shape.ml_bytes())?.as_chunks_mut::<2>().0 {
        *ml = [EMPTY_M, 0.0];
    }
    Ok(())
}

/// `into` ⊕ `from` (module documentation of [`crate::backend`]). If one side of a row is empty, the
/// result is the other side, bit for bit.
pub(super) fn merge(into: &mut StateMut<'_, CpuBuffer>, from: &State<'_, CpuBuffer>) -> Result<()> {
    let shape = into.shape;
    let (from_a, from_ml) = (from.a.elements::<f32>(), from.ml.elements::<f32>());
    let a: &mut [f32] = bytemuck::cast_slice_mut(into.a.bytes_mut()?);
    let ml: &mut [f32] = bytemuck::cast_slice_mut(into.ml.bytes_mut()?);
    if shape.rows * shape.heads * shape.dim == 0 {
        return Ok(());
    }
    let row = shape.heads * shape.dim;
    {
        let ml = &*ml;
        a[..shape.batch * shape.rows * row]
            .par_chunks_exact_mut(row)
            .with_min_len(ROWS_AT_ONCE)
            .enumerate()
            .for_each(|(i, a)| {
                for (head, a) in a.chunks_exact_mut(shape.dim).enumerate() {
                    let at = ml_at(shape, i, head);
                    let ours = [ml[at], ml[at + 1]];
                    let theirs = [from_ml[at], from_ml[at + 1]];
                    let b = &from_a[i * row + head * shape.dim..][..shape.dim];
                    match weights(ours, theirs) {
                        Weights::KeepOurs => {}
                        Weights::TakeTheirs => a.copy_from_slice(b),
                        Weights::Both { ours, theirs, .. } => {
                            for (a, b) in a.iter_mut().zip(b) {
                                *a = *a * ours + *b * theirs;
                            }
                        }
                    }
                }
            });
    }
    for (ours, theirs) in ml.as_chunks_mut::<2>().0.iter_mut().zip(from_ml.as_chunks::<2>().0) {
        match weights(*ours, *theirs) {
            Weights::KeepOurs => {}
            Weights::TakeTheirs => *ours = *theirs,
            Weights::Both { m, ours: a, theirs: b } => *ours = [m, ours[1] * a + theirs[1] * b],
        }
    }
    Ok(())
}

/// `o` and `lse` of a state.
pub(super) fn finalize(
    state: &State<'_, CpuBuffer>,
    sinks: &[f32],
    dtype: Dtype,
    o: &mut CpuBuffer,
    lse: &mut CpuBuffer,
) -> Result<()> {
    let shape = state.shape;
    let (a, ml) = (state.a.elements::<f32>(), state.ml.elements::<f32>());
    let rows = shape.batch * shape.rows;
    let o = whole(o, rows * shape.heads * shape.dim * dtype.bytes())?;
    let lse: &mut [f32] = bytemuck::cast_slice_mut(whole(lse, shape.lse_bytes())?);
    if rows * shape.heads * shape.dim == 0 {
        return Ok(());
    }
    let row = shape.heads * shape.dim;
    o.par_chunks_exact_mut(row * dtype.bytes())
        .zip(lse.par_chunks_exact_mut(shape.heads * 2))
        .with_min_len(ROWS_AT_ONCE)
        .enumerate()
        .for_each_init(
            || vec![0.0; shape.dim],
            |space, (i, (o, lse))| {
                let heads = o.chunks_exact_mut(shape.dim * dtype.bytes()).zip(lse.as_chunks_mut::<2>().0);
                for (head, (o, lse)) in heads.enumerate() {
                    let at = ml_at(shape, i, head);
                    let (m, l) = (ml[at], ml[at + 1]);
                    let a = &a[i * row + head * shape.dim..][..shape.dim];
                    let sink = sinks.get(head).copied();
                    // A NaN in l is not 0, and reaches o and lse.
                    if l == 0.0 {
                        o.fill(0);
                        *lse = [sink.unwrap_or(f32::NEG_INFINITY), 0.0];
                        continue;
                    }
                    // m, l and a after the sink is merged; a is multiplied by `weight`.
                    let (m, l, weight) = match sink {
                        None => (m, l, 1.0),
                        Some(sink) => {
                            let most = m.max(sink);
                            let weight = exp(m - most);
                            (most, l * weight + exp(sink - most), weight)
                        }
                    };
                    let (ln, sum) = (ln(l), m + ln(l));
                    *lse = [sum, ln - (sum - m)];
                    for (space, a) in space.iter_mut().zip(a) {
                        // Adding zero removes the sign of zeros: the sign depends on the order of the merges.
                        *space = a * weight / l + 0.0;
                    }
                    match dtype {
                        Dtype::F32 => o.copy_from_slice(bytemuck::cast_slice(space)),
                        Dtype::F16 => bytemuck::cast_slice_mut::<u8, f16>(o).convert_from_f32_slice(space),
                        Dtype::Bf16 => narrow_bf16(space, bytemuck::cast_slice_mut(o)),
                    }
                }
            },
        );
    Ok(())
}

/// How a merge changes a row.
enum Weights {
    KeepOurs,
    TakeTheirs,
    Both { m: f32, ours: f32, theirs: f32 },
}

fn weights(ours: [f32; 2], theirs: [f32; 2]) -> Weights {
    let empty = |[m, l]: [f32; 2]| l == 0.0 && m == EMPTY_M;
    if empty(theirs) {
        Weights::KeepOurs
    } else if empty(ours) {
        Weights::TakeTheirs
    } else {
        // A row that saw +∞ or NaN has NaN in l already; with any weights l stays NaN.
        let m = ours[0].max(theirs[0]);
        Weights::Both { m, ours: exp(ours[0] - m), theirs: exp(theirs[0] - m) }
    }
}

/// Where m of row `batch_row` (batch · rows + row) and `head` is in `ml`.
fn ml_at(shape: StateShape, batch_row: usize, head: usize) -> usize {
    let (batch, row) = (batch_row / shape.rows, batch_row % shape.rows);
    ((batch * shape.heads + head) * shape.rows + row) * 2
}

/// The first `bytes` of a buffer, which will be overwritten; the bytes after them are kept.
fn whole(buffer: &mut CpuBuffer, bytes: usize) -> Result<&mut [u8]> {
    let all = if buffer.bytes().len() == bytes { buffer.overwrite() } else { buffer.bytes_mut() };
    all.map(|all| &mut all[..bytes])
}

fn floats(buffer: &mut CpuBuffer, bytes: usize) -> Result<&mut [f32]> {
    whole(buffer, bytes).map(bytemuck::cast_slice_mut)
}

/// Rows that one task takes, so that small states do not pay for waking threads.
const ROWS_AT_ONCE: usize = 64;
