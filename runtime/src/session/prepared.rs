//! Many calls of one shape after one vote.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kyklos_transport::{Abort, AbortCause, Progress, TransportError, Vote};

use super::Session;
use super::attend::{FORWARD, Output, Pass};
use super::backward::{BACKWARD, Gradients, Saved};
use super::shapes::{CallShapes, Shapes};
use crate::backend::{Backend, DeviceBuffer};
use crate::call::Attention;
use crate::error::{Error, Result};
use crate::exec::LoweredPlan;
use crate::tensor::Tensor;
use kyklos_plan::plan::Direction;

/// Calls of one shape for which the ranks have voted together, as the layers of a model are: the
/// n-th call of a rank meets the n-th calls of its peers. Made by [`Session::prepare`], and for the
/// backward passes of these layers by [`Session::prepare_backward`].
///
/// All ranks make all calls that they announced. If a rank drops this before, the group is aborted
/// on all ranks.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use kyklos::backend::Device;
/// use kyklos::{Attention, CallShapes, Mask, Session, Tensor};
/// use kyklos_transport::in_process_group;
///
/// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
/// let mut hidden = Tensor::new([1, 16, 4, 64], vec![0.25_f32; 16 * 4 * 64])?;
/// let call = Attention::new().mask(Mask::causal());
/// let mut layers = session.prepare(&call, &CallShapes::of(&hidden, &hidden), 40)?;
/// while layers.remaining() > 0 {
///     hidden = layers.run(&hidden, &hidden, &hidden)?.o;
/// }
/// # }
/// # Ok::<(), kyklos::Error>(())
/// ```
pub struct Prepared<'s> {
    session: &'s mut Session,
    direction: Direction,
    call: Attention,
    lowered: Arc<LoweredPlan>,
    /// This rank's part of the attention bias tensor, which all calls use.
    bias: Option<DeviceBuffer>,
    shapes: Shapes,
    announced: u32,
    made: u32,
}

impl Session {
    /// Agrees with all ranks on `count` calls with tensors of these shapes, and on their plan, in
    /// one vote. The mask, the attention bias tensor and all other options are those of `call` in
    /// every call. Blocks until all ranks have voted.
    ///
    /// # Errors
    /// As [`Session::attend`]; also [`Error::Request`] where ranks announce different numbers of
    /// calls.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn prepare(&mut self, call: &Attention, shapes: &CallShapes, count: u32) -> Result<Prepared<'_>> {
        pollster::block_on(self.prepare_async(call, shapes, count))
    }

    /// [`Self::prepare`] as a future. If it is dropped after its first poll and before its end, the
    /// group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub async fn prepare_async(
        &mut self,
        call: &Attention,
        shapes: &CallShapes,
        count: u32,
    ) -> Result<Prepared<'_>> {
        self.announce(&FORWARD, call, shapes, count).await
    }

    /// As [`Self::prepare`], for `count` backward passes: [`Prepared::backward`].
    ///
    /// # Errors
    /// As [`Session::backward`]; also [`Error::Request`] where ranks announce different numbers of
    /// calls.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn prepare_backward(
        &mut self,
        call: &Attention,
        shapes: &CallShapes,
        count: u32,
    ) -> Result<Prepared<'_>> {
        pollster::block_on(self.prepare_backward_async(call, shapes, count))
    }

    /// [`Self::prepare_backward`] as a future. If it is dropped after its first poll and before its
    /// end, the group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::prepare_backward`].
    pub async fn prepare_backward_async(
        &mut self,
        call: &Attention,
        shapes: &CallShapes,
        count: u32,
    ) -> Result<Prepared<'_>> {
        self.announce(&BACKWARD, call, shapes, count).await
    }

    async fn announce(
        &mut self,
        pass: &Pass,
        call: &Attention,
        shapes: &CallShapes,
        count: u32,
    ) -> Result<Prepared<'_>> {
        let &CallShapes { q: [.., dim], dtype, .. } = shapes;
        let direction = pass.direction;
        let prepare = |session: &Self| {
            match direction {
                Direction::Forward => session.supports(call, dtype, dim)?,
                Direction::Backward => session.supports_gradients(call, dtype, dim)?,
            }
            session.bias_buffer(call)
        };
        let shapes = shapes.of_tensors();
        let (lowered, bias) = self.agree(pass, call, &shapes, count, prepare).await?;
        let call = call.clone();
        Ok(Prepared { session: self, direction, call, lowered, bias, shapes, announced: count, made: 0 })
    }
}

impl Prepared<'_> {
    /// The next call, without a vote. Blocks until the device has the output.
    ///
    /// # Errors
    /// [`Error::Request`] for tensors of other shapes, another type or another device than
    /// announced, and for a call beyond the announced ones. Nothing has moved then, and the
    /// call can be made again with the right tensors. For elements beyond the range
    /// of [`WireFormat::F16`](crate::WireFormat::F16) [`Error::Request`], or
    /// [`TransportError::Refused`] where another rank has them: all ranks make the call again,
    /// or none. Other errors end the call on all ranks, and the group with it.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn run(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Output> {
        pollster::block_on(self.run_async(q, k, v))
    }

    /// [`Self::run`] as a future. If it is dropped after its first poll and before its end, the
    /// group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_async(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Output> {
        self.check(Direction::Forward, [q, k, v])?;
        let bias = self.bias();
        let mut inputs = self.session.inputs_with(&self.call, [q, k, v], bias)?;
        self.session.check_group().await?;
        self.made += 1;
        let output = self.session.run_call(&self.lowered, &mut inputs, q).await;
        self.made -= u32::from(is_refused(&output));
        output
    }

    /// The next backward pass, without a vote: the gradients as of [`Session::backward`]. Blocks
    /// until the device has them.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use kyklos::backend::Device;
    /// use kyklos::{Attention, CallShapes, Saved, Session, Tensor, in_process_group};
    ///
    /// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    /// let x = Tensor::new([1, 16, 4, 64], vec![0.25_f32; 16 * 4 * 64])?;
    /// let (call, shapes) = (Attention::new(), CallShapes::of(&x, &x));
    /// let mut layers = session.prepare(&call, &shapes, 2)?;
    /// let outputs = [layers.run(&x, &x, &x)?, layers.run(&x, &x, &x)?];
    /// drop(layers);
    /// let mut layers = session.prepare_backward(&call, &shapes, 2)?;
    /// for output in outputs.into_iter().rev() {
    ///     let saved = Saved { q: x.clone(), k: x.clone(), v: x.clone(), o: output.o, lse: output.lse_pair };
    ///     assert_eq!(layers.backward(&saved, &x, None)?.dq.shape(), x.shape());
    /// }
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::run`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn backward(&mut self, saved: &Saved, d_o: &Tensor, d_lse: Option<&Tensor>) -> Result<Gradients> {
        pollster::block_on(self.backward_async(saved, d_o, d_lse))
    }

    /// [`Self::backward`] as a future. If it is dropped after its first poll and before its end,
    /// the group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn backward_async(
        &mut self,
        saved: &Saved,
        d_o: &Tensor,
        d_lse: Option<&Tensor>,
    ) -> Result<Gradients> {
        let Saved { q, k, v, .. } = saved;
        self.check(Direction::Backward, [q, k, v])?;
        let bias = self.bias();
        let inputs = self.session.gradient_inputs(&self.call, saved, d_o, d_lse, bias)?;
        self.session.check_group().await?;
        self.made += 1;
        let gradients = self.session.run_backward(&self.lowered, inputs, &self.call, saved).await;
        self.made -= u32::from(is_refused(&gradients));
        gradients
    }

    /// This rank's part of the attention bias tensor, for one call.
    fn bias(&mut self) -> Option<DeviceBuffer> {
        self.bias.as_mut().map(|bias| self.session.device.share(bias))
    }

    /// Announced calls that have not been made.
    pub fn remaining(&self) -> u32 {
        self.announced - self.made
    }

    fn check(&self, direction: Direction, tensors: [&Tensor; 3]) -> Result<()> {
        let Self { announced, made, .. } = self;
        if direction != self.direction {
            return Err(Error::request(
                "a call in the direction for which the ranks have not voted",
                "use run after prepare, and backward after prepare_backward",
            ));
        }
        if made == announced {
            return Err(Error::request(
                format!("call {} of {announced} calls for which the ranks have voted", made + 1),
                "announce as many calls as you make",
            ));
        }
        self.shapes.check(tensors)
    }
}

/// Whether all ranks refuse the call, which then counts as not made.
pub(super) fn is_refused<T>(output: &Result<T>) -> bool {
    let refused = |error: &Error| matches!(error, Error::Transport(TransportError::Refused { .. }));
    output.as_ref().is_err_and(|error| error.is_request() || refused(error))
}

impl Session {
    /// The error of a group that has been aborted: a rank whose plan has no messages would not
    /// notice.
    pub(super) async fn check_group(&self) -> Result<()> {
        if self.collective.stop_flag().load(Ordering::Acquire) {
            self.group.agree(Vote::ready([0; 32]), self.options.deadline).await?;
        }
        Ok(())
    }

    /// Ends the group: this rank made fewer calls than it announced.
    pub(super) fn end_unfinished(&self, made: usize, announced: usize) {
        let cause = format!("it made {made} of the {announced} calls that it announced");
        let (culprit, progress) = (self.rank(), Progress { op: self.op, step: 0 });
        self.group.abort(Abort { culprit, cause: AbortCause::Failed(cause), progress });
    }
}

impl Drop for Prepared<'_> {
    fn drop(&mut self) {
        if self.remaining() > 0 {
            self.session.end_unfinished(self.made as usize, self.announced as usize);
        }
    }
}

impl std::fmt::Debug for Prepared<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { session, announced, made, .. } = self;
        f.debug_struct("Prepared")
            .field("session", session)
            .field("announced", announced)
            .field("made", made)
            .finish_non_exhaustive()
    }
}
