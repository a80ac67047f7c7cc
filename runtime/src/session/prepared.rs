//! Many calls of one shape after one vote.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kyklos_transport::{Abort, AbortCause, Progress, TransportError, Vote};

use super::Session;
use super::attend::{FORWARD, Output};
use super::shapes::{CallShapes, Shapes};
use crate::backend::{Backend, DeviceBuffer};
use crate::call::Attention;
use crate::error::{Error, Result};
use crate::exec::LoweredPlan;
use crate::tensor::Tensor;

/// Calls of one shape for which the ranks have voted together, as the layers of a model are: the
/// n-th call of a rank meets the n-th calls of its peers. Made by [`Session::prepare`].
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
        let &CallShapes { q: [.., dim], dtype, .. } = shapes;
        let prepare = |session: &Self| {
            session.device.supports(dtype, dim)?;
            session.bias_buffer(call)
        };
        let shapes = shapes.of_tensors();
        let (lowered, bias) = self.agree(&FORWARD, call, &shapes, count, prepare).await?;
        Ok(Prepared { session: self, call: call.clone(), lowered, bias, shapes, announced: count, made: 0 })
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
        self.check([q, k, v])?;
        let bias = self.bias.as_mut().map(|bias| self.session.device.share(bias));
        let mut inputs = self.session.inputs_with(&self.call, [q, k, v], bias)?;
        self.session.check_group().await?;
        self.made += 1;
        let output = self.session.run_call(&self.lowered, &mut inputs, q).await;
        self.made -= u32::from(is_refused(&output));
        output
    }

    /// Announced calls that have not been made.
    pub fn remaining(&self) -> u32 {
        self.announced - self.made
    }

    fn check(&self, tensors: [&Tensor; 3]) -> Result<()> {
        let Self { announced, made, .. } = self;
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
pub(super) fn is_refused(output: &Result<Output>) -> bool {
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
