//! A case with its right gradients, on sessions.

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{HostLayout, bias_layout, layouts, shard};
use kyklos::local::on_threads;
use kyklos::{
    Attention, AttentionProblem, Dtype, Execution, Gradients, Mesh, Placement, Saved, Session, Strategy,
    Tensor, TokenRuns, plan_placed,
};
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::tolerance::GradientComparison;
use kyklos_transport::{Group, Rank};

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

/// Runs of a case.
pub trait OnSessions {
    /// Attends forward, and backward with the strategy of `sharing.execution`. The errors of dQ,
    /// dK, dV, dSinks and, if the problem asks for it, dBias.
    fn run(&self, group: Vec<Group>, sharing: &Sharing) -> Vec<GradientComparison>;

    /// These gradients of the whole problem.
    fn gradients(&self, group: Vec<Group>, sharing: &Sharing) -> Vec<Vec<f64>> {
        self.gradients_on(group, sharing, |transport| Session::new(transport, sharing.device.clone()))
    }

    /// The same on sessions of the caller's.
    fn gradients_on(
        &self,
        group: Vec<Group>,
        sharing: &Sharing,
        open: impl Fn(Group) -> Session + Sync,
    ) -> Vec<Vec<f64>>;
}

impl OnSessions for GradientCase {
    fn run(&self, group: Vec<Group>, sharing: &Sharing) -> Vec<GradientComparison> {
        self.judge(&self.gradients(group, sharing))
    }

    fn gradients_on(
        &self,
        group: Vec<Group>,
        sharing: &Sharing,
        open: impl Fn(Group) -> Session + Sync,
    ) -> Vec<Vec<f64>> {
        let Sharing { mesh, q, kv, forward, execution, .. } = sharing;
        let problem = &self.prepared.problem;
        let set = plan_placed(problem, *mesh, q.clone(), kv.clone(), *forward).unwrap();
        let (q_layout, kv_layout) = layouts(&set);
        let lse_layout = HostLayout { token_bytes: problem.q_heads as usize * 4, ..q_layout };
        let base = Attention::new()
            .mask(problem.mask.clone())
            .scale(problem.scale)
            .sinks(problem.sinks.clone())
            .q_offset(problem.q_offset);
        let execution = execution.clone().replicated(problem.replicated.clone());
        let base = match problem.softcap {
            Some(softcap) => base.softcap(softcap),
            None => base,
        };
        let base = if problem.bias_gradient { base.bias_gradient() } else { base };
        let done = on_threads(group, |transport| {
            let rank = transport.rank();
            let tokens = set.q_placement.of_rank(rank);
            let own = shard(&set, rank, &self.prepared.tensors).unwrap();
            let call = match (problem.bias, &own.bias) {
                (Some(tensor), Some(rows)) => base.clone().bias(tensor, rows.clone()),
                _ => base.clone(),
            };
            assert_eq!(bias_layout(&set).is_some(), problem.bias.is_some() && own.bias.is_some());
            let [batch, q_heads, kv_heads, dim] =
                [problem.batch, problem.q_heads, problem.kv_heads, problem.head_dim].map(|n| n as usize);
            let tensor = |count: usize, heads, dim, dtype, data: Bytes| {
                Tensor::from_bytes([batch, count, heads, dim], dtype, data).unwrap()
            };
            let (q_count, kv_count) = (tokens.len(), set.kv_placement.held_by(rank).len());
            let of_q = |data| tensor(q_count, q_heads, dim, problem.dtype, data);
            let of_kv = |data| tensor(kv_count, kv_heads, dim, problem.dtype, data);
            let (q, k, v) = (of_q(own.q), of_kv(own.k), of_kv(own.v));
            let mut session = open(transport);
            let execution =
                execution.clone().mesh(*mesh).owners(set.q_placement.clone(), set.kv_placement.clone());
            let ahead = call.clone().execution(execution.clone().strategy(*forward));
            let output = session.attend(&ahead, &q, &k, &v).unwrap();
            let d_o = of_q(q_layout.gather(&self.d_o, tokens).unwrap());
            let d_lse = lse_layout.gather(&self.d_lse, tokens).unwrap();
            let d_lse = tensor(q_count, q_heads, 1, Dtype::F32, d_lse);
            let saved = Saved { q, k, v, o: output.o, lse: output.lse_pair };
            session.backward(&call.execution(execution), &saved, &d_o, Some(&d_lse)).unwrap()
        });
        let mut whole = [q_layout, kv_layout, kv_layout].map(|layout| vec![0xFF; layout.bytes()]);
        let mut d_sinks = vec![0.0; problem.sinks.len()];
        let mut d_bias = problem.bias_gradient.then(|| vec![0.0; self.right.d_bias.len()]);
        let everywhere = problem.replicated.len();
        let mut of_all: Option<[Vec<u8>; 2]> = None;
        for (rank, gradients) in (0..).map(Rank).zip(done) {
            let Gradients { dq, dk, dv, d_sinks_part, d_bias: of_bias, .. } = gradients;
            assert_eq!(of_bias.is_some(), d_bias.is_some());
            for (whole, part) in d_bias.iter_mut().zip(of_bias) {
                add_bias(whole, &part, set.q_placement.of_rank(rank), problem);
            }
            let q_tokens = set.q_placement.of_rank(rank);
            let kv_tokens: &TokenRuns = &set.kv_placement.held_by(rank);
            // Of keys on every rank, all ranks have the whole gradient, in equal bytes.
            let [dk_bytes, dv_bytes] = [&dk, &dv].map(|tensor| pollster::block_on(tensor.bytes()).unwrap());
            let heads = problem.kv_heads as usize * problem.head_dim as usize * problem.dtype.bytes();
            let front = |bytes: &Bytes| -> Vec<u8> {
                let entries = bytes.chunks((kv_tokens.len() * heads).max(1));
                entries.flat_map(|entry| &entry[..everywhere * heads]).copied().collect()
            };
            let fronts = [front(&dk_bytes), front(&dv_bytes)];
            assert!(*of_all.get_or_insert_with(|| fronts.clone()) == fronts, "{rank} has other bytes");
            for (((tensor, tokens), layout), whole) in [(dq, q_tokens), (dk, kv_tokens), (dv, kv_tokens)]
                .into_iter()
                .zip([q_layout, kv_layout, kv_layout])
                .zip(&mut whole)
            {
                layout.scatter(&pollster::block_on(tensor.bytes()).unwrap(), tokens, whole).unwrap();
            }
            d_sinks.iter_mut().zip(d_sinks_part).for_each(|(sum, part)| *sum += part);
        }
        let [dq, dk, dv] = whole.map(|bytes| numbers(problem.dtype, &bytes));
        [dq, dk, dv, d_sinks].into_iter().chain(d_bias).collect()
    }
}

/// Adds a rank's `[batch, tokens or 1, heads, keys]` to the whole, which the oracle has as `[batch,
/// heads, queries or 1, keys]`.
fn add_bias(whole: &mut [f64], part: &Tensor, tokens: &TokenRuns, problem: &AttentionProblem) {
    let [_, rows, heads, keys] = part.shape();
    let shared = problem.bias.is_some_and(|bias| bias.shared_rows);
    let queries = if shared { 1 } else { problem.q_len as usize };
    let tokens: Vec<usize> = match shared {
        true => vec![0],
        false => tokens.iter().map(|token| token as usize).collect(),
    };
    assert_eq!(rows, tokens.len());
    for (index, value) in part.to_vec::<f32>().unwrap().into_iter().enumerate() {
        let (key, head, row, batch) =
            (index % keys, index / keys % heads, index / keys / heads % rows, index / keys / heads / rows);
        whole[((batch * heads + head) * queries + tokens[row]) * keys + key] += f64::from(value);
    }
}

/// The elements of a stored tensor.
fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytemuck::pod_collect_to_vec::<u8, f32>(bytes).into_iter().map(f64::from).collect(),
        Dtype::F16 => {
            bytemuck::pod_collect_to_vec::<u8, half::f16>(bytes).into_iter().map(f64::from).collect()
        }
        Dtype::Bf16 => {
            bytemuck::pod_collect_to_vec::<u8, half::bf16>(bytes).into_iter().map(f64::from).collect()
        }
    }
}
