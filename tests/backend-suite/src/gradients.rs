//! A case with its right gradients, and the comparison of gradients with them.

use bytes::Bytes;
use kyklos::Dtype;
use kyklos_oracle::inputs::{Case, TensorId, normal};
use kyklos_oracle::oracle::{self, Element, Oracle, Values};
use kyklos_oracle::tolerance::{GradientComparison, GradientLimit, NaiveGradients, naive_f32_gradients};

use crate::kept::Kept;
use crate::{Prepared, oracle_dtype};

/// A case in one storage type, with the gradients of its output.
#[derive(Clone, Debug)]
pub struct GradientCase {
    /// The case, with its tensors.
    pub prepared: Prepared,
    /// `[batch, q_len, q_heads, dim]` in the storage type.
    pub d_o: Bytes,
    /// `[batch, q_len, q_heads]`.
    pub d_lse: Bytes,
    /// The right gradients.
    pub right: oracle::Gradients,
    naive: Vec<GradientComparison>,
    plain: NaiveGradients,
}

impl GradientCase {
    /// Computes the right gradients, of a gradient of the output and of the log-sum-exp that are
    /// drawn from the seed.
    pub fn new(case: Case, dtype: Dtype) -> Self {
        Self::of_scaled_loss(case, dtype, 1.0)
    }

    /// The same with the gradient of the output multiplied by `factor`, as training in f16 does.
    pub fn of_scaled_loss(case: Case, dtype: Dtype, factor: f32) -> Self {
        static KEPT: Kept<GradientCase> = Kept::new();
        KEPT.of(case, (dtype, factor), |case| match dtype {
            Dtype::F32 => Self::typed::<f32>(case, dtype, factor),
            Dtype::F16 => Self::typed::<half::f16>(case, dtype, factor),
            Dtype::Bf16 => Self::typed::<half::bf16>(case, dtype, factor),
        })
    }

    fn typed<E: Element + bytemuck::Pod>(case: Case, dtype: Dtype, factor: f32) -> Self {
        // dQ and dK are multiplied by the scale of the logits, and end at 65,504 in f16.
        let small = if dtype == Dtype::F16 && case.problem.scale > 1e3 { 1.0 / 128.0 } else { 1.0 };
        let factor = factor * small;
        let inputs = case.inputs::<E>();
        let mut prepared = Prepared::new(case, dtype);
        prepared.problem = prepared.problem.with_inference(false);
        let (case, problem) = (&prepared.case, &prepared.oracle);
        let rows = problem.batch * problem.q_len * problem.q_heads;
        let made = |seed: u64, index: usize| normal(seed, TensorId::OutputGradient, index as u64);
        let d_o: Vec<E> =
            (0..rows * problem.head_dim).map(|index| E::from_f32(factor * made(case.seed, index))).collect();
        let by_token: Vec<f32> = (0..rows).map(|index| small * made(case.seed + 1, index)).collect();
        let mut by_head = vec![0.0; rows];
        for (id, value) in problem.row_ids().into_iter().zip(&by_token) {
            by_head[problem.lse_index(id)] = *value;
        }
        let mut truth =
            Oracle::new(problem, E::values(&inputs.q), E::values(&inputs.k), E::values(&inputs.v)).unwrap();
        if let Some(bias) = inputs.oracle_bias(case) {
            truth = truth.with_bias(bias).unwrap();
        }
        let given = (E::values(&d_o), Some(Values::F32(&by_head)));
        let right = truth.gradients(given.0, given.1).unwrap();
        let plain = naive_f32_gradients(&truth, oracle_dtype(dtype), given.0, given.1).unwrap();
        let oracle::Gradients { dq, dk, dv, d_sinks, d_bias } = &plain.gradients;
        let naive = compare(&[dq, dk, dv, d_sinks, d_bias], &right, &plain);
        let bytes = |values: &[u8]| Bytes::copy_from_slice(values);
        let (d_o, d_lse) = (bytes(bytemuck::cast_slice(&d_o)), bytes(bytemuck::cast_slice(&by_token)));
        Self { d_o, d_lse, right, naive, plain, prepared }
    }

    /// The same with the gradient of the bias, if the case has an additive bias tensor.
    #[must_use]
    pub fn with_bias_gradient(mut self) -> Self {
        let wanted = !self.right.d_bias.is_empty();
        self.prepared.problem = self.prepared.problem.with_bias_gradient(wanted).unwrap();
        self
    }

    /// The errors of whole gradients of q, k, v, the sinks and, where it is there, the bias. Where
    /// the right value is not finite, any value that is not finite is right.
    pub fn judge(&self, whole: &[Vec<f64>]) -> Vec<GradientComparison> {
        compare(&Vec::from_iter(whole), &self.right, &self.plain)
    }

    /// The limits of a device that computes the case alone.
    pub fn dense_limits(&self) -> Vec<GradientLimit> {
        let dtype = oracle_dtype(self.prepared.problem.dtype);
        self.naive.iter().map(|naive| GradientLimit::dense(dtype, naive)).collect()
    }

    /// The limits of several ranks, from the errors of one.
    pub fn parallel_limits(&self, alone: &[GradientComparison]) -> Vec<GradientLimit> {
        let dtype = oracle_dtype(self.prepared.problem.dtype);
        alone.iter().map(|alone| GradientLimit::parallel(dtype, alone)).collect()
    }
}

fn compare(
    actual: &[&Vec<f64>],
    right: &oracle::Gradients,
    plain: &NaiveGradients,
) -> Vec<GradientComparison> {
    let names = ["dq", "dk", "dv", "d_sinks", "d_bias"];
    let slack = &plain.slack;
    let slacks = [&slack.dq, &slack.dk, &slack.dv, &slack.d_sinks, &slack.d_bias];
    let rights = [&right.dq, &right.dk, &right.dv, &right.d_sinks, &right.d_bias];
    let of = |which: usize| {
        let (actual, right) = (actual[which], rights[which]);
        let read = |index: usize| match (right[index].is_finite(), actual[index].is_finite()) {
            (false, false) => right[index],
            _ => actual[index],
        };
        let values = Values::Read { dtype: oracle::Dtype::F32, len: actual.len(), read: &read };
        GradientComparison::new(names[which], values, right, plain.scales[which], slacks[which])
    };
    (0..actual.len()).map(of).collect()
}
