//! All inputs of one rank's run, apart from a device.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::Transport;

use crate::RunOptions;
use crate::plan::World;

/// Everything that one rank needs to run its plan, apart from a device.
///
/// [`Self::run`] runs it. [`run_ranks`](crate::local::run_ranks) and [`join_ranks`](crate::local::join_ranks) make the tasks of
/// all ranks of a process.
#[derive(Debug)]
pub struct RankTask<'a> {
    /// The plans of all ranks. [`check`](crate::plan::check()) has proved them.
    pub world: &'a World,
    /// This rank's endpoint in the group.
    pub transport: Arc<dyn Transport>,
    /// Hash of the plans that all ranks are about to run ([`plan_hash`](crate::plan::plan_hash())); it is compared before each
    /// operation.
    pub plan_hash: [u8; 32],
    /// Peak bytes of plan buffers that the proof found for this rank; goes into [`RankReport::peak_bytes`](crate::RankReport::peak_bytes).
    pub peak_bytes: u64,
    /// The rank's own queries, `[batch, tokens, q_heads, dim]` in the problem's dtype.
    pub q: Bytes,
    /// The keys that the rank holds, `[batch, tokens, kv_heads, dim]`: first the replicated ones, then its own.
    pub k: Bytes,
    /// The values of the same tokens, like `k`.
    pub v: Bytes,
    /// The rank's own rows of the problem's attention bias tensor, `[its batch, tokens, its heads, row]`.
    pub bias: Option<Bytes>,
    /// How often to run; operations are numbered from 0.
    pub repeat: u64,
    /// How long a message or an agreement may take before it is an error.
    pub deadline: Duration,
    /// Clock, observer, trace and poisoning.
    pub options: RunOptions,
}
