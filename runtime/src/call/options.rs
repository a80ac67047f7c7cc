//! The options of a call that are the same on all ranks, and their problem.

use super::{Execution, GivenPlans, digest};
use crate::error::Result;
use kyklos_plan::{AttentionProblem, BiasTensor, Dtype, Mask, Placement, TokenRuns};

/// The options that are the same on all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    pub(crate) mask: Mask,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Vec<f32>,
    pub(crate) q_offset: u32,
    pub(crate) bias: Option<BiasTensor>,
    pub(crate) bias_gradient: bool,
    pub(crate) execution: Execution,
}

impl Options {
    /// The problem of this call with these extents.
    pub(crate) fn problem(&self, extents: &Extents) -> Result<AttentionProblem> {
        let &Extents { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype } = extents;
        let Execution { wire, fixed_order, replicated, same_queries, results, .. } = &self.execution;
        let problem =
            AttentionProblem::new([batch, kv_len, q_heads, kv_heads, head_dim], dtype, self.mask.clone())?
                .with_queries(q_len, self.q_offset)?;
        let scale = self.scale.unwrap_or(problem.scale);
        Ok(problem
            .with_logits(scale, self.softcap)?
            .with_sinks(self.sinks.clone())?
            .with_bias(self.bias)?
            .with_bias_gradient(self.bias_gradient)?
            .with_wire(*wire)?
            .with_fixed_order(*fixed_order)?
            .with_inference(self.execution.inference || *same_queries)
            .with_replicated(replicated.clone())?
            .with_same_queries(*same_queries)?
            .with_results(*results)?)
    }

    /// Hashes of the parts in which ranks may differ by mistake, each with its name in errors.
    /// Without tensors.
    pub(crate) fn digests(&self) -> [(&'static str, u64); 5] {
        let Self { mask, scale, softcap, sinks, q_offset, bias, bias_gradient, execution } = self;
        let Execution {
            strategy,
            mesh,
            placement,
            owners,
            wire,
            fixed_order,
            inference: _,
            replicated,
            same_queries,
            results,
            plans,
        } = execution;
        // Rebuilt token by token, so that equal lists give equal texts.
        let runs = |tokens: &TokenRuns| tokens.canonical().runs().to_vec();
        let lists = |placement: &Placement| placement.ranks().iter().map(runs).collect::<Vec<_>>();
        let owners = owners.as_ref().map(|(queries, keys)| [lists(queries), lists(keys)]);
        let plans = plans.as_ref().map(|GivenPlans(plans)| plans.hash());
        let bits = |value: &Option<f32>| value.map(f32::to_bits);
        let sinks: Vec<u32> = sinks.iter().map(|sink| sink.to_bits()).collect();
        [
            ("mask", digest(format!("{mask} {q_offset}").as_bytes())),
            (
                "scale, softcap or sinks",
                digest(format!("{:?} {:?} {sinks:?}", bits(scale), bits(softcap)).as_bytes()),
            ),
            ("attention bias tensor", digest(format!("{bias:?} {bias_gradient}").as_bytes())),
            ("mesh or strategy", digest(format!("{strategy:?} {mesh:?}").as_bytes())),
            (
                "placement, wire format, order of sums, replicated keys, same queries or results",
                digest(
                    format!("{placement} {owners:?} {wire:?} {fixed_order} {replicated:?} {same_queries} {results:?} {plans:?}")
                        .as_bytes(),
                ),
            ),
        ]
    }
}

/// The extents of a call over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extents {
    pub(crate) batch: u32,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) dtype: Dtype,
}
