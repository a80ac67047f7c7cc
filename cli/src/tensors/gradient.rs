//! The gradients of the output in an input file: the tensors `do` and `dlse`.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use kyklos::{AttentionProblem, Dtype, TokenRuns};
use safetensors::tensor::{Metadata, TensorInfo};

use super::positioned::read_exact_at;
use super::shard::{Elements, Shard, dtype_of, zeroed};
use crate::failure::{Failure, Result};

/// Where `do` `[batch, seq, heads, dim]` and `dlse` `[batch, heads, seq]` are in a file, in bytes.
#[derive(Clone, Debug)]
pub(super) struct FileGradients {
    pub(super) d_o: Range<u64>,
    pub(super) d_lse: Option<Range<u64>>,
}

impl FileGradients {
    /// Finds the tensors in the header of a file whose q has `shape` and `dtype`. An error is a
    /// mismatch and its remedy.
    pub(super) fn find(
        tensors: &Metadata,
        data_start: u64,
        shape: [u32; 4],
        dtype: Dtype,
    ) -> Result<Self, (String, String)> {
        let [batch, seq, heads, dim] = shape.map(|extent| extent as usize);
        let bytes = |info: &TensorInfo| {
            let (start, end) = info.data_offsets;
            data_start + start as u64..data_start + end as u64
        };
        let found = |name: &str, wanted: Dtype, shape: &[usize]| match tensors.info(name) {
            Some(info) if info.shape != shape => Err((
                format!("holds `{name}` with shape {:?}", info.shape),
                format!("give {name} the shape {shape:?}"),
            )),
            Some(info) => match dtype_of(name, info)? {
                dtype if dtype == wanted => Ok(Some(bytes(info))),
                dtype => Err((format!("holds `{name}` as {dtype}"), format!("convert {name} to {wanted}"))),
            },
            None => Ok(None),
        };
        let d_o = found("do", dtype, &[batch, seq, heads, dim])?.ok_or_else(|| {
            (
                "has no tensor `do`, the gradient of the output".to_owned(),
                "add `do`, shaped as q, or leave --grad out".to_owned(),
            )
        })?;
        Ok(Self { d_o, d_lse: found("dlse", Dtype::F32, &[batch, heads, seq])? })
    }

    /// The rows of the queries `tokens` of the gradient of lse, f32 `[batch, tokens, heads]`, if
    /// the file has one.
    pub(super) fn read_d_lse(
        &self,
        (file, path): (&File, &Path),
        problem: &AttentionProblem,
        tokens: &TokenRuns,
    ) -> Result<Option<Bytes>> {
        let Some(start) = self.d_lse.as_ref().map(|d_lse| d_lse.start) else { return Ok(None) };
        let (batch, heads, count) = (problem.batch as usize, problem.q_heads as usize, tokens.len());
        let mut rows = zeroed(batch * count * heads, 0.0_f32)?;
        let line = Shard { batch: 1, seq: problem.q_len, token_elements: 1, elements: count, tokens };
        let mut numbers = zeroed(count, 0.0_f32)?;
        for index in 0..batch * heads {
            let (batch, head) = (index / heads, index % heads);
            let first = start + index as u64 * u64::from(problem.q_len) * 4;
            let mut rest = numbers.as_mut_slice();
            line.for_each_range(|range| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
                rest = later;
                read_exact_at(file, bytemuck::cast_slice_mut(now), first + range.start * 4)
                    .map_err(|error| Failure::file("read", path, &error))
            })?;
            for (token, number) in numbers.iter().enumerate() {
                rows[(batch * count + token) * heads + head] = *number;
            }
        }
        Ok(Some(Bytes::from_owner(Elements(rows))))
    }
}
