//! The attention call: its size, its tensors, and running it on one or several devices.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use kyklos::host::{Tensors, shard};
use kyklos::local::on_threads;
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::simulate::{Candidate, Capacity, Shares};
use kyklos::{
    Attention, AttentionProblem, Dtype, Mask, Mesh, PlacementKind, RankReport, Session, Split, Strategy,
    plan_forward,
};
use kyklos_oracle::inputs::{TensorId, fill};
use kyklos_transport::in_process_group;

use crate::devices::OneDevice;
use crate::error::Result;

/// Attention of one sequence over ranks.
pub(crate) struct Call {
    pub(crate) set: PlanSet,
    pub(crate) tensors: Tensors,
}

/// What ranks computed together.
pub(crate) struct Output {
    /// By rank, `[batch, tokens, heads, dim]`, f32.
    pub(crate) o: Vec<Bytes>,
    /// By rank, `[batch, tokens, heads]`, f32.
    pub(crate) lse: Vec<Bytes>,
    /// By rank.
    pub(crate) reports: Vec<RankReport>,
    /// Median of the repetitions, without the first one, which compiles kernels and allocates.
    pub(crate) wall_s: f64,
}

impl Call {
    /// A causal call that takes the devices about half a second together. Tokens are shared by what
    /// each rank's device can do.
    pub(crate) fn new(capacities: &[Capacity]) -> Result<Self> {
        let problem = problem(tokens_for(capacities.iter().map(gflops).sum()), Dtype::F32, Mask::causal())?;
        let mesh = Mesh::new(1, u32::try_from(capacities.len())?)?;
        // Zigzag: every rank gets early and late tokens, so that the causal mask leaves no rank idle.
        let (strategy, placement) = (Strategy::of_mesh(mesh), PlacementKind::Zigzag);
        let shares = Shares::level(&problem, Candidate { strategy, mesh, placement }, capacities, None)?;
        let set = plan_forward(&problem, mesh, placement, &shares.split, strategy)?;
        Ok(Self { tensors: tensors(&problem), set })
    }

    /// One line for the user.
    pub(crate) fn description(&self) -> String {
        let problem = &self.set.problem;
        format!(
            "problem    {} tokens, {} query heads, {} key/value heads of dim {}, f32, causal; a ring of {} ranks\n",
            problem.q_len,
            problem.q_heads,
            problem.kv_heads,
            problem.head_dim,
            self.set.mesh.size(),
        )
    }

    /// Runs it with one rank on each device.
    pub(crate) fn run(&self, devices: &[OneDevice]) -> Result<Output> {
        run(&self.set, &self.tensors, devices.iter())
    }

    /// Runs the whole call on `device`.
    pub(crate) fn run_alone(&self, device: &OneDevice) -> Result<Output> {
        run(&set_of_one(&self.set.problem)?, &self.tensors, [device].into_iter())
    }
}

fn run<'a>(set: &PlanSet, tensors: &Tensors, devices: impl Iterator<Item = &'a OneDevice>) -> Result<Output> {
    let devices: Vec<&OneDevice> = devices.collect();
    let plans = Arc::new(ProvedPlans::new(set.clone())?);
    // When the last rank finished each repetition: the ranks start the next one together, by a vote.
    let finished = Mutex::new(vec![Instant::now(); REPETITIONS]);
    let results = on_threads(in_process_group(u32::try_from(devices.len())?), |transport| {
        let rank = transport.rank();
        let part = shard(set, rank, tensors)?;
        let device = &devices[rank.0 as usize].device;
        let mut session = Session::new(transport, device.clone());
        pollster::block_on(async {
            let [q, k, v] = part.qkv(&plans.set().problem)?;
            // Brought there once, not for each repetition.
            let [q, k, v] = [q.to_device(device)?, k.to_device(device)?, v.to_device(device)?];
            let call = Attention::planned(&plans);
            let mut last = None;
            for repetition in 0..REPETITIONS {
                last = Some(session.attend_async(&call, &q, &k, &v).await?);
                finished.lock().unwrap_or_else(PoisonError::into_inner)[repetition] = Instant::now();
            }
            let Some(kyklos::Output { o, lse, report, .. }) = last else { return Ok(None) };
            Ok::<_, kyklos::Error>(Some((o.bytes().await?, lse.bytes().await?, report)))
        })
    });
    let mut output = Output { o: Vec::new(), lse: Vec::new(), reports: Vec::new(), wall_s: 0.0 };
    for result in results {
        let (o, lse, report) = result?.ok_or("a rank ended without an output")?;
        output.o.push(o);
        output.lse.push(lse);
        output.reports.push(report);
    }
    let finished = finished.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut walls: Vec<f64> = finished.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    walls.sort_by(f64::total_cmp);
    output.wall_s = walls[walls.len() / 2];
    Ok(output)
}

/// A speed as people compare it, in GFLOP/s: 2 operations for each multiply and add of q·k and of
/// p·v.
#[expect(clippy::cast_precision_loss, reason = "printed without a fraction")]
pub(crate) fn gflops(capacity: &Capacity) -> f64 {
    capacity.pairs_per_s as f64 * 4.0 * f64::from(DIM) / 1e9
}

/// A call of the demonstration's heads.
pub(crate) fn problem(tokens: u32, dtype: Dtype, mask: Mask) -> Result<AttentionProblem> {
    Ok(AttentionProblem::new([1, tokens, HEADS, KV_HEADS, DIM], dtype, mask)?)
}

fn set_of_one(problem: &AttentionProblem) -> Result<PlanSet> {
    let mesh = Mesh::new(1, 1)?;
    Ok(plan_forward(problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Dense)?)
}

/// Standard normal numbers, the same for any number of ranks.
fn tensors(problem: &AttentionProblem) -> Tensors {
    let made_up = |tensor, heads: u32| {
        let mut values = vec![0.0_f32; problem.q_len as usize * heads as usize * problem.head_dim as usize];
        fill(SEED, tensor, 0..values.len() as u64, &mut values);
        Bytes::from(bytemuck::pod_collect_to_vec::<f32, u8>(&values))
    };
    Tensors {
        q: made_up(TensorId::Q, problem.q_heads),
        k: made_up(TensorId::K, problem.kv_heads),
        v: made_up(TensorId::V, problem.kv_heads),
        bias: None,
    }
}

/// Tokens whose causal attention, half of 4·S²·H·D operations, takes devices of this speed about
/// [`SECONDS`].
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to a range of u32")]
fn tokens_for(gflops: f64) -> u32 {
    let tokens = (SECONDS * gflops * 1e9 / (2.0 * f64::from(HEADS * DIM))).sqrt();
    (tokens.clamp(1024.0, 32_768.0) as u32).next_multiple_of(256)
}

const HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const DIM: u32 = 64;
const SEED: u64 = 0;
const SECONDS: f64 = 0.5;
/// The first one is not timed.
const REPETITIONS: usize = 4;
