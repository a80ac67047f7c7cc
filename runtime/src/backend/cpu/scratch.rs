//! Memory that jobs work in, kept between jobs.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::tiles;
use crate::backend::cpu::arithmetic::simd::KernelShape;
use kyklos_plan::TileShape;

/// A cache line: vectors in scratch memory never straddle two.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 16]);

/// Work space of one job, in panels of `lanes` rows. Its size depends on the tile and, with few
/// rows, on the heads; not on the sequence.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// `panels × [dim][lane]`.
    pub(super) q: Vec<Line>,
    /// `panels × [dim][lane]`.
    pub(super) o: Vec<Line>,
    /// `panels × [m, l][lane]`, m in base-2 units.
    pub(super) ml: Vec<Line>,
    /// Scores, then weights, of a panel: `[key][lane]`; with few rows, of all of them:
    /// `[place][key]`.
    pub(super) scores: Vec<Line>,
    /// Terms of a panel's logits from an attention bias tensor: `[key][lane]`.
    pub(super) terms: Vec<Line>,
    /// Rows of one head while they are converted: as many as are packed side by side.
    pub(super) row: Vec<Line>,
}

impl Scratch {
    /// Makes room; contents are unspecified.
    pub(super) fn fit(&mut self, tile: TileShape, dim: usize, shape: KernelShape) {
        let keys = (tile.kv_cols as usize).next_multiple_of(shape.mr);
        let keys = tiles::rows_of(keys);
        let rows = (tile.q_rows as usize).next_multiple_of(shape.lanes);
        // Room for whole tile registers, where there are any.
        let padded = dim.next_multiple_of(shape.mr).next_multiple_of(tiles::SIDE);
        grow(&mut self.q, rows * padded);
        grow(&mut self.o, rows * padded);
        grow(&mut self.ml, rows * 2);
        grow(&mut self.scores, keys * shape.lanes);
        grow(&mut self.terms, keys * shape.lanes);
        grow(&mut self.row, shape.mr.max(shape.lanes) * dim);
    }
}

/// A pool of objects that are not in use: at most as many as were ever in use at the same time.
#[derive(Debug)]
pub(super) struct Spare<T>(Mutex<Vec<T>>);

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Default> Spare<T> {
    /// One of them, or a new one.
    pub(super) fn take(&self) -> T {
        self.lock().pop().unwrap_or_default()
    }

    /// Back for the next.
    pub(super) fn give(&self, spare: T) {
        self.lock().push(spare);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes room for `floats`; contents are unspecified.
pub(super) fn grow(lines: &mut Vec<Line>, floats: usize) {
    let wanted = floats.div_ceil(16);
    if lines.len() < wanted {
        lines.resize(wanted, bytemuck::Zeroable::zeroed());
    }
}

/// The numbers in some lines.
pub(super) fn floats(lines: &[Line]) -> &[f32] {
    bytemuck::cast_slice(lines)
}

/// The numbers in some lines.
pub(super) fn floats_mut(lines: &mut [Line]) -> &mut [f32] {
    bytemuck::cast_slice_mut(lines)
}
