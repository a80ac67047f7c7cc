//! Division of a call into pieces that are submitted one by one.

use std::ops::Range;

use kyklos::{BlockWork, TileRun};

use crate::device::PieceSize;

/// Limit for the blocks of a grid in its second and third dimension.
const MAX_BLOCKS: usize = 65_535;

/// Part of a call: some query tiles of some heads of some batch entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) tiles: Range<usize>,
    pub(crate) heads: Range<usize>,
    pub(crate) batch: Range<usize>,
}

/// Divides the query tiles of a call by a [`PieceSize`]: into whole batch entries if one fits, else
/// into heads of an entry, else into query tiles of a head. The keys of a query tile are never
/// divided, so results do not depend on measured speeds, and the shortest piece takes as long as a
/// tile.
pub(crate) struct PieceSplitter {
    /// `[class][query tile]`: floating-point operations of a query tile of one head.
    tiles: Vec<Vec<f64>>,
    batch: usize,
    heads: usize,
    /// Batch entry, head and query tile at which the next piece begins.
    next: (usize, usize, usize),
}

impl PieceSplitter {
    /// `extra_tiles`: cost of a query tile besides its keys, in tiles of keys. If it is not 0,
    /// query tiles without keys are in a piece too.
    pub(crate) fn new(work: &BlockWork, batch: usize, heads: usize, dim: usize, extra_tiles: u32) -> Self {
        let flops_of_tile = 4.0 * f64::from(work.tile.q_rows) * f64::from(work.tile.kv_cols) * dim as f64;
        let tiles = work.classes.iter().map(|class| {
            let runs = class.starts.windows(2).map(|ends| &class.runs[ends[0] as usize..ends[1] as usize]);
            let tiles = |runs: &[TileRun]| runs.iter().map(|run| f64::from(run.count)).sum::<f64>();
            runs.map(|runs| (tiles(runs) + f64::from(extra_tiles)) * flops_of_tile).collect()
        });
        Self::of_costs(tiles.collect(), batch, heads)
    }

    /// Of tiles whose operations are given: `[class][tile]`, for one head.
    pub(crate) fn of_costs(tiles: Vec<Vec<f64>>, batch: usize, heads: usize) -> Self {
        Self { tiles, batch, heads, next: (0, 0, 0) }
    }

    /// Floating-point operations of each query tile of one head of a batch entry.
    pub(crate) fn tile_flops(&self, batch: usize) -> &[f64] {
        &self.tiles[batch.min(self.tiles.len() - 1)]
    }

    /// Floating-point operations of all query tiles.
    pub(crate) fn all_flops(&self) -> f64 {
        let of_head = |batch: usize| self.tile_flops(batch).iter().sum::<f64>();
        (0..self.batch).map(of_head).sum::<f64>() * self.heads as f64
    }

    /// Whether all query tiles were given out.
    pub(crate) fn is_finished(&self) -> bool {
        self.next.0 == self.batch
    }

    /// The next piece that has work, and its operations.
    pub(crate) fn next(&mut self, size: PieceSize) -> Option<(Piece, f64)> {
        loop {
            let (piece, flops) = self.advance(size)?;
            if flops > 0.0 {
                return Some((piece, flops));
            }
        }
    }

    fn advance(&mut self, size: PieceSize) -> Option<(Piece, f64)> {
        let (batch, head, tile) = self.next;
        if batch == self.batch {
            return None;
        }
        let of_head: f64 = self.tile_flops(batch).iter().sum();
        let tiles = 0..self.tile_flops(batch).len();
        let of_batch = |batch: usize| self.tile_flops(batch).iter().sum::<f64>() * self.heads as f64;
        let fits = |flops: f64, tiles: usize| flops <= size.flops || tiles <= size.fewest_tiles;
        let batch_tiles = tiles.len() * self.heads;
        if (head, tile) == (0, 0) && self.heads <= MAX_BLOCKS && fits(of_batch(batch), batch_tiles) {
            let (end, flops) = take(batch..self.batch, size, batch_tiles, of_batch);
            self.next = (end, 0, 0);
            return Some((Piece { tiles, heads: 0..self.heads, batch: batch..end }, flops));
        }
        if tile == 0 && fits(of_head, tiles.len()) {
            let (end, flops) = take(head..self.heads, size, tiles.len(), |_| of_head);
            self.next = if end == self.heads { (batch + 1, 0, 0) } else { (batch, end, 0) };
            return Some((Piece { tiles, heads: head..end, batch: batch..batch + 1 }, flops));
        }
        let of_tile = self.tile_flops(batch);
        let (end, flops) = take(tile..tiles.end, size, 1, |tile| of_tile[tile]);
        self.next = match (end == tiles.end, head + 1 == self.heads) {
            (false, _) => (batch, head, end),
            (true, false) => (batch, head + 1, 0),
            (true, true) => (batch + 1, 0, 0),
        };
        Some((Piece { tiles: tile..end, heads: head..head + 1, batch: batch..batch + 1 }, flops))
    }
}

/// The end of the longest prefix of `range` within a size, of at least one and at most
/// [`MAX_BLOCKS`] elements, and its cost. Each element has `tiles` tiles; one that is more than a
/// piece by itself is not in one with others. What remains has the fewest tiles of a piece too.
pub(crate) fn take(
    range: Range<usize>,
    size: PieceSize,
    tiles: usize,
    cost: impl Fn(usize) -> f64,
) -> (usize, f64) {
    let (mut end, mut sum, mut with_work) = (range.start, 0.0, 0);
    while end < range.end && end - range.start < MAX_BLOCKS {
        let cost = cost(end);
        let filled = with_work > 0 && tiles * with_work.min(range.end - end) >= size.fewest_tiles;
        let is_whole = cost <= size.flops || tiles <= size.fewest_tiles;
        if end > range.start && (!is_whole || (filled && sum + cost > size.flops)) {
            break;
        }
        sum += cost;
        with_work += usize::from(cost > 0.0);
        end += 1;
    }
    (end, sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{PIECE_S, measured_speed};
    use kyklos::{AttentionProblem, Dtype, Mask, TileShape, TokenRuns};

    /// For every budget, each query tile of each head of each batch entry that has work is in
    /// exactly one piece.
    #[test]
    fn every_tile_with_work_is_in_one_piece() {
        let tile = TileShape { q_rows: 16, kv_cols: 16 };
        let problem = AttentionProblem::new([2, 100, 3, 3, 8], Dtype::F32, Mask::causal()).unwrap();
        let tokens = TokenRuns::contiguous(0..100);
        let work = &BlockWork::layers(&problem, &tokens, &tokens, tile)[0];
        let all = {
            let pieces = PieceSplitter::new(work, 2, 3, 8, 0);
            pieces.tile_flops(0).iter().sum::<f64>() * 6.0
        };
        let budgets = [0.0, all / 40.0, all / 6.0, all / 5.0, all / 2.0, all];
        for (budget, fewest_tiles) in
            budgets.into_iter().flat_map(|budget| [1, 3, 10, 30].map(|n| (budget, n)))
        {
            let mut pieces = PieceSplitter::new(work, 2, 3, 8, 0);
            let size = PieceSize { flops: budget, fewest_tiles };
            let (mut seen, mut sum, mut count) = (vec![0; 7 * 3 * 2], 0.0, 0);
            while let Some((piece, flops)) = pieces.next(size) {
                for batch in piece.batch.clone() {
                    for head in piece.heads.clone() {
                        piece.tiles.clone().for_each(|tile| seen[(batch * 3 + head) * 7 + tile] += 1);
                    }
                }
                let tiles = piece.tiles.len() * piece.heads.len() * piece.batch.len();
                assert!(flops <= budget || fewest_tiles > 1 || tiles == 1, "{piece:?}: {flops} of {size:?}");
                // More tiles than a head has are heads, which are not divided evenly.
                assert!(tiles >= fewest_tiles.min(7), "{piece:?}: {tiles} tiles of {size:?}");
                sum += flops;
                count += 1;
            }
            assert!(seen.iter().all(|times| *times == 1), "{size:?}: {seen:?}");
            assert_eq!(sum, all);
            assert_eq!(count == 1, budget == all || fewest_tiles > 21, "{count} pieces of {size:?}");
        }
    }

    /// A query tile that costs something without keys is in a piece.
    #[test]
    fn tiles_without_keys_are_in_a_piece_if_they_cost_something() {
        let tile = TileShape { q_rows: 16, kv_cols: 16 };
        let mask: Mask = "valid:40,0".parse().unwrap();
        let problem = AttentionProblem::new([2, 100, 1, 1, 8], Dtype::F32, mask).unwrap();
        let (rows, keys) = (TokenRuns::contiguous(84..100), TokenRuns::contiguous(0..100));
        let work = &BlockWork::layers(&problem, &rows, &keys, tile)[0];
        for (extra_tiles, expected) in [(0, 1), (1, 2)] {
            let mut pieces = PieceSplitter::new(work, 2, 1, 8, extra_tiles);
            let count = std::iter::from_fn(|| pieces.next(PieceSize { flops: 0.0, fewest_tiles: 1 })).count();
            assert_eq!(count, expected, "{extra_tiles} extra tiles");
        }
    }

    /// An entry of a batch that is more than a piece is divided, whatever stands before it.
    #[test]
    fn large_entries_are_divided_after_small_ones_too() {
        for before in [0.0, 1.0] {
            let mut pieces = PieceSplitter::of_costs(vec![vec![before; 6], vec![100.0; 6]], 3, 2);
            let size = PieceSize { flops: 250.0, fewest_tiles: 2 };
            let all: Vec<_> = std::iter::from_fn(|| pieces.next(size)).collect();
            assert!(all.iter().all(|(_, flops)| *flops <= 300.0), "{all:?}");
            let sum: f64 = all.iter().map(|(_, flops)| flops).sum();
            assert_eq!(sum, 12.0 * before + 2.0 * 12.0 * 100.0, "{all:?}");
        }
    }

    /// A tile of a long sequence takes longer than a piece should. The device computes `slots` of
    /// them at a time; the third piece takes half a second longer.
    #[test]
    fn pieces_fill_a_device_whose_tiles_take_long() {
        for (flops_per_s, slots, tile_flops) in [(3e13, 1056, 4e9), (2e12, 128, 4e9), (1e12, 40, 33e9)] {
            for hiccup_s in [0.0, 0.5] {
                let mut pieces = PieceSplitter::of_costs(vec![vec![tile_flops; 9450]], 1, 4);
                let (mut speed, mut took_s, mut count) = (None, 0.0, 0);
                let size = |speed: Option<f64>| PieceSize {
                    flops: PIECE_S * speed.unwrap_or(1e12),
                    fewest_tiles: slots,
                };
                while let Some((piece, flops)) = pieces.next(size(speed)) {
                    let tiles = piece.tiles.len() * piece.heads.len();
                    assert!(tiles >= slots, "{piece:?} of {slots}");
                    let rounds = tiles.div_ceil(slots) as f64;
                    let mut of_piece_s = rounds * slots as f64 * tile_flops / flops_per_s;
                    of_piece_s += if count == 2 { hiccup_s } else { 0.0 };
                    speed = Some(measured_speed(speed, flops, of_piece_s));
                    took_s += of_piece_s;
                    count += 1;
                }
                let ideal_s = 4.0 * 9450.0 * tile_flops / flops_per_s + hiccup_s;
                assert!(
                    took_s < 1.3 * ideal_s,
                    "{slots}: {took_s} s in {count} pieces instead of {ideal_s} s"
                );
            }
        }
    }
}
