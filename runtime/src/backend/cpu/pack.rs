//! Tiles in the order in which the kernel reads them, as f32.

use bytemuck::cast_slice;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::CpuBuffer;
use crate::Dtype;
use crate::backend::{Layout, Operand};

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

    /// `count` rows of `dim` elements from row `first` on: in place if they are f32, else a converted copy in `space`.
    pub(super) fn rows<'s>(
        &self,
        [batch, first, head]: [usize; 3],
        count: usize,
        dim: usize,
        space: &'s mut [f32],
    ) -> Rows<'s>
    where
        'a: 's,
    {
        if let Elements::F32(all) = self.elements {
            let at = self.start([batch, first, head]);
            return Rows { elements: &all[at..], stride: self.layout.row_stride, dim };
        }
        for (index, space) in space.chunks_exact_mut(dim).take(count).enumerate() {
            self.row([batch, first + index, head], space);
        }
        Rows { elements: space, stride: dim, dim }
    }

    /// One head of one row: the row itself, or a converted copy in `space`, which has its length.
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

    /// Copies one head of one row, converted.
    fn copy_row(&self, at: [usize; 3], into: &mut [f32]) {
        let range = self.start(at)..self.start(at) + into.len();
        match self.elements {
            Elements::F32(all) => into.copy_from_slice(&all[range]),
            Elements::F16(all) => all[range].convert_to_f32_slice(into),
            Elements::Bf16(all) => all[range].convert_to_f32_slice(into),
        }
    }

    /// The index of the first element of one head of one row.
    fn start(&self, [batch, row, head]: [usize; 3]) -> usize {
        let Layout { offset, batch_stride, row_stride, head_stride } = self.layout;
        offset + batch * batch_stride + row * row_stride + head * head_stride
    }
}

/// Consecutive rows of a head, as f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    elements: &'a [f32],
    stride: usize,
    pub(super) dim: usize,
}

impl Rows<'_> {
    #[inline(always)]
    pub(super) fn row(&self, index: usize, dim: usize) -> &[f32] {
        &self.elements[index * self.stride..][..dim]
    }

    /// Whether the first `count` rows hold neither NaN nor ∞.
    pub(super) fn are_finite(&self, count: usize, dim: usize) -> bool {
        (0..count).all(|index| self.row(index, dim).iter().all(|value| value.is_finite()))
    }
}

/// `into[d][lane]` = row `first + lane` times `factor`; lanes from `rows` on are 0. `space` holds `lanes` rows.
#[inline(always)]
pub(super) fn pack_lanes(
    tensor: &Tensor<'_>,
    [batch, first, head]: [usize; 3],
    rows: usize,
    lanes: usize,
    factor: f32,
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
    for (d, into) in (0..dim).step_by(8).zip(into.chunks_exact_mut(8 * lanes)) {
        for (lane, sources) in (0..).step_by(4).zip(sources.as_chunks::<4>().0) {
            // Loops instead of array::map, because the compiler does not inline array::map.
            let mut block = [[0.0; 8]; 4];
            for (to, row) in block.iter_mut().zip(sources) {
                if let Some(row) = row.get(d..d + 8) {
                    to.copy_from_slice(row);
                }
            }
            for (i, column) in transposed(block).into_iter().enumerate() {
                for (into, value) in into[i * lanes + lane..][..4].iter_mut().zip(column) {
                    *into = value * factor;
                }
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

/// `into[d / MR][key][d % MR]`, `stride` keys to a group, the last group padded with 0. Returns whether every element
/// is finite.
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
