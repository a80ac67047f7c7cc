//! The work of one thread at a time: a stretch of query rows of all heads that share a KV head, against a stretch of its keys. So the
//! keys are packed once for all of them.

use std::ops::Range;

use pulp::Simd;

use super::super::pack::{pack_keys, pack_lanes, pack_value_words, pack_values, transposed};
use super::super::scratch::{Line, floats, floats_mut, grow};
use super::super::simd::{KernelShape, WithKernel, vectors, vectors_mut};
use super::bias::BiasBlock;
use super::blocks::Blocks;
use super::lanes::{Lanes, Stats};
use super::panel::{Keys, OfBias, OfWords, Panel, Rows, Sums};
use super::{BackwardCall, TILE};
use crate::backend::EMPTY_M;
use crate::{MaskClass, RowSpan};

/// One row of a sum for each token.
pub(super) type SumRows<'a> = Vec<&'a mut [f32]>;

/// The pairs of some query rows and some keys of a KV head, and the sums to which they add. No other job of the same wave has these
/// sums.
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

/// A job of a call.
pub(super) struct Run<'r, 'a> {
    pub(super) call: &'r BackwardCall<'r>,
    pub(super) job: &'r mut Job<'a>,
    pub(super) space: &'r mut Space,
}

/// Work space of one job. Its size depends on the stretches, which are bounded, not on the sequence.
#[derive(Debug, Default)]
pub(in super::super) struct Space {
    /// Of each query head.
    of_heads: Vec<OfHead>,
    /// k and v of a KV tile: `[key / MR][dim][MR]`.
    keys: [Vec<Line>; 2],
    /// k of a KV tile: `[dim / MR][key][MR]`.
    columns: Vec<Line>,
    /// dK and dV of a KV tile, in [`Blocks`].
    d_keys: [Vec<Line>; 2],
    /// P and dS of a panel: `[key][lane]`.
    weights: [Vec<Line>; 2],
    /// dS and P of a panel in words of two rows: `[key][lane / 2]`.
    words: [Vec<Line>; 2],
    /// Terms of logits of a panel: `[key][lane]`.
    terms: Vec<Line>,
    /// With a softcap and the gradient of a bias, the slopes of a panel: `[key][lane]`.
    slopes: Vec<Line>,
    /// Rows of one head while they are converted.
    row: Vec<Line>,
}

/// The query rows of a head.
#[derive(Debug, Default)]
struct OfHead {
    /// q with the factor of the scores, and dO: `panels × [dim][lane]`.
    lanes: [Vec<Line>; 2],
    /// q and dO, by row: `panels ×` [`Blocks`].
    rows: [Vec<Line>; 2],
    /// dQ: `panels × [dim][lane]`.
    dq: Vec<Line>,
    /// Span and statistics of each query row.
    spans: Vec<RowSpan>,
    stats: Vec<Stats>,
    /// For each panel, whether all elements of q and dO are finite.
    finite: Vec<[bool; 2]>,
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

impl WithKernel for Run<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, simd: S) {
        let Self { call, job, space } = self;
        let shape = KernelShape::of::<S, MR, NV>();
        let (lanes, dim) = (shape.lanes, call.forward.dim);
        let (padded, columns) = (dim.next_multiple_of(MR), TILE.kv_cols as usize);
        let words = call.forward.words();
        let of_rows = Blocks::new(dim, S::F32_LANES, lanes / call.forward.elements_in_word());
        let of_keys = Blocks::new(dim, S::F32_LANES, columns);
        space.fit(job, dim, shape, [of_rows, of_keys], call.of_bias && call.forward.softcap.is_some());
        for (q_head, of_head) in job.q_heads.clone().zip(&mut space.of_heads) {
            load_rows(call, job, q_head, of_head);
            let row = &mut floats_mut(&mut space.row)[..lanes * words];
            pack_queries(call, job, q_head, lanes, of_rows, row, of_head);
            floats_mut(&mut of_head.dq).fill(0.0);
        }
        let class = call.forward.work.class_of(job.batch);
        let tile_rows = TILE.q_rows as usize;
        let mut cursors: Vec<_> =
            job.q_tiles.clone().map(|tile| seen(class, tile, job.kv_tiles.clone()).peekable()).collect();
        for kv_tile in job.kv_tiles.clone() {
            let of_tile = cursors.iter_mut().map(|seen| seen.next_if(|(tile, _)| *tile == kv_tile));
            let seen: Vec<_> = of_tile.map(|seen| seen.map(|(_, full)| full)).collect();
            if seen.iter().all(Option::is_none) {
                continue;
            }
            let positions = call.forward.positions(kv_tile as u32);
            let finite = pack_tile::<MR>(call, job, kv_tile, positions.len(), space);
            let Space {
                of_heads,
                keys,
                columns: of_columns,
                d_keys,
                weights,
                terms,
                slopes,
                words: of_words,
                ..
            } = &mut *space;
            for (index, (q_head, of_head)) in job.q_heads.clone().zip(of_heads).enumerate() {
                for (q_tile, full) in seen.iter().enumerate() {
                    let Some(full) = full else { continue };
                    let rows = q_tile * tile_rows..job.rows().min((q_tile + 1) * tile_rows);
                    for first in rows.clone().step_by(lanes) {
                        let of_panel = first..rows.end.min(first + lanes);
                        let at = [job.batch, job.q_tiles.start * tile_rows + first, q_head];
                        if let Some(pairs) = &call.forward.pairs
                            && !pairs.terms(at, of_panel.len(), positions, lanes, floats_mut(terms))
                        {
                            continue;
                        }
                        let panel = first / lanes;
                        let OfHead { lanes: packed, rows, dq, spans, stats, finite: finite_rows } =
                            &mut *of_head;
                        let [q, d_o] = packed
                            .each_ref()
                            .map(|x| vectors::<S, NV>(&floats(x)[panel * lanes * words..][..lanes * words]));
                        let by_row = |index: usize| Rows {
                            elements: &floats(&rows[index])[panel * of_rows.elements()..]
                                [..of_rows.elements()],
                            finite: finite_rows[panel][index],
                        };
                        let [weights, d_scores] =
                            weights.each_mut().map(|w| vectors_mut::<S, NV>(floats_mut(w)));
                        let in_groups = keys.each_ref().map(|lines| floats(lines).as_chunks::<MR>().0);
                        let spans = &spans[of_panel.clone()];
                        Panel::<S, MR, NV> {
                            dim,
                            softcap: call.forward.softcap,
                            words: call.forward.bf16.map(|products| OfWords {
                                products,
                                factor: call.forward.query_factor(),
                                of_rows: of_words.each_mut().map(|lines| floats_mut(lines)),
                            }),
                            q,
                            d_o,
                            by_row: [by_row(0), by_row(1)],
                            spans,
                            stats: Lanes::new(simd, spans, &stats[of_panel]),
                            terms: call.forward.pairs.is_some().then(|| vectors::<S, NV>(floats(terms))),
                            masked: !full || spans.len() < lanes || spans.contains(&RowSpan::EMPTY),
                            weights,
                            d_scores,
                            bias: job.bias.get_mut(index).map(|block| OfBias {
                                block,
                                first: [first, (kv_tile - job.kv_tiles.start) * TILE.kv_cols as usize],
                                slopes: vectors_mut::<S, NV>(floats_mut(slopes)),
                            }),
                        }
                        .attend(
                            simd,
                            &Keys {
                                in_groups,
                                in_columns: floats(of_columns).as_chunks::<MR>().0,
                                stride: columns,
                                finite,
                                positions,
                            },
                            Sums {
                                dq: vectors_mut::<S, NV>(
                                    &mut floats_mut(dq)[panel * lanes * padded..][..lanes * padded],
                                ),
                                of_keys: d_keys
                                    .each_mut()
                                    .map(|lines| &mut floats_mut(lines)[..of_keys.elements()]),
                                blocks: of_keys,
                            },
                        );
                    }
                }
            }
            add_to_keys(call, job, kv_tile, of_keys, positions.len(), space);
        }
        for ((_, dq), of_head) in job.dq.iter_mut().zip(&space.of_heads) {
            add_to_rows(dq, call.forward.scale, [padded, lanes], &of_head.dq);
        }
    }
}

/// Spans and statistics of the query rows. A row whose log-sum-exp is −∞ sees nothing.
fn load_rows(call: &BackwardCall<'_>, job: &Job<'_>, q_head: usize, of_head: &mut OfHead) {
    let class = call.forward.work.class_of(job.batch);
    let first = job.q_tiles.start * TILE.q_rows as usize;
    of_head.spans.clear();
    of_head.stats.clear();
    for row in first..first + job.rows() {
        let mut of_row = [0.0; 2];
        let stats = call.stats.row([job.batch, row, q_head], &mut of_row);
        let [lse, delta] = [stats[0], stats[1]];
        let empty = lse == -EMPTY_M;
        of_head.spans.push(if empty { RowSpan::EMPTY } else { class.rows[row] });
        of_head.stats.push(Stats::new(if empty { None } else { Some(lse) }, delta));
    }
}

/// q and dO of a head, in lanes and by row. The factor is on q in lanes, as in the forward pass: so scores have the same rounding as
/// those in the log-sum-exp. `space` holds `lanes` rows.
#[inline(always)]
fn pack_queries(
    call: &BackwardCall<'_>,
    job: &Job<'_>,
    q_head: usize,
    lanes: usize,
    blocks: Blocks,
    space: &mut [f32],
    of_head: &mut OfHead,
) {
    let forward = &call.forward;
    let (rows, words, in_words) = (job.rows(), forward.words(), forward.bf16.is_some());
    let first = job.q_tiles.start * TILE.q_rows as usize;
    of_head.finite.clear();
    of_head.finite.resize(rows.div_ceil(lanes), [true; 2]);
    let tensors = [(&forward.q, (!in_words).then(|| forward.query_factor())), (&call.d_o, None)];
    for (index, (tensor, factor)) in tensors.into_iter().enumerate() {
        let in_lanes = floats_mut(&mut of_head.lanes[index]).chunks_exact_mut(lanes * words);
        let by_row = floats_mut(&mut of_head.rows[index]).chunks_exact_mut(blocks.elements());
        for (panel, (in_lanes, by_row)) in in_lanes.zip(by_row).enumerate().take(rows.div_ceil(lanes)) {
            let from = panel * lanes;
            let (at, count) = ([job.batch, first + from, q_head], lanes.min(rows - from));
            pack_lanes(tensor, at, count, lanes, factor, space, in_lanes);
            of_head.finite[panel][index] = if in_words {
                blocks.pack_words(tensor, at, count, space, by_row)
            } else {
                blocks.pack(tensor, at, count, space, by_row)
            };
        }
    }
}

/// k and v of a KV tile, and zeros for its sums. Whether k is finite.
#[inline(always)]
fn pack_tile<const MR: usize>(
    call: &BackwardCall<'_>,
    job: &Job<'_>,
    tile: usize,
    count: usize,
    space: &mut Space,
) -> bool {
    let (words, stride) = (call.forward.words(), TILE.kv_cols as usize);
    let at = [job.batch, tile * stride, job.kv_head];
    for sums in &mut space.d_keys {
        floats_mut(sums).fill(0.0);
    }
    let row = &mut floats_mut(&mut space.row)[..MR * words];
    for (tensor, into) in [&call.forward.k, &call.forward.v].into_iter().zip(&mut space.keys) {
        pack_keys::<MR>(tensor, at, count, row, floats_mut(into));
    }
    let columns = floats_mut(&mut space.columns);
    if call.forward.bf16.is_some() {
        pack_value_words::<MR>(&call.forward.k, at, count, stride / 2, &mut row[..2 * words], columns)
    } else {
        pack_values::<MR>(&call.forward.k, at, count, stride, &mut row[..words], columns)
    }
}

/// Adds dK and dV of a KV tile to the sums of the job.
#[inline(always)]
fn add_to_keys(
    call: &BackwardCall<'_>,
    job: &mut Job<'_>,
    tile: usize,
    blocks: Blocks,
    count: usize,
    space: &Space,
) {
    let first = (tile - job.kv_tiles.start) * TILE.kv_cols as usize;
    for ((into, sums), factor) in
        [&mut job.dk, &mut job.dv].into_iter().zip(&space.d_keys).zip([call.forward.scale, 1.0])
    {
        let sums = floats(sums);
        for (key, into) in into[first..first + count].iter_mut().enumerate() {
            let mut into = &mut into[..];
            for block in 0..blocks.count() {
                let part = blocks.part(key, block);
                let (elements, rest) = into.split_at_mut(part.len());
                for (into, sum) in elements.iter_mut().zip(&sums[part]) {
                    *into += sum * factor;
                }
                into = rest;
            }
        }
    }
}

/// Adds dQ of a head to its sums.
#[inline(always)]
fn add_to_rows(into: &mut SumRows<'_>, scale: f32, [padded, lanes]: [usize; 2], dq: &[Line]) {
    let panels = floats(dq).chunks_exact(lanes * padded);
    for (rows, sums) in into.chunks_mut(lanes).zip(panels) {
        for (lane, rows) in (0..).step_by(4).zip(rows.chunks_mut(4)) {
            let mut chunks = rows.iter_mut().map(|row| row.as_chunks_mut::<8>().0.iter_mut());
            let mut chunks: [_; 4] = std::array::from_fn(|_| chunks.next().unwrap_or_default());
            for sums in sums.chunks_exact(8 * lanes) {
                // Loops, as in `pack_lanes`.
                let mut block = [[0.0; 4]; 8];
                for (to, sums) in block.iter_mut().zip(sums.chunks_exact(lanes)) {
                    to.copy_from_slice(&sums[lane..lane + 4]);
                }
                for (into, values) in chunks.iter_mut().zip(transposed(block)) {
                    for (into, value) in into.next().into_iter().flatten().zip(values) {
                        *into += value * scale;
                    }
                }
            }
        }
    }
}

impl Space {
    /// Makes room; contents are unspecified.
    fn fit(
        &mut self,
        job: &Job<'_>,
        dim: usize,
        shape: KernelShape,
        [of_rows, of_keys]: [Blocks; 2],
        slopes: bool,
    ) {
        let rows = job.rows().next_multiple_of(shape.lanes);
        let keys = (TILE.kv_cols as usize).next_multiple_of(shape.mr);
        let padded = dim.next_multiple_of(shape.mr);
        if self.of_heads.len() < job.q_heads.len() {
            self.of_heads.resize_with(job.q_heads.len(), OfHead::default);
        }
        for of_head in &mut self.of_heads[..job.q_heads.len()] {
            of_head.lanes.iter_mut().for_each(|lines| grow(lines, rows * dim));
            of_head.rows.iter_mut().for_each(|lines| grow(lines, rows / shape.lanes * of_rows.elements()));
            grow(&mut of_head.dq, rows * padded);
        }
        self.keys.iter_mut().for_each(|lines| grow(lines, keys * dim));
        grow(&mut self.columns, keys * padded);
        self.d_keys.iter_mut().for_each(|lines| grow(lines, of_keys.elements()));
        self.weights.iter_mut().for_each(|lines| grow(lines, keys * shape.lanes));
        self.words.iter_mut().for_each(|lines| grow(lines, keys * shape.lanes / 2));
        grow(&mut self.terms, keys * shape.lanes);
        if slopes {
            grow(&mut self.slopes, keys * shape.lanes);
        }
        grow(&mut self.row, shape.mr.max(shape.lanes) * dim);
    }
}
