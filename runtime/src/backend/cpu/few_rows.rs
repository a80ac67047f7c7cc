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
use super::pack::Rows;
use super::scratch::{Line, Scratch, floats, floats_mut, grow};
use crate::backend::{Control, EMPTY_M, StateShape, yield_now};
use crate::{MaskClass, Result, RowSpan};
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
    let mut stretches = stretches(call, shape, &heads_of);
    let keys = stretches.first().map_or(1, |stretch| stretch.tiles.len() * call.work.tile.kv_cols as usize);
    let cost = keys * dim * 2 * heads_of.iter().map(|heads| (rows * heads.len()).max(8)).sum::<usize>();
    let at_once = backend.threads() * (PIECE_COST / cost).max(1);
    for piece in stretches.chunks_mut(at_once) {
        backend.install(|| {
            piece.par_iter_mut().for_each(|stretch| {
                let mut scratch = backend.scratch.take();
                backend.level.dispatch(Run { call, stretch, scratch: &mut scratch });
                backend.scratch.give(scratch);
            });
        });
        control.piece_done()?;
        yield_now().await;
    }
    // In the order of the keys, whichever thread computed them.
    for stretch in &stretches {
        for part in &stretch.parts {
            let o = floats(&part.o).chunks_exact(part.padded);
            for (index, ((m, l), o)) in part.m.iter().zip(&part.l).zip(o).enumerate() {
                let (head, row) = (part.heads[index / rows], index % rows);
                let ml = &mut ml[((stretch.batch * heads + head) * rows + row) * 2..];
                let ml = ml.first_chunk_mut().expect("the state has m and l of each row");
                let a = &mut a[((stretch.batch * rows + row) * heads + head) * dim..][..dim];
                Merge::of(ml, *m, *l).apply(a, &o[..dim]);
            }
        }
    }
    Ok(())
}

/// Some keys, and all KV heads of them.
struct Stretch<'a> {
    class: &'a MaskClass,
    batch: usize,
    rows: usize,
    tiles: Range<u32>,
    parts: Vec<Part<'a>>,
}

/// The rows of the query heads that share a KV head, and their running state over the keys of a stretch. A row has the index
/// `head in heads · rows + row`.
struct Part<'a> {
    kv_head: usize,
    heads: &'a [usize],
    /// Elements of a row in `q` and `o`: whole vectors.
    padded: usize,
    /// `[padded]` for each row: queries, scaled so that scores are base-2 logits; with a softcap, the argument of its tanh.
    q: Vec<Line>,
    /// `[padded]` for each row, un-normalised.
    o: Vec<Line>,
    /// Scores, then weights, of the keys of a tile, for each row.
    weights: Vec<Line>,
    /// In base-2 units.
    m: Vec<f32>,
    l: Vec<f32>,
}

/// The stretches, cut at keys that do not depend on the machine: neither do results. Those without a visible key are left out.
fn stretches<'a>(call: &Call<'a>, shape: StateShape, heads_of: &'a [Vec<usize>]) -> Vec<Stretch<'a>> {
    let work = call.work;
    let index = |tile: usize| u32::try_from(tile).expect("positions are u32, so tiles are");
    let tiles = work.kv_positions.len().div_ceil(work.tile.kv_cols as usize);
    let mut stretches = Vec::new();
    for batch in 0..shape.batch {
        let class = work.class_of(batch);
        let step = (tiles / STRETCHES).clamp(1, STRETCH_TILES);
        for first in (0..tiles).step_by(step) {
            let tiles = index(first)..index(tiles.min(first + step));
            let seen = class
                .runs
                .iter()
                .any(|run| run.kv_tile < tiles.end && run.kv_tile + run.count > tiles.start && run.count > 0);
            if !seen {
                continue;
            }
            let heads_of = heads_of.iter().enumerate().filter(|(_, heads)| !heads.is_empty());
            let parts = heads_of.map(|(kv_head, heads)| {
                let count = heads.len() * shape.rows;
                let (m, l) = (vec![EMPTY_M; count], vec![0.0; count]);
                Part {
                    kv_head,
                    heads,
                    padded: call.dim,
                    q: Vec::new(),
                    o: Vec::new(),
                    weights: Vec::new(),
                    m,
                    l,
                }
            });
            stretches.push(Stretch { class, batch, rows: shape.rows, tiles, parts: parts.collect() });
        }
    }
    stretches
}

struct Run<'r, 'a> {
    call: &'r Call<'r>,
    stretch: &'r mut Stretch<'a>,
    scratch: &'r mut Scratch,
}

impl WithSimd for Run<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Run { call, stretch, scratch } = self;
        for part in &mut stretch.parts {
            part.begin::<S>(call, stretch.batch, stretch.rows);
        }
        let heads: Vec<usize> = stretch.parts.iter().map(|part| part.kv_head).collect();
        grow(&mut scratch.row, heads.len() * KEYS * call.dim);
        for run in &stretch.class.runs {
            let last = (run.kv_tile + run.count).min(stretch.tiles.end);
            for tile in run.kv_tile.max(stretch.tiles.start)..last {
                let spans = if run.full { None } else { Some(&stretch.class.rows[..]) };
                let positions = call.positions(tile);
                let first = tile as usize * call.work.tile.kv_cols as usize;
                let tile = Tile { call, batch: stretch.batch, rows: stretch.rows, first, positions, spans };
                tile.scores(simd, &mut stretch.parts, &heads, scratch);
                for part in &mut stretch.parts {
                    tile.weigh(simd, part, &mut scratch.terms);
                }
                tile.add(simd, &mut stretch.parts, &heads, scratch);
            }
        }
    }
}

/// A tile of keys.
struct Tile<'t> {
    call: &'t Call<'t>,
    batch: usize,
    rows: usize,
    first: usize,
    positions: &'t [u32],
    /// The span of each row; `None` where every row sees every key of the tile.
    spans: Option<&'t [RowSpan]>,
}

impl Tile<'_> {
    /// Elements of a row of weights: whole groups of vectors.
    fn width<S: Simd>(&self) -> usize {
        (self.call.work.tile.kv_cols as usize).next_multiple_of(4 * S::F32_LANES)
    }

    /// A few keys at a time, as ranges of the tile. The heads of a token are neighbours in memory: all heads of these keys are read
    /// before the next keys are, so that the processor sees few streams and loads them ahead.
    fn few_keys(&self) -> impl Iterator<Item = Range<usize>> {
        let keys = self.positions.len();
        (0..keys).step_by(KEYS).map(move |first| first..keys.min(first + KEYS))
    }

    /// Scores of all rows.
    #[inline(always)]
    fn scores<S: Simd>(&self, simd: S, parts: &mut [Part<'_>], heads: &[usize], scratch: &mut Scratch) {
        let &Self { call, batch, first, .. } = self;
        let (dim, width) = (call.dim, self.width::<S>());
        for part in &mut *parts {
            grow(&mut part.weights, padded_count(part.m.len()) * width);
        }
        for keys in self.few_keys() {
            let (at, count) = (first + keys.start, keys.len());
            call.k.widen([batch, at], heads, count, dim, floats_mut(&mut scratch.row));
            for (index, part) in parts.iter_mut().enumerate() {
                let rows = call.k.widened([batch, at, part.kv_head], index, count, dim, floats(&scratch.row));
                let (q, scores) = (floats(&part.q), floats_mut(&mut part.weights));
                if part.m.len() == 1 {
                    score::<S, 1, KEYS>(simd, q, &rows, count, &mut scores[keys.start..], width);
                    continue;
                }
                let groups = q.chunks_exact(GROUP * part.padded).zip(scores.chunks_exact_mut(GROUP * width));
                for (q, scores) in groups {
                    score::<S, GROUP, 2>(simd, q, &rows, count, &mut scores[keys.start..], width);
                }
            }
        }
    }

    /// The part's scores become weights.
    #[inline(always)]
    fn weigh<S: Simd>(&self, simd: S, part: &mut Part<'_>, terms: &mut Vec<Line>) {
        let &Self { call, positions, spans, rows, .. } = self;
        let (padded, width) = (part.padded, self.width::<S>());
        let terms = self.terms(part.heads, terms);
        for index in 0..part.m.len() {
            let scores = &mut floats_mut(&mut part.weights)[index * width..][..width];
            if let Some(cap) = call.softcap {
                let cap = simd.splat_f32s(cap * std::f32::consts::LOG2_E);
                for s in S::as_mut_simd_f32s(scores).0 {
                    *s = simd.mul_f32s(cap, tanh(simd, *s));
                }
            }
            scores[positions.len()..].fill(f32::NEG_INFINITY);
            if let Some(terms) = &terms {
                for (key, s) in scores[..positions.len()].iter_mut().enumerate() {
                    let term = terms.of(index, key);
                    // Replaced, not added to: a hidden score may be NaN.
                    *s = if term == f32::NEG_INFINITY { term } else { *s + term };
                }
            }
            if let Some(spans) = spans {
                let span = spans[index % rows];
                for (s, position) in scores.iter_mut().zip(positions) {
                    *s = if span.sees(*position) { *s } else { f32::NEG_INFINITY };
                }
            }
            let row = &mut floats_mut(&mut part.o)[index * padded..][..padded];
            weigh(simd, scores, &mut part.m[index], &mut part.l[index], row);
        }
    }

    /// Adds the values of the keys, weighted, to all rows.
    #[inline(always)]
    fn add<S: Simd>(&self, simd: S, parts: &mut [Part<'_>], heads: &[usize], scratch: &mut Scratch) {
        let &Self { call, batch, first, .. } = self;
        let (dim, width) = (call.dim, self.width::<S>());
        let some_hidden = self.spans.is_some() || call.pairs.is_some();
        for keys in self.few_keys() {
            let (at, count) = (first + keys.start, keys.len());
            call.v.widen([batch, at], heads, count, dim, floats_mut(&mut scratch.row));
            for (index, part) in parts.iter_mut().enumerate() {
                let values =
                    call.v.widened([batch, at, part.kv_head], index, count, dim, floats(&scratch.row));
                if some_hidden && !values.are_finite(count, dim) {
                    self.add_seen(simd, part, &keys, &values, &mut scratch.terms);
                    continue;
                }
                let (weights, o) = (floats(&part.weights), floats_mut(&mut part.o));
                if part.m.len() == 1 {
                    // As many sums side by side as divide the row.
                    if (dim / S::F32_LANES).is_multiple_of(8) {
                        add::<S, 1, 8>(simd, o, &weights[keys.start..], width, &values, count, dim);
                    } else {
                        add::<S, 1, 4>(simd, o, &weights[keys.start..], width, &values, count, dim);
                    }
                    continue;
                }
                let groups = o.chunks_exact_mut(GROUP * part.padded).zip(weights.chunks_exact(GROUP * width));
                for (o, weights) in groups {
                    let weights = &weights[keys.start..];
                    // The sums of a group stay in registers.
                    if S::REGISTER_COUNT >= 32 {
                        add::<S, GROUP, 4>(simd, o, weights, width, &values, count, dim);
                    } else {
                        add::<S, GROUP, 2>(simd, o, weights, width, &values, count, dim);
                    }
                }
            }
        }
    }

    /// As [`Tile::add`], without hidden values: 0 · NaN is NaN.
    #[inline(always)]
    fn add_seen<S: Simd>(
        &self,
        simd: S,
        part: &mut Part<'_>,
        keys: &Range<usize>,
        values: &Rows<'_>,
        terms: &mut Vec<Line>,
    ) {
        let (padded, width) = (part.padded, self.width::<S>());
        let terms = self.terms(part.heads, terms);
        for index in 0..part.m.len() {
            let seen = |key: usize| {
                let key = keys.start + key;
                let shown = terms.as_ref().is_none_or(|terms| terms.of(index, key) != f32::NEG_INFINITY);
                shown && self.spans.is_none_or(|spans| spans[index % self.rows].sees(self.positions[key]))
            };
            let o = &mut floats_mut(&mut part.o)[index * padded..][..padded];
            let weights = &floats(&part.weights)[index * width + keys.start..];
            add_seen(simd, o, weights, values, keys.len(), self.call.dim, seen);
        }
    }

    /// Terms of an attention bias tensor for the rows of some heads.
    #[inline(always)]
    fn terms<'s>(&self, heads: &[usize], space: &'s mut Vec<Line>) -> Option<Terms<'s>> {
        let pairs = self.call.pairs.as_ref()?;
        let lanes = self.rows.next_multiple_of(4);
        let of_head = self.call.work.tile.kv_cols as usize * lanes;
        grow(space, heads.len() * of_head);
        let terms = &mut floats_mut(space)[..heads.len() * of_head];
        for (head, terms) in heads.iter().zip(terms.chunks_exact_mut(of_head)) {
            pairs.terms([self.batch, 0, *head], self.rows, self.positions, lanes, terms);
        }
        Some(Terms { terms, of_head, lanes, rows: self.rows })
    }
}

/// For each head `[key][lane]`, a lane for each row.
struct Terms<'s> {
    terms: &'s [f32],
    of_head: usize,
    lanes: usize,
    rows: usize,
}

impl Terms<'_> {
    /// The term of a row's logit; −∞ hides the key.
    fn of(&self, index: usize, key: usize) -> f32 {
        let (head, row) = (index / self.rows, index % self.rows);
        self.terms[head * self.of_head + key * self.lanes + row]
    }
}

impl Part<'_> {
    /// Packs the queries, and starts an empty state.
    #[inline(always)]
    fn begin<S: Simd>(&mut self, call: &Call<'_>, batch: usize, rows: usize) {
        self.padded = call.dim.next_multiple_of(S::F32_LANES);
        let padded = self.padded;
        grow(&mut self.q, padded_count(self.m.len()) * padded);
        grow(&mut self.o, padded_count(self.m.len()) * padded);
        let factor = call.query_factor();
        let rows = self.heads.iter().flat_map(|head| (0..rows).map(move |row| (*head, row)));
        for ((head, row), into) in rows.zip(floats_mut(&mut self.q).chunks_exact_mut(padded)) {
            let into = &mut into[..call.dim];
            call.q.copy_row([batch, row, head], into);
            for q in into {
                *q *= factor;
            }
        }
    }
}

/// Rows of `q`, `o` and the weights: whole groups, unless there is one row.
fn padded_count(count: usize) -> usize {
    if count == 1 { 1 } else { count.next_multiple_of(GROUP) }
}

/// Rows of a head up to which this path is faster: a panel of `job` takes about as long as 20 rows, and copies keys before.
const MOST_ROWS: usize = 16;
/// Keys that are read at a time, of all heads.
const KEYS: usize = 8;
/// Rows that share a load of a key.
const GROUP: usize = 4;
/// Stretches of a batch entry, at least where there are so many tiles: enough to keep several cores equally busy.
const STRETCHES: usize = 16;
/// KV tiles of a stretch, at most.
const STRETCH_TILES: usize = 8;
/// Multiply-adds of one thread between two looks at the stop flag: at most some tens of milliseconds.
const PIECE_COST: usize = 60_000_000;
