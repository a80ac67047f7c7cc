//! Few query rows against many keys, as in decoding. Head elements lie in the lanes of vectors, and
//! keys and values are read where they are, once for all query heads that share them.
//! [`super::job`] has rows in lanes instead: with few rows most of its lanes are empty, and it
//! copies keys that are used once.

mod rows;
mod tile;
mod values;
mod vectors;

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::iter::{IntoParallelIterator, IntoParallelRefIterator, ParallelIterator};

use super::CpuBackend;
use super::call::{Call, share};
use super::job::Merge;
use super::kernel::alone;
use super::scratch::Scratch;
use crate::backend::{Control, StateShape, yield_now};
use crate::error::Result;
use kyklos_plan::MaskClass;
use rows::{Parts, Queries, States};
use tile::{Add, Scores, Tile, Weigh};

/// Whether this path takes the call. In a fixed order no sum may depend on the number of rows,
/// which the mesh decides.
pub(super) fn takes(shape: StateShape, fixed_order: bool) -> bool {
    shape.rows <= MOST_ROWS && !fixed_order
}

/// Attends to all keys and merges into the state: `a` is `[batch, rows, heads, dim]`, `ml` `[batch,
/// heads, rows, 2]`.
pub(super) async fn attend(
    backend: &CpuBackend,
    call: &Call<'_>,
    kv_head_of: &[u32],
    shape: StateShape,
    a: &mut [f32],
    ml: &mut [f32],
    control: &Control,
) -> Result<()> {
    let StateShape { rows, heads, dim, .. } = shape;
    let parts = &Parts::new(kv_head_of, rows);
    let pack = |batch| backend.level.dispatch(Pack { call, parts, batch, rows });
    let queries: Vec<Queries> = match shape.batch {
        // Short: another thread takes longer to wake up.
        1 => vec![pack(0)],
        entries => backend.install(|| (0..entries).into_par_iter().map(pack).collect()),
    };
    let stretches = stretches(call, shape, parts);
    let keys = stretches.first().map_or(1, |stretch| stretch.tiles.len() * call.work.tile.kv_cols as usize);
    let cost = keys * dim * 2 * parts.all.iter().map(|part| part.count.max(8)).sum::<usize>();
    let at_once = backend.threads() * (PIECE_COST / cost).max(1);
    for piece in stretches.chunks(at_once) {
        let run = |stretch: &Stretch<'_>| {
            let queries = &queries[stretch.batch];
            let (mut scratch, mut states) = (backend.scratch.take(), States::new(queries, parts));
            let run = Run { call, parts, queries, stretch, scratch: &mut scratch, states: &mut states };
            backend.level.dispatch(run);
            backend.scratch.give(scratch);
            states
        };
        let states: Vec<States> = backend.install(|| piece.par_iter().map(run).collect());
        // In the order of the keys, whichever thread computed them.
        for (stretch, states) in piece.iter().zip(states) {
            for part in &parts.all {
                for index in 0..part.count {
                    let (m, l, o) = states.of(part.first + index);
                    let (head, row) = (part.heads[index / rows], index % rows);
                    let ml = &mut ml[((stretch.batch * heads + head) * rows + row) * 2..];
                    let ml = ml.first_chunk_mut().expect("the state has m and l of each row");
                    let a = &mut a[((stretch.batch * rows + row) * heads + head) * dim..][..dim];
                    Merge::of(ml, m, l).apply(a, &o[..dim]);
                }
            }
        }
        control.share_done(share(piece.len() as u64, stretches.len() as u64))?;
        yield_now().await;
    }
    Ok(())
}

/// Some keys, and all KV heads of them.
struct Stretch<'a> {
    class: &'a MaskClass,
    batch: usize,
    rows: usize,
    tiles: Range<u32>,
}

/// The stretches, cut at keys that do not depend on the machine: neither do results. Those without
/// a visible key are left out.
fn stretches<'a>(call: &Call<'a>, shape: StateShape, parts: &Parts) -> Vec<Stretch<'a>> {
    let work = call.work;
    let index = |tile: usize| u32::try_from(tile).expect("positions are u32, so tiles are");
    let tiles = work.kv_positions.len().div_ceil(work.tile.kv_cols as usize);
    let tile_elements = work.tile.kv_cols as usize * call.dim * parts.all.len();
    let least = LEAST_ELEMENTS.div_ceil(tile_elements.max(1)).min(STRETCH_TILES);
    let mut stretches = Vec::new();
    for batch in 0..shape.batch {
        let class = work.class_of(batch);
        let step = (tiles / STRETCHES).clamp(least, STRETCH_TILES);
        for first in (0..tiles).step_by(step) {
            let tiles = index(first)..index(tiles.min(first + step));
            let seen = class
                .runs
                .iter()
                .any(|run| run.kv_tile < tiles.end && run.kv_tile + run.count > tiles.start && run.count > 0);
            if seen {
                stretches.push(Stretch { class, batch, rows: shape.rows, tiles });
            }
        }
    }
    stretches
}

struct Pack<'r> {
    call: &'r Call<'r>,
    parts: &'r Parts,
    batch: usize,
    rows: usize,
}

impl WithSimd for Pack<'_> {
    type Output = Queries;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Queries {
        Queries::pack::<S>(self.call, self.batch, self.rows, self.parts)
    }
}

struct Run<'r> {
    call: &'r Call<'r>,
    parts: &'r Parts,
    queries: &'r Queries,
    stretch: &'r Stretch<'r>,
    scratch: &'r mut Scratch,
    states: &'r mut States,
}

impl WithSimd for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Run { call, parts, queries, stretch, scratch, states } = self;
        let Stretch { class, batch, rows, tiles } = stretch;
        let Scratch { scores, terms, row: space, .. } = scratch;
        for run in &class.runs {
            let last = (run.kv_tile + run.count).min(tiles.end);
            for tile in run.kv_tile.max(tiles.start)..last {
                let spans = if run.full { None } else { Some(&class.rows[..]) };
                let positions = call.positions(tile);
                let first = tile as usize * call.work.tile.kv_cols as usize;
                let tile =
                    &Tile { call, parts, batch: *batch, queries, rows: *rows, first, positions, spans };
                match call.bf16 {
                    None => alone(simd, Scores { simd, tile, scores }),
                    Some(words) => words.alone(simd, Scores { simd, tile, scores }),
                }
                let weights = &mut scores[..];
                alone(simd, Weigh { simd, tile, weights, states, terms });
                match call.bf16 {
                    None => alone(simd, Add { simd, tile, weights, states, terms }),
                    Some(words) => words.alone(simd, Add { simd, tile, weights, states, terms }),
                }
            }
        }
        states.finish::<S>(call, space);
    }
}

/// Rows of a head up to which this path is faster: a panel of `job` takes about as long as 20 rows,
/// and copies keys before.
const MOST_ROWS: usize = 16;
/// Stretches of a batch entry, at least where there are so many tiles: enough to keep several cores
/// equally busy.
const STRETCHES: usize = 16;
/// Elements of K in a stretch, at least, unless it has the most tiles: some ten microseconds of
/// reading.
const LEAST_ELEMENTS: usize = 1 << 17;
/// KV tiles of a stretch, at most.
const STRETCH_TILES: usize = 8;
/// Multiply-adds of one thread between two looks at the stop flag: at most some tens of
/// milliseconds.
const PIECE_COST: usize = 60_000_000;
