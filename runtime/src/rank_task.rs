//! What a rank needs to run its plan, but a device.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::Transport;

use crate::RunOptions;
use crate::plan::World;

/// Everything one rank needs but a device.
#[derive(Debug)]
pub struct RankTask<'a> {
    /// The plans of all ranks.
    pub world: &'a World,
    /// This rank's way to the others.
    pub transport: Arc<dyn Transport>,
    /// Hash of what all ranks are about to run.
    pub plan_hash: [u8; 32],
    /// Peak bytes that the proof found for this rank.
    pub peak_bytes: u64,
    /// The rank's own queries, `[batch, tokens, q_heads, dim]`.
    pub q: Bytes,
    /// The keys that the rank holds, `[batch, tokens, kv_heads, dim]`: those of every rank, then its own.
    pub k: Bytes,
    /// The rank's own values, like `k`.
    pub v: Bytes,
    /// The rank's own rows of the problem's pair tensor, `[its batch, tokens, its heads, row]`.
    pub pairs: Option<Bytes>,
    /// How often to run; operations are numbered from 0.
    pub repeat: u64,
    /// After which time a message or an agreement that is not done is an error.
    pub deadline: Duration,
    /// Clock, observer and the like.
    pub options: RunOptions,
}
