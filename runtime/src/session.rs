//! One rank of a group, with its device: any number of attention calls.

mod agreement;
mod attend;
mod backward;
mod cache;
mod calls;
mod choice;
mod probe;
mod run_backward;
mod share;
mod speeds;

use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::{Rank, Transport, TransportError};

use crate::backend::{Backend, Device, DeviceBuffer, Threaded};
use crate::collective::{Collective, HostStaged, OneDevice};
use crate::exec::refusal;
use crate::host::Tensors;
use crate::plan::ProvedPlans;
use crate::{Error, Executor, Inputs, LoweredPlan, RankOutput, Result, RunOptions};
use agreement::LastFacts;
use attend::CachedCall;
pub use attend::Output;
pub use backward::{Gradients, Saved};
pub use cache::{CacheOptions, CachedCalls, KvCache};
pub use calls::Calls;
pub use run_backward::{OutputGradient, RankGradients};
use share::LastShares;
pub use share::SharedTokens;
use speeds::Speeds;

/// One rank of a group, with its device: any number of calls, one after the other.
///
/// The ranks of a group make the same calls in the same order. A call begins with a vote: if ranks disagree about what they
/// run, all of them get the same error, and the session stays usable. If a rank fails during a call, every call of every rank
/// ends with an error that names it, and so does every later call on this group.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use kyklos::backend::Device;
/// use kyklos::local::on_threads;
/// use kyklos::{Attention, Mask, Session, Tensor};
/// use kyklos_transport::in_process_group;
///
/// // Two ranks with 5 and 6 of 11 tokens, 4 query heads, 2 key/value heads, dim 16.
/// let outputs = on_threads(in_process_group(2), |transport| {
///     let tokens = 5 + transport.rank().0 as usize;
///     let mut session = Session::new(transport, Device::cpu());
///     let q = Tensor::new([1, tokens, 4, 16], vec![0.1_f32; tokens * 4 * 16])?;
///     let kv = Tensor::new([1, tokens, 2, 16], vec![0.2_f32; tokens * 2 * 16])?;
///     session.attend(&Attention::new().mask(Mask::causal()), &q, &kv, &kv)
/// });
/// for (output, tokens) in outputs.into_iter().zip([5, 6]) {
///     assert_eq!(output?.o.shape(), [1, tokens, 4, 16]);
/// }
/// # }
/// # Ok::<(), kyklos::Error>(())
/// ```
pub struct Session {
    transport: Arc<dyn Transport>,
    device: Device,
    collective: Arc<dyn DeviceCollective>,
    options: SessionOptions,
    /// The number of the next operation.
    op: u64,
    /// The plans of the last runs, at most one of each direction.
    lowered: Vec<Arc<LoweredPlan>>,
    /// Plans of the last calls, the last one at the end.
    cache: Vec<CachedCall>,
    last_facts: Option<LastFacts>,
    plans_made: u64,
    speeds: Speeds,
    last_shares: Option<LastShares>,
    /// The plan of the last run, and for how long it computed, in nanoseconds.
    last_run: Option<(Arc<LoweredPlan>, u64)>,
}

/// A [`Collective`] for devices of any backend, which the thread of a rank may own.
pub trait DeviceCollective: Collective<Device> + Threaded {}
impl<C: Collective<Device> + Threaded> DeviceCollective for C {}

/// Settings of a session that change no result.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// How long a message or an agreement may take before it is an error.
    pub deadline: Duration,
    /// Bytes that the buffers of a plan may take on the device, for [`Session::share`]; none: not known.
    pub memory_bytes: Option<u64>,
    /// Clock, observer, trace and poisoning.
    pub run: RunOptions,
}

impl Default for SessionOptions {
    /// A deadline of 60 s, memory that is not known, and default [`RunOptions`].
    fn default() -> Self {
        Self { deadline: Duration::from_secs(60), memory_bytes: None, run: RunOptions::default() }
    }
}

impl Session {
    /// A session of this rank of a group, on `device`. Messages are staged in host memory.
    pub fn new(transport: impl Into<Arc<dyn Transport>>, device: Device) -> Self {
        Self::with_options(transport, device, SessionOptions::default())
    }

    /// As [`Self::new`], with options.
    pub fn with_options(
        transport: impl Into<Arc<dyn Transport>>,
        device: Device,
        options: SessionOptions,
    ) -> Self {
        let transport = transport.into();
        let collective = Arc::new(HostStaged::new(transport.clone(), options.deadline));
        Self::with_collective(transport, device, collective, options)
    }

    /// As [`Self::with_options`], with another way to move buffers of the device between the ranks of the group of `transport`.
    pub fn with_collective(
        transport: Arc<dyn Transport>,
        device: Device,
        collective: Arc<dyn DeviceCollective>,
        options: SessionOptions,
    ) -> Self {
        Self {
            transport,
            device,
            collective,
            options,
            op: 0,
            lowered: Vec::new(),
            cache: Vec::new(),
            last_facts: None,
            plans_made: 0,
            speeds: Speeds::default(),
            last_shares: None,
            last_run: None,
        }
    }

    /// The sessions of ranks of this process that share `device`; `transports` are theirs, of one group. Tensors that travel
    /// between these ranks stay on the device.
    pub fn on_one_device(
        transports: Vec<Arc<dyn Transport>>,
        device: &Device,
        options: &SessionOptions,
    ) -> Vec<Self> {
        let collectives = OneDevice::of(&transports, options.deadline);
        let ranks = transports.into_iter().zip(collectives);
        ranks
            .map(|(transport, collective)| {
                Self::with_collective(transport, device.clone(), Arc::new(collective), options.clone())
            })
            .collect()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.transport.rank()
    }

    /// This rank's endpoint in the group.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Brings this rank's tensors for `plans` to its device: `q` `[batch, tokens, q_heads, dim]`; `k` and `v`
    /// `[batch, tokens, kv_heads, dim]`, first the replicated keys, then its own; the rows of the attention bias tensor, if
    /// the problem has one ([`BiasTensor`](crate::BiasTensor)). Several runs may use them.
    ///
    /// # Errors
    /// [`Error::Request`] when the size of a tensor is not that of the rank's tokens, [`Error::OutOfMemory`],
    /// [`Error::Device`]. The other ranks get the error as the result of their next vote.
    pub async fn load(&mut self, plans: &Arc<ProvedPlans>, tensors: Tensors) -> Result<Inputs<DeviceBuffer>> {
        let lowered = self.lower(plans);
        match executor(&self.device, &*self.collective, &lowered, &self.options).load(tensors) {
            Ok(mut inputs) => {
                inputs.device = Some(self.device.clone());
                Ok(inputs)
            }
            Err(error) => {
                self.refuse(&error).await?;
                Err(error)
            }
        }
    }

    /// Runs this rank's plan of `plans`. All ranks run the same plans. The output is copied to the host.
    ///
    /// If the future is dropped after its first poll and before its end, the group is aborted on all ranks; the inputs stay.
    ///
    /// # Errors
    /// [`Error::Request`] for inputs of another device, or of other plans in which this rank has other tokens; the other ranks
    /// then get [`TransportError::Refused`], and the session stays usable. Any other error of one rank ends the run on all
    /// ranks.
    pub async fn run(
        &mut self,
        plans: &Arc<ProvedPlans>,
        inputs: &mut Inputs<DeviceBuffer>,
    ) -> Result<RankOutput> {
        if let Err(error) = self.check_device(inputs) {
            self.refuse(&error).await?;
            return Err(error);
        }
        let lowered = self.lower(plans);
        let executor = executor(&self.device, &*self.collective, &lowered, &self.options);
        let result = executor.run(self.op, inputs).await;
        if let Ok(output) = &result {
            self.last_run = Some((lowered.clone(), output.report.compute_ns));
        }
        self.op += 1;
        result
    }

    /// Refuses inputs that are not on the device of this session.
    fn check_device(&self, inputs: &Inputs<DeviceBuffer>) -> Result<()> {
        if inputs.device.as_ref().is_some_and(|device| device.is_same(&self.device)) {
            return Ok(());
        }
        let place = match &inputs.device {
            Some(device) => device.info().name.as_str(),
            None => "an unknown device",
        };
        Err(Error::request(
            format!("inputs on {place}, which is not the device of the session"),
            "load the inputs with a session on the same `Device` or a clone of it",
        ))
    }

    /// Takes the number of the next operation, which no run then uses: for messages of the caller's own over
    /// [`Self::transport`]. All ranks take it between the same two runs.
    ///
    /// Every call takes a number, also one that the ranks refuse. A rank that leaves a call out, because it failed before this session
    /// knew of it, takes the number alone: the next call then fails on all ranks, instead of being taken for the one that was left
    /// out.
    pub fn take_operation(&mut self) -> u64 {
        let op = self.op;
        self.op += 1;
        op
    }

    /// Votes against the next operation: this rank cannot take part, because of `error`. On all ranks the operation counts as made.
    ///
    /// # Errors
    /// If the group fails before the vote ends. That all ranks refuse is no error of this function.
    pub async fn refuse(&mut self, error: &Error) -> Result<()> {
        let vote = refusal(self.rank(), error);
        self.op += 1;
        match self.transport.agree(vote, self.options.deadline).await {
            Ok(_) | Err(TransportError::Refused { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Leaves the group in order: waits, at most `deadline`, until the peers have all messages of this rank.
    ///
    /// # Errors
    /// [`Error::Transport`] if peers do not take their messages in time.
    pub async fn close_async(self, deadline: Duration) -> Result<()> {
        Ok(self.transport.close(deadline).await?)
    }

    /// [`Self::close_async`], blocking.
    ///
    /// # Errors
    /// As [`Self::close_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn close(self, deadline: Duration) -> Result<()> {
        pollster::block_on(self.close_async(deadline))
    }

    /// Calls of [`Self::attend`] so far for which the session had to make plans. The others used plans of earlier calls.
    pub fn plans_made(&self) -> u64 {
        self.plans_made
    }

    /// The plan of this rank, lowered for its device; the last one of each direction is kept.
    fn lower(&mut self, plans: &Arc<ProvedPlans>) -> Arc<LoweredPlan> {
        if let Some(lowered) = self.lowered.iter().find(|lowered| Arc::ptr_eq(lowered.plans(), plans)) {
            return lowered.clone();
        }
        let direction = plans.world().direction;
        self.lowered.retain(|lowered| lowered.plans().world().direction != direction);
        let lowered = Arc::new(LoweredPlan::new(plans.clone(), self.rank(), &self.device));
        self.lowered.push(lowered.clone());
        lowered
    }
}

/// An executor as the options of a session want it.
fn executor<'a>(
    device: &'a Device,
    collective: &'a (dyn DeviceCollective + 'static),
    lowered: &'a LoweredPlan,
    options: &SessionOptions,
) -> Executor<'a, Device, dyn DeviceCollective> {
    Executor::new(device, collective, lowered, options.run.clone())
}

impl Drop for Session {
    fn drop(&mut self) {
        self.device.release_idle();
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { transport, device, op, .. } = self;
        f.debug_struct("Session")
            .field("rank", &transport.rank())
            .field("world", &transport.world())
            .field("device", device)
            .field("op", op)
            .finish_non_exhaustive()
    }
}
