//! What a device can do, in numbers that ranks tell each other.

use serde::{Deserialize, Serialize};

/// What the device of a rank can do with calls of one class: one type of elements, one head dim,
/// one number of heads. Ranks tell each other in votes, so these are whole numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Visible (query, key) pairs of one head to which the device attends in a second; 0 for a rank
    /// that takes no tokens.
    pub pairs_per_s: u64,
    /// Nanoseconds of an attend step with hardly any work.
    pub step_ns: u64,
    /// Bytes that the buffers of a plan may take; none: not known.
    pub memory_bytes: Option<u64>,
}
