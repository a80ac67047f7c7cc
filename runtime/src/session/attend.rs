//! Attention calls of a session: agreement, plan and run.

use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::Vote;

use super::Session;
use super::agreement::{Agreed, CallNote};
use crate::backend::{Backend, Device, DeviceBuffer};
use crate::call::{Attention, Options};
use crate::exec::DeviceOutput;
use crate::plan::ProvedPlans;
use crate::{
    Carryover, Deal, Dtype, Error, Inputs, LoweredPlan, Mesh, Placement, PlacementKind, RankReport, Result,
    Span, Split, Strategy, Tensor, placed_meshes_by_bytes, plan_placed,
};

/// The result of a call on one rank, on its device.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[batch, tokens, q_heads, dim]` of the rank's own queries, in the type of q.
    pub o: Tensor,
    /// Log-sum-exp of the logits (natural logarithm), f32 `[batch, tokens, q_heads, 1]`.
    pub lse: Tensor,
    /// Time in nanoseconds and traffic in bytes.
    pub report: RankReport,
    /// The rank's timelines; empty without [`RunOptions::trace`](crate::RunOptions::trace).
    pub spans: Vec<Span>,
}

/// The plan of a call that this session has made before.
pub(super) struct CachedCall {
    options: Options,
    agreed: Agreed,
    lowered: Arc<LoweredPlan>,
}

/// Calls whose plans a session keeps; the one used longest ago is dropped first.
const CACHED_CALLS: usize = 32;

/// The hash under which calls vote, as opposed to runs of given plans, whose hash is that of the plans.
const CALLS: [u8; 32] = *b"kyklos: attention call, release1";

impl Session {
    /// Attention over the tokens of all ranks: `q`, `k` and `v` are this rank's, `[batch, tokens, heads, dim]`. Ranks may hold
    /// any numbers of tokens, zero included; they learn each other's with the vote. Blocks until the device has the output.
    ///
    /// # Errors
    /// [`Error::Request`] when the tensors or the ranks' calls do not fit together: the same on all ranks, and the session stays
    /// usable. Other errors end the call on all ranks, and the group with it.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attend(&mut self, call: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Output> {
        pollster::block_on(self.attend_async(call, q, k, v))
    }

    /// [`Self::attend`] as a future.
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub async fn attend_async(
        &mut self,
        call: &Attention,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Output> {
        // What only this rank can find wrong is found before the vote, which then carries it to the others.
        let prepared = CallNote::new(call, q, k, v).and_then(|note| Ok((note, self.inputs(call, q, k, v)?)));
        let (note, mut inputs) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let vote = Vote::Ready { plan_hash: CALLS, note: note.encode() };
        let notes = self.transport.agree(vote, self.options.deadline).await?;
        let lowered = self.plan_of(call, &notes)?;
        let op = self.op;
        self.op += 1;
        let mut carryover = Carryover::default();
        let executor = self.executor(&lowered);
        let DeviceOutput { o, lse, report, spans } =
            executor.run_agreed(op, &mut inputs, &mut carryover, false).await?;
        let [batch, tokens, heads, dim] = q.shape();
        let tensor =
            |dim, dtype, buffer| Tensor::on_device([batch, tokens, heads, dim], dtype, &self.device, buffer);
        Ok(Output {
            o: tensor(dim, q.dtype(), o.buffer),
            lse: tensor(1, Dtype::F32, lse.buffer),
            report,
            spans,
        })
    }

    fn inputs(&self, call: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Inputs<DeviceBuffer>> {
        let device: &Device = &self.device;
        let rows = call.bias_rows.clone();
        let shared = call.options.bias.is_some_and(|tensor| tensor.shared_rows);
        Ok(Inputs::of(
            [q.buffer("q", device)?, k.buffer("k", device)?, v.buffer("v", device)?],
            rows.map(|rows| device.upload("attention bias tensor", rows)).transpose()?,
            shared,
        ))
    }

    /// The plan for these notes, made at the first call and kept.
    fn plan_of(&mut self, call: &Attention, notes: &[Bytes]) -> Result<Arc<LoweredPlan>> {
        let agreed = CallNote::agree(call, notes)?;
        let known = |cached: &CachedCall| cached.agreed == agreed && cached.options == call.options;
        if let Some(index) = self.cache.iter().position(known) {
            let cached = self.cache.remove(index);
            let lowered = cached.lowered.clone();
            self.cache.push(cached);
            return Ok(lowered);
        }
        let plans = Arc::new(plans(&call.options, &agreed)?);
        self.plans_made += 1;
        let lowered = Arc::new(LoweredPlan::new(plans, self.rank(), &self.device));
        if self.cache.len() == CACHED_CALLS {
            self.cache.remove(0);
        }
        self.cache.push(CachedCall { options: call.options.clone(), agreed, lowered: lowered.clone() });
        Ok(lowered)
    }
}

/// The plans of a call, by the same rules on all ranks.
fn plans(options: &Options, agreed: &Agreed) -> Result<ProvedPlans> {
    let problem = options.problem(&agreed.extents)?;
    for (rank, (queries, bytes)) in agreed.q_counts.iter().zip(&agreed.bias_bytes).enumerate() {
        let wanted = problem.bias.map_or(0, |tensor| tensor.bytes(problem.dtype, *queries, problem.kv_len));
        if *bytes != wanted {
            return Err(Error::request(
                format!(
                    "the attention bias tensor of rank {rank} has {bytes} bytes, its shape needs {wanted}"
                ),
                "give the rows of the rank's queries, or with shared rows the whole tensor",
            ));
        }
    }
    let execution = &options.execution;
    let ranks = u32::try_from(agreed.q_counts.len()).unwrap_or(u32::MAX);
    let place = |total: u32, counts: &[u32], replicated: std::ops::Range<u32>, mesh: Mesh| {
        let documents = options.mask.document_boundaries().to_vec();
        let deal = Deal { total, replicated, documents };
        Placement::deal(&deal, execution.placement, mesh, &Split::Tokens(counts.to_vec()))
    };
    let dealt = |mesh| {
        let q = place(problem.q_len, &agreed.q_counts, 0..0, mesh)?;
        let kv = place(problem.kv_len, &agreed.kv_counts, execution.replicated.clone(), mesh)?;
        Ok::<_, Error>((q, kv))
    };
    let any_mesh = || match &execution.owners {
        Some((q, kv)) => Ok((q.clone(), kv.clone())),
        None if execution.placement == PlacementKind::Contiguous => dealt(Mesh::new(1, ranks)?),
        None => Err(Error::request(
            format!(
                "placement {} without a mesh, which decides the tokens of each rank",
                execution.placement
            ),
            "name the mesh, or use placement contiguous",
        )),
    };
    let (q, kv) = match (execution.mesh, &execution.owners) {
        (Some(mesh), _) if mesh.world() != ranks => {
            return Err(Error::request(
                format!("mesh {mesh} for {ranks} ranks"),
                "use a mesh of all ranks of the group, or none",
            ));
        }
        (Some(mesh), Some((q, kv))) => (q.on_mesh(mesh)?, kv.on_mesh(mesh)?),
        (Some(mesh), None) => dealt(mesh)?,
        (None, _) => {
            let (q, kv) = any_mesh()?;
            let meshes = placed_meshes_by_bytes(&problem, &q, &kv, execution.strategy)?;
            let (mesh, _) = meshes
                .first()
                .ok_or_else(|| Error::request(format!("no mesh of {ranks} ranks"), "use fewer ranks"))?;
            (q.on_mesh(*mesh)?, kv.on_mesh(*mesh)?)
        }
    };
    for (what, placement, counts) in [("queries", &q, &agreed.q_counts), ("keys", &kv, &agreed.kv_counts)] {
        for (rank, (tokens, count)) in placement.ranks().iter().zip(counts).enumerate() {
            if tokens.len() != *count as usize {
                return Err(Error::request(
                    format!("rank {rank} has {count} {what}, the placement gives it {}", tokens.len()),
                    "let each rank pass the tokens that the placement gives it",
                ));
            }
        }
    }
    let mesh = q.mesh();
    let strategy = execution.strategy.unwrap_or_else(|| Strategy::of_mesh(mesh));
    ProvedPlans::new(plan_placed(&problem, mesh, q, kv, strategy)?)
}
