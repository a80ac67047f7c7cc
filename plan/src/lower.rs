//! Lowering of masks and token lists to the arrays that kernels read: an interval of key positions
//! for each query row, a position for each key, and a list of tiles that are not empty. If a mask
//! gives a row several intervals, there is one layer for each interval, and a block is attended
//! layer by layer.

use std::sync::Arc;

use crate::problem::AttentionProblem;
use crate::spans::RowSpan;
use crate::tokens::{TokenIndex, TokenRuns};

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
    /// Whether every row of the Q tile sees every key of these tiles, so that no element needs a
    /// test.
    pub full: bool,
}

/// The visible part of one block of queries × keys, for all batch entries with the same mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskClass {
    /// One span for each query row of the block, in buffer order. Blocks of other keys may share
    /// them.
    pub rows: Arc<[RowSpan]>,
    /// `q_tiles + 1` offsets into `runs`: the runs of Q tile `t` are `runs[starts[t]..starts[t +
    /// 1]]`.
    pub starts: Vec<u32>,
    /// Tiles that are not empty, ascending within a Q tile.
    pub runs: Vec<TileRun>,
}

/// Everything a kernel needs to know about positions and masks for one Q block against one KV
/// block.
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
    /// Lowers `problem`'s mask for the queries `q_tokens` against the keys `kv_tokens`. There is at
    /// least one layer; a mask without slices has no more.
    pub fn layers(
        problem: &AttentionProblem,
        q_tokens: &TokenRuns,
        kv_tokens: &TokenRuns,
        tile: TileShape,
    ) -> Vec<Self> {
        let kv_positions = kv_tokens.to_vec();
        let layers_of = |batch| row_layers(problem, batch, q_tokens, kv_tokens);
        let mut rows: Vec<Vec<Vec<RowSpan>>> = (0..problem.mask.batch_classes()).map(layers_of).collect();
        let layers = rows.iter().map(Vec::len).max().unwrap_or(0);
        (0..layers)
            .map(|layer| {
                let rows = rows.iter_mut().map(|layers| match layers.get_mut(layer) {
                    Some(rows) => std::mem::take(rows),
                    None => vec![RowSpan::EMPTY; q_tokens.len()],
                });
                Self::of_rows(kv_positions.clone(), rows.collect(), tile, problem.fixed_order)
            })
            .collect()
    }

    /// The work of one layer, from what each row sees: `rows` by class of the mask, the keys by
    /// their positions. With `fixed_order` every tile is tested, see
    /// `kyklos::backend::Attend::fixed_order`.
    pub fn of_rows(
        kv_positions: Vec<u32>,
        rows: Vec<Vec<RowSpan>>,
        tile: TileShape,
        fixed_order: bool,
    ) -> Self {
        let kv_bounds: Vec<(u32, u32)> = kv_positions
            .chunks(tile.kv_cols as usize)
            .map(|tile| tile.iter().fold((u32::MAX, 0), |(lo, hi), p| (lo.min(*p), hi.max(*p))))
            .collect();
        let class = |rows| MaskClass::new(rows, &kv_bounds, tile, fixed_order);
        Self { tile, classes: rows.into_iter().map(class).collect(), kv_positions }
    }

    /// Shares the row spans of `other` where they are the same: otherwise each step of a tile would
    /// keep a copy.
    pub fn share_rows(&mut self, other: &Self) {
        for (class, other) in self.classes.iter_mut().zip(&other.classes) {
            if class.rows == other.rows {
                class.rows = other.rows.clone();
            }
        }
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

    /// (query, key) tiles that are not empty, over `batch` entries and one head: the work, in
    /// tiles.
    pub fn tiles(&self, batch: usize) -> u64 {
        (0..batch).map(|b| self.class_of(b).runs.iter().map(|run| u64::from(run.count)).sum::<u64>()).sum()
    }
}

/// Whether any of the queries sees any of the keys, for any batch entry.
pub(crate) fn any_visible(problem: &AttentionProblem, q_tokens: &TokenRuns, kv_tokens: &TokenRuns) -> bool {
    let keys = TokenIndex::new(kv_tokens);
    (0..problem.mask.batch_classes()).any(|batch| {
        let sees = |token: u32| {
            let spans = problem.mask.visible(batch, problem.q_position(token), problem.kv_len);
            spans.iter().any(|span| keys.meets(span.lo, span.hi))
        };
        q_tokens.runs().iter().any(|run| {
            // Most invisible blocks are outside the hull of a whole run. Most visible blocks are visible to
            // the last query of a run. In both cases one test is enough.
            let [first, last] = [run.start, run.last()].map(|token| problem.q_position(token));
            let hull = problem.mask.hull(batch, first, last, problem.kv_len);
            keys.meets(hull.lo, hull.hi)
                && (sees(run.last()) || (0..run.count).any(|i| sees(run.start + i * run.stride)))
        })
    })
}

/// The interval of every query row in each layer. If a row has several intervals, only intervals
/// with keys of the block need a layer.
fn row_layers(
    problem: &AttentionProblem,
    batch: usize,
    q_tokens: &TokenRuns,
    kv_tokens: &TokenRuns,
) -> Vec<Vec<RowSpan>> {
    let keys = TokenIndex::new(kv_tokens);
    let mut layers = vec![vec![RowSpan::EMPTY; q_tokens.len()]];
    for (row, token) in q_tokens.iter().enumerate() {
        match &*problem.mask.visible(batch, problem.q_position(token), problem.kv_len) {
            [] => {}
            [span] => layers[0][row] = *span,
            spans => {
                for (layer, span) in spans.iter().filter(|span| keys.meets(span.lo, span.hi)).enumerate() {
                    if layer == layers.len() {
                        layers.push(vec![RowSpan::EMPTY; q_tokens.len()]);
                    }
                    layers[layer][row] = *span;
                }
            }
        }
    }
    layers
}

impl MaskClass {
    /// With `each_tested` no tile counts as full. The reason: whether a tile is full depends on the
    /// rows in it, and kernels use other instructions for full tiles, which may round
    /// differently.
    fn new(rows: Vec<RowSpan>, kv_bounds: &[(u32, u32)], tile: TileShape, each_tested: bool) -> Self {
        let mut starts = vec![0];
        let mut runs: Vec<TileRun> = Vec::new();
        for tile_rows in rows.chunks(tile.q_rows as usize) {
            // Over the rows that see any key: the union of their visible keys, and the intersection. A tile
            // with a row that sees no key is not full.
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
                let full = !each_tested && all_see && common.0 <= *lo && *hi < common.1;
                match runs[first..].last_mut() {
                    Some(run) if run.full == full && run.kv_tile + run.count == kv_tile => run.count += 1,
                    _ => runs.push(TileRun { kv_tile, count: 1, full }),
                }
            }
            starts.push(u32::try_from(runs.len()).expect("at most one run for each pair of tiles"));
        }
        Self { rows: rows.into(), starts, runs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::mask::Mask;

    #[test]
    fn causal_tiles_are_full_below_the_diagonal_and_absent_above() {
        let problem = AttentionProblem::new([1, 64, 1, 1, 8], Dtype::F32, Mask::causal()).unwrap();
        let tokens = TokenRuns::contiguous(0..64);
        let work = &BlockWork::layers(&problem, &tokens, &tokens, TileShape { q_rows: 16, kv_cols: 16 })[0];
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
            let [work] = &BlockWork::layers(&problem, &q, &kv, tile)[..] else { panic!("{mask}: one layer") };
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

    #[test]
    fn layers_show_every_visible_pair_of_a_union_once() {
        let mask = "slices:0..40x0..10,0..40x20..30,10..61x28..50/causal,30..61x55..61,5..6x0..61+valid:58";
        let problem = AttentionProblem::new([1, 61, 1, 1, 8], Dtype::F32, mask.parse().unwrap()).unwrap();
        let q = TokenRuns::from_positions((0..20).chain(45..61));
        for kv in [TokenRuns::from_positions((1..61).step_by(2)), TokenRuns::contiguous(0..61)] {
            let layers = BlockWork::layers(&problem, &q, &kv, TileShape { q_rows: 7, kv_cols: 5 });
            assert!(layers.len() > 1);
            for (row, token) in q.iter().enumerate() {
                for key in kv.iter() {
                    let times = layers.iter().filter(|work| work.classes[0].rows[row].sees(key)).count();
                    assert_eq!(times == 1, problem.mask.visible(0, token, 61).sees(key), "{token} {key}");
                    assert!(times <= 1);
                }
            }
        }
        // A block with keys of only one interval has one layer.
        let one = TokenRuns::contiguous(20..30);
        assert_eq!(BlockWork::layers(&problem, &q, &one, TileShape { q_rows: 7, kv_cols: 5 }).len(), 1);
    }
}
