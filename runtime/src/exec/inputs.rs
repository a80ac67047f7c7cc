//! A rank's inputs: the check of their sizes, and their agreement between ranks.

use bytes::Bytes;
use kyklos_transport::Vote;

use super::Executor;
use crate::backend::Backend;
use crate::collective::Collective;
use crate::host::Tensors;
use crate::{Error, Result};

/// A rank's own queries, keys and values on its device. Made by [`Executor::load`].
#[derive(Debug)]
pub struct Inputs<Buffer> {
    pub(super) q: Option<Buffer>,
    pub(super) k: Option<Buffer>,
    pub(super) v: Option<Buffer>,
    /// The rank's rows of the attention bias tensor, a buffer of the plan.
    pub(super) bias: Option<Buffer>,
    /// The whole attention bias tensor, if all queries share its rows.
    pub(super) shared_bias: Option<Buffer>,
    /// Hash of the bytes of `shared_bias`, if the ranks have not compared them yet.
    shared_digest: Option<[u8; DIGEST_BYTES]>,
}

/// Of the hash of a tensor that all ranks hold: enough to find ranks with unlike tensors.
const DIGEST_BYTES: usize = 8;

impl<Buffer> Inputs<Buffer> {
    /// Inputs that are on the device, and on which the ranks agree: q, k and v, and the attention bias tensor if there is one:
    /// the rank's rows, or `shared` the whole tensor.
    pub(crate) fn of([q, k, v]: [Buffer; 3], bias: Option<Buffer>, shared: bool) -> Self {
        let (bias, shared_bias) = if shared { (None, bias) } else { (bias, None) };
        Self { q: Some(q), k: Some(k), v: Some(v), bias, shared_bias, shared_digest: None }
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
            shared_digest,
        })
    }

    /// Agrees with all ranks that they run the same plans, and that a tensor that each of them holds whole is the same.
    ///
    /// # Errors
    /// [`Error::Transport`] and [`Error::Request`], the same on all ranks.
    pub(super) async fn agree(&self, inputs: &Inputs<B::Buffer>) -> Result<()> {
        let note = inputs.shared_digest.map_or_else(Bytes::new, |digest| Bytes::copy_from_slice(&digest));
        let vote = Vote::Ready { plan_hash: self.lowered.plans.hash(), note };
        let notes = self.collective.agree(vote).await?;
        match notes.iter().position(|note| *note != notes[0]) {
            None => Ok(()),
            Some(rank) => Err(Error::request(
                format!(
                    "rank {rank} has another attention bias tensor than rank 0, for rows that all queries share"
                ),
                "give every rank the whole tensor, with the same bytes",
            )),
        }
    }
}

fn digest(bytes: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut first = [0; DIGEST_BYTES];
    first.copy_from_slice(&blake3::hash(bytes).as_bytes()[..DIGEST_BYTES]);
    first
}
