//! Packed keys and values of some heads: packed once, read by every Q tile of every query head that
//! shares them.

use std::ops::Range;

use pulp::Simd;
use rayon::iter::{IndexedParallelIterator, IntoParallelRefMutIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::call::Call;
use super::pack::{pack_key_tiles, pack_keys, pack_value_tiles, pack_value_words, pack_values};
use super::scratch::{Line, Scratch, Spare, floats_mut, grow};
use super::tiles;
use crate::backend::cpu::arithmetic::simd::{KernelShape, Level, WithKernel};

/// Packed KV tiles of some (batch entry, KV head) pairs; f32 for every storage type, or words of
/// bf16 (module `bf16`): of two elements of a key in k, of two keys in v. For tile registers
/// (module `tiles`) both are in blocks of 16 words.
#[derive(Debug, Default)]
pub(super) struct PackedKeys {
    /// The range of the tiles.
    pub(super) tiles: Range<u32>,
    /// The first (batch · KV heads + KV head), how many of them, and the number of KV heads.
    first: usize,
    heads: usize,
    kv_heads: usize,
    /// Keys in an element of v.
    keys_at_once: usize,
    /// Lines of one tile of k and of v.
    tile_lines: [usize; 2],
    /// `tiles × heads × [key / MR][dim][MR]`, or `[word / 16][key][16]`.
    k: Vec<Line>,
    /// `tiles × heads × [dim / MR][key][MR]`, or `[word / 16][dim][16]`.
    v: Vec<Line>,
    /// `tiles × heads`: whether v holds neither NaN nor ∞.
    finite: Vec<bool>,
}

/// One packed KV tile.
#[derive(Debug)]
pub(super) struct KeyTile<'a, const MR: usize> {
    /// `[key / MR][dim or word][MR]`; for tile registers `[word / 16][key][16]`.
    pub(super) k: &'a [[f32; MR]],
    /// `[dim / MR][key or word][MR]`; for tile registers `[word / 16][dim][16]`.
    pub(super) v: &'a [[f32; MR]],
    /// Keys, or words of two keys, in a group of `v`; for tile registers elements of the head in a
    /// block of `v`.
    pub(super) stride: usize,
    /// Global position of each key.
    pub(super) positions: &'a [u32],
    /// Whether v holds neither NaN nor ∞.
    pub(super) finite: bool,
}

impl PackedKeys {
    /// Bytes of one tile, packed.
    pub(super) fn tile_bytes(call: &Call<'_>, shape: KernelShape) -> usize {
        tile_lines(call, shape).iter().sum::<usize>() * size_of::<Line>()
    }

    /// Packs the tiles of the range `tiles` for which `wanted` is true, of the heads `heads` (batch
    /// · KV heads + KV head).
    pub(super) fn pack(
        &mut self,
        level: Level,
        shape: KernelShape,
        call: &Call<'_>,
        kv_heads: usize,
        heads: &Range<usize>,
        tiles: &Range<u32>,
        wanted: impl Fn(usize, u32) -> bool + Sync,
        scratch: &Spare<Scratch>,
    ) {
        self.tiles = tiles.clone();
        self.first = heads.start;
        self.heads = heads.len();
        self.kv_heads = kv_heads;
        self.keys_at_once = call.elements_in_word();
        self.tile_lines = tile_lines(call, shape);
        let [k_lines, v_lines] = self.tile_lines;
        let count = heads.len() * tiles.len();
        grow(&mut self.k, count * k_lines * 16);
        grow(&mut self.v, count * v_lines * 16);
        self.finite.clear();
        self.finite.resize(count, true);
        self.k
            .par_chunks_exact_mut(k_lines)
            .zip(self.v.par_chunks_exact_mut(v_lines))
            .zip(self.finite.par_iter_mut())
            .enumerate()
            .for_each(|(i, ((k, v), finite))| {
                // Heads of a token are adjacent in memory, so packing them one after the other uses the
                // core's prefetched data.
                let head = heads.start + i % heads.len();
                let tile = tiles.start + (i / heads.len()) as u32;
                if wanted(head / kv_heads, tile) {
                    let mut space = scratch.take();
                    *finite = level.run(Pack {
                        call,
                        at: [head / kv_heads, head % kv_heads],
                        tile,
                        k: bytemuck::cast_slice_mut(k),
                        v: bytemuck::cast_slice_mut(v),
                        scratch: &mut space,
                    });
                    scratch.give(space);
                }
            });
    }

    /// One of the packed tiles.
    pub(super) fn tile<'t, const MR: usize>(
        &'t self,
        call: &Call<'t>,
        batch: usize,
        kv_head: usize,
        tile: u32,
    ) -> KeyTile<'t, MR> {
        let slot = batch * self.kv_heads + kv_head - self.first;
        let at = (tile - self.tiles.start) as usize * self.heads + slot;
        let [k, v] = self.tile_lines;
        let k = bytemuck::cast_slice::<Line, f32>(&self.k[at * k..(at + 1) * k]);
        let v = bytemuck::cast_slice::<Line, f32>(&self.v[at * v..(at + 1) * v]);
        KeyTile {
            k: k.as_chunks().0,
            v: v.as_chunks().0,
            stride: if call.tiles.is_some() {
                call.panel_dim(MR)
            } else {
                (call.work.tile.kv_cols as usize).next_multiple_of(MR) / self.keys_at_once
            },
            positions: call.positions(tile),
            finite: self.finite[at],
        }
    }
}

struct Pack<'a> {
    call: &'a Call<'a>,
    /// Batch entry and KV head.
    at: [usize; 2],
    tile: u32,
    k: &'a mut [f32],
    v: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl WithKernel for Pack<'_> {
    type Output = bool;

    #[inline(always)]
    fn with_kernel<S: Simd, const MR: usize, const NV: usize>(self, _: S) -> bool {
        let call = self.call;
        let shape = KernelShape::of::<S, MR, NV>();
        self.scratch.fit(call.work.tile, call.dim, shape);
        let words = call.words();
        let row = floats_mut(&mut self.scratch.row);
        let keys = call.positions(self.tile).len();
        let first = self.tile as usize * call.work.tile.kv_cols as usize;
        let at = [self.at[0], first, self.at[1]];
        if call.tiles.is_some() {
            pack_key_tiles(&call.k, at, keys, words, &mut row[..call.panel_words()], self.k);
            let dim = (call.dim, call.panel_dim(MR));
            return pack_value_tiles(&call.v, at, keys, dim, row, self.v);
        }
        let row = &mut row[..words * MR];
        let stride = (call.work.tile.kv_cols as usize).next_multiple_of(MR);
        pack_keys::<MR>(&call.k, at, keys, row, self.k);
        if call.bf16.is_some() {
            pack_value_words::<MR>(&call.v, at, keys, stride / 2, &mut row[..2 * words], self.v)
        } else {
            pack_values::<MR>(&call.v, at, keys, stride, &mut row[..words], self.v)
        }
    }
}

fn tile_lines(call: &Call<'_>, shape: KernelShape) -> [usize; 2] {
    if call.tiles.is_some() {
        let keys = tiles::rows_of(call.work.tile.kv_cols as usize);
        let words = (keys / 2).next_multiple_of(tiles::SIDE);
        return [call.panel_words() * keys, words * call.panel_dim(shape.mr)].map(|floats| floats / 16);
    }
    let keys = (call.work.tile.kv_cols as usize).next_multiple_of(shape.mr);
    [call.dim, call.dim.next_multiple_of(shape.mr)]
        .map(|dim| (keys * dim / call.elements_in_word()).div_ceil(16))
}
