//! A case with its right gradients, run on sessions.

use std::sync::Arc;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{HostLayout, bias_layout, layouts, shard};
use kyklos::local::on_threads;
use kyklos::{
    Attention, Dtype, Execution, Gradients, Mesh, Placement, Saved, Session, Strategy, Tensor, TokenRuns,
    plan_placed,
};
use kyklos_backend_suite::{Prepared, oracle_dtype};
use kyklos_oracle::inputs::{Case, TensorId, normal};
use kyklos_oracle::oracle::{self, Element, Oracle, Values};
use kyklos_oracle::tolerance::{GradientComparison, GradientLimit, NaiveGradients, naive_f32_gradients};
use kyklos_transport::{Rank, Transport};

/// A case in one storage type, with the gradients of its output.
pub struct GradientCase {
    pub prepared: Prepared,
    /// `[batch, q_len, q_heads, dim]` in the storage type.
    d_o: Bytes,
    /// `[batch, q_len, q_heads]`.
    d_lse: Bytes,
    pub right: oracle::Gradients,
    naive: Vec<GradientComparison>,
    scales: [f64; 4],
}

/// How a case is shared.
#[derive(Clone)]
pub struct Sharing {
    pub mesh: Mesh,
    pub q: Placement,
    pub kv: Placement,
    pub forward: Strategy,
    pub execution: Execution,
    /// The device of every rank.
    pub device: Device,
}

impl GradientCase {
    pub fn new(case: Case, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::typed::<f32>(case, dtype),
            Dtype::F16 => Self::typed::<half::f16>(case, dtype),
            Dtype::Bf16 => Self::typed::<half::bf16>(case, dtype),
        }
    }

    fn typed<E: Element + bytemuck::Pod>(case: Case, dtype: Dtype) -> Self {
        let inputs = case.inputs::<E>();
        let prepared = Prepared::new(case, dtype);
        let (case, problem) = (&prepared.case, &prepared.oracle);
        let rows = problem.batch * problem.q_len * problem.q_heads;
        let made = |seed: u64, index: usize| normal(seed, TensorId::OutputGradient, index as u64);
        let d_o: Vec<E> =
            (0..rows * problem.head_dim).map(|index| E::from_f32(made(case.seed, index))).collect();
        let by_token: Vec<f32> = (0..rows).map(|index| made(case.seed + 1, index)).collect();
        let mut by_head = vec![0.0; rows];
        for (id, value) in problem.row_ids().into_iter().zip(&by_token) {
            by_head[problem.lse_index(id)] = *value;
        }
        let mut truth =
            Oracle::new(problem, E::values(&inputs.q), E::values(&inputs.k), E::values(&inputs.v)).unwrap();
        if let Some(pairs) = inputs.oracle_pairs(case) {
            truth = truth.with_bias(pairs).unwrap();
        }
        let given = (E::values(&d_o), Some(Values::F32(&by_head)));
        let right = truth.gradients(given.0, given.1).unwrap();
        let plain = naive_f32_gradients(&truth, oracle_dtype(dtype), given.0, given.1).unwrap();
        let NaiveGradients { gradients, scales } = plain;
        let naive =
            compare([&gradients.dq, &gradients.dk, &gradients.dv, &gradients.d_sinks], &right, scales);
        let bytes = |values: &[u8]| Bytes::copy_from_slice(values);
        let (d_o, d_lse) = (bytes(bytemuck::cast_slice(&d_o)), bytes(bytemuck::cast_slice(&by_token)));
        Self { d_o, d_lse, right, naive, scales, prepared }
    }

    /// Attends forward, and backward with the strategy of `sharing.execution`. The errors of dQ, dK, dV and dSinks.
    pub fn run(&self, group: Vec<Arc<dyn Transport>>, sharing: &Sharing) -> Vec<GradientComparison> {
        self.judge(&self.gradients(group, sharing))
    }

    /// dQ, dK, dV and dSinks of the whole problem.
    pub fn gradients(&self, group: Vec<Arc<dyn Transport>>, sharing: &Sharing) -> [Vec<f64>; 4] {
        let Sharing { mesh, q, kv, forward, execution, device } = sharing;
        let problem = &self.prepared.problem;
        let world = plan_placed(problem, *mesh, q.clone(), kv.clone(), *forward).unwrap();
        let (q_layout, kv_layout) = layouts(&world);
        let lse_layout = HostLayout { token_bytes: problem.q_heads as usize * 4, ..q_layout };
        let base = Attention::new()
            .mask(problem.mask.clone())
            .scale(problem.scale)
            .sinks(problem.sinks.clone())
            .q_offset(problem.q_offset);
        let base = match problem.softcap {
            Some(softcap) => base.softcap(softcap),
            None => base,
        };
        let done = on_threads(group, |transport| {
            let rank = transport.rank();
            let tokens = world.q_placement.of_rank(rank);
            let own = shard(&world, rank, &self.prepared.tensors).unwrap();
            let call = match (problem.bias, &own.bias) {
                (Some(tensor), Some(rows)) => base.clone().bias(tensor, rows.clone()),
                _ => base.clone(),
            };
            assert_eq!(bias_layout(&world).is_some(), problem.bias.is_some() && own.bias.is_some());
            let [batch, q_heads, kv_heads, dim] =
                [problem.batch, problem.q_heads, problem.kv_heads, problem.head_dim].map(|n| n as usize);
            let tensor = |count: usize, heads, dim, dtype, data: Bytes| {
                Tensor::from_bytes([batch, count, heads, dim], dtype, data).unwrap()
            };
            let (q_count, kv_count) = (tokens.len(), world.kv_placement.of_rank(rank).len());
            let of_q = |data| tensor(q_count, q_heads, dim, problem.dtype, data);
            let of_kv = |data| tensor(kv_count, kv_heads, dim, problem.dtype, data);
            let (q, k, v) = (of_q(own.q), of_kv(own.k), of_kv(own.v));
            let mut session = Session::new(transport, device.clone());
            let execution =
                execution.clone().mesh(*mesh).owners(world.q_placement.clone(), world.kv_placement.clone());
            let ahead = call.clone().execution(execution.clone().strategy(*forward));
            let output = session.attend(&ahead, &q, &k, &v).unwrap();
            let d_o = of_q(q_layout.gather(&self.d_o, tokens).unwrap());
            let d_lse = lse_layout.gather(&self.d_lse, tokens).unwrap();
            let d_lse = tensor(q_count, q_heads, 1, Dtype::F32, d_lse);
            let saved = Saved { q, k, v, o: output.o, lse: output.lse };
            session.backward(&call.execution(execution), &saved, &d_o, Some(&d_lse)).unwrap()
        });
        let mut whole = [q_layout, kv_layout, kv_layout].map(|layout| vec![0xFF; layout.bytes()]);
        let mut d_sinks = vec![0.0; problem.sinks.len()];
        for (rank, gradients) in (0..).map(Rank).zip(done) {
            let Gradients { dq, dk, dv, d_sinks_part, .. } = gradients;
            let q_tokens = world.q_placement.of_rank(rank);
            let kv_tokens: &TokenRuns = world.kv_placement.of_rank(rank);
            for (((tensor, tokens), layout), whole) in [(dq, q_tokens), (dk, kv_tokens), (dv, kv_tokens)]
                .into_iter()
                .zip([q_layout, kv_layout, kv_layout])
                .zip(&mut whole)
            {
                layout.scatter(&pollster::block_on(tensor.bytes()).unwrap(), tokens, whole).unwrap();
            }
            d_sinks.iter_mut().zip(d_sinks_part).for_each(|(sum, part)| *sum += part);
        }
        let [dq, dk, dv] = whole.map(|bytes| self.numbers(&bytes));
        [dq, dk, dv, d_sinks]
    }

    /// The errors of whole gradients. Where the right value is not finite, any value that is not finite is right.
    pub fn judge(&self, whole: &[Vec<f64>; 4]) -> Vec<GradientComparison> {
        compare(whole.each_ref(), &self.right, self.scales)
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

    fn numbers(&self, bytes: &[u8]) -> Vec<f64> {
        match self.prepared.problem.dtype {
            Dtype::F32 => bytemuck::pod_collect_to_vec::<u8, f32>(bytes).into_iter().map(f64::from).collect(),
            Dtype::F16 => {
                bytemuck::pod_collect_to_vec::<u8, half::f16>(bytes).into_iter().map(f64::from).collect()
            }
            Dtype::Bf16 => {
                bytemuck::pod_collect_to_vec::<u8, half::bf16>(bytes).into_iter().map(f64::from).collect()
            }
        }
    }
}

fn compare(actual: [&Vec<f64>; 4], right: &oracle::Gradients, scales: [f64; 4]) -> Vec<GradientComparison> {
    let names = ["dq", "dk", "dv", "d_sinks"];
    let rights = [&right.dq, &right.dk, &right.dv, &right.d_sinks];
    let of = |which: usize| {
        let (actual, right) = (actual[which], rights[which]);
        let read = |index: usize| match (right[index].is_finite(), actual[index].is_finite()) {
            (false, false) => right[index],
            _ => actual[index],
        };
        let values = Values::Read { dtype: oracle::Dtype::F32, len: actual.len(), read: &read };
        GradientComparison::new(names[which], values, right, scales[which])
    };
    (0..names.len()).map(of).collect()
}
