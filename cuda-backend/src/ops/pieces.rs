//! Parts of a call, of about as many operations as are submitted at a time.

use std::ops::Range;

use kyklos::{BlockWork, TileRun};

/// Blocks of a grid in its second and third direction.
const MOST_BLOCKS: usize = 65_535;

/// Part of a call: these tiles of these heads of these batch entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) tiles: Range<usize>,
    pub(crate) heads: Range<usize>,
    pub(crate) batch: Range<usize>,
}

/// The tiles of a call, a budget at a time: whole batch entries while they fit, else heads of one, else tiles of a head.
/// Keys are never cut, so that results do not depend on the pacer.
pub(crate) struct PieceSplitter {
    /// Operations of each query tile of a head, for each mask class.
    tiles: Vec<Vec<f64>>,
    batch: usize,
    heads: usize,
    /// Where the next piece begins.
    next: (usize, usize, usize),
}

impl PieceSplitter {
    /// `more_tiles`: what each query tile costs besides its keys, as tiles of keys. Where it is not 0 there is a piece for
    /// tiles without keys too.
    pub(crate) fn new(work: &BlockWork, batch: usize, heads: usize, dim: usize, more_tiles: u32) -> Self {
        let flops_of_tile = 4.0 * f64::from(work.tile.q_rows) * f64::from(work.tile.kv_cols) * dim as f64;
        let tiles = work.classes.iter().map(|class| {
            let runs = class.starts.windows(2).map(|ends| &class.runs[ends[0] as usize..ends[1] as usize]);
            let tiles = |runs: &[TileRun]| runs.iter().map(|run| f64::from(run.count)).sum::<f64>();
            runs.map(|runs| (tiles(runs) + f64::from(more_tiles)) * flops_of_tile).collect()
        });
        Self { tiles: tiles.collect(), batch, heads, next: (0, 0, 0) }
    }

    /// Operations of each query tile of a head of a batch entry.
    pub(crate) fn tile_flops(&self, batch: usize) -> &[f64] {
        &self.tiles[batch.min(self.tiles.len() - 1)]
    }

    /// Whether there is no tile left.
    pub(crate) fn is_finished(&self) -> bool {
        self.next.0 == self.batch
    }

    /// The next piece with work in it, of about `budget` operations, and those operations.
    pub(crate) fn next(&mut self, budget: f64) -> Option<(Piece, f64)> {
        loop {
            let (piece, flops) = self.advance(budget)?;
            if flops > 0.0 {
                return Some((piece, flops));
            }
        }
    }

    fn advance(&mut self, budget: f64) -> Option<(Piece, f64)> {
        let (batch, head, tile) = self.next;
        if batch == self.batch {
            return None;
        }
        let of_head: f64 = self.tile_flops(batch).iter().sum();
        let tiles = 0..self.tile_flops(batch).len();
        let of_batch = |batch: usize| self.tile_flops(batch).iter().sum::<f64>() * self.heads as f64;
        if (head, tile) == (0, 0) && self.heads <= MOST_BLOCKS && of_batch(batch) <= budget {
            let (end, flops) = take_within_budget(batch..self.batch, budget, of_batch);
            self.next = (end, 0, 0);
            return Some((Piece { tiles, heads: 0..self.heads, batch: batch..end }, flops));
        }
        if tile == 0 && of_head <= budget {
            let (end, flops) = take_within_budget(head..self.heads, budget, |_| of_head);
            self.next = if end == self.heads { (batch + 1, 0, 0) } else { (batch, end, 0) };
            return Some((Piece { tiles, heads: head..end, batch: batch..batch + 1 }, flops));
        }
        let of_tile = self.tile_flops(batch);
        let (end, flops) = take_within_budget(tile..tiles.end, budget, |tile| of_tile[tile]);
        self.next = match (end == tiles.end, head + 1 == self.heads) {
            (false, _) => (batch, head, end),
            (true, false) => (batch, head + 1, 0),
            (true, true) => (batch + 1, 0, 0),
        };
        Some((Piece { tiles: tile..end, heads: head..head + 1, batch: batch..batch + 1 }, flops))
    }
}

/// How far a range goes within a budget, at least one and at most what a grid has, and what that costs.
pub(crate) fn take_within_budget(
    range: Range<usize>,
    budget: f64,
    cost: impl Fn(usize) -> f64,
) -> (usize, f64) {
    let (mut end, mut sum) = (range.start + 1, cost(range.start));
    while end < range.end && end - range.start < MOST_BLOCKS && sum + cost(end) <= budget {
        sum += cost(end);
        end += 1;
    }
    (end, sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos::{AttentionProblem, Dtype, Mask, TileShape, TokenRuns};

    /// Every tile of every head of every batch entry that has work is in just one piece, whatever the budget.
    #[test]
    fn pieces_are_everything_once() {
        let tile = TileShape { q_rows: 16, kv_cols: 16 };
        let problem = AttentionProblem::new([2, 100, 3, 3, 8], Dtype::F32, Mask::causal()).unwrap();
        let tokens = TokenRuns::contiguous(0..100);
        let work = &BlockWork::layers(&problem, &tokens, &tokens, tile)[0];
        let all = {
            let pieces = PieceSplitter::new(work, 2, 3, 8, 0);
            pieces.tile_flops(0).iter().sum::<f64>() * 6.0
        };
        for budget in [0.0, all / 40.0, all / 6.0, all / 5.0, all / 2.0, all] {
            let mut pieces = PieceSplitter::new(work, 2, 3, 8, 0);
            let (mut seen, mut sum, mut count) = (vec![0; 7 * 3 * 2], 0.0, 0);
            while let Some((piece, flops)) = pieces.next(budget) {
                for batch in piece.batch.clone() {
                    for head in piece.heads.clone() {
                        piece.tiles.clone().for_each(|tile| seen[(batch * 3 + head) * 7 + tile] += 1);
                    }
                }
                let one = piece.tiles.len() * piece.heads.len() * piece.batch.len() == 1;
                assert!(flops <= budget || one, "{piece:?}: {flops} of {budget}");
                sum += flops;
                count += 1;
            }
            assert!(seen.iter().all(|times| *times == 1), "{budget}: {seen:?}");
            assert_eq!(sum, all);
            assert_eq!(count == 1, budget == all, "{count} pieces of {budget}");
        }
    }

    /// Where a tile is work without keys too, there is a piece for it.
    #[test]
    fn tiles_without_keys_are_pieces_where_they_cost_something() {
        let tile = TileShape { q_rows: 16, kv_cols: 16 };
        let mask: Mask = "valid:40,0".parse().unwrap();
        let problem = AttentionProblem::new([2, 100, 1, 1, 8], Dtype::F32, mask).unwrap();
        let (rows, keys) = (TokenRuns::contiguous(84..100), TokenRuns::contiguous(0..100));
        let work = &BlockWork::layers(&problem, &rows, &keys, tile)[0];
        for (more_tiles, expected) in [(0, 1), (1, 2)] {
            let mut pieces = PieceSplitter::new(work, 2, 1, 8, more_tiles);
            let count = std::iter::from_fn(|| pieces.next(0.0)).count();
            assert_eq!(count, expected, "{more_tiles} more tiles");
        }
    }
}
