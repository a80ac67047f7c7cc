//! dK and dV of a panel of query rows and a tile of keys.

use pulp::Simd;

use super::super::kernel::{OfKeys, alone};
use super::super::tiles::{self, TileProduct};
use super::blocks::Blocks;
use super::panel::{Keys, Panel};
use crate::backend::cpu::arithmetic::simd::{vectors, vectors_mut};

impl<S: Simd, const MR: usize, const NV: usize> Panel<'_, S, MR, NV> {
    /// `sums[key] += Σ dS[key][row] · q[row]`, or with `TENSOR` 1 `Σ P[key][row] · dO[row]`. Sums
    /// behind the last key have no meaning.
    #[inline(always)]
    pub(super) fn add_to_keys<const TENSOR: usize>(
        &self,
        simd: S,
        keys: &Keys<'_, MR>,
        sums: &mut [f32],
        blocks: Blocks,
    ) {
        let rows = &self.by_row[TENSOR];
        let factors: &[f32] = match &self.words {
            Some(words) => words.of_rows[TENSOR],
            None => bytemuck::cast_slice::<S::f32s, f32>(
                if TENSOR == 0 { &*self.d_scores } else { &*self.weights }.as_flattened(),
            ),
        };
        if self.hides(rows.finite) {
            return self.add_to_keys_where_seen(keys, factors, rows.elements, sums, blocks);
        }
        let (pairs, last) = rows.elements.split_at(self.of_rows.of_pairs());
        let (sums_of_pairs, sums_of_last) = sums.split_at_mut(blocks.of_pairs());
        self.add_blocks::<2>(simd, keys, factors, pairs, sums_of_pairs);
        if !last.is_empty() {
            self.add_blocks::<1>(simd, keys, factors, last, sums_of_last);
        }
    }

    /// The blocks of `W` vectors of [`Self::add_to_keys`].
    #[inline(always)]
    fn add_blocks<const W: usize>(
        &self,
        simd: S,
        keys: &Keys<'_, MR>,
        factors: &[f32],
        rows: &[f32],
        sums: &mut [f32],
    ) {
        let (count, stride) = (keys.positions.len(), keys.stride);
        if let Some(tiles) = self.words.as_ref().and_then(|words| words.tiles) {
            let row = W * tiles::SIDE;
            let blocks = rows.chunks_exact(self.of_rows.rows * row);
            for (rows, sums) in blocks.zip(sums.chunks_exact_mut(stride * row)) {
                tiles.multiply::<W>(TileProduct {
                    a: factors,
                    rows: stride,
                    first: 0,
                    b: rows,
                    c: &mut sums[..tiles::rows_of(count) * row],
                    add: true,
                });
            }
            return;
        }
        let factors = &factors[..count.next_multiple_of(MR) * NV * S::F32_LANES / self.rows_in_word()];
        let (rows, sums) = (vectors::<S, W>(rows), vectors_mut::<S, W>(sums));
        let product = OfKeys::<S, MR, NV, W> { simd, factors, rows, sums, stride };
        match &self.words {
            None => alone(simd, product),
            Some(words) => words.products.of_keys(product),
        }
    }

    /// As [`Self::add_to_keys`], but leaves hidden pairs out. Only for rows with NaN or ∞.
    fn add_to_keys_where_seen(
        &self,
        keys: &Keys<'_, MR>,
        factors: &[f32],
        rows: &[f32],
        sums: &mut [f32],
        blocks: Blocks,
    ) {
        let (lanes, per_word) = (NV * S::F32_LANES, self.rows_in_word());
        let tiles = self.words.as_ref().is_some_and(|words| words.tiles.is_some());
        let terms = self.terms.map(|terms| bytemuck::cast_slice::<S::f32s, f32>(terms.as_flattened()));
        for (index, position) in keys.positions.iter().enumerate() {
            for (lane, span) in self.spans.iter().enumerate() {
                let hidden = terms.is_some_and(|terms| terms[index * lanes + lane] == f32::NEG_INFINITY);
                if hidden || (self.masked && !span.sees(*position)) {
                    continue;
                }
                let element = |word: f32| match (per_word, lane % 2) {
                    (1, _) => word,
                    (_, 0) => f32::from_bits(word.to_bits() << 16),
                    _ => f32::from_bits(word.to_bits() & 0xffff_0000),
                };
                let factor = element(
                    factors[if tiles {
                        tiles::place(keys.stride, index, lane / per_word)
                    } else {
                        (index * lanes + lane) / per_word
                    }],
                );
                for block in 0..blocks.count() {
                    let row = &rows[self.of_rows.part(lane / per_word, block)];
                    for (sum, word) in sums[blocks.part(index, block)].iter_mut().zip(row) {
                        *sum += factor * element(*word);
                    }
                }
            }
        }
    }
}
