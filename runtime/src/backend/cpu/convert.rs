//! Elements from one form to another: between storage types, and to 8-bit codes and back.

use std::borrow::Cow;

use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::CpuBuffer;
use crate::backend::cpu::arithmetic::halves::{narrow_bf16, widen_bf16, widen_f16};
use crate::backend::{Elements, Scales};
use crate::error::Result;
use kyklos_plan::{Dtype, TOKENS_PER_SCALE};

/// [`Backend::convert`](crate::backend::Backend::convert) of this backend.
pub(super) fn convert(
    from: Elements<&CpuBuffer>,
    into: Elements<&mut CpuBuffer>,
    shape: [usize; 4],
    overflow: Option<&mut CpuBuffer>,
) -> Result<()> {
    let bytes = |first: usize, dtype: Dtype| {
        first * dtype.bytes()..(first + shape.iter().product::<usize>()) * dtype.bytes()
    };
    match (from, into) {
        (
            Elements::Stored { buffer: from, first, dtype },
            Elements::Stored { buffer: into, first: into_first, dtype: into_dtype },
        ) => {
            let source = &from.bytes()[bytes(first, dtype)];
            let target = &mut into.bytes_mut()?[bytes(into_first, into_dtype)];
            store((dtype, source), (into_dtype, target));
            if let Some(word) = overflow.filter(|_| (dtype, into_dtype) == (Dtype::F32, Dtype::F16))
                && overflows(bytemuck::cast_slice(source))
            {
                word.bytes_mut()?[..4].copy_from_slice(&1_u32.to_ne_bytes());
            }
        }
        (Elements::Stored { buffer, first, dtype }, Elements::Coded { codes, scales, of }) => {
            let grid = Grid::new(shape, of);
            let codes = grid.codes_mut(bytemuck::cast_slice_mut(codes.bytes_mut()?), 1);
            let scales = grid.scales_mut(bytemuck::cast_slice_mut(scales.bytes_mut()?));
            let source = grid.codes(&buffer.bytes()[bytes(first, dtype)], dtype.bytes());
            codes.into_par_iter().zip(scales).zip(source).for_each(|((codes, scales), source)| {
                grid.encode(&floats(dtype, source), codes, scales);
            });
        }
        (Elements::Coded { codes, scales, of }, Elements::Stored { buffer, first, dtype }) => {
            let grid = Grid::new(shape, of);
            let (codes, scales) = (grid.codes(codes.elements(), 1), grid.scales(scales.elements()));
            let target = grid.codes_mut(&mut buffer.bytes_mut()?[bytes(first, dtype)], dtype.bytes());
            target.into_par_iter().zip(codes).zip(scales).for_each(|((target, codes), scales)| {
                if dtype == Dtype::F32 {
                    return grid.decode(codes, scales, bytemuck::cast_slice_mut(target));
                }
                let mut numbers = vec![0.0; codes.len()];
                grid.decode(codes, scales, &mut numbers);
                store((Dtype::F32, bytemuck::cast_slice(&numbers)), (dtype, target));
            });
        }
        (Elements::Coded { .. }, Elements::Coded { .. }) => {
            unreachable!("plans convert to codes and back, not from codes to codes")
        }
    }
    Ok(())
}

/// `into` = `from`, element by element, rounded to nearest, ties to even; of the two types one is
/// f32. Both hold as many elements.
fn store((from, source): (Dtype, &[u8]), (into, target): (Dtype, &mut [u8])) {
    use bytemuck::{cast_slice, cast_slice_mut};
    match (from, into) {
        (Dtype::F32, Dtype::F16) => {
            cast_slice_mut::<_, f16>(target).convert_from_f32_slice(cast_slice(source));
        }
        (Dtype::F32, Dtype::Bf16) => {
            narrow_bf16(cast_slice(source), cast_slice_mut(target));
        }
        (Dtype::F16, Dtype::F32) => {
            widen_f16(cast_slice(source), cast_slice_mut(target));
        }
        (Dtype::Bf16, Dtype::F32) => {
            widen_bf16(cast_slice(source), cast_slice_mut(target));
        }
        (from, into) => unreachable!("plans convert between f32 and a 16-bit type, not {from} to {into}"),
    }
}

/// Whether a finite number is infinite in f16: at least half a step above its largest number. Has
/// no early return, so that it is compiled to wide instructions.
fn overflows(numbers: &[f32]) -> bool {
    let beyond = |x: &f32| u32::from(x.abs() >= 65_520.0) & u32::from(x.abs() < f32::INFINITY);
    numbers.iter().fold(0, |any, x| any | beyond(x)) == 1
}

fn floats(dtype: Dtype, source: &[u8]) -> Cow<'_, [f32]> {
    if dtype == Dtype::F32 {
        return Cow::Borrowed(bytemuck::cast_slice(source));
    }
    let mut numbers = vec![0.0_f32; source.len() / dtype.bytes()];
    store((dtype, source), (Dtype::F32, bytemuck::cast_slice_mut(&mut numbers)));
    Cow::Owned(numbers)
}

/// A tensor of codes in parts that share no scale and are computed in parallel:
/// [`TOKENS_PER_SCALE`] tokens of a batch entry, or fewer at its end.
struct Grid {
    tokens: usize,
    heads: usize,
    dim: usize,
    of: Scales,
}

impl Grid {
    fn new([_, tokens, heads, dim]: [usize; 4], of: Scales) -> Self {
        Self { tokens, heads, dim, of }
    }

    /// The parts of a tensor of `unit` items for each element.
    fn codes<'a, T>(&self, all: &'a [T], unit: usize) -> Vec<&'a [T]> {
        let token = self.heads * self.dim * unit;
        all.chunks(self.tokens * token).flat_map(|batch| batch.chunks(TOKENS_PER_SCALE * token)).collect()
    }

    fn codes_mut<'a, T>(&self, all: &'a mut [T], unit: usize) -> Vec<&'a mut [T]> {
        let token = self.heads * self.dim * unit;
        let batches = all.chunks_mut(self.tokens * token);
        batches.flat_map(|batch| batch.chunks_mut(TOKENS_PER_SCALE * token)).collect()
    }

    /// Scales of a batch entry, and of a part that is not its last.
    fn scale_counts(&self) -> (usize, usize) {
        match self.of {
            Scales::Channels => {
                let part = self.heads * self.dim;
                (self.tokens.div_ceil(TOKENS_PER_SCALE) * part, part)
            }
            Scales::Rows => (self.tokens * self.heads, TOKENS_PER_SCALE * self.heads),
        }
    }

    fn scales<'a>(&self, all: &'a [f32]) -> Vec<&'a [f32]> {
        let (batch, part) = self.scale_counts();
        all.chunks(batch).flat_map(|batch| batch.chunks(part)).collect()
    }

    fn scales_mut<'a>(&self, all: &'a mut [f32]) -> Vec<&'a mut [f32]> {
        let (batch, part) = self.scale_counts();
        all.chunks_mut(batch).flat_map(|batch| batch.chunks_mut(part)).collect()
    }

    /// Codes and scales of one part.
    fn encode(&self, numbers: &[f32], codes: &mut [i8], scales: &mut [f32]) {
        match self.of {
            Scales::Channels => {
                let token = scales.len();
                scales.fill(0.0);
                for numbers in numbers.chunks_exact(token) {
                    scales.iter_mut().zip(numbers).for_each(|(largest, x)| *largest = largest.max(size(*x)));
                }
                scales.iter_mut().for_each(|scale| *scale = scale_for(*scale));
                for (codes, numbers) in codes.chunks_exact_mut(token).zip(numbers.chunks_exact(token)) {
                    for ((code, x), scale) in codes.iter_mut().zip(numbers).zip(&*scales) {
                        *code = code_of(*x, *scale);
                    }
                }
            }
            Scales::Rows => {
                let rows = codes.chunks_exact_mut(self.dim).zip(numbers.chunks_exact(self.dim));
                for ((codes, numbers), scale) in rows.zip(scales) {
                    *scale = scale_for(numbers.iter().map(|x| size(*x)).fold(0.0, f32::max));
                    codes.iter_mut().zip(numbers).for_each(|(code, x)| *code = code_of(*x, *scale));
                }
            }
        }
    }

    /// The numbers of one part.
    fn decode(&self, codes: &[i8], scales: &[f32], numbers: &mut [f32]) {
        match self.of {
            Scales::Channels => {
                let token = scales.len();
                for (numbers, codes) in numbers.chunks_exact_mut(token).zip(codes.chunks_exact(token)) {
                    for ((x, code), scale) in numbers.iter_mut().zip(codes).zip(scales) {
                        *x = number_of(*code, *scale);
                    }
                }
            }
            Scales::Rows => {
                let rows = numbers.chunks_exact_mut(self.dim).zip(codes.chunks_exact(self.dim));
                for ((numbers, codes), scale) in rows.zip(scales) {
                    numbers.iter_mut().zip(codes).for_each(|(x, code)| *x = number_of(*code, *scale));
                }
            }
        }
    }
}

/// Magnitude of an element that counts for a scale; 0 for NaN and ∞, which do not count.
fn size(x: f32) -> f32 {
    if x.is_finite() { x.abs() } else { 0.0 }
}

/// 0 if the scale would be subnormal: devices may flush subnormal numbers.
fn scale_for(largest: f32) -> f32 {
    let scale = largest / 127.0;
    if scale < f32::MIN_POSITIVE { 0.0 } else { scale }
}

/// Adding 1.5 · 2²³ rounds to a whole number, ties to even, and leaves it in the low bits: a few
/// instructions for a whole vector of numbers, on any processor.
#[expect(clippy::cast_possible_truncation, reason = "the low byte is the code")]
fn code_of(x: f32, scale: f32) -> i8 {
    // With a scale of 0 every element rounds to 0 anyway.
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    let code = (x / divisor + 12_582_912.0).to_bits() as i8;
    if x.is_finite() { code } else { NOT_FINITE }
}

fn number_of(code: i8, scale: f32) -> f32 {
    if code == NOT_FINITE { f32::NAN } else { f32::from(code) * scale }
}

const NOT_FINITE: i8 = i8::MIN;
