//! The source of q, k and v: a safetensors file or a seed. A rank reads or generates only its own
//! tokens.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::host::Tensors;
use kyklos::{AttentionProblem, Dtype, TokenRuns};
use kyklos_oracle::inputs::{TensorId, normal};

use super::file::InputFile;
use super::shard::{Shard, TensorKind, too_large};
use crate::failure::Result;

/// The gradients of the output, for some queries.
#[derive(Clone, Debug)]
pub(crate) struct GivenGradient {
    /// `[batch, tokens, heads, dim]` in the problem's dtype.
    pub(crate) d_o: Bytes,
    /// f32 `[batch, tokens, heads]`.
    pub(crate) d_lse: Option<Bytes>,
}

/// The source of the tensors.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Random { seed: u64 },
    File(Arc<InputFile>),
}

impl Source {
    /// The rows of the queries `q_tokens` and of the keys `kv_tokens`, of all tensors.
    pub(crate) fn all(
        &self,
        problem: &AttentionProblem,
        q_tokens: &TokenRuns,
        kv_tokens: &TokenRuns,
    ) -> Result<Tensors> {
        Ok(Tensors {
            q: self.read(problem, TensorKind::Q, q_tokens)?,
            k: self.read(problem, TensorKind::K, kv_tokens)?,
            v: self.read(problem, TensorKind::V, kv_tokens)?,
            bias: self.read_bias(problem, q_tokens)?,
        })
    }

    /// The tokens `tokens` of a tensor, `[batch, tokens, heads, dim]`, in their order.
    pub(crate) fn read(
        &self,
        problem: &AttentionProblem,
        which: TensorKind,
        tokens: &TokenRuns,
    ) -> Result<Bytes> {
        let (seq, heads) = match which {
            TensorKind::Q | TensorKind::OutputGradient => (problem.q_len, problem.q_heads),
            TensorKind::K | TensorKind::V => (problem.kv_len, problem.kv_heads),
        };
        let token_elements = u64::from(heads) * u64::from(problem.head_dim);
        let elements = u64::from(problem.batch) * tokens.len() as u64 * token_elements;
        let shard = Shard {
            batch: problem.batch,
            seq,
            token_elements,
            elements: usize::try_from(elements).map_err(|_| too_large(elements))?,
            tokens,
        };
        match self {
            Self::File(file) => file.read(which, &shard),
            Self::Random { seed } => {
                let id = match which {
                    TensorKind::Q => TensorId::Q,
                    TensorKind::K => TensorId::K,
                    TensorKind::V => TensorId::V,
                    TensorKind::OutputGradient => TensorId::OutputGradient,
                };
                match problem.dtype {
                    Dtype::F32 => shard.make_up::<f32>(*seed, id, 0.0),
                    Dtype::F16 => shard.make_up::<f16>(*seed, id, f16::ZERO),
                    Dtype::Bf16 => shard.make_up::<bf16>(*seed, id, bf16::ZERO),
                }
            }
        }
    }

    /// The rows of the queries `tokens` in the mask or bias tensor, if there is one.
    pub(crate) fn read_bias(&self, problem: &AttentionProblem, tokens: &TokenRuns) -> Result<Option<Bytes>> {
        match self {
            Self::Random { .. } => Ok(None),
            Self::File(file) => {
                file.bias.map(|bias| bias.read(&file.file, &file.path, problem, tokens)).transpose()
            }
        }
    }

    /// The rows of the queries `tokens` of the gradients of the output.
    pub(crate) fn output_gradient(
        &self,
        problem: &AttentionProblem,
        tokens: &TokenRuns,
    ) -> Result<GivenGradient> {
        Ok(GivenGradient {
            d_o: self.read(problem, TensorKind::OutputGradient, tokens)?,
            d_lse: match self {
                Self::Random { .. } => None,
                Self::File(file) => match &file.gradients {
                    Some(gradients) => gradients.read_d_lse((&file.file, &file.path), problem, tokens)?,
                    None => None,
                },
            },
        })
    }

    /// Random sinks, one for each query head, about as large as the largest logit of a row.
    pub(crate) fn random_sinks(seed: u64, q_heads: u32) -> Vec<f32> {
        (0..q_heads).map(|head| normal(seed, TensorId::Sinks, u64::from(head)) + 2.0).collect()
    }

    /// Refuses a file that was written to since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        match self {
            Self::Random { .. } => Ok(()),
            Self::File(file) => file.check_unchanged(),
        }
    }

    /// A warning about the file, if there is one.
    pub(crate) fn warning(&self) -> Option<String> {
        match self {
            Self::File(file) if !file.ignored.is_empty() => {
                let (path, count) = (file.path.display(), file.ignored.len());
                let names = file.ignored.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
                let more = if count > 4 { ", …" } else { "" };
                Some(format!("warning: {path}: {count} more tensors are ignored: {names}{more}"))
            }
            _ => None,
        }
    }

    /// The path of the file, if the source is a file.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Random { .. } => None,
            Self::File(file) => Some(&file.path),
        }
    }
}
