//! A job, panel by panel.

use pulp::Simd;

use super::super::pack::transposed;
use super::super::scratch::{Line, floats, floats_mut};
use super::super::tiles;
use super::blocks::Blocks;
use super::job::{Job, OfHead, Space, SumRows, seen};
use super::lanes::Lanes;
use super::operands::{load_rows, pack_queries, pack_tile};
use super::panel::{Keys, OfBias, OfWords, Panel, Rows, Sums};
use super::{BackwardCall, TILE};
use crate::backend::cpu::arithmetic::simd::{KernelShape, WithKernel, vectors, vectors_mut};
use kyklos_plan::RowSpan;

/// A job of a call.
pub(super) struct Run<'r, 'a> {
    pub(super) call: &'r BackwardCall<'r>,
    pub(super) job: &'r mut Job<'a>,
    pub(super) space: &'r mut Space,
}

impl WithKernel for Run<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, simd: S) {
        let Self { call, job, space } = self;
        let shape = KernelShape::of::<S, MR, NV>();
        let (lanes, dim) = (shape.lanes, call.forward.dim);
        let (padded, columns) = (call.forward.panel_dim(MR), TILE.kv_cols as usize);
        let words = call.forward.panel_words();
        let tiles = call.forward.tiles.map(|tiles| tiles.prepare(lanes));
        let vector = if tiles.is_some() { tiles::SIDE } else { S::F32_LANES };
        let of_rows = Blocks::new(dim, vector, call.forward.words_of_rows(lanes));
        let of_keys = Blocks::new(dim, vector, columns);
        space.fit(job, padded, shape, [of_rows, of_keys], call.of_bias && call.forward.softcap.is_some());
        for (q_head, of_head) in job.q_heads.clone().zip(&mut space.of_heads) {
            load_rows(call, job, q_head, of_head);
            let row = &mut floats_mut(&mut space.row)[..lanes * call.forward.words()];
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
                        if let Some(bias) = &call.forward.bias
                            && !bias.terms(at, of_panel.len(), positions, lanes, floats_mut(terms))
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
                            of_rows,
                            softcap: call.forward.softcap,
                            factor: call.forward.factors()[1],
                            words: call.forward.bf16.map(|products| OfWords {
                                products,
                                tiles: tiles.as_ref(),
                                of_rows: of_words
                                    .each_mut()
                                    .map(|lines| &mut floats_mut(lines)[..columns * of_rows.rows]),
                            }),
                            q,
                            d_o,
                            by_row: [by_row(0), by_row(1)],
                            spans,
                            stats: Lanes::new(simd, spans, &stats[of_panel]),
                            terms: call.forward.bias.is_some().then(|| vectors::<S, NV>(floats(terms))),
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
