//! Attention in a web page: one call over a ring of ranks that share the page's thread and its GPU, and its check.

#![cfg(target_arch = "wasm32")]

mod tab;
mod verify;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::try_join_all;
use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};
use kyklos::backend::{Backend, Device};
use kyklos::host::{Tensors, shard};
use kyklos::plan::{ProvedPlans, PlanSet};
use kyklos::{
    Attention, AttentionProblem, Clock, Dtype, Mask, Mesh, PlacementKind, RankReport, Session, Split, Strategy,
    SystemClock, plan_forward,
};
use kyklos_oracle::inputs::{TensorId, fill};
use kyklos_oracle::{oracle, wire};
use kyklos_transport::{Rank, in_process_group};
use wasm_bindgen::prelude::{JsError, wasm_bindgen};

use crate::verify::{Verdict, problem_of, verify};

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = console)]
    fn error(text: &str);
}

/// Panics are told to the page: the trap that follows says nothing.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|panic| error(&panic.to_string())));
}

/// An attention call of one sequence with made-up inputs.
#[wasm_bindgen]
#[derive(Clone)]
pub struct Call {
    plans: Arc<ProvedPlans>,
    tensors: Rc<Tensors>,
    mask: Rc<(String, u32)>,
}

#[wasm_bindgen]
impl Call {
    /// `mask` is `full`, `causal` or `window`; a window is causal and has `window` keys before the query. `dtype` is `f32` or `f16`.
    #[wasm_bindgen(constructor)]
    pub fn new(
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        dim: u32,
        mask: String,
        window: u32,
        ranks: u32,
        dtype: String,
    ) -> Result<Self, JsError> {
        let visible = match mask.as_str() {
            "causal" => Mask::causal(),
            "window" => Mask::window(Some(window), Some(0)),
            _ => Mask::full(),
        };
        let problem = AttentionProblem::new([1, tokens, heads, kv_heads, dim], dtype.parse()?, visible)?;
        let mesh = Mesh::new(1, ranks)?;
        // Zigzag: every rank gets early and late tokens, so that a causal mask leaves no rank idle.
        let set = plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::of_mesh(mesh))?;
        let made_up = |tensor, heads: u32| {
            let mut values = vec![0.0_f32; tokens as usize * heads as usize * dim as usize];
            fill(SEED, tensor, 0..values.len() as u64, &mut values);
            Bytes::from(wire::store(oracle_dtype(problem.dtype), &values))
        };
        let tensors = Tensors {
            q: made_up(TensorId::Q, heads),
            k: made_up(TensorId::K, kv_heads),
            v: made_up(TensorId::V, kv_heads),
            bias: None,
        };
        Ok(Self {
            plans: Arc::new(ProvedPlans::new(set)?),
            tensors: Rc::new(tensors),
            mask: Rc::new((mask, window)),
        })
    }

    /// Queries `[tokens, heads, dim]`.
    pub fn q(&self) -> Vec<f32> {
        self.floats(&self.tensors.q)
    }

    /// Keys `[tokens, kv_heads, dim]`.
    pub fn k(&self) -> Vec<f32> {
        self.floats(&self.tensors.k)
    }

    /// Values `[tokens, kv_heads, dim]`.
    pub fn v(&self) -> Vec<f32> {
        self.floats(&self.tensors.v)
    }

    /// The rank of each token.
    pub fn owners(&self) -> Vec<u32> {
        let set = self.plans.set();
        let mut owners = vec![0; set.problem.q_len as usize];
        for rank in 0..set.mesh.size() {
            for token in set.q_placement.of_rank(Rank(rank)).iter() {
                owners[token as usize] = rank;
            }
        }
        owners
    }

    /// Compares `o` `[tokens, heads, dim]` and `lse` `[tokens, heads]` with attention in f64, on a sample of rows.
    pub fn verify(&self, o: &[f32], lse: &[f32]) -> Result<Verdict, JsError> {
        let problem = problem_of(&self.plans.set().problem, &self.mask.0, self.mask.1);
        let dtype = oracle_dtype(self.plans.set().problem.dtype);
        Ok(verify(&problem, dtype, [&self.q(), &self.k(), &self.v()], o, lse)?)
    }
}

impl Call {
    fn floats(&self, tensor: &Bytes) -> Vec<f32> {
        wire::load(oracle_dtype(self.plans.set().problem.dtype), tensor)
    }
}

fn oracle_dtype(dtype: Dtype) -> oracle::Dtype {
    match dtype {
        Dtype::F32 => oracle::Dtype::F32,
        Dtype::F16 => oracle::Dtype::F16,
        Dtype::Bf16 => oracle::Dtype::Bf16,
    }
}

/// What the ranks computed together.
#[wasm_bindgen(getter_with_clone)]
pub struct Outcome {
    /// `[tokens, heads, dim]`.
    pub o: Vec<f32>,
    /// `[tokens, heads]`.
    pub lse: Vec<f32>,
    /// Of each repetition but the first, which compiles kernels.
    pub wall_ms: Vec<f64>,
    /// By rank: tokens, bytes sent; of the last repetition. Times would mislead: the ranks share one queue.
    pub ranks: Vec<f64>,
}

/// Opens the GPU, and gives its name.
///
/// # Errors
/// When there is no adapter, or it cannot be opened.
#[wasm_bindgen(js_name = openDevice)]
pub async fn open_device() -> Result<String, JsError> {
    let backend = WgpuBackend::request(&WgpuOptions::default()).await?;
    let name = backend.info().name.clone();
    DEVICE.set(Some(Device::new(backend)));
    Ok(name)
}

/// Runs the call `repetitions` times and once more before.
///
/// # Errors
/// Those of the library; when the device was not opened.
#[wasm_bindgen]
pub async fn attend(call: &Call, repetitions: usize) -> Result<Outcome, JsError> {
    let call = call.clone();
    let device = DEVICE.with_borrow(Clone::clone).ok_or_else(|| JsError::new("the device is not open"))?;
    let set = call.plans.set();
    device.supports(set.problem.dtype, set.problem.head_dim as usize)?;
    // By repetition, when the last rank finished it; the ranks start the next one together, by a vote.
    let finished_ns = RefCell::new(vec![0; repetitions + 1]);
    let clock = SystemClock::new();
    let ranks = in_process_group(set.mesh.size()).into_iter().map(async |transport| {
        let part = shard(set, transport.rank(), &call.tensors)?;
        let mut session = Session::new(transport, device.clone());
        let [q, k, v] = part.qkv(&set.problem)?;
        // Brought there once, not for each repetition.
        let [q, k, v] = [q.to_device(&device)?, k.to_device(&device)?, v.to_device(&device)?];
        let planned = Attention::planned(&call.plans);
        let mut output = session.attend_async(&planned, &q, &k, &v).await?;
        finished_ns.borrow_mut()[0] = clock.now_ns();
        for repetition in 1..=repetitions {
            output = session.attend_async(&planned, &q, &k, &v).await?;
            finished_ns.borrow_mut()[repetition] = clock.now_ns();
        }
        Ok::<_, kyklos::Error>((output.o.bytes().await?, output.lse.bytes().await?, output.report))
    });
    let outputs = try_join_all(ranks).await?;
    let wall_ms = finished_ns.borrow().windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1e6).collect();
    Ok(gather(set, &outputs, wall_ms))
}

/// The ranks' outputs in the order of the tokens.
fn gather(set: &PlanSet, outputs: &[(Bytes, Bytes, RankReport)], wall_ms: Vec<f64>) -> Outcome {
    let problem = &set.problem;
    let (heads, dim) = (problem.q_heads as usize, problem.head_dim as usize);
    let rows = problem.q_len as usize * heads;
    let mut outcome = Outcome { o: vec![0.0; rows * dim], lse: vec![0.0; rows], wall_ms, ranks: Vec::new() };
    for (rank, (o, lse, report)) in (0..).zip(outputs) {
        let o = wire::load(oracle_dtype(problem.dtype), o);
        let lse: Vec<f32> = bytemuck::pod_collect_to_vec(lse);
        for (index, token) in set.q_placement.of_rank(Rank(rank)).iter().enumerate() {
            let (from, to) = (index * heads, token as usize * heads);
            outcome.lse[to..to + heads].copy_from_slice(&lse[from..from + heads]);
            let (from, to, length) = (from * dim, to * dim, heads * dim);
            outcome.o[to..to + length].copy_from_slice(&o[from..from + length]);
        }
        outcome.ranks.extend([report.tokens as f64, report.bytes_sent as f64]);
    }
    outcome
}

thread_local!(static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) });

const SEED: u64 = 0;
