//! One call on each of several caches after one vote: the layers of a step.

use super::KvCache;
use super::attend::CachedStep;
use crate::backend::{Backend, DeviceBuffer};
use crate::call::Attention;
use crate::error::{Error, Result};
use crate::session::Session;
use crate::session::attend::Output;
use crate::session::prepared::is_refused;
use crate::session::shapes::Shapes;
use crate::tensor::Tensor;

/// One call on each of several caches, for which the ranks have voted together: the layers of a
/// model, in one step. The n-th call is on the n-th cache. Made by [`Session::cached_calls`].
///
/// All ranks make all of these calls. If a rank drops this before, the group is aborted on all
/// ranks; the caches of the calls that were made have the new tokens then, and the others do not.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use kyklos::backend::Device;
/// use kyklos::{Attention, CacheOptions, Dtype, Execution, Mask, Session, Tensor};
/// use kyklos_transport::in_process_group;
///
/// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
/// let options = CacheOptions::new([1, 2, 8], Dtype::F32);
/// let mut caches = (0..4).map(|_| session.kv_cache(options.clone())).collect::<kyklos::Result<Vec<_>>>()?;
/// let decode = Attention::new().mask(Mask::causal()).execution(Execution::new().same_queries());
/// let tensor = || Tensor::new([1, 1, 2, 8], vec![0.5_f32; 16]);
/// let (mut hidden, kv) = (tensor()?, tensor()?);
/// let mut layers = session.cached_calls(&decode, &mut caches, &hidden, &kv, &kv)?;
/// while layers.remaining() > 0 {
///     hidden = layers.attend(&hidden, &kv, &kv)?.o;
/// }
/// # }
/// # Ok::<(), kyklos::Error>(())
/// ```
#[derive(Debug)]
pub struct CachedCalls<'s> {
    session: &'s mut Session,
    call: Attention,
    step: CachedStep,
    /// This rank's part of the attention bias tensor, which all calls use.
    bias: Option<DeviceBuffer>,
    shapes: Shapes,
    caches: &'s mut [KvCache],
    made: usize,
}

impl Session {
    /// Agrees with all ranks, in one vote, on one call on each of `caches`, as
    /// [`Self::attend_cached`] makes them: the layers of a step. The caches have the same
    /// record of tokens. Every call has tensors of the shapes and the type of these; their
    /// elements are not read. Blocks until all ranks have voted.
    ///
    /// # Errors
    /// As [`Self::attend_cached`]; also [`Error::Request`] for caches with unlike records.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn cached_calls<'s>(
        &'s mut self,
        call: &Attention,
        caches: &'s mut [KvCache],
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<CachedCalls<'s>> {
        pollster::block_on(self.cached_calls_async(call, caches, q, k, v))
    }

    /// [`Self::cached_calls`] as a future. If it is dropped after its first poll and before its
    /// end, the group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::cached_calls`].
    pub async fn cached_calls_async<'s>(
        &'s mut self,
        call: &Attention,
        caches: &'s mut [KvCache],
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<CachedCalls<'s>> {
        let prepare = |session: &Self, _: &KvCache| session.bias_buffer(call);
        let (step, bias) = self.agree_cached(call, caches, [q, k, v], prepare).await?;
        let (call, shapes) = (call.clone(), Shapes::of([q, k, v]));
        Ok(CachedCalls { session: self, call, step, bias, shapes, caches, made: 0 })
    }
}

impl CachedCalls<'_> {
    /// The call on the next cache, without a vote. Blocks until the device has the output.
    ///
    /// # Errors
    /// As [`Prepared::run`](super::super::Prepared::run).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attend(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Output> {
        pollster::block_on(self.attend_async(q, k, v))
    }

    /// [`Self::attend`] as a future. If it is dropped after its first poll and before its end, the
    /// group is aborted on all ranks.
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub async fn attend_async(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Output> {
        let Some(cache) = self.caches.get_mut(self.made) else {
            let all = self.made;
            return Err(Error::request(
                format!("call {} on {all} caches for which the ranks have voted", all + 1),
                "make one call on each cache",
            ));
        };
        self.shapes.check([q, k, v])?;
        let bias = self.bias.as_mut().map(|bias| self.session.device.share(bias));
        let inputs = (q.buffer("q", &self.session.device)?, cache.upload([k, v])?, bias);
        self.session.check_group().await?;
        self.made += 1;
        let output = self.session.run_cached(&self.call, &self.step, cache, inputs, q).await;
        self.made -= usize::from(is_refused(&output));
        output
    }

    /// Calls that have not been made.
    pub fn remaining(&self) -> usize {
        self.caches.len() - self.made
    }
}

impl Drop for CachedCalls<'_> {
    fn drop(&mut self) {
        if self.remaining() > 0 {
            self.session.end_unfinished(self.made, self.caches.len());
        }
    }
}
