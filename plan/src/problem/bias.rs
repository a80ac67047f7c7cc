//! The attention bias tensor of a problem.

use crate::bias::BiasTensor;
use crate::error::Result;
use crate::problem::AttentionProblem;

impl AttentionProblem {
    /// This problem with an attention bias tensor, or without: `[batch or 1, q_len, heads or 1,
    /// kv_len]`, or with [`BiasTensor::shared_rows`] `[batch or 1, 1, heads or 1, kv_len]`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_bias(self, bias: Option<BiasTensor>) -> Result<Self> {
        Self { bias, ..self }.checked()
    }

    /// This problem with or without the gradient of its additive bias tensor in a backward pass.
    ///
    /// # Errors
    /// As [`Self::new`]; also for a problem without an additive bias tensor.
    pub fn with_bias_gradient(self, bias_gradient: bool) -> Result<Self> {
        Self { bias_gradient, ..self }.checked()
    }

    /// The attention bias tensor, if each query has its own rows: they are with their query, and
    /// travel with it.
    pub(crate) fn query_bias(&self) -> Option<BiasTensor> {
        self.bias.filter(|tensor| !tensor.shared_rows)
    }

    /// The attention bias tensor, if all queries share its rows: it is whole on every rank, and in
    /// no plan.
    pub fn shared_bias(&self) -> Option<BiasTensor> {
        self.bias.filter(|tensor| tensor.shared_rows)
    }

    /// Bytes of [`Self::shared_bias`], which every rank holds beside the buffers of its plan.
    pub fn shared_bias_bytes(&self) -> u64 {
        self.shared_bias().map_or(0, |tensor| tensor.bytes(self.dtype, self.q_len, self.kv_len))
    }

    /// Bytes of a rank's part of the gradient of [`Self::shared_bias`], which it holds beside the
    /// buffers of a backward plan.
    pub fn shared_bias_gradient_bytes(&self) -> u64 {
        let shared = self.shared_bias().filter(|_| self.bias_gradient);
        shared.map_or(0, |tensor| tensor.gradient_bytes(1, self.kv_len))
    }
}
