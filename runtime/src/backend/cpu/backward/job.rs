//! The work of one thread at a time: one tile of rows or of keys in the lanes of vectors, against tiles of the other side.

use std::ops::Range;

use pulp::Simd;

use super::super::pack::{MAX_LANES, pack_keys, pack_lanes, pack_values};
use super::super::scratch::{Line, grow};
use super::super::simd::{KernelShape, WithKernel};
use super::panel::{Broadcast, Fixed, Lanes, Panel, Stats};
use super::{BackwardCall, TILE};
use crate::RowSpan;
use crate::backend::EMPTY_M;

/// A tile of the side that is not in lanes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BroadcastTile {
    pub(super) tile: usize,
    /// Whether every row sees every key of the two tiles.
    pub(super) full: bool,
}

/// One tile of one head, and the sums of its rows.
pub(super) struct Job<'a> {
    pub(super) batch: usize,
    /// A query head, or a KV head.
    pub(super) head: usize,
    pub(super) tile: usize,
    /// dQ, or dK: `rows × [dim]`.
    pub(super) first: Vec<&'a mut [f32]>,
    /// dV; empty in a job of query rows.
    pub(super) second: Vec<&'a mut [f32]>,
}

/// A job against the tiles `tiles` of its list.
pub(super) struct Run<'r, 'a> {
    pub(super) call: &'r BackwardCall<'r>,
    pub(super) job: &'r mut Job<'a>,
    pub(super) fixed: Fixed,
    pub(super) tiles: Range<usize>,
    pub(super) space: &'r mut Space,
}

/// Work space of one job. Its size depends on the tile, not on the sequence.
#[derive(Debug, Default)]
pub(in super::super) struct Space {
    /// q with the factor of the scores, or k, and dO or v: `panels × [dim][lane]`.
    lanes: [Vec<Line>; 2],
    /// The sums: `panels × [dim][lane]`.
    sums: [Vec<Line>; 2],
    /// k and v, or q with the factor of the scores and dO: `[row / MR][dim][MR]`.
    by_row: [Vec<Line>; 2],
    /// k, or q and dO: `[dim / MR][row][MR]`.
    by_dim: [Vec<Line>; 2],
    /// P and dS of a panel: `[row][lane]`.
    pub(super) weights: [Vec<Line>; 2],
    /// Terms of logits of a panel: `[row][lane]`, and as the tensor's reader writes them.
    terms: [Vec<Line>; 2],
    /// Rows of one head while they are converted.
    row: Vec<Line>,
    /// Span and statistics of each row of the Q tile.
    spans: Vec<RowSpan>,
    stats: Vec<Stats>,
}

impl Job<'_> {
    /// The tiles of the other side that it meets.
    pub(super) fn tiles<'c>(&self, call: &'c BackwardCall<'_>, fixed: Fixed) -> &'c [BroadcastTile] {
        let classes = if fixed == Fixed::Rows { &call.by_rows } else { &call.by_keys };
        &classes[if classes.len() > 1 { self.batch } else { 0 }][self.tile]
    }
}

impl WithKernel for Run<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, simd: S) {
        let Self { call, job, fixed, tiles, space } = self;
        let shape = KernelShape::of::<S, MR, NV>();
        let (lanes, dim) = (shape.lanes, call.forward.dim);
        let padded = dim.next_multiple_of(MR);
        space.fit(dim, shape);
        let rows = job.first.len();
        let panels = rows.div_ceil(lanes);
        pack_fixed(call, job, fixed, lanes, space);
        let sums = if fixed == Fixed::Rows { 1 } else { 2 };
        for sums in &mut space.sums[..sums] {
            floats_mut(sums)[..panels * lanes * padded].fill(0.0);
        }
        let all = job.tiles(call, fixed);
        let tiles = &all[tiles.start.min(all.len())..tiles.end.min(all.len())];
        let heads = match fixed {
            Fixed::Rows => job.head..job.head + 1,
            Fixed::Keys => call.q_heads_of[job.head].clone(),
        };
        for q_head in heads {
            if fixed == Fixed::Rows {
                load_rows(call, job.batch, q_head, job.tile, space);
            }
            for BroadcastTile { tile, full } in tiles.iter().copied() {
                if fixed == Fixed::Keys {
                    load_rows(call, job.batch, q_head, tile, space);
                }
                let full = full && space.spans.iter().all(|span| *span != RowSpan::EMPTY);
                let kv_head = if fixed == Fixed::Keys { job.head } else { kv_head_of(call, q_head) };
                let finite = pack_broadcast::<MR>(call, fixed, [job.batch, q_head, kv_head], tile, space);
                let (q_tile, kv_tile) =
                    if fixed == Fixed::Rows { (job.tile, tile) } else { (tile, job.tile) };
                let positions = positions(call, kv_tile);
                for p in 0..panels {
                    let first = p * lanes;
                    let of_lanes = first..rows.min(first + lanes);
                    let at = [job.batch, q_tile, q_head];
                    if call.forward.pairs.is_some()
                        && !load_terms(call, fixed, at, of_lanes.clone(), positions, lanes, space)
                    {
                        continue;
                    }
                    let Space { lanes: x, sums, by_row, by_dim, weights, terms, spans, stats, .. } =
                        &mut *space;
                    let [x1, x2] =
                        x.each_ref().map(|x| vectors::<S, NV>(&floats(x)[p * lanes * dim..][..lanes * dim]));
                    let [sum1, sum2] = sums.each_mut().map(|sums| {
                        let all = floats_mut(sums);
                        let at = (p * lanes * padded).min(all.len());
                        let end = (at + lanes * padded).min(all.len());
                        vectors_mut::<S, NV>(&mut all[at..end])
                    });
                    let [weights, d_scores] = weights.each_mut().map(|w| vectors_mut::<S, NV>(floats_mut(w)));
                    let panel = Panel::<S, MR, NV> {
                        dim,
                        softcap: call.forward.softcap,
                        x: [x1, x2],
                        lanes: match fixed {
                            Fixed::Rows => Lanes::rows(simd, &spans[of_lanes.clone()], &stats[of_lanes]),
                            Fixed::Keys => Lanes::keys(simd, &positions[of_lanes]),
                        },
                        terms: call.forward.pairs.is_some().then(|| vectors::<S, NV>(floats(&terms[0]))),
                        masked: !full,
                        weights,
                        d_scores,
                    };
                    let count = if fixed == Fixed::Rows { positions.len() } else { spans.len() };
                    let stride = (TILE.q_rows as usize).next_multiple_of(MR);
                    let y = Broadcast {
                        fixed,
                        by_row: by_row.each_ref().map(|y| floats(y).as_chunks::<MR>().0),
                        by_dim: by_dim.each_ref().map(|y| floats(y).as_chunks::<MR>().0),
                        stride,
                        count,
                        positions,
                        spans,
                        stats,
                        finite,
                    };
                    panel.attend(simd, &y, sum1, (fixed == Fixed::Keys).then_some(sum2));
                }
            }
        }
        add(job, call.forward.scale, padded, lanes, space);
    }
}

/// Adds the sums of the lanes to the rows of the job.
fn add(job: &mut Job<'_>, scale: f32, padded: usize, lanes: usize, space: &Space) {
    for ((rows, sums), factor) in
        [&mut job.first, &mut job.second].into_iter().zip(&space.sums).zip([scale, 1.0])
    {
        let panels = floats(sums).chunks_exact(lanes * padded);
        for (rows, sums) in rows.chunks_mut(lanes).zip(panels) {
            for (lane, row) in rows.iter_mut().enumerate() {
                for (sum, value) in row.iter_mut().zip(sums[lane..].iter().step_by(lanes)) {
                    *sum += value * factor;
                }
            }
        }
    }
}

/// The job's own tile, in lanes.
#[inline(always)]
fn pack_fixed(call: &BackwardCall<'_>, job: &Job<'_>, fixed: Fixed, lanes: usize, space: &mut Space) {
    let forward = &call.forward;
    let (rows, dim) = (job.first.len(), forward.dim);
    let tensors = match fixed {
        Fixed::Rows => [&forward.q, &call.d_o],
        Fixed::Keys => [&forward.k, &forward.v],
    };
    let first = job.tile * TILE.q_rows as usize;
    let row = &mut bytemuck::cast_slice_mut::<Line, f32>(&mut space.row)[..lanes * dim];
    let factors = [if fixed == Fixed::Rows { forward.query_factor() } else { 1.0 }, 1.0];
    for ((tensor, into), factor) in tensors.into_iter().zip(&mut space.lanes).zip(factors) {
        let panels = floats_mut(into).chunks_exact_mut(lanes * dim);
        for (from, into) in (0..rows).step_by(lanes).zip(panels) {
            let at = [job.batch, first + from, job.head];
            pack_lanes(tensor, at, lanes.min(rows - from), lanes, factor, row, into);
        }
    }
}

/// A tile of the other side: whether k, or q and dO, hold neither NaN nor ∞.
#[inline(always)]
fn pack_broadcast<const MR: usize>(
    call: &BackwardCall<'_>,
    fixed: Fixed,
    [batch, q_head, kv_head]: [usize; 3],
    tile: usize,
    space: &mut Space,
) -> [bool; 2] {
    let forward = &call.forward;
    let dim = forward.dim;
    let (tensors, head, count, sums) = match fixed {
        Fixed::Rows => ([&forward.k, &forward.v], kv_head, positions(call, tile).len(), 1),
        Fixed::Keys => ([&forward.q, &call.d_o], q_head, space.spans.len(), 2),
    };
    let at = [batch, tile * TILE.q_rows as usize, head];
    let stride = (TILE.q_rows as usize).next_multiple_of(MR);
    let row = &mut bytemuck::cast_slice_mut::<Line, f32>(&mut space.row)[..dim * MR];
    for (tensor, into) in tensors.iter().zip(&mut space.by_row) {
        let into: &mut [f32] = bytemuck::cast_slice_mut(into);
        pack_keys::<MR>(tensor, at, count, row, &mut into[..stride * dim]);
    }
    if fixed == Fixed::Keys {
        // The factor is on q, as in the forward pass: so scores have the same rounding as those in the log-sum-exp.
        let factor = forward.query_factor();
        floats_mut(&mut space.by_row[0])[..stride * dim].iter_mut().for_each(|q| *q *= factor);
    }
    let mut finite = [true; 2];
    for ((tensor, into), finite) in tensors.iter().zip(&mut space.by_dim).zip(&mut finite).take(sums) {
        let into: &mut [f32] = bytemuck::cast_slice_mut(into);
        *finite = pack_values::<MR>(tensor, at, count, stride, &mut row[..dim], into);
    }
    finite
}

/// Spans and statistics of a Q tile. A row whose log-sum-exp is −∞ sees nothing.
#[inline(always)]
fn load_rows(call: &BackwardCall<'_>, batch: usize, q_head: usize, tile: usize, space: &mut Space) {
    let class = call.forward.work.class_of(batch);
    let first = tile * TILE.q_rows as usize;
    let last = class.rows.len().min(first + TILE.q_rows as usize);
    space.spans.clear();
    space.stats.clear();
    for row in first..last {
        let mut of_row = [0.0; 2];
        let stats = call.stats.rows([batch, row, q_head], 1, 2, &mut of_row);
        let [lse, delta] = [stats.row(0, 2)[0], stats.row(0, 2)[1]];
        let empty = lse == -EMPTY_M;
        space.spans.push(if empty { RowSpan::EMPTY } else { class.rows[row] });
        space.stats.push(Stats::new(if empty { None } else { Some(lse) }, delta));
    }
}

/// Terms of the pairs of a panel and a tile. Whether any row sees any key.
#[inline(always)]
fn load_terms(
    call: &BackwardCall<'_>,
    fixed: Fixed,
    [batch, q_tile, q_head]: [usize; 3],
    of_lanes: Range<usize>,
    positions: &[u32],
    lanes: usize,
    space: &mut Space,
) -> bool {
    let Some(pairs) = &call.forward.pairs else { return true };
    let first = q_tile * TILE.q_rows as usize;
    let [terms, read] = &mut space.terms;
    if fixed == Fixed::Rows {
        let at = [batch, first + of_lanes.start, q_head];
        return pairs.terms(at, of_lanes.len(), positions, lanes, floats_mut(terms));
    }
    // The reader writes `[key][row]`; here keys are in lanes.
    let (terms, keys) = (floats_mut(terms), &positions[of_lanes]);
    let rows = space.spans.len();
    let mut seen = false;
    for from in (0..rows).step_by(MAX_LANES) {
        let count = MAX_LANES.min(rows - from);
        let read = floats_mut(read);
        seen |= pairs.terms([batch, first + from, q_head], count, keys, MAX_LANES, read);
        for (lane, of_key) in read.chunks_exact(MAX_LANES).take(keys.len()).enumerate() {
            for (row, term) in of_key[..count].iter().enumerate() {
                terms[(from + row) * lanes + lane] = *term;
            }
        }
    }
    seen
}

/// Global positions of the keys of a KV tile.
fn positions<'c>(call: &BackwardCall<'c>, tile: usize) -> &'c [u32] {
    let all = &call.forward.work.kv_positions;
    let first = tile * TILE.kv_cols as usize;
    &all[first..all.len().min(first + TILE.kv_cols as usize)]
}

fn kv_head_of(call: &BackwardCall<'_>, q_head: usize) -> usize {
    call.q_heads_of
        .iter()
        .position(|heads| heads.contains(&q_head))
        .expect("every query head reads a KV head")
}

impl Space {
    /// Makes room; contents are unspecified.
    fn fit(&mut self, dim: usize, shape: KernelShape) {
        let rows = (TILE.q_rows as usize).next_multiple_of(shape.lanes);
        let by_row = (TILE.q_rows as usize).next_multiple_of(shape.mr);
        let padded = dim.next_multiple_of(shape.mr);
        self.lanes.iter_mut().for_each(|lines| grow(lines, rows * dim));
        self.sums.iter_mut().for_each(|lines| grow(lines, rows * padded));
        self.by_row.iter_mut().for_each(|lines| grow(lines, by_row * dim));
        self.by_dim.iter_mut().for_each(|lines| grow(lines, by_row * padded));
        let panel = by_row * shape.lanes.max(MAX_LANES);
        self.weights.iter_mut().chain(&mut self.terms).for_each(|lines| grow(lines, panel));
        grow(&mut self.row, shape.mr.max(shape.lanes) * dim);
    }
}

fn floats(lines: &[Line]) -> &[f32] {
    bytemuck::cast_slice(lines)
}

fn floats_mut(lines: &mut [Line]) -> &mut [f32] {
    bytemuck::cast_slice_mut(lines)
}

#[inline(always)]
fn vectors<S: Simd, const NV: usize>(floats: &[f32]) -> &[[S::f32s; NV]] {
    S::as_simd_f32s(floats).0.as_chunks::<NV>().0
}

#[inline(always)]
fn vectors_mut<S: Simd, const NV: usize>(floats: &mut [f32]) -> &mut [[S::f32s; NV]] {
    S::as_mut_simd_f32s(floats).0.as_chunks_mut::<NV>().0
}
