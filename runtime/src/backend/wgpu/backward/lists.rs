//! Heads, positions and work lists of a backward call, in the one array that its kernels read.

use std::ops::Range;

use super::super::numbers::narrow;
use crate::backend::wgpu::attention::work::{RunList, TileRuns, key_runs};
use crate::error::Result;
use kyklos_plan::{BlockWork, MaskClass, RowSpan, TileRun};

/// The mask between a block's queries and keys in both directions, ready to upload.
#[derive(Debug)]
pub(super) struct Lists {
    pub(super) words: Vec<u32>,
    /// For each KV head, the query heads that read it; in the words from `readers_at` on.
    pub(super) readers: Vec<Range<u32>>,
    pub(super) readers_at: u32,
    pub(super) keys_at: u32,
    pub(super) spans_at: u32,
    /// What each tile of rows, and each tile of keys, meets of the other side.
    pub(super) sides: [Side; 2],
    pub(super) last_class: usize,
}

/// The work list of one kind of kernel.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) list: RunList,
    /// Where its starts and its runs are in the words.
    pub(super) starts_at: u32,
    pub(super) runs_at: u32,
}

impl Lists {
    pub(super) fn new(work: &BlockWork, kv_head_of: &[u32]) -> Result<Self> {
        let keys = narrow("the number of keys", work.kv_positions.len())?;
        let rows = narrow("the number of rows", work.classes[0].rows.len())?;
        let readers = readers(kv_head_of)?;
        let mut words = kv_head_of.to_vec();
        let readers_at = narrow("the number of query heads", words.len())?;
        words.extend(readers.iter().map(|heads| heads.start).chain(readers.last().map(|heads| heads.end)));
        let keys_at = narrow("the number of heads", words.len())?;
        words.extend_from_slice(&work.kv_positions);
        let spans_at = narrow("the number of keys", words.len())?;
        let spans = work.classes.iter().flat_map(|class| class.rows.iter());
        words.extend(spans.flat_map(|RowSpan { lo, hi }| [*lo, *hi]));
        let by_rows = |class: &MaskClass| {
            (0..work.q_tiles()).map(|tile| key_runs(class, tile, work.tile.kv_cols, keys)).collect()
        };
        let by_keys =
            |class: &MaskClass| row_runs(class, keys.div_ceil(work.tile.kv_cols), work.tile.q_rows, rows);
        let mut side = |classes: Vec<Vec<TileRuns>>| -> Result<Side> {
            let list = RunList::new(classes)?;
            let starts_at = narrow("the work list", words.len())?;
            words.extend_from_slice(&list.starts);
            let runs_at = narrow("the work list", words.len())?;
            words.extend_from_slice(&list.runs);
            narrow("the work list", words.len())?;
            Ok(Side { list, starts_at, runs_at })
        };
        let sides = [
            side(work.classes.iter().map(by_rows).collect())?,
            side(work.classes.iter().map(by_keys).collect())?,
        ];
        let last_class = work.classes.len() - 1;
        Ok(Self { readers, readers_at, keys_at, spans_at, sides, last_class, words })
    }
}

/// For each KV head the query heads that read it; `kv_head_of` ascends.
fn readers(kv_head_of: &[u32]) -> Result<Vec<Range<u32>>> {
    let kv_heads = kv_head_of.last().map_or(0, |last| last + 1);
    let first = |head: u32| {
        narrow("the number of query heads", kv_head_of.partition_point(|of_query| *of_query < head))
    };
    (0..kv_heads).map(|head| Ok(first(head)?..first(head + 1)?)).collect()
}

/// For each KV tile, the runs of rows that meet it: the list of `class`, transposed. Takes as many
/// steps as the two lists have runs, and one for each Q tile.
fn row_runs(class: &MaskClass, kv_tiles: u32, q_rows: u32, rows: u32) -> Vec<TileRuns> {
    let mut of_keys = vec![TileRuns::default(); kv_tiles as usize];
    // For each KV tile the run that goes on: its first row, and whether it is full.
    let mut open: Vec<Option<(u32, bool)>> = vec![None; kv_tiles as usize];
    let mut before = kinds(&[], kv_tiles);
    let q_tiles = class.starts.windows(2).map(|bounds| &class.runs[bounds[0] as usize..bounds[1] as usize]);
    for (row, runs) in
        (0..).step_by(q_rows as usize).map(|row: u32| row.min(rows)).zip(q_tiles.chain([&[][..]]))
    {
        let now = kinds(runs, kv_tiles);
        changes(&before, &now, |tiles, kind| {
            for tile in tiles {
                let tile = tile as usize;
                if let Some((first, full)) = open[tile].take() {
                    of_keys[tile].push(first..row, full, q_rows);
                }
                open[tile] = kind.map(|full| (row, full));
            }
        });
        before = now;
    }
    of_keys
}

/// A stretch of tiles of one kind, by its end: met in full, met in part, or not met.
type Kind = (u32, Option<bool>);

/// The kinds of all tiles `0..tiles`.
fn kinds(runs: &[TileRun], tiles: u32) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::with_capacity(2 * runs.len() + 1);
    let mut at = 0;
    for run in runs {
        if at < run.kv_tile {
            kinds.push((run.kv_tile, None));
        }
        at = run.kv_tile + run.count;
        kinds.push((at, Some(run.full)));
    }
    if at < tiles {
        kinds.push((tiles, None));
    }
    kinds
}

/// Calls `change` for each stretch whose kind is another one in `now`.
fn changes(before: &[Kind], now: &[Kind], mut change: impl FnMut(Range<u32>, Option<bool>)) {
    let (mut before, mut now) = (before.iter().peekable(), now.iter().peekable());
    let mut at = 0;
    while let (Some((old_end, old)), Some((new_end, new))) = (before.peek(), now.peek()) {
        let end = *old_end.min(new_end);
        if old != new {
            change(at..end, *new);
        }
        let (old_ends, new_ends) = (*old_end == end, *new_end == end);
        if old_ends {
            before.next();
        }
        if new_ends {
            now.next();
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos_plan::{AttentionProblem, Dtype, TileShape, TokenRuns};

    #[test]
    fn the_transposed_list_meets_the_same_pairs_in_runs() {
        let tile = TileShape { q_rows: 32, kv_cols: 32 };
        for mask in
            ["full", "causal", "window:40,3", "documents:0,90,130,301", "valid:170", "causal+window:70,0"]
        {
            let problem =
                AttentionProblem::new([1, 301, 1, 1, 8], Dtype::F32, mask.parse().unwrap()).unwrap();
            let q = TokenRuns::from_positions((0..100).chain(200..301));
            let kv = TokenRuns::from_positions((1..301).step_by(2));
            let work = &BlockWork::layers(&problem, &q, &kv, tile)[0];
            let lists = Lists::new(work, &[0, 0, 2, 2]).unwrap();
            assert_eq!(lists.readers, [0..2, 2..2, 2..4]);
            assert_eq!(lists.words[..8], [0, 0, 2, 2, 0, 2, 2, 4]);
            let [by_rows, by_keys] = &lists.sides;
            for (q_tile, rows) in (0..201).step_by(32).enumerate() {
                for (kv_tile, keys) in (0..150).step_by(32).enumerate() {
                    let of_rows = by_rows.list.met(0, q_tile, &(keys..keys + 32));
                    let of_keys = by_keys.list.met(0, kv_tile, &(rows..rows + 32));
                    let expected = if of_rows == 0 { 0 } else { 32.min(201 - rows) };
                    assert_eq!(of_keys, expected, "{mask}: {q_tile}, {kv_tile}");
                }
            }
        }
    }

    #[test]
    fn a_causal_list_has_two_runs_for_each_tile_of_keys() {
        let problem =
            AttentionProblem::new([1, 640, 1, 1, 8], Dtype::F32, "causal".parse().unwrap()).unwrap();
        let tokens = TokenRuns::contiguous(0..640);
        let tile = TileShape { q_rows: 32, kv_cols: 32 };
        let lists = Lists::new(&BlockWork::layers(&problem, &tokens, &tokens, tile)[0], &[0]).unwrap();
        let by_keys = &lists.sides[1].list;
        // The diagonal, and what is below it; the last tile has the diagonal only.
        assert_eq!(by_keys.runs.len(), 2 * (2 * 20 - 1));
        assert_eq!(by_keys.runs[..4], [32, 640, 0, 32]);
    }
}
