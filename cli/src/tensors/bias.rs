//! The mask or bias tensor of an input file.

use std::fs::File;
use std::path::Path;

use bytes::Bytes;
use kyklos::{AttentionProblem, BiasKind, BiasTensor, Dtype, TokenRuns};
use kyklos_oracle::oracle::{Element, Values};
use safetensors::tensor::{Metadata, TensorInfo};

use crate::failure::{Failure, Result};
use crate::tensors::positioned::read_exact_at;

/// The position of `mask` or `bias` in a file, `[batch or 1, query heads or 1, q_len or 1,
/// kv_len]`; a key mask may also be `[batch, kv_len]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileBias {
    pub(crate) tensor: BiasTensor,
    /// Where it is in the file.
    start: u64,
    end: u64,
}

impl FileBias {
    /// Finds the tensor in the header of a file whose q is `[batch, q_len, q_heads, …]` of `dtype`.
    /// An error is a mismatch and its remedy.
    pub(crate) fn find(
        tensors: &Metadata,
        data_start: u64,
        [batch, q_len, q_heads, kv_len]: [u32; 4],
        dtype: Dtype,
    ) -> Result<Option<Self>, (String, String)> {
        let (name, kind, info) = match (tensors.info("mask"), tensors.info("bias")) {
            (None, None) => return Ok(None),
            (Some(info), None) => ("mask", BiasKind::Mask, info),
            (None, Some(info)) => ("bias", BiasKind::Additive, info),
            (Some(_), Some(_)) => {
                return Err((
                    "holds both `mask` and `bias`".to_owned(),
                    "give the bias alone, and -inf in it where the mask hides a key".to_owned(),
                ));
            }
        };
        let wanted = match (kind, dtype) {
            (BiasKind::Mask, _) => [safetensors::Dtype::BOOL, safetensors::Dtype::U8],
            (BiasKind::Additive, Dtype::F32) => [safetensors::Dtype::F32; 2],
            (BiasKind::Additive, Dtype::F16) => [safetensors::Dtype::F16; 2],
            (BiasKind::Additive, Dtype::Bf16) => [safetensors::Dtype::BF16; 2],
        };
        if !wanted.contains(&info.dtype) {
            return Err((
                format!("holds `{name}` as {:?}", info.dtype),
                format!(
                    "convert it to {:?}{}",
                    wanted[0],
                    if kind == BiasKind::Additive { ", as q is" } else { "" }
                ),
            ));
        }
        let keys_of_entries = (kind == BiasKind::Mask).then_some(batch);
        let tensor = tensor(info, kind, [q_len, kv_len], keys_of_entries).ok_or_else(|| {
            let queries = if q_len == 1 { "1".to_owned() } else { format!("{q_len} or 1") };
            let keys = keys_of_entries.map_or_else(String::new, |batch| format!(", or [{batch}, {kv_len}]"));
            (
                format!("holds `{name}` with shape {:?}", info.shape),
                format!(
                    "use [{batch} or 1, {q_heads} or 1, {queries}, {kv_len}], or [{queries}, {kv_len}]{keys}"
                ),
            )
        })?;
        let (start, end) = info.data_offsets;
        Ok(Some(Self { tensor, start: data_start + start as u64, end: data_start + end as u64 }))
    }

    /// The tensor's name in the file.
    pub(super) fn name(&self) -> &'static str {
        match self.tensor.kind {
            BiasKind::Mask => "mask",
            BiasKind::Additive => "bias",
        }
    }

    /// Where the tensor is in the file.
    pub(super) fn bytes(&self) -> std::ops::Range<u64> {
        self.start..self.end
    }

    /// The rows of the queries `tokens`, `[its batch, tokens, its heads, row]` as [`BiasTensor`]
    /// says; with shared rows the whole tensor.
    pub(crate) fn read(
        &self,
        file: &File,
        path: &Path,
        problem: &AttentionProblem,
        tokens: &TokenRuns,
    ) -> Result<Bytes> {
        let (tensor, kv_len) = (self.tensor, problem.kv_len as usize);
        let row_bytes = tensor.row_bytes(problem.dtype, problem.kv_len);
        let shared = TokenRuns::contiguous(0..1);
        let (tokens, q_len) = if tensor.shared_rows { (&shared, 1) } else { (tokens, problem.q_len) };
        let rows = tensor.batch as usize * tokens.len() * tensor.heads as usize;
        let mut out = Vec::new();
        out.try_reserve_exact(rows.saturating_mul(row_bytes)).map_err(|_| {
            Failure::run(format!(
                "{rows} rows of the attention bias tensor do not fit the memory: use fewer tokens"
            ))
        })?;
        let element = if tensor.kind == BiasKind::Mask { 1 } else { problem.dtype.bytes() };
        let mut row = vec![0; kv_len * element];
        for batch in 0..u64::from(tensor.batch) {
            for token in tokens.iter() {
                for head in 0..u64::from(tensor.heads) {
                    let index = (batch * u64::from(tensor.heads) + head) * u64::from(q_len);
                    let at = self.start + (index + u64::from(token)) * row.len() as u64;
                    read_exact_at(file, &mut row, at).map_err(|error| Failure::file("read", path, &error))?;
                    match tensor.kind {
                        BiasKind::Mask => {
                            let words = BiasTensor::pack(row.iter().map(|byte| *byte != 0));
                            out.extend_from_slice(bytemuck::cast_slice(&words));
                        }
                        BiasKind::Additive => {
                            out.extend_from_slice(&row);
                            out.resize(out.len().next_multiple_of(4), 0);
                        }
                    }
                }
            }
        }
        // The only reference, so the buffer can become whole words without a copy.
        Ok(Bytes::from(out))
    }
}

/// A tensor `[…, q_len or 1, kv_len]`; missing leading extents are 1. With `keys_of_entries`, the
/// batch, it may also be `[batch, kv_len]`; `[q_len, kv_len]` comes first where both are equal.
fn tensor(
    info: &TensorInfo,
    kind: BiasKind,
    [q_len, kv_len]: [u32; 2],
    keys_of_entries: Option<u32>,
) -> Option<BiasTensor> {
    let (leading, [rows, keys]) = info.shape.split_last_chunk::<2>()?;
    let small = |extent: usize| u32::try_from(extent).ok().filter(|extent| *extent > 0);
    let rows = small(*rows)?;
    if *keys != kv_len as usize {
        return None;
    }
    if leading.is_empty() && rows != q_len && rows != 1 && keys_of_entries == Some(rows) {
        return Some(BiasTensor { kind, batch: rows, heads: 1, shared_rows: true });
    }
    let [batch, heads] = match leading {
        [] => [1, 1],
        [heads] => [1, small(*heads)?],
        [batch, heads] => [small(*batch)?, small(*heads)?],
        _ => return None,
    };
    (rows == q_len || rows == 1).then_some(BiasTensor { kind, batch, heads, shared_rows: rows != q_len })
}

/// Rows for the oracle: `[its batch, its heads, kv_len]` of one token.
pub(crate) enum OracleRows {
    Visible(Vec<bool>),
    Bias(Vec<f32>),
}

impl OracleRows {
    /// `bytes` holds the rows of one token.
    pub(crate) fn new(tensor: BiasTensor, problem: &AttentionProblem, bytes: &[u8]) -> Self {
        let kv_len = problem.kv_len as usize;
        let rows = bytes.chunks_exact(tensor.row_bytes(problem.dtype, problem.kv_len));
        match tensor.kind {
            BiasKind::Mask => Self::Visible(
                rows.flat_map(|row| (0..kv_len).map(|key| row[key / 8] >> (key % 8) & 1 == 1)).collect(),
            ),
            BiasKind::Additive => {
                let element = problem.dtype.bytes();
                let number = |bytes: &[u8]| match problem.dtype {
                    Dtype::F32 => bytemuck::pod_read_unaligned::<f32>(bytes).to_f64(),
                    Dtype::F16 => Element::to_f64(bytemuck::pod_read_unaligned::<half::f16>(bytes)),
                    Dtype::Bf16 => Element::to_f64(bytemuck::pod_read_unaligned::<half::bf16>(bytes)),
                };
                #[expect(clippy::cast_possible_truncation, reason = "all storage types are exact in f32")]
                let row = |row: &[u8]| -> Vec<f32> {
                    row[..kv_len * element].chunks_exact(element).map(|bytes| number(bytes) as f32).collect()
                };
                Self::Bias(rows.flat_map(row).collect())
            }
        }
    }

    pub(crate) fn values(&self) -> kyklos_oracle::oracle::BiasValues<'_> {
        match self {
            Self::Visible(values) => kyklos_oracle::oracle::BiasValues::Visible(values),
            Self::Bias(values) => kyklos_oracle::oracle::BiasValues::Bias(Values::F32(values)),
        }
    }
}
