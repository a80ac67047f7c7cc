//! Few query rows against many keys, as in decoding. Head elements lie in the lanes of vectors, and keys and values are read
//! where they are, once for all query heads that share them. [`super::job`] has rows in lanes instead: with few rows most of its
//! lanes are empty, and it copies keys that are used once.

mod vectors;

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::iter::{IntoParallelRefMutIterator, ParallelIterator};

use super::CpuBackend;
use super::call::Call;
use super::exp::tanh;
use super::job::Merge;
use super::scratch::{Line, Scratch, grow};
use crate::backend::{Control, EMPTY_M, StateShape, yield_now};
use crate::{MaskClass, Result};
use vectors::{add, add_seen, score, weigh};

/// Whether this path takes the call. In a fixed order no sum may depend on the number of rows, which the mesh decides.
pub(super) fn takes(shape: StateShape, fixed_order: bool) -> bool {
    shape.rows <= MOST_ROWS && !fixed_order
}

/// Attends to all keys and merges into the state: `a` is `[batch, rows, heads, dim]`, `ml` `[batch, heads, rows, 2]`.
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
    let kv_heads = kv_head_of.iter().max().map_or(0, |head| *head as usize + 1);
    let mut heads_of = vec![Vec::new(); kv_heads];
    for (head, kv_head) in kv_head_of.iter().enumerate() {
        heads_of[*kv_head as usize].push(head);
    }
    let mut parts = parts(call, shape, &heads_of);
    let keys = (PART_TILES * call.work.tile.kv_cols) as usize;
    let most_heads = heads_of.iter().map(Vec::len).max().unwrap_or(1);
    let cost = keys * dim * 2 * (rows * most_heads).max(8);
    let at_once = backend.threads() * (PIECE_COST / cost).max(1);
    for piece in parts.chunks_mut(at_once) {
        backend.install(|| {
            piece.par_iter_mut().for_each(|part| {
                let mut scratch = backend.scratch.take();
                backend.level.dispatch(Run { call, part, scratch: &mut scratch });
                backend.scratch.give(scratch);
            });
        });
        control.piece_done()?;
        yield_now().await;
    }
    // In the order of the keys, whichever thread computed them.
    for part in &parts {
        let states = part.m.iter().zip(&part.l).zip(part.o.chunks_exact(dim));
        for (index, ((m, l), o)) in states.enumerate() {
            let (head, row) = (part.heads[index / rows], index % rows);
            let ml = &mut ml[((part.batch * heads + head) * rows + row) * 2..];
            let ml = ml.first_chunk_mut().expect("the state has m and l of each row");
            let a = &mut a[((part.batch * rows + row) * heads + head) * dim..][..dim];
            Merge::of(ml, *m, *l).apply(a, o);
        }
    }
    Ok(())
}

/// Some keys of one KV head for all rows of the query heads that share it, and the running state of these rows over these keys.
/// A row has the index `head in heads · rows + row`.
struct Part<'a> {
    class: &'a MaskClass,
    batch: usize,
    kv_head: usize,
    heads: &'a [usize],
    rows: usize,
    tiles: Range<u32>,
    /// In base-2 units.
    m: Vec<f32>,
    l: Vec<f32>,
    /// `[dim]` for each row, un-normalised.
    o: Vec<f32>,
}

/// The parts, cut at keys that do not depend on the machine: neither do results. Those without a visible key are left out.
fn parts<'a>(call: &Call<'a>, shape: StateShape, heads_of: &'a [Vec<usize>]) -> Vec<Part<'a>> {
    let work = call.work;
    let tiles = u32::try_from(work.kv_positions.len().div_ceil(work.tile.kv_cols as usize))
        .expect("positions are u32, so tiles are");
    let mut parts = Vec::new();
    for batch in 0..shape.batch {
        let class = work.class_of(batch);
        for (kv_head, heads) in heads_of.iter().enumerate().filter(|(_, heads)| !heads.is_empty()) {
            for first in (0..tiles).step_by(PART_TILES as usize) {
                let tiles = first..tiles.min(first + PART_TILES);
                let count = heads.len() * shape.rows;
                let seen = class.runs.iter().any(|run| {
                    run.kv_tile < tiles.end && run.kv_tile + run.count > tiles.start && run.count > 0
                });
                if seen {
                    parts.push(Part {
                        class,
                        batch,
                        kv_head,
                        heads,
                        rows: shape.rows,
                        tiles,
                        m: vec![EMPTY_M; count],
                        l: vec![0.0; count],
                        o: vec![0.0; count * shape.dim],
                    });
                }
            }
        }
    }
    parts
}

struct Run<'r, 'a> {
    call: &'r Call<'r>,
    part: &'r mut Part<'a>,
    scratch: &'r mut Scratch,
}

impl WithSimd for Run<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Run { call, part, scratch } = self;
        let (dim, count) = (call.dim, part.m.len());
        let padded = dim.next_multiple_of(S::F32_LANES);
        let width = (call.work.tile.kv_cols as usize).next_multiple_of(4 * S::F32_LANES);
        let count_padded = if count == 1 { 1 } else { count.next_multiple_of(GROUP) };
        grow(&mut scratch.q, count_padded * padded);
        grow(&mut scratch.o, count_padded * padded);
        grow(&mut scratch.scores, count_padded * width);
        // Terms of an attention bias tensor: for each head `[key][lane]`, a lane for each row.
        let lanes = part.rows.next_multiple_of(4);
        let head_terms = call.work.tile.kv_cols as usize * lanes;
        let all_terms = if call.pairs.is_some() { part.heads.len() * head_terms } else { 0 };
        grow(&mut scratch.terms, all_terms);
        let terms = &mut floats_mut(&mut scratch.terms)[..all_terms];
        grow(&mut scratch.row, call.work.tile.kv_cols as usize * dim);
        let q = &mut floats_mut(&mut scratch.q)[..count_padded * padded];
        let o = &mut floats_mut(&mut scratch.o)[..count_padded * padded];
        let scores = &mut floats_mut(&mut scratch.scores)[..count_padded * width];
        let space = floats_mut(&mut scratch.row);
        part.queries(call, padded, q);
        o.fill(0.0);

        let runs = part.class.runs.iter();
        for run in runs {
            let last = (run.kv_tile + run.count).min(part.tiles.end);
            for tile in run.kv_tile.max(part.tiles.start)..last {
                let positions = call.positions(tile);
                let first = tile as usize * call.work.tile.kv_cols as usize;
                let at = [part.batch, first, part.kv_head];
                let keys = call.k.rows(at, positions.len(), dim, space);
                if count == 1 {
                    score::<S, 1, 8>(simd, q, &keys, positions.len(), scores, width);
                } else {
                    for (q, scores) in
                        q.chunks_exact(GROUP * padded).zip(scores.chunks_exact_mut(GROUP * width))
                    {
                        score::<S, GROUP, 2>(simd, q, &keys, positions.len(), scores, width);
                    }
                }
                if let Some(pairs) = &call.pairs {
                    for (head, terms) in part.heads.iter().zip(terms.chunks_exact_mut(head_terms)) {
                        pairs.terms([part.batch, 0, *head], part.rows, positions, lanes, terms);
                    }
                }
                // The term of a row's logit; −∞ hides the key.
                let term = |index: usize, key: usize| {
                    let (head, row) = (index / part.rows, index % part.rows);
                    terms[head * head_terms + key * lanes + row]
                };
                for index in 0..count {
                    let scores = &mut scores[index * width..][..width];
                    if let Some(cap) = call.softcap {
                        let cap = simd.splat_f32s(cap * std::f32::consts::LOG2_E);
                        for s in S::as_mut_simd_f32s(scores).0 {
                            *s = simd.mul_f32s(cap, tanh(simd, *s));
                        }
                    }
                    scores[positions.len()..].fill(f32::NEG_INFINITY);
                    if call.pairs.is_some() {
                        for (key, s) in scores[..positions.len()].iter_mut().enumerate() {
                            let term = term(index, key);
                            // Replaced, not added to: a hidden score may be NaN.
                            *s = if term == f32::NEG_INFINITY { term } else { *s + term };
                        }
                    }
                    if !run.full {
                        let span = part.class.rows[index % part.rows];
                        for (s, position) in scores.iter_mut().zip(positions) {
                            *s = if span.sees(*position) { *s } else { f32::NEG_INFINITY };
                        }
                    }
                    let row = &mut o[index * padded..][..padded];
                    weigh(simd, scores, &mut part.m[index], &mut part.l[index], row);
                }
                let values = call.v.rows(at, positions.len(), dim, space);
                let some_hidden = !run.full || call.pairs.is_some();
                if some_hidden && !values.are_finite(positions.len(), dim) {
                    // 0 · NaN is NaN, so hidden values are left out.
                    for index in 0..count {
                        let span = part.class.rows[index % part.rows];
                        let seen = |key: usize| {
                            let shown = call.pairs.is_none() || term(index, key) != f32::NEG_INFINITY;
                            shown && (run.full || span.sees(positions[key]))
                        };
                        let (o, weights) = (&mut o[index * padded..][..padded], &scores[index * width..]);
                        add_seen(simd, o, weights, &values, positions.len(), dim, seen);
                    }
                } else if count == 1 {
                    add::<S, 1, 4>(simd, o, scores, width, &values, positions.len(), dim);
                } else {
                    for (o, scores) in
                        o.chunks_exact_mut(GROUP * padded).zip(scores.chunks_exact(GROUP * width))
                    {
                        add::<S, GROUP, 2>(simd, o, scores, width, &values, positions.len(), dim);
                    }
                }
            }
        }
        for (into, o) in part.o.chunks_exact_mut(dim).zip(o.chunks_exact(padded)) {
            into.copy_from_slice(&o[..dim]);
        }
    }
}

impl Part<'_> {
    /// `into[row][padded dim]`: queries, scaled so that scores are base-2 logits; with a softcap, the argument of its tanh.
    fn queries(&self, call: &Call<'_>, padded: usize, into: &mut [f32]) {
        let factor = call.query_factor();
        into.fill(0.0);
        let rows = self.heads.iter().flat_map(|head| (0..self.rows).map(move |row| (*head, row)));
        for ((head, row), into) in rows.zip(into.chunks_exact_mut(padded)) {
            let mut space = vec![0.0; call.dim];
            let q = call.q.rows([self.batch, row, head], 1, call.dim, &mut space);
            for (into, q) in into.iter_mut().zip(q.row(0, call.dim)) {
                *into = q * factor;
            }
        }
    }
}

fn floats_mut(lines: &mut [Line]) -> &mut [f32] {
    bytemuck::cast_slice_mut(lines)
}

/// Rows of a head up to which this path is faster: a panel of `job` takes about as long as 20 rows, and copies keys before.
const MOST_ROWS: usize = 16;
/// Rows that share a load of a key.
const GROUP: usize = 4;
/// KV tiles of a part: some hundred kilobytes of keys and values, so that even short caches keep several cores busy.
const PART_TILES: u32 = 8;
/// Multiply-adds of one thread between two looks at the stop flag: at most some tens of milliseconds.
const PIECE_COST: usize = 60_000_000;
