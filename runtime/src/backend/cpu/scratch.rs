//! Memory that jobs work in, kept between jobs.

use std::sync::{Mutex, PoisonError};

use crate::{TileRun, TileShape};

/// A cache line: vectors in scratch memory never straddle two.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 16]);

/// What one job works in. Bounded by tile and job size, not by the sequence.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) units: Vec<UnitScratch>,
    /// A KV tile: `[key / MR][dim][MR]`.
    pub(super) k: Vec<Line>,
    /// A KV tile: `[dim / MR][key][MR]`.
    pub(super) v: Vec<Line>,
    /// Scores, then weights, of a panel: `[key][lane]`.
    pub(super) scores: Vec<Line>,
    /// `MR` rows of one head while they are converted.
    pub(super) row: Vec<Line>,
}

/// What one Q tile works in, in panels of `lanes` rows.
#[derive(Debug, Default)]
pub(super) struct UnitScratch {
    /// `panels × [dim][lane]`.
    pub(super) q: Vec<Line>,
    /// `panels × [dim][lane]`.
    pub(super) o: Vec<Line>,
    /// `panels × [m, l][lane]`, m in base-2 units.
    pub(super) ml: Vec<Line>,
    /// The run that the last [`Self::seek`] ended in.
    pub(super) cursor: usize,
}

impl Scratch {
    /// Makes room; contents are unspecified.
    pub(super) fn fit(&mut self, units: usize, tile: TileShape, dim: usize, lanes: usize, mr: usize) {
        let keys = (tile.kv_cols as usize).next_multiple_of(mr);
        let rows = (tile.q_rows as usize).next_multiple_of(lanes);
        grow(&mut self.k, keys * dim);
        grow(&mut self.v, keys * dim);
        grow(&mut self.scores, keys * lanes);
        grow(&mut self.row, mr * dim);
        if self.units.len() < units {
            self.units.resize_with(units, UnitScratch::default);
        }
        for unit in &mut self.units[..units] {
            grow(&mut unit.q, rows * dim);
            grow(&mut unit.o, rows * dim);
            grow(&mut unit.ml, rows * 2);
        }
    }
}

impl UnitScratch {
    /// The first tile at or after `from` that `runs` hold. `from` never decreases within a job.
    pub(super) fn seek(&mut self, runs: &[TileRun], from: u32) -> Option<u32> {
        while let Some(run) = runs.get(self.cursor) {
            if run.kv_tile + run.count > from {
                return Some(run.kv_tile.max(from));
            }
            self.cursor += 1;
        }
        None
    }

    /// Whether `tile`, at or after the last seek, is full, partial or absent.
    pub(super) fn kind(&self, runs: &[TileRun], tile: u32) -> Option<bool> {
        let run = runs.get(self.cursor)?;
        (run.kv_tile..run.kv_tile + run.count)
            .contains(&tile)
            .then_some(run.full)
    }
}

/// Scratch that no job holds at the moment: at most one for each thread that ever worked at the same time.
#[derive(Debug, Default)]
pub(super) struct ScratchPool(Mutex<Vec<Scratch>>);

impl ScratchPool {
    /// Lends a scratch for the time of `job`.
    pub(super) fn with<T>(&self, job: impl FnOnce(&mut Scratch) -> T) -> T {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = lock().pop().unwrap_or_default();
        let result = job(&mut scratch);
        lock().push(scratch);
        result
    }
}

fn grow(lines: &mut Vec<Line>, floats: usize) {
    let wanted = floats.div_ceil(16);
    if lines.len() < wanted {
        lines.resize(wanted, bytemuck::Zeroable::zeroed());
    }
}
