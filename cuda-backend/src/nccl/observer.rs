//! What NCCL does for a rank, for records and diagnosis.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::exchange::{Failure, Shared};
use super::islands::NcclIsland;
use super::library::Nccl;

/// Tells what NCCL does for a rank, also after its [`NcclCollective`](super::NcclCollective) is
/// dropped. It keeps neither that nor the group alive.
#[derive(Clone, Debug)]
pub struct NcclObserver {
    shared: Arc<Shared>,
    island: NcclIsland,
}

/// What NCCL does for a rank at one time: [`NcclObserver::state`].
///
/// ```
/// use kyklos_cuda::NcclState;
///
/// /// Whether messages are under way, or will never arrive.
/// fn waits(state: &NcclState) -> bool {
///     state.ended < state.posted
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclState {
    /// The ranks of the communicator, and the version of NCCL.
    pub island: NcclIsland,
    /// The file from which NCCL was loaded, where the system tells.
    pub library: Option<String>,
    /// Exchanges that this rank has posted.
    pub posted: u64,
    /// Those of them whose messages have moved.
    pub ended: u64,
    /// Why the communicator was aborted, if it was.
    pub failure: Option<String>,
}

impl NcclObserver {
    pub(super) fn new(shared: Arc<Shared>, island: NcclIsland) -> Self {
        Self { shared, island }
    }

    /// What NCCL does now, or did last.
    #[must_use]
    pub fn state(&self) -> NcclState {
        let failure = self.shared.lock().failure.clone().map(|failure| match failure {
            Failure::Own(error) => error.to_string(),
            Failure::Late(error) => error.to_string(),
            Failure::Group => "the group has ended".to_owned(),
        });
        NcclState {
            island: self.island.clone(),
            library: Nccl::load().ok().and_then(Nccl::path),
            posted: self.shared.posted.load(Ordering::Relaxed),
            ended: self.shared.ended.load(Ordering::Relaxed),
            failure,
        }
    }
}
