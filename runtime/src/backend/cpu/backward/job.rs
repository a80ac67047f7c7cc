//! The work of one thread at a time: a stretch of query rows of all heads that share a KV head,
//! against a stretch of its keys. So the keys are packed once for all of them.

use std::ops::Range;

use super::super::scratch::{Line, grow};
use super::bias::BiasBlock;
use super::blocks::Blocks;
use super::lanes::Stats;
use super::{BackwardCall, TILE};
use crate::backend::cpu::arithmetic::simd::KernelShape;
use kyklos_plan::{MaskClass, RowSpan};

/// One row of a sum for each token.
pub(super) type SumRows<'a> = Vec<&'a mut [f32]>;

/// The pairs of some query rows and some keys of a KV head, and the sums to which they add. No
/// other job of the same wave has these sums.
pub(super) struct Job<'a> {
    pub(super) batch: usize,
    /// The query heads that read the KV head.
    pub(super) q_heads: Range<usize>,
    pub(super) kv_head: usize,
    pub(super) q_tiles: Range<usize>,
    pub(super) kv_tiles: Range<usize>,
    /// Where the sums of the keys belong.
    pub(super) kv_slot: usize,
    /// For each query head, where its sums belong, and the sums.
    pub(super) dq: Vec<(usize, SumRows<'a>)>,
    pub(super) dk: SumRows<'a>,
    pub(super) dv: SumRows<'a>,
    /// For each query head, dS of its pairs, where the gradient of the bias is wanted.
    pub(super) bias: Vec<BiasBlock>,
}

/// Work space of one job. Its size depends on the stretches, which are bounded, not on the
/// sequence.
#[derive(Debug, Default)]
pub(in super::super) struct Space {
    /// Of each query head.
    pub(super) of_heads: Vec<OfHead>,
    /// k and v of a KV tile: `[key / MR][dim][MR]`.
    pub(super) keys: [Vec<Line>; 2],
    /// k of a KV tile: `[dim / MR][key][MR]`.
    pub(super) columns: Vec<Line>,
    /// dK and dV of a KV tile, in [`Blocks`].
    pub(super) d_keys: [Vec<Line>; 2],
    /// P and dS of a panel: `[key][lane]`.
    pub(super) weights: [Vec<Line>; 2],
    /// dS and P of a panel in words of two rows: `[key][lane / 2]`.
    pub(super) words: [Vec<Line>; 2],
    /// Terms of logits of a panel: `[key][lane]`.
    pub(super) terms: Vec<Line>,
    /// With a softcap and the gradient of a bias, the slopes of a panel: `[key][lane]`.
    pub(super) slopes: Vec<Line>,
    /// Rows of one head while they are converted.
    pub(super) row: Vec<Line>,
}

/// The query rows of a head.
#[derive(Debug, Default)]
pub(super) struct OfHead {
    /// q with the factor of the scores, and dO: `panels × [dim][lane]`.
    pub(super) lanes: [Vec<Line>; 2],
    /// q and dO, by row: `panels ×` [`Blocks`].
    pub(super) rows: [Vec<Line>; 2],
    /// dQ: `panels × [dim][lane]`.
    pub(super) dq: Vec<Line>,
    /// Span and statistics of each query row.
    pub(super) spans: Vec<RowSpan>,
    pub(super) stats: Vec<Stats>,
    /// For each panel, whether all elements of q and dO are finite.
    pub(super) finite: Vec<[bool; 2]>,
}

/// The KV tiles of `tiles` that Q tile `q_tile` sees, each with whether every row sees every key.
pub(super) fn seen(
    class: &MaskClass,
    q_tile: usize,
    tiles: Range<usize>,
) -> impl Iterator<Item = (usize, bool)> {
    let runs = &class.runs[class.starts[q_tile] as usize..class.starts[q_tile + 1] as usize];
    let first = runs.partition_point(|run| (run.kv_tile + run.count) as usize <= tiles.start);
    let (from, to) = (tiles.start, tiles.end);
    runs[first..].iter().take_while(move |run| (run.kv_tile as usize) < to).flat_map(move |run| {
        let last = (run.kv_tile + run.count) as usize;
        ((run.kv_tile as usize).max(from)..last.min(to)).map(|tile| (tile, run.full))
    })
}

impl Job<'_> {
    /// Pairs of tiles, of all query heads.
    pub(super) fn tiles(&self, call: &BackwardCall<'_>) -> u64 {
        let class = call.forward.work.class_of(self.batch);
        let of_tile = |tile| seen(class, tile, self.kv_tiles.clone()).count() as u64;
        self.q_tiles.clone().map(of_tile).sum::<u64>() * self.q_heads.len() as u64
    }

    /// Query rows of each head.
    pub(super) fn rows(&self) -> usize {
        self.dq.first().map_or(0, |(_, sums)| sums.len())
    }
}

impl Space {
    /// Makes room for heads of `padded` elements; contents are unspecified.
    pub(super) fn fit(
        &mut self,
        job: &Job<'_>,
        padded: usize,
        shape: KernelShape,
        [of_rows, of_keys]: [Blocks; 2],
        slopes: bool,
    ) {
        let rows = job.rows().next_multiple_of(shape.lanes);
        let keys = (TILE.kv_cols as usize).next_multiple_of(shape.mr);
        if self.of_heads.len() < job.q_heads.len() {
            self.of_heads.resize_with(job.q_heads.len(), OfHead::default);
        }
        for of_head in &mut self.of_heads[..job.q_heads.len()] {
            of_head.lanes.iter_mut().for_each(|lines| grow(lines, rows * padded));
            of_head.rows.iter_mut().for_each(|lines| grow(lines, rows / shape.lanes * of_rows.elements()));
            grow(&mut of_head.dq, rows * padded);
        }
        self.keys.iter_mut().for_each(|lines| grow(lines, keys * padded));
        grow(&mut self.columns, keys * padded);
        self.d_keys.iter_mut().for_each(|lines| grow(lines, of_keys.elements()));
        self.weights.iter_mut().for_each(|lines| grow(lines, keys * shape.lanes));
        self.words.iter_mut().for_each(|lines| grow(lines, keys * of_rows.rows));
        grow(&mut self.terms, keys * shape.lanes);
        if slopes {
            grow(&mut self.slopes, keys * shape.lanes);
        }
        grow(&mut self.row, shape.mr.max(shape.lanes) * padded);
    }
}
