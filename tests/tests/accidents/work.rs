//! The problem of the ranks, and the right result.

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{Tensors, shard};
use kyklos::plan::PlanSet;
use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_forward};
use kyklos_oracle::inputs::{TensorId, fill};
use kyklos_transport::{Rank, in_process_group};

use crate::common::run_set;

/// A small causal problem on a mesh: `1xR` is a ring, `Ux1` an all-to-all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Work {
    pub(crate) ulysses: u32,
    pub(crate) ring: u32,
    /// The seed of the tensors.
    pub(crate) seed: u64,
}

const SHAPE: [u32; 5] = [1, 384, 6, 2, 32];

impl Work {
    pub(crate) fn ranks(self) -> u32 {
        self.ulysses * self.ring
    }

    pub(crate) fn set(self) -> PlanSet {
        let problem = AttentionProblem::new(SHAPE, Dtype::F32, Mask::causal()).unwrap();
        let mesh = Mesh::new(self.ulysses, self.ring).unwrap();
        plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Unified).unwrap()
    }

    fn tensors(self) -> Tensors {
        let [batch, tokens, q_heads, kv_heads, dim] = SHAPE.map(|extent| extent as usize);
        let made_up = |tensor, heads| {
            let mut values = vec![0.0_f32; batch * tokens * heads * dim];
            fill(self.seed, tensor, 0..values.len() as u64, &mut values);
            Bytes::copy_from_slice(bytemuck::cast_slice(&values))
        };
        let [q, k, v] = [(TensorId::Q, q_heads), (TensorId::K, kv_heads), (TensorId::V, kv_heads)]
            .map(|(t, h)| made_up(t, h));
        Tensors { q, k, v, bias: None }
    }

    /// A rank's own part of the tensors.
    pub(crate) fn tensors_of(self, set: &PlanSet, rank: Rank) -> Tensors {
        shard(set, rank, &self.tensors()).unwrap()
    }

    /// Every rank's result without a failure, computed on threads of this process.
    pub(crate) fn undisturbed(self) -> Vec<Vec<u8>> {
        let group = in_process_group(self.ranks());
        let (_, outputs) = run_set(&self.set(), group, &self.tensors(), Device::cpu);
        outputs.iter().map(|output| [&output.o[..], &output.lse[..]].concat()).collect()
    }
}
