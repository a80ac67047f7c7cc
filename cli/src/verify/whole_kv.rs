//! All keys and values of a problem, as they are or as ranks send them.

use std::collections::BTreeSet;

use bytes::Bytes;
use kyklos::WireFormat;
use kyklos::plan::{Content, PlanSet};
use kyklos_oracle::wire;

use super::oracle_dtype;

/// All keys and values.
#[derive(Clone, Debug)]
pub(crate) struct WholeKv {
    pub(super) k: Bytes,
    pub(super) v: Bytes,
}

impl WholeKv {
    /// Rounded like the keys and values that ranks of `set` send. The error of a device alone then
    /// includes the rounding.
    pub(super) fn as_on_the_wire(&self, set: &PlanSet) -> Self {
        let problem = &set.problem;
        let shape = [problem.batch, problem.kv_len, problem.kv_heads, problem.head_dim].map(|n| n as usize);
        let buffers = set.plans.iter().flat_map(|plan| &plan.buffers);
        let sent = buffers.filter(|buffer| buffer.content == Content::WireKeyValue);
        let lists: BTreeSet<Vec<u32>> = sent.map(|buffer| buffer.tokens.iter().collect()).collect();
        let lists: Vec<Vec<u32>> = lists.into_iter().collect();
        let rounded = |tensor: &Bytes, int8: fn(&mut [f32], wire::Shape, &[Vec<u32>])| {
            let dtype = oracle_dtype(problem.dtype);
            let mut numbers = wire::load(dtype, tensor);
            match problem.wire {
                WireFormat::Same => return tensor.clone(),
                WireFormat::F16 => wire::f16_each(&mut numbers),
                WireFormat::Int8 => int8(&mut numbers, shape, &lists),
            }
            wire::store(dtype, &numbers).into()
        };
        Self { k: rounded(&self.k, wire::int8_keys), v: rounded(&self.v, wire::int8_values) }
    }
}
