//! The backward pass of a session's calls: gradients of q, k and v.

use std::sync::Arc;

use super::Session;
use super::attend::Pass;
use super::choice::backward_plans;
use super::shapes::Shapes;
use crate::backend::{Backend, Device, DeviceBuffer, Extent, Layout, RowStats, StateShape};
use crate::call::Attention;
use crate::error::{Error, Result};
use crate::exec::{DeviceOutput, Executor, Inputs, LoweredPlan};
use crate::meter::{RankReport, Span};
use crate::tensor::Tensor;
use kyklos_plan::Dtype;
use kyklos_plan::plan::{Direction, PlanSet};

/// The tensors of a forward call that its backward pass reads: this rank's part of each, as
/// [`Session::attend`] took and returned them.
#[derive(Clone, Debug)]
pub struct Saved {
    /// `[batch, tokens, q_heads, dim]`.
    pub q: Tensor,
    /// `[batch, tokens, kv_heads, dim]`.
    pub k: Tensor,
    /// Shaped as k.
    pub v: Tensor,
    /// The output, shaped as q.
    pub o: Tensor,
    /// Its log-sum-exp, f32: [`Output::lse_pair`](crate::Output::lse_pair); or
    /// [`Output::lse`](crate::Output::lse), whose rounding is an error of 2⁻²⁵ of it in the
    /// weights of a row.
    pub lse: Tensor,
}

/// The gradients of one rank's tensors, on its device.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Of q, shaped as q, in its type.
    pub dq: Tensor,
    /// Of k, shaped as k: summed over the queries of all ranks.
    pub dk: Tensor,
    /// Of v, shaped as v: summed over the queries of all ranks.
    pub dv: Tensor,
    /// This rank's part of the gradients of the sinks, one for each query head: from its own
    /// queries. The gradient is the sum over all ranks. Empty without sinks.
    pub d_sinks_part: Vec<f64>,
    /// With [`Attention::bias_gradient`], of the bias tensor, f32 without padding of rows: of this
    /// rank's queries `[its batch, tokens, its heads, keys]`. With
    /// [`shared_rows`](crate::BiasTensor::shared_rows) this rank's part of `[its batch, 1, its
    /// heads, keys]`: the gradient is the sum over all ranks.
    pub d_bias: Option<Tensor>,
    /// Time in nanoseconds and traffic in bytes.
    pub report: RankReport,
    /// The rank's timelines; empty without [`RunOptions::trace`](crate::RunOptions::trace).
    pub spans: Vec<Span>,
}

/// The vote, the plans and the kept plans of backward passes.
pub(super) const BACKWARD: Pass = Pass {
    hash: *b"backward: a kyklos call, rel. 01",
    direction: Direction::Backward,
    plans: backward_plans,
};

impl Session {
    /// The gradients of `L` with respect to q, k and v, where `d_o` = ∂L/∂o and `d_lse` = ∂L/∂lse
    /// are this rank's rows of the gradients of the output, `[batch, tokens, q_heads, dim]` in
    /// the type of q, and of the log-sum-exp, f32 `[batch, tokens, q_heads, 1]`; without
    /// `d_lse`, `L` does not depend on the log-sum-exp. `call` is that of the forward pass,
    /// or one of given backward plans ([`Attention::planned`]), and `saved` its tensors. All ranks
    /// make this call together, as they make [`Self::attend`]. Nothing is divided by the number
    /// of ranks. Blocks until the device has the gradients.
    ///
    /// The formulas are in [`Backend::attend_backward`](crate::backend::Backend::attend_backward).
    /// Of a call without given plans, a strategy without a backward pass is replaced by the
    /// default strategy of its mesh; each rank gets the gradients of its own tokens in any case. An
    /// attention bias tensor is a constant, unless the call asks for its gradient
    /// ([`Attention::bias_gradient`]). Of keys that every rank holds
    /// ([`Execution::replicated`](crate::Execution::replicated)) every rank gets the whole
    /// gradient, in equal bytes. A caller that sums gradients of parameters over the ranks uses
    /// these rows on one rank only.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use kyklos::backend::Device;
    /// use kyklos::local::on_threads;
    /// use kyklos::{Attention, Mask, Saved, Session, Tensor};
    /// use kyklos_transport::in_process_group;
    ///
    /// let gradients = on_threads(in_process_group(2), |group| {
    ///     let mut session = Session::new(group, Device::cpu());
    ///     let x = Tensor::new([1, 8, 2, 16], vec![0.1_f32; 8 * 2 * 16])?;
    ///     let call = Attention::new().mask(Mask::causal());
    ///     let output = session.attend(&call, &x, &x, &x)?;
    ///     let saved = Saved { q: x.clone(), k: x.clone(), v: x.clone(), o: output.o, lse: output.lse_pair };
    ///     session.backward(&call, &saved, &x, None)
    /// });
    /// for gradients in gradients {
    ///     assert_eq!(gradients?.dk.shape(), [1, 8, 2, 16]);
    /// }
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::attend`]. [`Error::Request`] also for a device without kernels for gradients, and
    /// for options without a backward pass ([`plan_backward`](crate::plan_backward)).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn backward(
        &mut self,
        call: &Attention,
        saved: &Saved,
        d_o: &Tensor,
        d_lse: Option<&Tensor>,
    ) -> Result<Gradients> {
        pollster::block_on(self.backward_async(call, saved, d_o, d_lse))
    }

    /// [`Self::backward`] as a future. If it is dropped after its first poll and before its end,
    /// the group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::backward`].
    pub async fn backward_async(
        &mut self,
        call: &Attention,
        saved: &Saved,
        d_o: &Tensor,
        d_lse: Option<&Tensor>,
    ) -> Result<Gradients> {
        let Saved { q, k, v, .. } = saved;
        let shapes = Shapes::of([q, k, v]);
        let prepare = |session: &Self| {
            session.supports_gradients(call, q.dtype(), q.shape()[3])?;
            session.gradient_inputs(call, saved, d_o, d_lse, session.bias_buffer(call)?)
        };
        let (lowered, inputs) = self.agree(&BACKWARD, call, &shapes, 1, prepare).await?;
        self.run_backward(&lowered, inputs, call, saved).await
    }

    /// Refuses gradients for which the device has no kernels.
    pub(super) fn supports_gradients(&self, call: &Attention, dtype: Dtype, dim: usize) -> Result<()> {
        self.device.supports_backward(dtype, dim)?;
        if call.options.bias_gradient {
            self.device.supports_bias_gradient()?;
        }
        Ok(())
    }

    /// Runs a backward pass on which the ranks agree.
    pub(super) async fn run_backward(
        &mut self,
        lowered: &Arc<LoweredPlan>,
        (mut inputs, of_sinks): GradientInputs,
        call: &Attention,
        saved: &Saved,
    ) -> Result<Gradients> {
        let op = self.op;
        self.op += 1;
        let executor = Executor::new(&self.device, &*self.collective, lowered, self.options.run.clone());
        let DeviceOutput { results, report, spans } = executor.run(op, &mut inputs).await?;
        // After the run: other ranks wait for this one only until it has sent its sums.
        let d_sinks_part = match of_sinks {
            Some(rows) => {
                let part = rows.sum(&self.device, &call.options.sinks).await;
                part.inspect_err(|error| self.end_call(error))?
            }
            None => Vec::new(),
        };
        let tensor = |of: &Tensor, buffer| Tensor::on_device(of.shape(), of.dtype(), &self.device, buffer);
        let mut results = results.into_iter();
        let (Some(dq), Some(dk), Some(dv)) = (results.next(), results.next(), results.next()) else {
            unreachable!("a backward plan has three results")
        };
        Ok(Gradients {
            dq: tensor(&saved.q, dq),
            dk: tensor(&saved.k, dk),
            dv: tensor(&saved.v, dv),
            d_bias: results.next().map(|sum| self.bias_gradient(lowered.plans().set(), saved, sum)),
            d_sinks_part,
            report,
            spans,
        })
    }

    /// The gradient of the bias tensor from its sum.
    fn bias_gradient(&self, set: &PlanSet, saved: &Saved, sum: DeviceBuffer) -> Tensor {
        let problem = &set.problem;
        let [batch, rows, heads] = problem.bias.map_or([0; 3], |tensor| {
            let rows = if tensor.shared_rows { 1 } else { saved.q.shape()[1] };
            [tensor.batch as usize, rows, tensor.heads as usize]
        });
        let shape = [batch, rows, heads, problem.kv_len as usize];
        Tensor::on_device(shape, Dtype::F32, &self.device, sum)
    }

    /// The inputs of a backward pass; `bias` is this rank's part of the attention bias tensor.
    pub(super) fn gradient_inputs(
        &self,
        call: &Attention,
        saved: &Saved,
        d_o: &Tensor,
        d_lse: Option<&Tensor>,
        bias: Option<DeviceBuffer>,
    ) -> Result<GradientInputs> {
        let Saved { q, k, v, o, lse } = saved;
        let device = &self.device;
        let [batch, rows, heads, dim] = q.shape();
        let [row_shape, pair_shape] = [1, 2].map(|numbers| [batch, rows, heads, numbers]);
        let is_pair = lse.shape()[3] == 2;
        for (name, tensor, shape, dtype) in [
            ("the output", Some(o), q.shape(), q.dtype()),
            ("the gradient of the output", Some(d_o), q.shape(), q.dtype()),
            ("the log-sum-exp", Some(lse), if is_pair { pair_shape } else { row_shape }, Dtype::F32),
            ("the gradient of the log-sum-exp", d_lse, row_shape, Dtype::F32),
        ] {
            if let Some(tensor) = tensor.filter(|tensor| (tensor.shape(), tensor.dtype()) != (shape, dtype)) {
                return Err(Error::request(
                    format!(
                        "{name} of shape {:?} in {}, for q of shape {:?} in {}",
                        tensor.shape(),
                        tensor.dtype(),
                        q.shape(),
                        q.dtype()
                    ),
                    "give o and its gradient the shape and the type of q, and lse and its gradient f32 [batch, tokens, q_heads, 1], or lse its pair [batch, tokens, q_heads, 2]",
                ));
            }
        }
        let inputs = self.inputs_with(call, [q, k, v], bias)?;
        let of_output = OutputRows {
            o: o.buffer("o", device)?,
            lse: if is_pair { lse.buffer("lse", device)? } else { paired(lse, device)? },
            d_o: d_o.buffer("do", device)?,
            d_lse: d_lse.map(|d_lse| d_lse.buffer("dlse", device)).transpose()?,
        };
        let shape = StateShape { batch, rows, heads, dim };
        of_output.add_to(inputs, device, (q.dtype(), shape), !call.options.sinks.is_empty())
    }
}

/// Pairs of the numbers of `lse` and zeros.
fn paired(lse: &Tensor, device: &Device) -> Result<DeviceBuffer> {
    let [batch, rows, heads, _] = lse.shape();
    let from = lse.buffer("lse", device)?;
    let mut pairs = device.alloc("lse", batch * rows * heads * 8)?;
    device.clear(&mut pairs)?;
    let layout = |bytes| Layout {
        offset: 0,
        batch_stride: rows * heads * bytes,
        row_stride: heads * bytes,
        head_stride: bytes,
    };
    let extent = Extent { batch, rows, heads, row_bytes: 4 };
    device.repack((&from, layout(4)), (&mut pairs, layout(8)), extent)?;
    Ok(pairs)
}

/// The inputs of a backward pass, and where there are sinks the statistics for their gradients.
pub(super) type GradientInputs = (Inputs<DeviceBuffer>, Option<StatsOfRows>);

/// A rank's rows of the output, and of the gradients of the output.
struct OutputRows {
    o: DeviceBuffer,
    lse: DeviceBuffer,
    d_o: DeviceBuffer,
    d_lse: Option<DeviceBuffer>,
}

impl OutputRows {
    /// The inputs of a backward pass: those of the forward pass and these. With `sinks` also the
    /// statistics for their gradients.
    fn add_to(
        self,
        inputs: Inputs<DeviceBuffer>,
        device: &Device,
        (dtype, shape): (Dtype, StateShape),
        sinks: bool,
    ) -> Result<GradientInputs> {
        let Self { o, lse, d_o, d_lse } = self;
        let bytes = shape.stats_bytes();
        let mut stats = device.alloc("row statistics", bytes)?;
        let args =
            RowStats { dtype, shape, o: &o, d_o: &d_o, lse: &lse, d_lse: d_lse.as_ref(), stats: &mut stats };
        device.row_stats(args)?;
        let of_rows =
            sinks.then(|| StatsOfRows { stats: device.share(&mut stats), bytes, heads: shape.heads });
        Ok((inputs.with_gradient(d_o, stats), of_rows))
    }
}

/// The statistics of a rank's rows, from which it makes its part of the gradients of the sinks.
pub(super) struct StatsOfRows {
    stats: DeviceBuffer,
    bytes: usize,
    heads: usize,
}

impl StatsOfRows {
    /// `−Σ exp(sink − lse) · δ` of each head, in f64.
    async fn sum(mut self, device: &Device, sinks: &[f32]) -> Result<Vec<f64>> {
        let stats = device.download(&mut self.stats, 0..self.bytes).await?;
        let mut sums = vec![0.0; self.heads];
        let numbers = stats.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_ne_bytes(*bytes)));
        let numbers: Vec<f64> = numbers.collect();
        for (row, [lse, factor, delta, _]) in numbers.as_chunks::<4>().0.iter().enumerate() {
            let head = row % self.heads;
            let sink = sinks.get(head).copied().map_or(f64::NEG_INFINITY, f64::from);
            sums[head] -= (sink - lse).exp() * factor * delta;
        }
        Ok(sums)
    }
}
