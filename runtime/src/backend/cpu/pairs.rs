//! Pair tensors as terms of base-2 logits.

use half::{bf16, f16};

use super::CpuBuffer;
use crate::backend::{Layout, Pairs};
use crate::{Dtype, PairKind};

/// Rows of a pair tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairRows<'a> {
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

impl<'a> PairRows<'a> {
    pub(super) fn new(dtype: Dtype, pairs: &Pairs<'a, CpuBuffer>) -> Self {
        let elements = match (pairs.kind, dtype) {
            (PairKind::Visible, _) => Elements::Visible(pairs.buffer.elements()),
            (PairKind::Bias, Dtype::F32) => Elements::F32(pairs.buffer.elements()),
            (PairKind::Bias, Dtype::F16) => Elements::F16(pairs.buffer.elements()),
            (PairKind::Bias, Dtype::Bf16) => Elements::Bf16(pairs.buffer.elements()),
        };
        Self { elements, layout: pairs.layout }
    }

    /// `into[key · lanes + lane]` = what row (batch entry, row, head) adds to its base-2 logit of the key at
    /// `positions[key]`; −∞ hides it.
    pub(super) fn terms(
        &self,
        [batch, row, head]: [usize; 3],
        positions: &[u32],
        (lane, lanes): (usize, usize),
        into: &mut [f32],
    ) {
        let Layout { offset, batch_stride, row_stride, head_stride } = self.layout;
        let at = offset + batch * batch_stride + row * row_stride + head * head_stride;
        let into = into.chunks_exact_mut(lanes).map(|terms| &mut terms[lane]).zip(positions);
        match self.elements {
            Elements::Visible(words) => into.for_each(|(term, position)| {
                let word = words[at + *position as usize / 32];
                *term = if word >> (position % 32) & 1 == 1 { 0.0 } else { f32::NEG_INFINITY };
            }),
            Elements::F32(all) => into.for_each(|(term, key)| *term = base_2(all[at + *key as usize])),
            Elements::F16(all) => {
                into.for_each(|(term, key)| *term = base_2(all[at + *key as usize].to_f32()));
            }
            Elements::Bf16(all) => {
                into.for_each(|(term, key)| *term = base_2(all[at + *key as usize].to_f32()));
            }
        }
    }
}

/// −∞ hides, and stays what it is; other numbers are kept where their product is finite.
fn base_2(bias: f32) -> f32 {
    let least = if bias < LEAST_BIAS && bias > f32::NEG_INFINITY { LEAST_BIAS } else { bias };
    least * std::f32::consts::LOG2_E
}

/// As [`PairKind::Bias`] says.
const LEAST_BIAS: f32 = -1e38;
