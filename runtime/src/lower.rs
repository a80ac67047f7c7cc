//! Lowering of masks and token lists to what kernels read: an interval of key positions for each query row, a
//! position for each key, and a list of tiles that are not empty.

use crate::{AttentionProblem, Mask, TokenRuns};

/// The key positions `lo..hi` that one query row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowSpan {
    /// First visible position.
    pub lo: u32,
    /// One past the last visible position.
    pub hi: u32,
}

impl RowSpan {
    /// Sees nothing.
    pub const EMPTY: Self = Self { lo: 0, hi: 0 };

    /// Whether the key at `position` is visible.
    pub fn sees(self, position: u32) -> bool {
        self.lo <= position && position < self.hi
    }
}

/// Extent of the tiles that a kernel works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Query rows of a tile.
    pub q_rows: u32,
    /// Keys of a tile.
    pub kv_cols: u32,
}

/// Consecutive KV tiles of the same kind, for one Q tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileRun {
    /// First KV tile.
    pub kv_tile: u32,
    /// How many.
    pub count: u32,
    /// Whether every row of the Q tile sees every key of these tiles, so that no element needs a test.
    pub full: bool,
}

/// What one block of queries sees of one block of keys, for all batch entries with the same mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskClass {
    /// One span for each query row of the block, in buffer order.
    pub rows: Vec<RowSpan>,
    /// `q_tiles + 1` offsets into `runs`: those of Q tile `t` are `runs[starts[t]..starts[t + 1]]`.
    pub starts: Vec<u32>,
    /// Tiles that are not empty, ascending within a Q tile.
    pub runs: Vec<TileRun>,
}

/// Everything a kernel needs to know about positions and masks for one Q block against one KV block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockWork {
    /// The tiles that `starts` and `runs` count in.
    pub tile: TileShape,
    /// Global position of each key of the block, in buffer order.
    pub kv_positions: Vec<u32>,
    /// One class, or one for each batch entry.
    pub classes: Vec<MaskClass>,
}

impl BlockWork {
    /// Lowers `problem`'s mask for the queries `q_tokens` against the keys `kv_tokens`.
    pub fn new(
        problem: &AttentionProblem,
        q_tokens: &TokenRuns,
        kv_tokens: &TokenRuns,
        tile: TileShape,
    ) -> Self {
        let kv_positions: Vec<u32> = kv_tokens.iter().collect();
        let kv_bounds: Vec<(u32, u32)> = kv_positions
            .chunks(tile.kv_cols as usize)
            .map(|tile| tile.iter().fold((u32::MAX, 0), |(lo, hi), p| (lo.min(*p), hi.max(*p))))
            .collect();
        let q_positions: Vec<u32> = q_tokens.iter().map(|token| problem.q_position(token)).collect();
        let classes = (0..problem.mask.batch_classes())
            .map(|batch| MaskClass::new(&problem.mask, batch, problem.kv_len, &q_positions, &kv_bounds, tile))
            .collect();
        Self { tile, kv_positions, classes }
    }

    /// The class of batch entry `batch`.
    pub fn class_of(&self, batch: usize) -> &MaskClass {
        &self.classes[if self.classes.len() > 1 { batch } else { 0 }]
    }

    /// Number of Q tiles.
    pub fn q_tiles(&self) -> usize {
        self.classes[0].starts.len() - 1
    }

    /// Whether no query of the block sees any key of it.
    pub fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| class.runs.is_empty())
    }

    /// (query, key) tiles that are not empty, over `batch` entries and one head: the work, in tiles.
    pub fn tiles(&self, batch: usize) -> u64 {
        (0..batch).map(|b| self.class_of(b).runs.iter().map(|run| u64::from(run.count)).sum::<u64>()).sum()
    }
}

/// Whether any of the queries sees any of the keys, for any batch entry.
pub(crate) fn any_visible(problem: &AttentionProblem, q_tokens: &TokenRuns, kv_tokens: &TokenRuns) -> bool {
    (0..problem.mask.batch_classes()).any(|batch| {
        let sees = |token: u32| {
            let span = problem.mask.visible(batch, problem.q_position(token), problem.kv_len);
            span != RowSpan::EMPTY && kv_tokens.runs().iter().any(|run| run.meets(span.lo, span.hi))
        };
        // Most blocks are seen by the last of some queries in a row, and need no look at the others.
        q_tokens.runs().iter().any(|run| sees(run.last())) || q_tokens.iter().any(sees)
    })
}

impl MaskClass {
    fn new(
        mask: &Mask,
        batch: usize,
        kv_len: u32,
        q_positions: &[u32],
        kv_bounds: &[(u32, u32)],
        tile: TileShape,
    ) -> Self {
        let rows: Vec<RowSpan> = q_positions.iter().map(|q| mask.visible(batch, *q, kv_len)).collect();
        let mut starts = vec![0];
        let mut runs: Vec<TileRun> = Vec::new();
        for tile_rows in rows.chunks(tile.q_rows as usize) {
            // Over the rows that see anything: the union of what they see, and the intersection. A row that sees
            // nothing keeps a tile from being full.
            let seeing = || tile_rows.iter().filter(|row| **row != RowSpan::EMPTY);
            let union =
                (seeing().map(|r| r.lo).min().unwrap_or(0), seeing().map(|r| r.hi).max().unwrap_or(0));
            let all_see = seeing().count() == tile_rows.len();
            let common =
                (seeing().map(|r| r.lo).max().unwrap_or(0), seeing().map(|r| r.hi).min().unwrap_or(0));
            let first = runs.len();
            for (kv_tile, (lo, hi)) in kv_bounds.iter().enumerate() {
                if *hi < union.0 || *lo >= union.1 {
                    continue;
                }
                let kv_tile = u32::try_from(kv_tile).expect("positions are u32, so tiles are");
                let full = all_see && common.0 <= *lo && *hi < common.1;
                match runs[first..].last_mut() {
                    Some(run) if run.full == full && run.kv_tile + run.count == kv_tile => run.count += 1,
                    _ => runs.push(TileRun { kv_tile, count: 1, full }),
                }
            }
            starts.push(u32::try_from(runs.len()).expect("at most one run for each pair of tiles"));
        }
        Self { rows, starts, runs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    #[test]
    fn causal_tiles_are_full_below_the_diagonal_and_absent_above() {
        let problem = AttentionProblem::new([1, 64, 1, 1, 8], Dtype::F32, Mask::causal()).unwrap();
        let tokens = TokenRuns::contiguous(0..64);
        let work = BlockWork::new(&problem, &tokens, &tokens, TileShape { q_rows: 16, kv_cols: 16 });
        let class = &work.classes[0];
        assert_eq!(class.starts, [0, 1, 3, 5, 7]);
        assert_eq!(class.runs[0], TileRun { kv_tile: 0, count: 1, full: false });
        assert_eq!(class.runs[5], TileRun { kv_tile: 0, count: 3, full: true });
        assert_eq!(class.runs[6], TileRun { kv_tile: 3, count: 1, full: false });
        assert_eq!(work.tiles(1), 10);
    }

    #[test]
    fn tile_kinds_agree_with_the_mask_element_by_element() {
        let masks =
            ["full", "causal", "window:5,3", "documents:0,9,30,61", "valid:17", "valid:0", "causal+valid:40"];
        let tile = TileShape { q_rows: 7, kv_cols: 5 };
        for mask in masks {
            let problem = AttentionProblem::new([1, 61, 1, 1, 8], Dtype::F32, mask.parse().unwrap()).unwrap();
            let q = TokenRuns::from_positions((0..20).chain(45..61));
            let kv = TokenRuns::from_positions((1..61).step_by(2));
            let work = BlockWork::new(&problem, &q, &kv, tile);
            let class = &work.classes[0];
            for (q_tile, rows) in class.rows.chunks(7).enumerate() {
                for (kv_tile, keys) in work.kv_positions.chunks(5).enumerate() {
                    let kind = class.runs[class.starts[q_tile] as usize..class.starts[q_tile + 1] as usize]
                        .iter()
                        .find(|run| (run.kv_tile..run.kv_tile + run.count).contains(&(kv_tile as u32)))
                        .map(|run| run.full);
                    let seen =
                        rows.iter().flat_map(|row| keys.iter().map(|key| row.sees(*key))).collect::<Vec<_>>();
                    if kind.is_none() {
                        assert!(!seen.contains(&true), "{mask}: tile {q_tile},{kv_tile} is not empty");
                    }
                    assert_eq!(kind == Some(true), !seen.contains(&false), "{mask}: tile {q_tile},{kv_tile}");
                }
            }
        }
    }
}
