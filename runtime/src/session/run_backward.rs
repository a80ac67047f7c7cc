//! The backward pass of a run of given plans, with host tensors.

use std::sync::Arc;

use bytes::Bytes;

use super::Session;
use super::backward::{OutputRows, StatsOfRows};
use crate::backend::{Backend, DeviceBuffer, StateShape};
use crate::exec::DeviceOutput;
use crate::plan::{Direction, ProvedPlans};
use crate::{Dtype, Error, Executor, Inputs, RankOutput, RankReport, Result, Span};

/// The output of one rank, and the gradients of the loss with respect to it, in host memory.
#[derive(Clone, Debug)]
pub struct OutputGradient<'a> {
    /// The result of [`Session::run`].
    pub output: &'a RankOutput,
    /// Of o, shaped as o, in the problem's dtype.
    pub d_o: Bytes,
    /// Of lse, f32 `[batch, tokens, q_heads]`. Without it the loss does not depend on lse.
    pub d_lse: Option<Bytes>,
}

/// The gradients of one rank's tensors, in host memory.
#[derive(Clone, Debug)]
pub struct RankGradients {
    /// Of q, shaped as q, in the problem's dtype.
    pub dq: Bytes,
    /// Of k, shaped as k: summed over the queries of all ranks.
    pub dk: Bytes,
    /// Of v, shaped as v: summed over the queries of all ranks.
    pub dv: Bytes,
    /// This rank's part of the gradients of the sinks, one for each query head: from its own queries. The gradient is the sum
    /// over all ranks. Empty without sinks.
    pub d_sinks_part: Vec<f64>,
    /// Where the problem asks for it ([`AttentionProblem::bias_gradient`](crate::AttentionProblem::bias_gradient)), of the bias
    /// tensor: f32 without padding of rows, as in [`Gradients::d_bias`](crate::Gradients::d_bias).
    pub d_bias: Option<Bytes>,
    /// Time in nanoseconds and traffic in bytes.
    pub report: RankReport,
    /// The rank's timelines; empty without [`RunOptions::trace`](crate::RunOptions::trace).
    pub spans: Vec<Span>,
}

impl Session {
    /// Runs this rank's plan of `plans`, which [`plan_backward`](crate::plan_backward) made: the gradients for the output of
    /// [`Self::run`] on `inputs`, whose plans gave this rank the same tokens. All ranks run the same plans. The gradients are
    /// copied to the host. Nothing is divided by the number of ranks.
    ///
    /// If the future is dropped after its first poll and before its end, the group is aborted on all ranks; the inputs stay.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use std::sync::Arc;
    ///
    /// use kyklos::backend::Device;
    /// use kyklos::bytes::Bytes;
    /// use kyklos::host::Tensors;
    /// use kyklos::plan::ProvedPlans;
    /// use kyklos::{AttentionProblem, Dtype, Mask, Mesh, OutputGradient, PlacementKind, Session, Split, Strategy};
    /// use kyklos::{plan_backward, plan_world};
    /// use kyklos_transport::in_process_group;
    ///
    /// let problem = AttentionProblem::new([1, 8, 2, 2, 16], Dtype::F32, Mask::causal())?;
    /// let (mesh, placement) = (Mesh::new(1, 1)?, PlacementKind::Contiguous);
    /// let forward = plan_world(&problem, mesh, placement, &Split::Even, Strategy::Dense)?;
    /// let backward = plan_backward(&problem, mesh, placement, &Split::Even, Strategy::Dense)?;
    /// let [forward, backward] = [ProvedPlans::new(forward)?, ProvedPlans::new(backward)?].map(Arc::new);
    ///
    /// let x = Bytes::from(vec![0; 8 * 2 * 16 * 4]);
    /// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    /// let gradients = pollster::block_on(async {
    ///     let tensors = Tensors { q: x.clone(), k: x.clone(), v: x.clone(), bias: None };
    ///     let mut inputs = session.load(&forward, tensors).await?;
    ///     let output = session.run(&forward, &mut inputs).await?;
    ///     let gradient = OutputGradient { output: &output, d_o: x.clone(), d_lse: None };
    ///     session.run_backward(&backward, &mut inputs, &gradient).await
    /// })?;
    /// assert_eq!(gradients.dk.len(), x.len());
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::run`]. [`Error::Request`] also for plans of a forward pass, for tensors of another size than the output, and
    /// for a device without kernels for gradients.
    pub async fn run_backward(
        &mut self,
        plans: &Arc<ProvedPlans>,
        inputs: &mut Inputs<DeviceBuffer>,
        gradient: &OutputGradient<'_>,
    ) -> Result<RankGradients> {
        let (mut inputs, d_sinks) = match self.inputs_of_backward(plans, inputs, gradient) {
            Ok(prepared) => prepared,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let lowered = self.lower(plans);
        let executor = Executor::new(&self.device, &*self.collective, &lowered, self.options.run.clone());
        let result = executor.run_to_host(self.op, &mut inputs).await;
        self.op += 1;
        let DeviceOutput { results, report, spans } = result?;
        let mut host = results.into_iter().map(|tensor| tensor.host.unwrap_or_default());
        let [dq, dk, dv] = [host.next(), host.next(), host.next()].map(Option::unwrap_or_default);
        let d_bias = host.next();
        let mut gradients = RankGradients { dq, dk, dv, d_sinks_part: Vec::new(), d_bias, report, spans };
        if let Some(rows) = d_sinks {
            let part = rows.sum(&self.device, &plans.world().problem.sinks).await;
            gradients.d_sinks_part = part.inspect_err(|error| self.end_call(error))?;
        }
        Ok(gradients)
    }

    /// The inputs of a backward pass, and where there are sinks the statistics for their gradients.
    fn inputs_of_backward(
        &self,
        plans: &ProvedPlans,
        inputs: &mut Inputs<DeviceBuffer>,
        OutputGradient { output, d_o, d_lse }: &OutputGradient<'_>,
    ) -> Result<(Inputs<DeviceBuffer>, Option<StatsOfRows>)> {
        self.check_device(inputs)?;
        let world = plans.world();
        if world.direction != Direction::Backward {
            return Err(Error::request(
                "a backward pass with plans of a forward pass",
                "make the plans with plan_backward",
            ));
        }
        let (device, problem) = (&self.device, &world.problem);
        let [batch, heads, dim] =
            [problem.batch, problem.q_heads, problem.head_dim].map(|extent| extent as usize);
        device.supports_backward(problem.dtype, dim)?;
        if problem.bias_gradient {
            device.supports_bias_gradient()?;
        }
        let rows = world.q_placement.held_by(self.rank()).len();
        let numbers = batch * rows * heads;
        let (o_bytes, lse_bytes) = (numbers * dim * problem.dtype.bytes(), numbers * Dtype::F32.bytes());
        let given = [
            ("o", Some(&output.o), o_bytes),
            ("lse", Some(&output.lse), lse_bytes),
            ("the gradient of o", Some(d_o), o_bytes),
            ("the gradient of lse", d_lse.as_ref(), lse_bytes),
        ];
        for (name, tensor, wanted) in given {
            if let Some(bytes) = tensor.map(Bytes::len).filter(|bytes| *bytes != wanted) {
                return Err(Error::request(
                    format!("{name} of rank {} has {bytes} bytes, its queries need {wanted}", self.rank()),
                    "give the output of the same rank, and gradients of its shape",
                ));
            }
        }
        let rows_of_output = OutputRows {
            o: device.upload("o", output.o.clone())?,
            lse: device.upload("lse", output.lse.clone())?,
            d_o: device.upload("do", d_o.clone())?,
            d_lse: d_lse.as_ref().map(|d_lse| device.upload("dlse", d_lse.clone())).transpose()?,
        };
        let shape = StateShape { batch, rows, heads, dim };
        let shared = inputs.share(device);
        rows_of_output.add_to(shared, device, (problem.dtype, shape), !problem.sinks.is_empty())
    }
}
