//! The part of a tensor that one rank holds: its tokens, in the order of its list.

use bytes::Bytes;
use kyklos::{Dtype, TokenRuns};
use kyklos_oracle::inputs::{TensorId, fill};
use kyklos_oracle::oracle::Element;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;
use safetensors::tensor::TensorInfo;

use crate::failure::{Failure, Result};

/// A tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorKind {
    Q,
    K,
    V,
    /// The gradient of the output, shaped as q.
    OutputGradient,
}

/// Some tokens of a tensor `[batch, seq, …]`.
pub(super) struct Shard<'a> {
    pub(super) batch: u32,
    pub(super) seq: u32,
    pub(super) token_elements: u64,
    pub(super) elements: usize,
    pub(super) tokens: &'a TokenRuns,
}

/// Elements that one thread makes up at a time.
const FILLED_AT_ONCE: usize = 1 << 14;

impl Shard<'_> {
    /// Calls `each` with every range of adjacent elements of the whole tensor, in order.
    pub(super) fn for_each_range<E>(
        &self,
        mut each: impl FnMut(std::ops::Range<u64>) -> Result<(), E>,
    ) -> Result<(), E> {
        for batch in 0..u64::from(self.batch) {
            let first = batch * u64::from(self.seq);
            for run in self.tokens.runs() {
                let at = |token: u32| (first + u64::from(token)) * self.token_elements;
                if run.stride == 1 {
                    each(at(run.start)..at(run.start) + u64::from(run.count) * self.token_elements)?;
                } else {
                    for i in 0..run.count {
                        let start = at(run.start + i * run.stride);
                        each(start..start + self.token_elements)?;
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn make_up<E: Element + bytemuck::Pod + Send>(
        &self,
        seed: u64,
        id: TensorId,
        zero: E,
    ) -> Result<Bytes> {
        let mut values = zeroed(self.elements, zero)?;
        let mut rest = values.as_mut_slice();
        self.for_each_range::<Failure>(|range| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
            let parts = now.par_chunks_mut(FILLED_AT_ONCE).enumerate();
            parts.for_each(|(n, part)| {
                let first = range.start + (n * FILLED_AT_ONCE) as u64;
                fill(seed, id, first..first + part.len() as u64, part);
            });
            rest = later;
            Ok(())
        })?;
        Ok(Bytes::from_owner(Elements(values)))
    }
}

/// Bytes with the alignment of their elements.
pub(super) struct Elements<E>(pub(super) Vec<E>);

impl<E: bytemuck::Pod> AsRef<[u8]> for Elements<E> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

pub(super) fn zeroed<E: Clone>(elements: usize, zero: E) -> Result<Vec<E>> {
    let mut values = Vec::new();
    values.try_reserve_exact(elements).map_err(|_| too_large(elements as u64))?;
    values.resize(elements, zero);
    Ok(values)
}

pub(super) fn too_large(elements: u64) -> Failure {
    Failure::run(format!(
        "a tensor part of {elements} elements does not fit the memory: use fewer tokens, or more hosts"
    ))
}

/// The type of the elements of a tensor of a file. An error is a mismatch and its remedy.
pub(super) fn dtype_of(name: &str, info: &TensorInfo) -> Result<Dtype, (String, String)> {
    match info.dtype {
        safetensors::Dtype::F32 => Ok(Dtype::F32),
        safetensors::Dtype::F16 => Ok(Dtype::F16),
        safetensors::Dtype::BF16 => Ok(Dtype::Bf16),
        other => Err((format!("holds `{name}` as {other:?}"), format!("convert {name} to F32, F16 or BF16"))),
    }
}
