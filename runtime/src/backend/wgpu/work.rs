//! Positions and work lists in the layout that kernels read, which `kyklos_shaders` describes.

use std::ops::Range;

use super::numbers::narrow;
use crate::{BlockWork, MaskClass, Result};

/// The mask between a block's queries and keys, ready to upload.
#[derive(Debug)]
pub(super) struct WorkList {
    pub(super) positions: Vec<u32>,
    pub(super) keys_at: u32,
    pub(super) spans_at: u32,
    pub(super) work: Vec<u32>,
    pub(super) starts_class: u32,
    pub(super) runs_at: u32,
    /// For each class and Q tile, its runs `first..end` of keys.
    tiles: Vec<Vec<Vec<Range<u32>>>>,
}

impl WorkList {
    pub(super) fn new(work: &BlockWork, kv_head_of: &[u32]) -> Result<Self> {
        let keys = narrow("the number of keys", work.kv_positions.len())?;
        let keys_at = narrow("the number of query heads", kv_head_of.len())?;
        let spans_at = narrow("the number of keys", kv_head_of.len() + work.kv_positions.len())?;
        let mut positions = kv_head_of.to_vec();
        positions.extend_from_slice(&work.kv_positions);
        let mut starts = Vec::new();
        let mut runs = Vec::new();
        let mut tiles = Vec::with_capacity(work.classes.len());
        for class in &work.classes {
            positions.extend(class.rows.iter().flat_map(|row| [row.lo, row.hi]));
            let mut class_tiles = Vec::with_capacity(work.q_tiles());
            for tile in 0..work.q_tiles() {
                let (full, partial) = key_runs(class, tile, work.tile.kv_cols, keys);
                for part in [&full, &partial] {
                    starts.push(narrow("the number of runs", runs.len() / 2)?);
                    runs.extend(part.iter().flat_map(|run| [run.start, run.end]));
                }
                class_tiles.push([full, partial].concat());
            }
            starts.push(narrow("the number of runs", runs.len() / 2)?);
            tiles.push(class_tiles);
        }
        let runs_at = narrow("the work list", starts.len())?;
        narrow("the work list", starts.len() + runs.len())?;
        narrow("the list of positions", positions.len())?;
        starts.extend(runs);
        Ok(Self {
            positions,
            keys_at,
            spans_at,
            work: starts,
            starts_class: narrow("the number of Q tiles", 2 * work.q_tiles() + 1)?,
            runs_at,
            tiles,
        })
    }

    pub(super) fn last_class(&self) -> usize {
        self.tiles.len() - 1
    }

    /// The range from the first to the last key that Q tile `tile` of these batch entries reads.
    pub(super) fn key_range(&self, batch: &Range<usize>, tile: usize) -> Range<usize> {
        let classes = batch.start.min(self.last_class())..=(batch.end - 1).min(self.last_class());
        let runs = || self.tiles[classes.clone()].iter().flat_map(|class| &class[tile]);
        let start = runs().map(|run| run.start).min().unwrap_or(0);
        let end = runs().map(|run| run.end).max().unwrap_or(0);
        start as usize..end as usize
    }

    /// How many of the keys `range` Q tile `tile` of batch entry `batch` reads.
    pub(super) fn keys_of(&self, batch: usize, tile: usize, range: &Range<u32>) -> u32 {
        self.tiles[batch.min(self.last_class())][tile]
            .iter()
            .map(|run| run.end.min(range.end).saturating_sub(run.start.max(range.start)))
            .sum()
    }
}

/// The full and the partial runs of one Q tile, in keys. A last tile that is not whole counts as partial, so that the
/// kernel tests which of its keys exist.
fn key_runs(class: &MaskClass, tile: usize, kv_cols: u32, keys: u32) -> (Vec<Range<u32>>, Vec<Range<u32>>) {
    let (mut full, mut partial) = (Vec::new(), Vec::new());
    for run in &class.runs[class.starts[tile] as usize..class.starts[tile + 1] as usize] {
        let first = run.kv_tile * kv_cols;
        let end = (first + run.count * kv_cols).min(keys);
        let whole = if run.full { end / kv_cols * kv_cols } else { first };
        if first < whole {
            full.push(first..whole);
        }
        if whole < end {
            partial.push(whole..end);
        }
    }
    (full, partial)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionProblem, Dtype, Mask, TileShape, TokenRuns};

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
