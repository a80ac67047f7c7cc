//! Rows of a head, cut into blocks of two vectors of elements: `[block][row][2 vectors]`, so that
//! the products that have elements in lanes read and write memory in its order. An odd number of
//! vectors leaves one for the last block.

use std::ops::Range;

use super::super::pack::Tensor;

/// Elements of a block, and rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    dim: usize,
    /// Elements of a block of two vectors.
    pair: usize,
    /// How many of them there are.
    pairs: usize,
    pub(super) rows: usize,
}

impl Blocks {
    /// For `rows` rows of `dim` elements in vectors of `lanes`.
    pub(super) fn new(dim: usize, lanes: usize, rows: usize) -> Self {
        Self { dim, pair: 2 * lanes, pairs: dim.div_ceil(lanes) / 2, rows }
    }

    /// Elements in all.
    pub(super) fn elements(self) -> usize {
        self.dim.next_multiple_of(self.pair / 2) * self.rows
    }

    /// Elements of the blocks of two vectors; those of the last block follow.
    pub(super) fn of_pairs(self) -> usize {
        self.pair * self.pairs * self.rows
    }

    /// How many blocks there are.
    pub(super) fn count(self) -> usize {
        self.dim.div_ceil(self.pair)
    }

    /// Where the elements of a row in a block are.
    #[inline(always)]
    pub(super) fn part(self, row: usize, block: usize) -> Range<usize> {
        let from = block * self.pair;
        let length = if block < self.pairs { self.pair } else { self.pair / 2 };
        let at = from * self.rows + row * length;
        at..at + length.min(self.dim - from)
    }

    /// Packs the first `count` rows from `at` on, and zeros for the others; `space` holds a row.
    /// Elements behind the last one of a row keep what they are. Returns whether every element
    /// is finite.
    #[inline(always)]
    pub(super) fn pack(
        self,
        tensor: &Tensor<'_>,
        [batch, first, head]: [usize; 3],
        count: usize,
        space: &mut [f32],
        into: &mut [f32],
    ) -> bool {
        let mut largest = 0_u32;
        for index in 0..self.rows {
            if index >= count {
                for block in 0..self.count() {
                    into[self.part(index, block)].fill(0.0);
                }
                continue;
            }
            let mut row = tensor.row([batch, first + index, head], &mut space[..self.dim]);
            // As in `pack_values`.
            for bits in bytemuck::cast_slice::<f32, u32>(row) {
                largest = largest.max(bits & 0x7fff_ffff);
            }
            for block in 0..self.count() {
                let part = self.part(index, block);
                let (elements, rest) = row.split_at(part.len());
                into[part].copy_from_slice(elements);
                row = rest;
            }
        }
        largest < f32::INFINITY.to_bits()
    }

    /// As [`Blocks::pack`], in words of two rows, of which `self` has half as many. The tensor is
    /// in words; `space` holds two rows of them.
    #[inline(always)]
    pub(super) fn pack_words(
        self,
        tensor: &Tensor<'_>,
        [batch, first, head]: [usize; 3],
        count: usize,
        space: &mut [f32],
        into: &mut [f32],
    ) -> bool {
        const MAGNITUDE: u32 = 0x7fff;
        let (low, high) = space[..self.dim].split_at_mut(self.dim / 2);
        let mut largest = 0;
        for pair in 0..self.rows {
            for (row, into) in [(2 * pair, &mut *low), (2 * pair + 1, &mut *high)] {
                if row < count {
                    tensor.copy_row([batch, first + row, head], into);
                } else {
                    into.fill(0.0);
                }
            }
            let low: &[u16] = bytemuck::cast_slice(low);
            let high: &[u16] = bytemuck::cast_slice(high);
            let mut from = 0;
            for block in 0..self.count() {
                let part = self.part(pair, block);
                let elements = from..from + part.len();
                from = elements.end;
                let elements = low[elements.clone()].iter().zip(&high[elements]);
                for (into, (low, high)) in into[part].iter_mut().zip(elements) {
                    let (low, high) = (u32::from(*low), u32::from(*high));
                    largest = largest.max(low & MAGNITUDE).max(high & MAGNITUDE);
                    *into = f32::from_bits(low | high << 16);
                }
            }
        }
        largest < u32::from(half::bf16::INFINITY.to_bits())
    }
}
