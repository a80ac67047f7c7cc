//! What a backend is told of a plan's buffers. Plans know no backend, and backends know no plan.

use crate::AttentionProblem;
use crate::backend::StateShape;
use crate::plan::Buffer;

impl Buffer {
    /// The extents of the running state that this buffer holds.
    pub(crate) fn state_shape(&self, problem: &AttentionProblem) -> StateShape {
        StateShape {
            batch: problem.batch as usize,
            rows: self.tokens.len(),
            heads: self.head_count() as usize,
            dim: problem.head_dim as usize,
        }
    }
}
