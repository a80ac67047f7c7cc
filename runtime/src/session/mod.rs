//! One rank of a group, with its device: any number of attention calls.

mod agreement;
mod attend;
mod backward;
mod cache;
mod choice;
mod facts;
#[cfg(not(target_arch = "wasm32"))]
mod links;
mod prepared;
mod probe;
mod shapes;
mod share;
mod speeds;

use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::{Group, Rank, TransportError};

use crate::backend::{Backend, Device, Threaded};
use crate::collective::{Collective, HostStaged, OneDevice};
use crate::error::{Error, Result};
use crate::exec::{LoweredPlan, RunOptions, refusal};
use agreement::LastFacts;
use attend::CachedCall;
pub use attend::Output;
pub use backward::{Gradients, Saved};
pub use cache::{CacheOptions, CachedCalls, KvCache};
pub use prepared::Prepared;
pub use shapes::CallShapes;
use share::LastShares;
pub use share::SharedTokens;
use speeds::Speeds;

/// One rank of a group, with its device: any number of calls, one after the other.
///
/// The ranks of a group make the same calls in the same order: [`Self::attend`] and
/// [`Self::backward`], of options from which the session makes plans, or of plans that the caller
/// has made ([`Attention::planned`](crate::Attention::planned)). A call begins with a vote: if
/// ranks disagree about what they run, all of them get the same error, and the session stays
/// usable. If a rank fails during a call, every call of every rank ends with an error that names
/// it, and so does every later call on this group.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use kyklos::backend::Device;
/// use kyklos::local::on_threads;
/// use kyklos::{Attention, Mask, Session, Tensor};
/// use kyklos_transport::in_process_group;
///
/// // Two ranks with 5 and 6 of 11 tokens, 4 query heads, 2 key/value heads, dim 16.
/// let outputs = on_threads(in_process_group(2), |group| {
///     let tokens = 5 + group.rank().0 as usize;
///     let mut session = Session::new(group, Device::cpu());
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
    group: Group,
    device: Device,
    collective: Arc<dyn DeviceCollective>,
    options: SessionOptions,
    /// The number of the next operation.
    op: u64,
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
    /// Bytes that the buffers of a plan may take on the device, for [`Session::share`]; none: not
    /// known.
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
    pub fn new(group: impl Into<Group>, device: Device) -> Self {
        Self::with_options(group, device, SessionOptions::default())
    }

    /// As [`Self::new`], with options.
    pub fn with_options(group: impl Into<Group>, device: Device, options: SessionOptions) -> Self {
        let group = group.into();
        let collective = Arc::new(HostStaged::new(group.clone(), options.deadline));
        Self::with_collective(group, device, collective, options)
    }

    /// As [`Self::with_options`], with another way to move buffers of the device between the ranks
    /// of `group`.
    pub fn with_collective(
        group: impl Into<Group>,
        device: Device,
        collective: Arc<dyn DeviceCollective>,
        options: SessionOptions,
    ) -> Self {
        Self {
            group: group.into(),
            device,
            collective,
            options,
            op: 0,
            cache: Vec::new(),
            last_facts: None,
            plans_made: 0,
            speeds: Speeds::default(),
            last_shares: None,
            last_run: None,
        }
    }

    /// The sessions of ranks of this process that share `device`; `groups` has the group on each of
    /// them. Tensors that travel between these ranks stay on the device.
    pub fn on_one_device(groups: Vec<Group>, device: &Device, options: &SessionOptions) -> Vec<Self> {
        let collectives = OneDevice::of(&groups, options.deadline);
        let ranks = groups.into_iter().zip(collectives);
        ranks
            .map(|(group, collective)| {
                Self::with_collective(group, device.clone(), Arc::new(collective), options.clone())
            })
            .collect()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// The group, on this rank.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Takes the number of the next operation, which no run then uses: for messages of the caller's
    /// own over [`Self::group`]. All ranks take it between the same two runs.
    ///
    /// Every call takes a number, also one that the ranks refuse. A rank that leaves a call out,
    /// because it failed before this session knew of it, takes the number alone: the next call
    /// then fails on all ranks, instead of being taken for the one that was left out.
    pub fn take_operation(&mut self) -> u64 {
        let op = self.op;
        self.op += 1;
        op
    }

    /// Votes against the next operation: this rank cannot take part, because of `error`. On all
    /// ranks the operation counts as made.
    ///
    /// # Errors
    /// If the group fails before the vote ends. That all ranks refuse is no error of this function.
    pub async fn refuse(&mut self, error: &Error) -> Result<()> {
        let vote = refusal(self.rank(), error);
        self.op += 1;
        match self.group.agree(vote, self.options.deadline).await {
            Ok(_) | Err(TransportError::Refused { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Leaves the group in order: waits, at most `deadline`, until the peers have all messages of
    /// this rank.
    ///
    /// # Errors
    /// [`Error::Transport`] if peers do not take their messages in time.
    pub async fn close_async(self, deadline: Duration) -> Result<()> {
        Ok(self.group.close(deadline).await?)
    }

    /// [`Self::close_async`], blocking.
    ///
    /// # Errors
    /// As [`Self::close_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn close(self, deadline: Duration) -> Result<()> {
        pollster::block_on(self.close_async(deadline))
    }

    /// Calls so far for which the session had to make plans, or to prepare given ones. The others
    /// used plans of earlier calls.
    pub fn plans_made(&self) -> u64 {
        self.plans_made
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.device.release_idle();
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { group, device, op, .. } = self;
        f.debug_struct("Session")
            .field("rank", &group.rank())
            .field("size", &group.size())
            .field("device", device)
            .field("op", op)
            .finish_non_exhaustive()
    }
}
