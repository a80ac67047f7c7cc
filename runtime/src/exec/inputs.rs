//! A rank's inputs: the check of their sizes, and their agreement between ranks.

use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::{Rank, RefusalReason, TransportError, Vote};

use super::Executor;
use crate::backend::{Backend, Device};
use crate::collective::Collective;
use crate::host::Tensors;
use crate::plan::{ProvedPlans, World};
use crate::{AttentionProblem, Error, Result, TokenRuns};

/// A rank's own queries, keys and values on its device, for the plans for which they were loaded, and for other plans in which
/// the rank has the same tokens. Made by [`Executor::load`] and [`Session::load`](crate::Session::load).
#[derive(Debug)]
pub struct Inputs<Buffer> {
    pub(super) q: Option<Buffer>,
    pub(super) k: Option<Buffer>,
    pub(super) v: Option<Buffer>,
    /// The rank's rows of the attention bias tensor, a buffer of the plan.
    pub(super) bias: Option<Buffer>,
    /// The whole attention bias tensor, if all queries share its rows.
    pub(super) shared_bias: Option<Buffer>,
    /// In a backward pass: the gradient of the rank's output rows, and their statistics.
    pub(super) d_o: Option<Buffer>,
    pub(super) stats: Option<Buffer>,
    /// Hash of the bytes of `shared_bias`, if the ranks have not compared them yet.
    shared_digest: Option<[u8; DIGEST_BYTES]>,
    /// The plans whose tensors these are, and the rank; `None` for inputs of one call only.
    plans: Option<(Arc<ProvedPlans>, Rank)>,
    /// The device of the session that loaded them.
    pub(crate) device: Option<Device>,
}

/// Of the hash of a tensor that all ranks hold: enough to find ranks with unlike tensors.
const DIGEST_BYTES: usize = 8;

impl<Buffer> Inputs<Buffer> {
    /// Inputs that are on the device, and on which the ranks agree: q, k and v, and the attention bias tensor if there is one:
    /// the rank's rows, or `shared` the whole tensor.
    pub(crate) fn of([q, k, v]: [Buffer; 3], bias: Option<Buffer>, shared: bool) -> Self {
        let (bias, shared_bias) = if shared { (None, bias) } else { (bias, None) };
        let (d_o, stats, plans, device) = (None, None, None, None);
        let (q, k, v) = (Some(q), Some(k), Some(v));
        Self { q, k, v, bias, shared_bias, d_o, stats, shared_digest: None, plans, device }
    }

    /// The same for a backward pass: with the gradient of the rank's output rows, and their statistics.
    pub(crate) fn with_gradient(self, d_o: Buffer, stats: Buffer) -> Self {
        Self { d_o: Some(d_o), stats: Some(stats), ..self }
    }

    /// The same tensors once more, in the same memory.
    pub(crate) fn share(&mut self, device: &impl Backend<Buffer = Buffer>) -> Self {
        let Self { q, k, v, bias, shared_bias, .. } = self;
        let [q, k, v, bias, shared_bias] =
            [q, k, v, bias, shared_bias].map(|tensor| tensor.as_mut().map(|tensor| device.share(tensor)));
        let (plans, device) = (self.plans.clone(), self.device.clone());
        let shared_digest = self.shared_digest;
        Self { q, k, v, bias, shared_bias, d_o: None, stats: None, shared_digest, plans, device }
    }

    /// Takes the keys and values out, if they are here.
    pub(crate) fn take_keys(&mut self) -> Option<[Buffer; 2]> {
        Some([self.k.take()?, self.v.take()?])
    }
}

impl<B: Backend, C: Collective<B> + ?Sized> Executor<'_, B, C> {
    /// Brings the rank's own tensors, `[batch, tokens, heads, dim]` in the problem's dtype, to its device, and its part of
    /// the problem's attention bias tensor if there is one: the rows of its queries, or with shared rows all of it. Their
    /// layout is in [`BiasTensor`](crate::BiasTensor).
    ///
    /// # Errors
    /// [`Error::Request`] when the size of a tensor is not that of the rank's tokens, [`Error::OutOfMemory`],
    /// [`Error::Device`].
    pub fn load(&self, Tensors { q, k, v, bias }: Tensors) -> Result<Inputs<B::Buffer>> {
        let problem = &self.world.problem;
        self.backend.supports(problem.dtype, problem.head_dim as usize)?;
        let [own_q, own_kv, own_bias] = [Some(self.plan.q), Some(self.plan.kv), self.plan.bias]
            .map(|id| id.map_or_else(Vec::new, |id| self.tensor_bytes(id)));
        let shared = problem.shared_bias().is_some();
        let own_bias = match shared {
            true => vec![usize::try_from(problem.shared_bias_bytes()).unwrap_or(usize::MAX)],
            false => own_bias,
        };
        let wanted = [own_q, own_kv, own_bias].concat();
        let none = Bytes::new();
        let given =
            [("q", &q), ("k", &k), ("v", &v), ("the attention bias tensor", bias.as_ref().unwrap_or(&none))];
        for (index, (name, tensor)) in given.into_iter().enumerate() {
            let wanted = wanted.get(index).copied().unwrap_or(0);
            if tensor.len() != wanted {
                let (rank, given) = (self.plan.rank, tensor.len());
                let needs = if shared && index == 3 { "the problem needs" } else { "its tokens need" };
                return Err(Error::request(
                    format!("{name} of rank {rank} has {given} bytes, {needs} {wanted}"),
                    "give each rank the tensors of its own tokens, in the problem's dtype",
                ));
            }
        }
        let upload = |name, data| self.backend.upload(name, data).map(Some);
        let bias = bias.filter(|_| problem.bias.is_some());
        let shared_digest = bias.as_ref().filter(|_| shared).map(|bias| digest(bias));
        let bias = match bias {
            Some(bias) => upload("the attention bias tensor", bias)?,
            None => None,
        };
        let (bias, shared_bias) = if shared { (None, bias) } else { (bias, None) };
        Ok(Inputs {
            q: upload("q", q)?,
            k: upload("k", k)?,
            v: upload("v", v)?,
            bias,
            shared_bias,
            d_o: None,
            stats: None,
            shared_digest,
            plans: Some((self.lowered.plans.clone(), Rank(self.plan.rank))),
            device: None,
        })
    }

    /// Votes against the next operation because of `error`, an error of this rank; ends with it, unless the group fails before.
    pub(super) async fn refuse(&self, error: Error) -> Error {
        let vote = refusal(Rank(self.plan.rank), &error);
        match self.collective.agree(vote).await {
            Ok(_) | Err(TransportError::Refused { .. }) => error,
            Err(of_group) => of_group.into(),
        }
    }

    /// Refuses inputs that were loaded for other tokens or other extents than those of this plan.
    pub(super) fn check_inputs(&self, inputs: &Inputs<B::Buffer>) -> Result<()> {
        if self.plan.gradients.is_some() && inputs.d_o.is_none() {
            return Err(Error::request(
                "plans of a backward pass, and inputs without the gradient of the output",
                "use Session::run_backward or Session::backward",
            ));
        }
        let Some((plans, rank)) = &inputs.plans else { return Ok(()) };
        if Arc::ptr_eq(plans, &self.lowered.plans) && rank.0 == self.plan.rank {
            return Ok(());
        }
        let (loaded, runs) = (Held::of(plans.world(), *rank), Held::of(self.world, Rank(self.plan.rank)));
        match runs.difference(&loaded) {
            None => Ok(()),
            Some(what) => Err(Error::request(
                format!("the inputs of rank {} were loaded for other plans: {what}", self.plan.rank),
                "load the tensors for the plans that are to run",
            )),
        }
    }

    /// Agrees with all ranks that they run the same plans as the same operation, and that a tensor that each of them holds whole is
    /// the same.
    ///
    /// # Errors
    /// [`Error::Transport`] and [`Error::Request`], the same on all ranks.
    pub(super) async fn agree(&self, op: u64, inputs: &Inputs<B::Buffer>) -> Result<()> {
        let digest = inputs.shared_digest.as_ref().map_or(&[][..], |digest| &digest[..]);
        let note = Bytes::from([&op.to_le_bytes(), digest].concat());
        let vote = Vote::Ready { plan_hash: self.lowered.plans.hash(), note };
        let notes = self.collective.agree(vote).await?;
        let op_of = |rank: usize| {
            let number = notes[rank].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            number.ok_or_else(|| unknown_form(rank))
        };
        match notes.iter().position(|note| *note != notes[0]) {
            None => Ok(()),
            Some(rank) if op_of(rank)? != op_of(0)? => Err(out_of_step(rank, op_of(rank)?, op_of(0)?)),
            Some(rank) => Err(Error::request(
                format!(
                    "rank {rank} has another attention bias tensor than rank 0, for rows that all queries share"
                ),
                "give every rank the whole tensor, with the same bytes",
            )),
        }
    }
}

/// The vote of a rank that cannot take part in an operation because of `error`.
pub(crate) fn refusal(rank: Rank, error: &Error) -> Vote {
    let reason = if error.is_request() { RefusalReason::WrongRequest } else { RefusalReason::Failed };
    Vote::Refuse { reason, text: format!("rank {rank}: {error}") }
}

/// A vote that no rank of this release makes.
pub(crate) fn unknown_form(rank: usize) -> Error {
    Error::request(
        format!("rank {rank} describes its call in a form that this release does not know"),
        "use the same release on all ranks",
    )
}

/// Ranks that are at different places in the sequence of their calls.
pub(crate) fn out_of_step(rank: usize, theirs: u64, first: u64) -> Error {
    Error::request(
        format!(
            "rank {rank} is at call {theirs} of its session, rank 0 at call {first}: a rank has left out calls"
        ),
        "make the same calls on all ranks; after a call that failed on one rank alone, form a new group",
    )
}

/// What the inputs of a rank are: plans with the same can run on them.
struct Held<'a> {
    problem: &'a AttentionProblem,
    q: &'a TokenRuns,
    /// Keys, the replicated ones included.
    kv: &'a TokenRuns,
}

impl<'a> Held<'a> {
    fn of(world: &'a World, rank: Rank) -> Self {
        let plan = world.plan(rank);
        let [q, kv] = [plan.q, plan.kv].map(|id| &plan.buffer(id).tokens);
        Self { problem: &world.problem, q, kv }
    }

    /// The first thing in which they differ, in words.
    fn difference(&self, loaded: &Self) -> Option<String> {
        let shape = |problem: &AttentionProblem| {
            let AttentionProblem { batch, q_heads, kv_heads, head_dim, dtype, .. } = problem;
            format!(
                "batch {batch}, {q_heads} query heads, {kv_heads} key/value heads, dim {head_dim}, {dtype}"
            )
        };
        let bias = |problem: &AttentionProblem| {
            problem
                .bias
                .map_or_else(|| "none".to_owned(), |bias| format!("{bias:?} over {} keys", problem.kv_len))
        };
        let differ = |what: &str, loaded: String, runs: String| {
            (loaded != runs).then(|| format!("{what} {loaded}, not {runs}"))
        };
        let tokens = |what: &str, loaded: &TokenRuns, runs: &TokenRuns| {
            let same = loaded.len() == runs.len() && loaded.iter().eq(runs.iter());
            (!same).then(|| format!("{what} {loaded}, not {runs}"))
        };
        differ("tensors of", shape(loaded.problem), shape(self.problem))
            .or_else(|| tokens("queries", loaded.q, self.q))
            .or_else(|| tokens("keys", loaded.kv, self.kv))
            .or_else(|| differ("attention bias tensor", bias(loaded.problem), bias(self.problem)))
    }
}

fn digest(bytes: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut first = [0; DIGEST_BYTES];
    first.copy_from_slice(&blake3::hash(bytes).as_bytes()[..DIGEST_BYTES]);
    first
}
