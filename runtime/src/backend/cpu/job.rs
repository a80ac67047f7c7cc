//! The work of one thread at a time: some Q tiles of heads that share a KV head, against a range of its KV tiles.
//!
//! Query rows lie in the lanes of vectors, `NV` vectors (a *panel*) at a time, keys and head elements are broadcast:
//! row statistics then need no reduction across lanes, the mask of a key is one comparison for all rows, and of q, k
//! and v only q is transposed. A KV tile is packed once for all Q tiles of the job.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::pack::{Tensor, pack_keys, pack_lanes, pack_values};
use super::panel::{Keys, Panel};
use super::scratch::{Scratch, UnitScratch};
use crate::backend::EMPTY_M;
use crate::{BlockWork, MaskClass, RowSpan};

/// What all jobs of one call share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    pub(super) q: Tensor<'a>,
    pub(super) k: Tensor<'a>,
    pub(super) v: Tensor<'a>,
    pub(super) work: &'a BlockWork,
    pub(super) dim: usize,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
}

/// One Q tile of one query head, and the running state of its rows.
#[derive(Debug)]
pub(super) struct Unit<'a> {
    pub(super) class: &'a MaskClass,
    pub(super) tile: usize,
    pub(super) head: usize,
    /// `rows × [dim]`.
    pub(super) a: Vec<&'a mut [f32]>,
    /// `rows × [m, l]`.
    pub(super) ml: &'a mut [f32],
}

/// Units of the same batch entry and KV head.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) batch: usize,
    pub(super) kv_head: usize,
    pub(super) units: Vec<Unit<'a>>,
}

/// A job against the KV tiles `tiles`.
pub(super) struct Run<'r, 'a> {
    pub(super) call: &'r Call<'r>,
    pub(super) job: &'r mut Job<'a>,
    pub(super) tiles: Range<u32>,
    pub(super) scratch: &'r mut Scratch,
}

impl WithSimd for Run<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 {
            self.run::<S, 8, 3>(simd);
        } else {
            self.run::<S, 4, 3>(simd);
        }
    }
}

impl Run<'_, '_> {
    #[inline(always)]
    fn run<S: Simd, const MR: usize, const NV: usize>(self, simd: S) {
        let Self {
            call,
            job,
            tiles,
            scratch,
        } = self;
        let lanes = NV * S::F32_LANES;
        let dim = call.dim;
        let tile_keys = call.work.tile.kv_cols as usize;
        let key_stride = tile_keys.next_multiple_of(MR);
        scratch.fit(job.units.len(), call.work.tile, dim, lanes, MR);
        let Scratch {
            units: states,
            k,
            v,
            scores,
            row,
            ..
        } = scratch;
        let row = &mut bytemuck::cast_slice_mut(row)[..dim * MR];

        for (unit, state) in job.units.iter().zip(states.iter_mut()) {
            unit.begin(call, job.batch, lanes, &mut row[..dim], state);
        }
        let mut next = tiles.start;
        loop {
            // The next KV tile that any unit sees: what nobody sees costs nothing.
            let wanted = job
                .units
                .iter()
                .zip(states.iter_mut())
                .filter_map(|(unit, state)| state.seek(unit.runs(), next))
                .min();
            let Some(tile) = wanted.filter(|tile| *tile < tiles.end) else {
                break;
            };
            next = tile + 1;
            let first = tile as usize * tile_keys;
            let positions = &call.work.kv_positions;
            let positions = &positions[first..positions.len().min(first + tile_keys)];
            let at = [job.batch, first, job.kv_head];
            let k = &mut bytemuck::cast_slice_mut(k)[..key_stride * dim];
            let v = &mut bytemuck::cast_slice_mut(v)[..key_stride * dim];
            pack_keys::<MR>(&call.k, at, positions.len(), row, k);
            let finite = pack_values::<MR>(&call.v, at, positions.len(), key_stride, &mut row[..dim], v);
            let keys = Keys {
                k: k.as_chunks::<MR>().0,
                v: v.as_chunks::<MR>().0,
                stride: key_stride,
                positions,
                finite,
            };
            for (unit, state) in job.units.iter().zip(states.iter_mut()) {
                let Some(full) = state.kind(unit.runs(), tile) else {
                    continue;
                };
                let panels = unit.ml.len().div_ceil(2 * lanes);
                for p in 0..panels {
                    let spans = &unit.spans(call)[p * lanes..];
                    let spans = &spans[..spans.len().min(lanes)];
                    Panel::<S, MR, NV> {
                        dim,
                        softcap: call.softcap,
                        q: vectors::<S, NV>(&lines(&state.q)[p * lanes * dim..][..lanes * dim]),
                        o: vectors_mut::<S, NV>(
                            &mut lines_mut(&mut state.o)[p * lanes * dim..][..lanes * dim],
                        ),
                        ml: vectors_mut::<S, NV>(&mut lines_mut(&mut state.ml)[p * lanes * 2..][..lanes * 2]),
                        scores: vectors_mut::<S, NV>(&mut lines_mut(scores)[..key_stride * lanes]),
                        spans: if full { None } else { Some(spans) },
                    }
                    .attend(simd, &keys);
                }
            }
        }
        for (unit, state) in job.units.iter_mut().zip(states.iter()) {
            unit.end(dim, lanes, state);
        }
    }
}

impl Unit<'_> {
    /// The tile's runs of KV tiles.
    fn runs(&self) -> &[crate::TileRun] {
        let class = self.class;
        &class.runs[class.starts[self.tile] as usize..class.starts[self.tile + 1] as usize]
    }

    /// How many of the KV tiles `tiles` its rows see.
    pub(super) fn count(&self, tiles: &Range<u32>) -> u64 {
        self.runs()
            .iter()
            .map(|run| {
                let end = (run.kv_tile + run.count).min(tiles.end);
                u64::from(end.saturating_sub(run.kv_tile.max(tiles.start)))
            })
            .sum()
    }

    /// What its rows see.
    fn spans(&self, call: &Call<'_>) -> &[RowSpan] {
        let first = self.tile * call.work.tile.q_rows as usize;
        &self.class.rows[first..first + self.a.len()]
    }

    /// Packs q and starts a state of its own: base-2 logits, merged into the caller's state at the end.
    #[inline(always)]
    fn begin(&self, call: &Call<'_>, batch: usize, lanes: usize, row: &mut [f32], state: &mut UnitScratch) {
        let (rows, dim) = (self.a.len(), call.dim);
        let first = self.tile * call.work.tile.q_rows as usize;
        // The base-2 factor goes into q, so that no score needs it; under a softcap it goes behind the tanh.
        let factor = match call.softcap {
            None => f64::from(call.scale) * std::f64::consts::LOG2_E,
            Some(cap) => f64::from(call.scale) / f64::from(cap),
        };
        #[expect(clippy::cast_possible_truncation, reason = "rounded once, on purpose")]
        let factor = factor as f32;
        let q = lines_mut(&mut state.q).chunks_exact_mut(lanes * dim);
        for (from, q) in (0..rows).step_by(lanes).zip(q) {
            let at = [batch, first + from, self.head];
            pack_lanes(&call.q, at, lanes.min(rows - from), lanes, factor, row, q);
        }
        let panels = rows.div_ceil(lanes);
        lines_mut(&mut state.o)[..panels * lanes * dim].fill(0.0);
        for ml in lines_mut(&mut state.ml)[..panels * lanes * 2].chunks_exact_mut(2 * lanes) {
            ml[..lanes].fill(EMPTY_M);
            ml[lanes..].fill(0.0);
        }
        state.cursor = 0;
    }

    /// Merges what the job found into the caller's state (`reference`: Milakov & Gimelshein 2018, §3.1). A row that
    /// saw nothing, or nothing but −∞, is not touched.
    #[inline(always)]
    fn end(&mut self, dim: usize, lanes: usize, state: &UnitScratch) {
        for (r, (a, ml)) in self.a.iter_mut().zip(self.ml.as_chunks_mut::<2>().0).enumerate() {
            let (panel, lane) = (r / lanes, r % lanes);
            let found = &lines(&state.ml)[panel * lanes * 2..];
            let (m2, l) = (found[lane], found[lanes + lane]);
            if l == 0.0 && m2 == EMPTY_M {
                continue;
            }
            let column = lines(&state.o)[panel * lanes * dim..][..lanes * dim]
                .chunks_exact(lanes)
                .map(|d| d[lane]);
            let old = *ml;
            let empty = old[1] == 0.0 && old[0] == EMPTY_M;
            let m = if empty {
                m2 * std::f32::consts::LN_2
            } else {
                old[0].max(m2 * std::f32::consts::LN_2)
            };
            // In f64, for m is rounded to natural units and this weight makes up for the rounding.
            #[expect(clippy::cast_possible_truncation, reason = "a weight in 0..=1")]
            let weight = (f64::from(m2) - f64::from(m) * std::f64::consts::LOG2_E).exp2() as f32;
            if empty {
                *ml = [m, l * weight];
                for (a, o) in a.iter_mut().zip(column) {
                    *a = o * weight;
                }
            } else {
                let keep = (old[0] - m).exp();
                *ml = [m, old[1] * keep + l * weight];
                for (a, o) in a.iter_mut().zip(column) {
                    *a = *a * keep + o * weight;
                }
            }
        }
    }
}

fn lines(lines: &[super::scratch::Line]) -> &[f32] {
    bytemuck::cast_slice(lines)
}

fn lines_mut(lines: &mut [super::scratch::Line]) -> &mut [f32] {
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
