//! The work of one thread at a time: one Q tile of one head, against a range of KV tiles.
//!
//! Query rows lie in the lanes of vectors, `NV` vectors (a *panel*) at a time, keys and head
//! elements are broadcast: row statistics then need no reduction across lanes, the mask of a key is
//! one comparison for all rows, and of q, k and v only q is transposed.

use std::ops::Range;

use pulp::Simd;

use super::call::Call;
use super::keys::PackedKeys;
use super::pack::{MAX_LANES, pack_lanes, transposed};
use super::panel::Panel;
use super::scratch::{Scratch, floats, floats_mut};
use crate::backend::EMPTY_M;
use crate::backend::cpu::arithmetic::scalar::exp;
use crate::backend::cpu::arithmetic::simd::{KernelShape, WithKernel, vectors, vectors_mut};
use kyklos_plan::{MaskClass, RowSpan, TileRun};

/// One Q tile of one query head, and the running state of its rows.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) class: &'a MaskClass,
    pub(super) batch: usize,
    pub(super) tile: usize,
    pub(super) head: usize,
    pub(super) kv_head: usize,
    /// `rows × [dim]`.
    pub(super) a: Vec<&'a mut [f32]>,
    /// `rows × [m, l]`.
    pub(super) ml: &'a mut [f32],
}

/// A job against the KV tiles that `keys` holds.
pub(super) struct Run<'r, 'a> {
    pub(super) call: &'r Call<'r>,
    pub(super) job: &'r mut Job<'a>,
    pub(super) keys: &'r PackedKeys,
    pub(super) scratch: &'r mut Scratch,
}

impl WithKernel for Run<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, simd: S) {
        let Self { call, job, keys, scratch } = self;
        let shape = KernelShape::of::<S, MR, NV>();
        let (lanes, dim, words) = (shape.lanes, call.dim, call.panel_words());
        let padded = call.panel_dim(MR);
        let tiles = call.tiles.map(|tiles| tiles.prepare(lanes));
        scratch.fit(call.work.tile, dim, shape);
        job.begin(call, padded, lanes, scratch);
        let spans = job.spans(call);
        for run in job.runs() {
            let last = (run.kv_tile + run.count).min(keys.tiles.end);
            for tile in run.kv_tile.max(keys.tiles.start)..last {
                let tile = keys.tile::<MR>(call, job.batch, job.kv_head, tile);
                for (p, spans) in spans.chunks(lanes).enumerate() {
                    if let Some(bias) = &call.bias {
                        let first = job.tile * call.work.tile.q_rows as usize + p * lanes;
                        let at = [job.batch, first, job.head];
                        let into = floats_mut(&mut scratch.terms);
                        let seen = bias.terms(at, spans.len(), tile.positions, lanes, into);
                        if !seen {
                            continue;
                        }
                    }
                    Panel::<S, MR, NV> {
                        softcap: call.softcap,
                        words: call.bf16,
                        factor: call.factors()[1],
                        tiles: tiles.as_ref(),
                        q: vectors::<S, NV>(&floats(&scratch.q)[p * lanes * words..][..lanes * words]),
                        o: vectors_mut::<S, NV>(
                            &mut floats_mut(&mut scratch.o)[p * lanes * padded..][..lanes * padded],
                        ),
                        ml: vectors_mut::<S, NV>(
                            &mut floats_mut(&mut scratch.ml)[p * lanes * 2..][..lanes * 2],
                        ),
                        scores: vectors_mut::<S, NV>(floats_mut(&mut scratch.scores)),
                        terms: call.bias.is_some().then(|| vectors::<S, NV>(floats(&scratch.terms))),
                        spans: if run.full { None } else { Some(spans) },
                    }
                    .attend(simd, &tile);
                }
            }
        }
        job.end(dim, padded, lanes, scratch);
    }
}

impl<'a> Job<'a> {
    /// The tile's runs of KV tiles.
    fn runs(&self) -> &'a [TileRun] {
        let class = self.class;
        &class.runs[class.starts[self.tile] as usize..class.starts[self.tile + 1] as usize]
    }

    /// How many of the KV tiles `tiles` its rows see.
    pub(super) fn tiles_in(&self, tiles: &Range<u32>) -> u64 {
        self.runs()
            .iter()
            .map(|run| {
                let end = (run.kv_tile + run.count).min(tiles.end);
                u64::from(end.saturating_sub(run.kv_tile.max(tiles.start)))
            })
            .sum()
    }

    /// Number of the (batch entry, KV head) that it reads.
    pub(super) fn kv_slot(&self, kv_heads: usize) -> usize {
        self.batch * kv_heads + self.kv_head
    }

    /// The row spans of its rows.
    fn spans(&self, call: &Call<'_>) -> &'a [RowSpan] {
        let first = self.tile * call.work.tile.q_rows as usize;
        &self.class.rows[first..first + self.a.len()]
    }

    /// Packs q and starts a local running state, which is merged into the caller's state at the
    /// end.
    #[inline(always)]
    fn begin(&self, call: &Call<'_>, padded: usize, lanes: usize, scratch: &mut Scratch) {
        let (rows, words, padded_words) = (self.a.len(), call.words(), call.panel_words());
        let first = self.tile * call.work.tile.q_rows as usize;
        let factor = call.bf16.is_none().then(|| call.factors()[0]);
        let row = &mut floats_mut(&mut scratch.row)[..lanes * words];
        let q = floats_mut(&mut scratch.q).chunks_exact_mut(lanes * padded_words);
        for (from, q) in (0..rows).step_by(lanes).zip(q) {
            let at = [self.batch, first + from, self.head];
            let (q, padding) = q.split_at_mut(lanes * words);
            pack_lanes(&call.q, at, lanes.min(rows - from), lanes, factor, row, q);
            padding.fill(0.0);
        }
        let panels = rows.div_ceil(lanes);
        floats_mut(&mut scratch.o)[..panels * lanes * padded].fill(0.0);
        for ml in floats_mut(&mut scratch.ml)[..panels * lanes * 2].chunks_exact_mut(2 * lanes) {
            ml[..lanes].fill(EMPTY_M);
            ml[lanes..].fill(0.0);
        }
    }

    /// Merges the local running state into the caller's (Milakov & Gimelshein 2018, §3.1). Rows
    /// that saw no key, or only logits of −∞, keep the caller's state bit for bit.
    #[inline(always)]
    fn end(&mut self, dim: usize, padded: usize, lanes: usize, scratch: &Scratch) {
        let rows = self.a.chunks_mut(lanes).zip(self.ml.chunks_mut(2 * lanes));
        let found = floats(&scratch.ml).chunks_exact(2 * lanes);
        let panels = floats(&scratch.o).chunks_exact(lanes * padded);
        for (((a, ml), found), o) in rows.zip(found).zip(panels) {
            let mut weights = [Merge::Nothing; MAX_LANES];
            for (lane, ml) in ml.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                weights[lane] = Merge::of(ml, found[lane], found[lanes + lane]);
            }
            // A few elements of all rows, then the next few, so that each line of o is read once.
            for (d, o) in (0..dim).step_by(8).zip(o.chunks_exact(8 * lanes)) {
                for (lane, a) in (0..).step_by(4).zip(a.chunks_mut(4)) {
                    let columns: [[f32; 4]; 8] = std::array::from_fn(|i| {
                        *o[i * lanes + lane..].first_chunk().expect("panels hold a multiple of four")
                    });
                    for ((a, weights), o) in a.iter_mut().zip(&weights[lane..]).zip(transposed(columns)) {
                        let a: &mut [f32; 8] =
                            a[d..].first_chunk_mut().expect("head dimensions are multiples of eight");
                        match *weights {
                            Merge::Nothing => {}
                            Merge::Write => *a = o,
                            Merge::Add { keep, found } => {
                                *a = std::array::from_fn(|i| a[i] * keep + o[i] * found);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// How the local state of a row is merged into the caller's accumulator.
#[derive(Clone, Copy)]
pub(super) enum Merge {
    Nothing,
    Write,
    Add { keep: f32, found: f32 },
}

impl Merge {
    /// Merges the accumulator `o` of these weights into `a`.
    pub(super) fn apply(self, a: &mut [f32], o: &[f32]) {
        match self {
            Self::Nothing => {}
            Self::Write => a.copy_from_slice(o),
            Self::Add { keep, found } => a.iter_mut().zip(o).for_each(|(a, o)| *a = *a * keep + o * found),
        }
    }

    /// Merges (m, l) into `ml`.
    #[inline(always)]
    pub(super) fn of(ml: &mut [f32; 2], m: f32, l: f32) -> Self {
        if l == 0.0 && m == EMPTY_M {
            return Self::Nothing;
        }
        let [old_m, old_l] = *ml;
        if old_l == 0.0 && old_m == EMPTY_M {
            *ml = [m, l];
            return Self::Write;
        }
        let top = old_m.max(m);
        let (keep, found) = (exp(old_m - top), exp(m - top));
        *ml = [top, old_l * keep + l * found];
        Self::Add { keep, found }
    }
}
