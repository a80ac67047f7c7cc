//! Gradients in the file of a result.

use bytes::Bytes;
use kyklos::collect::Piece;
use kyklos::{AttentionProblem, BiasTensor, Placement};

use super::{Declared, OutputFile, Place};
use crate::failure::{Failure, Result};
use crate::tensors::results::HostGradients;

/// Where the gradients are in a file.
#[derive(Debug)]
pub(super) struct GradientPlaces {
    pub(super) dq: Place,
    pub(super) dk: Place,
    pub(super) dv: Place,
    pub(super) sums: SumPlaces,
}

/// Where the gradients are that are f32 in every file.
#[derive(Clone, Copy, Debug)]
pub(super) struct SumPlaces {
    /// `[heads]`, where there are sinks.
    d_sinks: Option<u64>,
    /// In the shape of the bias, where its gradient is asked for.
    d_bias: Option<u64>,
}

/// Gradients that a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradientRows {
    /// dq.
    OfQueries,
    /// dk and dv.
    OfKeys,
}

impl SumPlaces {
    /// Declares the tensors of a file of `queries` queries, or of the part of one rank: `…_part`
    /// where the sum over the parts is the gradient.
    pub(super) fn declare(
        declared: &mut Declared,
        problem: &AttentionProblem,
        queries: usize,
        is_part: bool,
    ) -> Self {
        let mut add = |name: &str, is_sum: bool, shape: Vec<usize>| {
            let name = if is_part && is_sum { format!("{name}_part") } else { name.to_owned() };
            declared.add(&name, safetensors::Dtype::F32, shape)
        };
        let d_sinks = (!problem.sinks.is_empty()).then(|| add("dsinks", true, vec![problem.sinks.len()]));
        let d_bias = problem.bias.filter(|_| problem.bias_gradient).map(|bias| {
            let rows = if bias.shared_rows { 1 } else { queries };
            let shape = vec![bias.batch as usize, bias.heads as usize, rows, problem.kv_len as usize];
            add("dbias", bias.shared_rows, shape)
        });
        Self { d_sinks, d_bias }
    }
}

impl GradientPlaces {
    /// The same places, counted from the start of the file.
    pub(super) fn map(self, place: impl Fn(Place) -> Place, start: impl Fn(u64) -> u64) -> Self {
        let Self { dq, dk, dv, sums: SumPlaces { d_sinks, d_bias } } = self;
        let [dq, dk, dv] = [dq, dk, dv].map(place);
        let [d_sinks, d_bias] = [d_sinks, d_bias].map(|sum| sum.map(&start));
        Self { dq, dk, dv, sums: SumPlaces { d_sinks, d_bias } }
    }
}

impl OutputFile {
    /// Writes a piece of gradients to the positions of its tokens in the whole sequence.
    pub(crate) fn write_gradients(
        &self,
        of: GradientRows,
        placement: &Placement,
        piece: &Piece,
    ) -> Result<()> {
        let Some(GradientPlaces { dq, dk, dv, .. }) = &self.gradients else { return Ok(()) };
        match (of, &piece.rows[..]) {
            (GradientRows::OfQueries, [rows]) => self.write_rows(placement, piece, &[(*dq, rows)]),
            (GradientRows::OfKeys, [of_k, of_v]) => {
                self.write_rows(placement, piece, &[(*dk, of_k), (*dv, of_v)])
            }
            _ => Err(Failure::run("a piece of gradients with another number of tensors")),
        }
    }

    /// Writes the gradients of the sinks, where the file has them.
    pub(crate) fn write_sinks(&self, d_sinks: &[f64]) -> Result<()> {
        match self.gradients.as_ref().and_then(|gradients| gradients.sums.d_sinks) {
            #[expect(clippy::cast_possible_truncation, reason = "the file holds f32")]
            Some(start) => {
                let narrow: Vec<f32> = d_sinks.iter().map(|number| *number as f32).collect();
                self.put(bytemuck::cast_slice(&narrow), start)
            }
            None => Ok(()),
        }
    }

    /// Writes the gradient of the bias, `[batch, heads, queries or 1, keys]`, where the file has
    /// it.
    pub(crate) fn write_bias_gradient(&self, d_bias: &[f32]) -> Result<()> {
        let place = self.gradients.as_ref().and_then(|gradients| gradients.sums.d_bias);
        place.map_or(Ok(()), |start| self.put(bytemuck::cast_slice(d_bias), start))
    }

    /// Writes a rank's gradients to its part.
    pub(super) fn write_part_of_gradients(&self, gradients: &HostGradients) -> Result<()> {
        let Some(places) = &self.gradients else { return Ok(()) };
        self.put(&gradients.dq, places.dq.start)?;
        self.put(&gradients.dk, places.dk.start)?;
        self.put(&gradients.dv, places.dv.start)?;
        if let (Some(rows), Some((tensor, keys))) = (&gradients.d_bias, self.bias) {
            self.write_bias_gradient(&by_head(rows, tensor, keys))?;
        }
        self.write_sinks(&gradients.d_sinks_part)
    }
}

/// The gradient of a bias over `keys` keys, from `[batch, rows, heads, keys]` to `[batch, heads,
/// rows, keys]`.
pub(crate) fn by_head(rows: &Bytes, tensor: BiasTensor, keys: u32) -> Vec<f32> {
    let numbers: Vec<f32> = bytemuck::pod_collect_to_vec(rows);
    let (heads, keys) = (tensor.heads as usize, keys as usize);
    let queries = numbers.len() / (tensor.batch as usize * heads * keys).max(1);
    let mut turned = Vec::with_capacity(numbers.len());
    let entries = 0..tensor.batch as usize;
    for (batch, head) in entries.flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        for query in 0..queries {
            let at = ((batch * queries + query) * heads + head) * keys;
            turned.extend_from_slice(&numbers[at..at + keys]);
        }
    }
    turned
}
