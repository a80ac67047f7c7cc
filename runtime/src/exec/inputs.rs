//! A rank's inputs on its device.

use bytes::Bytes;
use kyklos_transport::{Rank, RefusalReason, TransportError, Vote};

use super::{Executor, LoweredPlan};
use crate::backend::Backend;
use crate::collective::Collective;
use crate::error::{Error, Result};
use crate::host::Tensors;

/// A rank's own queries, keys and values on its device, for the plans for which they were loaded.
/// Made by [`Executor::load`].
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
}

impl<Buffer> Inputs<Buffer> {
    /// Inputs that are on the device, and on which the ranks agree: q, k and v, and the attention
    /// bias tensor if there is one: the rank's rows, or `shared` the whole tensor.
    pub(crate) fn of([q, k, v]: [Buffer; 3], bias: Option<Buffer>, shared: bool) -> Self {
        let (bias, shared_bias) = if shared { (None, bias) } else { (bias, None) };
        Self { q: Some(q), k: Some(k), v: Some(v), bias, shared_bias, d_o: None, stats: None }
    }

    /// The same for a backward pass: with the gradient of the rank's output rows, and their
    /// statistics.
    pub(crate) fn with_gradient(self, d_o: Buffer, stats: Buffer) -> Self {
        Self { d_o: Some(d_o), stats: Some(stats), ..self }
    }

    /// Takes the keys and values out, if they are here.
    pub(crate) fn take_keys(&mut self) -> Option<[Buffer; 2]> {
        Some([self.k.take()?, self.v.take()?])
    }
}

impl<B: Backend, C: Collective<B> + ?Sized> Executor<'_, B, C> {
    /// Brings the rank's own tensors, `[batch, tokens, heads, dim]` in the problem's dtype, to its
    /// device, and its part of the problem's attention bias tensor if there is one: the rows of
    /// its queries, or with shared rows all of it. Their layout is in
    /// [`BiasTensor`](crate::BiasTensor).
    ///
    /// # Errors
    /// [`Error::Request`] when the size of a tensor is not that of the rank's tokens,
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn load(&self, Tensors { q, k, v, bias }: Tensors) -> Result<Inputs<B::Buffer>> {
        let problem = &self.set.problem;
        self.backend.supports(problem.dtype, problem.head_dim as usize)?;
        LoweredPlan::check_states(self.set, self.lowered.rank, self.backend.most_state_bytes())?;
        if problem.fixed_order {
            self.backend.supports_fixed_order()?;
        }
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
        let upload = |name, data| self.backend.upload(name, data);
        let bias = bias.filter(|_| problem.bias.is_some());
        let bias = bias.map(|bias| upload("the attention bias tensor", bias)).transpose()?;
        Ok(Inputs::of([upload("q", q)?, upload("k", k)?, upload("v", v)?], bias, shared))
    }

    /// Votes against the next operation because of `error`, an error of this rank; ends with it,
    /// unless the group fails before.
    pub(super) async fn refuse(&self, error: Error) -> Error {
        let vote = refusal(Rank(self.plan.rank), &error);
        match self.collective.agree(vote).await {
            Ok(_) | Err(TransportError::Refused { .. }) => error,
            Err(of_group) => of_group.into(),
        }
    }
}

/// The vote of a rank that cannot take part in an operation because of `error`.
pub(crate) fn refusal(rank: Rank, error: &Error) -> Vote {
    let reason = if error.is_request() { RefusalReason::WrongRequest } else { RefusalReason::Failed };
    Vote::Refuse { reason, text: format!("rank {rank}: {error}") }
}
