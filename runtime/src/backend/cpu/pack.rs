//! Tiles in the order in which the kernel reads them, as f32.

use bytemuck::{Pod, cast_slice};
use half::{bf16, f16};

use super::{CpuBuffer, tiles};
use crate::backend::cpu::arithmetic::elements::Rows;
use crate::backend::cpu::arithmetic::halves::{widen_bf16, widen_f16};
use crate::backend::{Layout, Operand};
use kyklos_plan::Dtype;

/// A strided `[batch, rows, heads, dim]` tensor to be read as f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor<'a> {
    elements: Elements<'a>,
    layout: Layout,
}

#[derive(Clone, Copy, Debug)]
enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    /// Read as words of two elements (module `bf16`).
    Words(&'a [bf16]),
}

impl<'a> Tensor<'a> {
    pub(super) fn new(dtype: Dtype, operand: Operand<'a, CpuBuffer>) -> Self {
        Self {
            elements: match dtype {
                Dtype::F32 => Elements::F32(operand.buffer.elements()),
                Dtype::F16 => Elements::F16(operand.buffer.elements()),
                Dtype::Bf16 => Elements::Bf16(operand.buffer.elements()),
            },
            layout: operand.layout,
        }
    }

    /// The type of its elements.
    pub(super) fn dtype(&self) -> Dtype {
        match self.elements {
            Elements::F32(_) => Dtype::F32,
            Elements::F16(_) => Dtype::F16,
            Elements::Bf16(_) | Elements::Words(_) => Dtype::Bf16,
        }
    }

    /// This tensor of bf16, to be read as words of two elements: a row has half as many of them.
    pub(super) fn in_words(self) -> Self {
        match self.elements {
            Elements::Bf16(all) => Self { elements: Elements::Words(all), ..self },
            _ => unreachable!("only bf16 has words"),
        }
    }

    /// The rows of a head from row `first` on, where they lie. The elements are stored as `T`.
    #[inline(always)]
    pub(super) fn in_place<T: Pod>(&self, at: [usize; 3], dim: usize) -> Rows<'a, T> {
        Rows::new(&self.stored()[self.start(at)..], self.layout.row_stride, dim)
    }

    #[inline(always)]
    fn stored<T: Pod>(&self) -> &'a [T] {
        match self.elements {
            Elements::F32(all) => cast_slice(all),
            Elements::F16(all) => cast_slice(all),
            Elements::Bf16(all) | Elements::Words(all) => cast_slice(all),
        }
    }

    /// One head of one row: the row itself, or a converted copy in `space`, which has its length.
    #[inline(always)]
    pub(super) fn row<'s>(&self, at: [usize; 3], space: &'s mut [f32]) -> &'s [f32]
    where
        'a: 's,
    {
        if let Elements::F32(all) = self.elements {
            return &all[self.start(at)..][..space.len()];
        }
        self.copy_row(at, space);
        space
    }

    /// Copies one head of one row, converted or in words.
    #[inline(always)]
    pub(super) fn copy_row(&self, at: [usize; 3], into: &mut [f32]) {
        let range = self.start(at)..self.start(at) + into.len();
        match self.elements {
            Elements::Words(all) => {
                let into: &mut [bf16] = bytemuck::cast_slice_mut(into);
                into.copy_from_slice(&all[range.start..][..into.len()]);
            }
            Elements::F32(all) => into.copy_from_slice(&all[range]),
            Elements::F16(all) => widen_f16(&all[range], into),
            Elements::Bf16(all) => widen_bf16(&all[range], into),
        }
    }

    /// The index of the first element of one head of one row.
    fn start(&self, [batch, row, head]: [usize; 3]) -> usize {
        let Layout { offset, batch_stride, row_stride, head_stride } = self.layout;
        offset + batch * batch_stride + row * row_stride + head * head_stride
    }
}

/// `into[d][lane]` = row `first + lane` times `factor` (`None`: as it is); lanes from `rows` on are
/// 0. `space` holds `lanes` rows.
#[inline(always)]
pub(super) fn pack_lanes(
    tensor: &Tensor<'_>,
    [batch, first, head]: [usize; 3],
    rows: usize,
    lanes: usize,
    factor: Option<f32>,
    space: &mut [f32],
    into: &mut [f32],
) {
    let dim = into.len() / lanes;
    let mut sources: [&[f32]; MAX_LANES] = [&[]; MAX_LANES];
    let spaces = space.chunks_exact_mut(dim);
    for ((lane, source), space) in sources[..rows].iter_mut().enumerate().zip(spaces) {
        *source = tensor.row([batch, first + lane, head], space);
    }
    let sources = &sources[..lanes];
    // A few elements of all rows, then the next few: the rows' cache misses overlap.
    let (eights, four) = into.split_at_mut(dim / 8 * 8 * lanes);
    for (d, into) in (0..).step_by(8).zip(eights.chunks_exact_mut(8 * lanes)) {
        pack_block::<8>(sources, d, factor, into);
    }
    // Head dimensions are multiples of eight, words of two elements are half as many.
    if !four.is_empty() {
        pack_block::<4>(sources, dim - 4, factor, four);
    }
}

/// `N` elements of all rows, from `d` on.
#[inline(always)]
fn pack_block<const N: usize>(sources: &[&[f32]], d: usize, factor: Option<f32>, into: &mut [f32]) {
    let lanes = sources.len();
    for (lane, sources) in (0..).step_by(4).zip(sources.as_chunks::<4>().0) {
        // Loops instead of array::map, because the compiler does not inline array::map.
        let mut block = [[0.0; N]; 4];
        for (to, row) in block.iter_mut().zip(sources) {
            if let Some(row) = row.get(d..d + N) {
                to.copy_from_slice(row);
            }
        }
        for (i, column) in transposed(block).into_iter().enumerate() {
            for (into, value) in into[i * lanes + lane..][..4].iter_mut().zip(column) {
                // Words are copied as bits.
                *into = factor.map_or(value, |factor| value * factor);
            }
        }
    }
}

/// Columns of a small matrix; the compiler makes shuffles of it.
#[inline(always)]
pub(super) fn transposed<const ROWS: usize, const COLUMNS: usize>(
    rows: [[f32; COLUMNS]; ROWS],
) -> [[f32; ROWS]; COLUMNS] {
    std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
}

/// Rows of a panel, at most: three vectors of sixteen. Panels hold a multiple of four.
pub(super) const MAX_LANES: usize = 48;

/// `into[key / MR][d][key % MR]`; keys from `keys` to the end of their group are 0.
#[inline(always)]
pub(super) fn pack_keys<const MR: usize>(
    tensor: &Tensor<'_>,
    [batch, first, head]: [usize; 3],
    keys: usize,
    space: &mut [f32],
    into: &mut [f32],
) {
    let dim = space.len() / MR;
    for (group, into) in into.chunks_exact_mut(MR * dim).enumerate() {
        let from = group * MR;
        if from >= keys {
            break;
        }
        let mut spaces = space.chunks_exact_mut(dim);
        let rows: [&[f32]; MR] = std::array::from_fn(|i| {
            let space = spaces.next().expect("space has MR rows");
            if from + i < keys {
                &tensor.row([batch, first + from + i, head], space)[..dim]
            } else {
                space.fill(0.0);
                space
            }
        });
        for (d, into) in into.as_chunks_mut::<MR>().0.iter_mut().enumerate() {
            *into = std::array::from_fn(|i| rows[i][d]);
        }
    }
}

/// `into[d / MR][key][d % MR]`, `stride` keys to a group, the last group padded with 0. Returns
/// whether every element is finite.
#[inline(always)]
pub(super) fn pack_values<const MR: usize>(
    tensor: &Tensor<'_>,
    [batch, first, head]: [usize; 3],
    keys: usize,
    stride: usize,
    space: &mut [f32],
    into: &mut [f32],
) -> bool {
    let mut largest = 0_u32;
    for key in 0..keys {
        let row = tensor.row([batch, first + key, head], space);
        // An integer test: it stays one instruction for each vector, and no float rule can fold it away.
        for bits in cast_slice::<f32, u32>(row) {
            largest = largest.max(bits & 0x7fff_ffff);
        }
        let (whole, rest) = row.as_chunks::<MR>();
        for (group, chunk) in whole.iter().enumerate() {
            let at = (group * stride + key) * MR;
            into[at..at + MR].copy_from_slice(chunk);
        }
        if !rest.is_empty() {
            let at = (whole.len() * stride + key) * MR;
            into[at..at + MR].fill(0.0);
            into[at..at + rest.len()].copy_from_slice(rest);
        }
    }
    largest < f32::INFINITY.to_bits()
}

/// As [`pack_values`], in words of two keys: `into[d / MR][key / 2][d % MR]`, `stride` words to a
/// group. A last key without a neighbour is paired with 0. `space` holds two rows of `dim / 2`
/// words.
#[inline(always)]
pub(super) fn pack_value_words<const MR: usize>(
    tensor: &Tensor<'_>,
    [batch, first, head]: [usize; 3],
    keys: usize,
    stride: usize,
    space: &mut [f32],
    into: &mut [f32],
) -> bool {
    const MAGNITUDE: u32 = 0x7fff;
    let (low, high) = space.split_at_mut(space.len() / 2);
    let mut largest = [0_u32; 2];
    for (pair, key) in (0..keys).step_by(2).enumerate() {
        tensor.copy_row([batch, first + key, head], low);
        if key + 1 < keys {
            tensor.copy_row([batch, first + key + 1, head], high);
        } else {
            high.fill(0.0);
        }
        let low: &[u16] = cast_slice(low);
        let high: &[u16] = cast_slice(high);
        for (group, (low, high)) in low.chunks(MR).zip(high.chunks(MR)).enumerate() {
            let into = &mut into[(group * stride + pair) * MR..][..MR];
            for (into, (low, high)) in into.iter_mut().zip(low.iter().zip(high)) {
                let (low, high) = (u32::from(*low), u32::from(*high));
                largest[0] = largest[0].max(low & MAGNITUDE);
                largest[1] = largest[1].max(high & MAGNITUDE);
                *into = f32::from_bits(low | high << 16);
            }
            into[low.len()..].fill(0.0);
        }
    }
    largest[0].max(largest[1]) < u32::from(bf16::INFINITY.to_bits())
}

/// Words of the head dimension as operands of tile registers: `into[word / 16][key][word % 16]`,
/// `rows` keys in a block. Words beyond the head are 0, keys beyond `keys` are left as they are.
/// `space` holds a row in whole tiles.
#[inline(always)]
pub(super) fn pack_key_tiles(
    tensor: &Tensor<'_>,
    [batch, first, head]: [usize; 3],
    keys: usize,
    words: usize,
    space: &mut [f32],
    into: &mut [f32],
) {
    space[words..].fill(0.0);
    let rows = into.len() / space.len();
    for key in 0..keys {
        tensor.copy_row([batch, first + key, head], &mut space[..words]);
        let pieces = space.as_chunks::<{ tiles::SIDE }>().0;
        let blocks = into.chunks_exact_mut(rows * tiles::SIDE);
        for (piece, block) in pieces.iter().zip(blocks) {
            block[key * tiles::SIDE..][..tiles::SIDE].copy_from_slice(piece);
        }
    }
}

/// Words of two keys as operands of tile registers: `into[word / 16][d][word % 16]`, `rows`
/// elements of the head in a block, of which those beyond `dim` are left as they are. Keys up to
/// the end of a block are 0. Returns whether every element is finite. `space` holds 17 rows of
/// `dim` words.
#[inline(always)]
pub(super) fn pack_value_tiles(
    tensor: &Tensor<'_>,
    [batch, first, head]: [usize; 3],
    keys: usize,
    (dim, rows): (usize, usize),
    space: &mut [f32],
    into: &mut [f32],
) -> bool {
    let (pair, space) = space.split_at_mut(dim);
    let mut largest = 0;
    let blocks = into.chunks_exact_mut(rows * tiles::SIDE);
    for (from, into) in (0..keys).step_by(2 * tiles::SIDE).zip(blocks) {
        let mut sources: [&[f32]; tiles::SIDE] = [&[]; tiles::SIDE];
        let words = (from..keys).step_by(2).zip(space.chunks_exact_mut(dim));
        for ((key, words), source) in words.zip(&mut sources) {
            let (low, high) = pair.split_at_mut(dim / 2);
            tensor.copy_row([batch, first + key, head], low);
            if key + 1 < keys {
                tensor.copy_row([batch, first + key + 1, head], high);
            } else {
                high.fill(0.0);
            }
            largest = largest.max(interleave(cast_slice(low), cast_slice(high), words));
            *source = words;
        }
        for (d, into) in (0..dim).step_by(8).zip(into.chunks_exact_mut(8 * tiles::SIDE)) {
            pack_block::<8>(&sources, d, None, into);
        }
    }
    largest < bf16::INFINITY.to_bits()
}

/// Words of the elements of two rows; returns the bits of the largest magnitude.
#[inline(always)]
fn interleave(low: &[u16], high: &[u16], into: &mut [f32]) -> u16 {
    const MAGNITUDE: u16 = 0x7fff;
    let mut largest = [0_u16; 2];
    for (into, (low, high)) in into.iter_mut().zip(low.iter().zip(high)) {
        largest[0] = largest[0].max(low & MAGNITUDE);
        largest[1] = largest[1].max(high & MAGNITUDE);
        *into = f32::from_bits(u32::from(*low) | u32::from(*high) << 16);
    }
    largest[0].max(largest[1])
}
