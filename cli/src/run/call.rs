//! A planned call of one rank, with its tensors on the rank's device.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::plan::ProvedPlans;
use kyklos::{Attention, Dtype, Gradients, Output, Saved, Session, Tensor};

use crate::tensors::GivenGradient;

/// A call that a rank makes any number of times on the same tensors.
#[derive(Debug)]
pub(crate) struct RankCall {
    forward: Attention,
    qkv: [Tensor; 3],
    /// The call, and the gradients of the output and of the log-sum-exp.
    backward: Option<(Attention, Tensor, Option<Tensor>)>,
}

impl RankCall {
    /// The call of `plans` on this rank's `tensors`, and of the plans of a backward pass with the
    /// gradient of the output. If the tensors do not get to the device of `session`, its other
    /// ranks are refused the call.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) async fn open(
        session: &mut Session,
        plans: &Arc<ProvedPlans>,
        tensors: Tensors,
        backward: Option<(&Arc<ProvedPlans>, &GivenGradient)>,
    ) -> kyklos::Result<Self> {
        match Self::on(session.device(), plans, tensors, backward) {
            Ok(call) => Ok(call),
            Err(error) => {
                session.refuse(&error).await?;
                Err(error)
            }
        }
    }

    fn on(
        device: &Device,
        plans: &Arc<ProvedPlans>,
        tensors: Tensors,
        backward: Option<(&Arc<ProvedPlans>, &GivenGradient)>,
    ) -> kyklos::Result<Self> {
        let problem = &plans.set().problem;
        let mut forward = Attention::planned(plans);
        if let (Some(tensor), Some(rows)) = (problem.bias, &tensors.bias) {
            forward = forward.bias(tensor, rows.clone()).to_device(device)?;
        }
        let [q, k, v] = tensors.qkv(problem)?;
        let [batch, tokens, heads, _] = q.shape();
        let backward = backward.map(|(plans, GivenGradient { d_o, d_lse })| {
            let d_o = Tensor::from_bytes(q.shape(), q.dtype(), d_o.clone())?.to_device(device)?;
            let d_lse = d_lse.as_ref().map(|d_lse| {
                Tensor::from_bytes([batch, tokens, heads, 1], Dtype::F32, d_lse.clone())?.to_device(device)
            });
            Ok::<_, kyklos::Error>((forward.with_plans(plans), d_o, d_lse.transpose()?))
        });
        Ok(Self {
            backward: backward.transpose()?,
            forward,
            qkv: [q.to_device(device)?, k.to_device(device)?, v.to_device(device)?],
        })
    }

    /// The forward pass.
    pub(crate) async fn attend(&self, session: &mut Session) -> kyklos::Result<Output> {
        let [q, k, v] = &self.qkv;
        session.attend_async(&self.forward, q, k, v).await
    }

    /// The backward pass of a call that ended with `output`; `None` for a call without one.
    pub(crate) async fn backward(
        &self,
        session: &mut Session,
        output: &Output,
    ) -> kyklos::Result<Option<Gradients>> {
        let Some((call, d_o, d_lse)) = &self.backward else { return Ok(None) };
        let [q, k, v] = self.qkv.clone();
        let saved = Saved { q, k, v, o: output.o.clone(), lse: output.lse_pair.clone() };
        session.backward_async(call, &saved, d_o, d_lse.as_ref()).await.map(Some)
    }
}
