//! Positions and work lists in the layout that kernels read, which `kyklos_shaders` describes.

use std::ops::Range;

use crate::backend::wgpu::numbers::narrow;
use crate::error::Result;
use kyklos_plan::{BlockWork, MaskClass};

/// The mask between a block's queries and keys, ready to upload.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct WorkList {
    pub(in crate::backend::wgpu) positions: Vec<u32>,
    pub(in crate::backend::wgpu) keys_at: u32,
    pub(in crate::backend::wgpu) spans_at: u32,
    pub(in crate::backend::wgpu) work: Vec<u32>,
    pub(in crate::backend::wgpu) starts_class: u32,
    pub(in crate::backend::wgpu) runs_at: u32,
    list: RunList,
}

/// What each tile of each class meets of the other side, as kernels read it.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct RunList {
    /// For each class `2·tiles + 1` starts: first full run, first tested run of each tile, and the
    /// end.
    pub(in crate::backend::wgpu) starts: Vec<u32>,
    /// Distance of classes in `starts`.
    pub(in crate::backend::wgpu) starts_class: u32,
    /// First and end of each run.
    pub(in crate::backend::wgpu) runs: Vec<u32>,
    /// For each class and tile, its runs.
    tiles: Vec<Vec<Vec<Range<u32>>>>,
}

/// The runs of one tile: rows or keys `first..end` of the other side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::backend::wgpu) struct TileRuns {
    full: Vec<Range<u32>>,
    tested: Vec<Range<u32>>,
}

impl WorkList {
    pub(in crate::backend::wgpu) fn new(work: &BlockWork, kv_head_of: &[u32]) -> Result<Self> {
        let keys = narrow("the number of keys", work.kv_positions.len())?;
        let keys_at = narrow("the number of query heads", kv_head_of.len())?;
        let spans_at = narrow("the number of keys", kv_head_of.len() + work.kv_positions.len())?;
        let mut positions = kv_head_of.to_vec();
        positions.extend_from_slice(&work.kv_positions);
        let tiles = |class: &MaskClass| {
            (0..work.q_tiles()).map(|tile| key_runs(class, tile, work.tile.kv_cols, keys)).collect()
        };
        for class in &work.classes {
            positions.extend(class.rows.iter().flat_map(|row| [row.lo, row.hi]));
        }
        narrow("the list of positions", positions.len())?;
        let list = RunList::new(work.classes.iter().map(tiles).collect())?;
        let runs_at = narrow("the work list", list.starts.len())?;
        narrow("the work list", list.starts.len() + list.runs.len())?;
        Ok(Self {
            positions,
            keys_at,
            spans_at,
            work: [&list.starts[..], &list.runs[..]].concat(),
            starts_class: list.starts_class,
            runs_at,
            list,
        })
    }

    pub(in crate::backend::wgpu) fn last_class(&self) -> usize {
        self.list.tiles.len() - 1
    }

    /// The range from the first to the last key that Q tile `tile` of these batch entries reads.
    pub(in crate::backend::wgpu) fn key_range(&self, batch: &Range<usize>, tile: usize) -> Range<usize> {
        let classes = batch.start.min(self.last_class())..=(batch.end - 1).min(self.last_class());
        let runs = || self.list.tiles[classes.clone()].iter().flat_map(|class| &class[tile]);
        let start = runs().map(|run| run.start).min().unwrap_or(0);
        let end = runs().map(|run| run.end).max().unwrap_or(0);
        start as usize..end as usize
    }

    /// How many of the keys `range` Q tile `tile` of batch entry `batch` reads.
    pub(in crate::backend::wgpu) fn keys_of(&self, batch: usize, tile: usize, range: &Range<u32>) -> u32 {
        self.list.met(batch, tile, range)
    }
}

impl RunList {
    /// From the tiles of each class.
    pub(in crate::backend::wgpu) fn new(classes: Vec<Vec<TileRuns>>) -> Result<Self> {
        let (mut starts, mut runs) = (Vec::new(), Vec::new());
        let starts_class = classes.first().map_or(1, |tiles| 2 * tiles.len() + 1);
        for tile in classes.iter().flat_map(|tiles| tiles.iter().map(Some).chain([None])) {
            // After the last tile of a class, the end of its runs.
            starts.push(narrow("the number of runs", runs.len() / 2)?);
            let Some(tile) = tile else { continue };
            runs.extend(tile.full.iter().flat_map(|run| [run.start, run.end]));
            starts.push(narrow("the number of runs", runs.len() / 2)?);
            runs.extend(tile.tested.iter().flat_map(|run| [run.start, run.end]));
        }
        let all = |tile: TileRuns| [tile.full, tile.tested].concat();
        Ok(Self {
            starts,
            starts_class: narrow("the number of tiles", starts_class)?,
            runs,
            tiles: classes.into_iter().map(|tiles| tiles.into_iter().map(all).collect()).collect(),
        })
    }

    /// How much of `range` of the other side tile `tile` of batch entry `batch` meets.
    pub(in crate::backend::wgpu) fn met(&self, batch: usize, tile: usize, range: &Range<u32>) -> u32 {
        self.tiles[batch.min(self.tiles.len() - 1)][tile]
            .iter()
            .map(|run| run.end.min(range.end).saturating_sub(run.start.max(range.start)))
            .sum()
    }
}

impl TileRuns {
    /// Adds `run`, which starts at a tile of the other side. A last tile of it that is not whole is
    /// tested, so that the kernel tests which of its rows or keys exist.
    pub(in crate::backend::wgpu) fn push(&mut self, run: Range<u32>, full: bool, tile: u32) {
        let whole = if full { run.end / tile * tile } else { run.start };
        if run.start < whole {
            self.full.push(run.start..whole);
        }
        if whole < run.end {
            self.tested.push(whole..run.end);
        }
    }
}

/// The runs of one Q tile, in keys.
pub(in crate::backend::wgpu) fn key_runs(
    class: &MaskClass,
    tile: usize,
    kv_cols: u32,
    keys: u32,
) -> TileRuns {
    let mut runs = TileRuns::default();
    for run in &class.runs[class.starts[tile] as usize..class.starts[tile + 1] as usize] {
        let first = run.kv_tile * kv_cols;
        runs.push(first..(first + run.count * kv_cols).min(keys), run.full, kv_cols);
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos_plan::{AttentionProblem, Dtype, Mask, TileShape, TokenRuns};

    #[test]
    fn a_ragged_last_tile_is_tested_and_costs_are_counted_in_keys() {
        let problem = AttentionProblem::new([1, 70, 2, 1, 8], Dtype::F32, Mask::full()).unwrap();
        let tokens = TokenRuns::contiguous(0..70);
        let tile = TileShape { q_rows: 64, kv_cols: 32 };
        let list = WorkList::new(&BlockWork::layers(&problem, &tokens, &tokens, tile)[0], &[0, 0]).unwrap();
        // Two tiles, one class: five starts, then the runs 0..64 (full) and 64..70 (partial) of each tile.
        assert_eq!(list.work, [0, 1, 2, 3, 4, 0, 64, 64, 70, 0, 64, 64, 70]);
        assert_eq!((list.starts_class, list.runs_at, list.keys_at, list.spans_at), (5, 5, 2, 72));
        assert_eq!(list.positions[..4], [0, 0, 0, 1]);
        assert_eq!(list.positions[72..74], [0, 70]);
        assert_eq!(list.keys_of(0, 1, &(0..70)), 70);
        assert_eq!(list.key_range(&(0..3), 1), 0..70);
        assert_eq!(list.keys_of(3, 1, &(32..66)), 34);
    }
}
