//! Attention bias tensors as terms of logits.

use half::{bf16, f16};

use super::CpuBuffer;
use super::pack::{MAX_LANES, transposed};
use crate::backend::cpu::arithmetic::halves::widen_f16;
use crate::backend::{BiasInput, Layout};
use kyklos_plan::{BiasKind, Dtype};

/// Rows of an attention bias tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct BiasRows<'a> {
    elements: Elements<'a>,
    layout: Layout,
}

#[derive(Clone, Copy, Debug)]
enum Elements<'a> {
    Visible(&'a [u32]),
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> BiasRows<'a> {
    pub(super) fn new(dtype: Dtype, bias: &BiasInput<'a, CpuBuffer>) -> Self {
        let elements = match (bias.kind, dtype) {
            (BiasKind::Mask, _) => Elements::Visible(bias.buffer.elements()),
            (BiasKind::Additive, Dtype::F32) => Elements::F32(bias.buffer.elements()),
            (BiasKind::Additive, Dtype::F16) => Elements::F16(bias.buffer.elements()),
            (BiasKind::Additive, Dtype::Bf16) => Elements::Bf16(bias.buffer.elements()),
        };
        Self { elements, layout: bias.layout }
    }

    /// `into[key · lanes + lane]` = the term of row `first + lane` for its logit of the key at
    /// `positions[key]`; −∞ hides the key. Lanes from `rows` on have no meaning. Returns
    /// whether any of the rows sees any of the keys.
    #[inline(always)]
    pub(super) fn terms(
        &self,
        [batch, first, head]: [usize; 3],
        rows: usize,
        positions: &[u32],
        lanes: usize,
        into: &mut [f32],
    ) -> bool {
        let Layout { offset, batch_stride, row_stride, head_stride } = self.layout;
        let at = offset + batch * batch_stride + first * row_stride + head * head_stride;
        let mut starts = [0; MAX_LANES];
        for (lane, start) in starts[..rows].iter_mut().enumerate() {
            *start = at + lane * row_stride;
        }
        let rows = Rows { starts: &starts[..rows], positions, lanes };
        match self.elements {
            Elements::Visible(words) => rows.visible(words, into),
            Elements::F32(all) => rows.bias(all, |bias| *bias, into),
            Elements::F16(all) => rows.bias(
                all,
                |bias| {
                    let mut converted = [0.0; 8];
                    widen_f16(bias, &mut converted);
                    converted
                },
                into,
            ),
            Elements::Bf16(all) => rows.bias(all, |bias| bias.map(bf16::to_f32), into),
        }
    }
}

/// Some rows of a head, by the elements at which they start.
struct Rows<'a> {
    starts: &'a [usize],
    positions: &'a [u32],
    lanes: usize,
}

impl Rows<'_> {
    /// Bits of 32 positions are fetched together, and tested in all lanes at once.
    #[inline(always)]
    fn visible(&self, all: &[u32], into: &mut [f32]) -> bool {
        let mut words = [0_u32; MAX_LANES];
        let mut fetched = None;
        let mut seen = [0_u32; MAX_LANES];
        for (position, terms) in self.positions.iter().zip(into.chunks_exact_mut(self.lanes)) {
            let word = *position as usize / 32;
            if fetched != Some(word) {
                fetched = Some(word);
                for (word_of_row, start) in words.iter_mut().zip(self.starts) {
                    *word_of_row = all[start + word];
                }
            }
            let bit = 1 << (position % 32);
            for ((term, word), seen) in terms.iter_mut().zip(&words).zip(&mut seen) {
                *seen |= word & bit;
                *term = if word & bit == 0 { f32::NEG_INFINITY } else { 0.0 };
            }
        }
        seen[..self.starts.len()].iter().any(|seen| *seen != 0)
    }

    /// If eight positions are consecutive, eight elements of each row.
    #[inline(always)]
    fn bias<E: Copy>(&self, all: &[E], f32_of: impl Fn(&[E; 8]) -> [f32; 8], into: &mut [f32]) -> bool {
        let lanes = self.lanes;
        let mut largest = [f32::NEG_INFINITY; MAX_LANES];
        for (positions, terms) in self.positions.chunks(8).zip(into.chunks_mut(8 * lanes)) {
            let first = positions[0] as usize;
            let follow = positions.iter().zip(first..).all(|(position, next)| *position as usize == next);
            for (lane, starts) in (0..).step_by(4).zip(self.starts.chunks(4)) {
                let mut block = [[0.0; 8]; 4];
                for (row, start) in block.iter_mut().zip(starts) {
                    let at = start + first;
                    *row = match all.get(at..at + 8).and_then(<[E]>::first_chunk) {
                        Some(elements) if follow => f32_of(elements),
                        // Elements one by one; the elements behind the last position have no meaning.
                        _ => f32_of(&std::array::from_fn(|i| {
                            all[start + positions[i.min(positions.len() - 1)] as usize]
                        })),
                    };
                }
                for (terms, biases) in terms.chunks_exact_mut(lanes).zip(transposed(block)) {
                    let largest = largest[lane..lane + 4].iter_mut();
                    for ((term, bias), largest) in terms[lane..].iter_mut().zip(biases).zip(largest) {
                        *term = limited(bias);
                        *largest = if *term > *largest || term.is_nan() { *term } else { *largest };
                    }
                }
            }
        }
        largest[..self.starts.len()].iter().any(|largest| *largest != f32::NEG_INFINITY)
    }
}

/// −∞ hides a key, and stays −∞. Other numbers are limited, so that logits stay above that of a row
/// that saw no key.
#[inline(always)]
fn limited(bias: f32) -> f32 {
    if bias < LEAST_BIAS && bias > f32::NEG_INFINITY { LEAST_BIAS } else { bias }
}

/// The limit that [`BiasKind::Additive`] documents.
const LEAST_BIAS: f32 = -1e38;
