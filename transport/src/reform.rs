//! What the seam says of forming a group again.

use std::sync::Arc;
use std::time::Duration;

use crate::transport::{Rank, Transport};

/// Who is to be in the next group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regroup {
    /// Those of the last group that are left.
    Survivors,
    /// All ranks of the first group, those that were started anew among them; after so long those who have come.
    Everyone {
        /// How long to wait for all.
        within: Duration,
    },
}

/// A group that was formed again.
#[derive(Clone, Debug)]
pub struct Reformed {
    /// This rank's end of it, with the number that it has there.
    pub transport: Arc<dyn Transport>,
    /// By rank of this group, its rank in the first one.
    pub members: Vec<Rank>,
    /// How often the group has been formed again, or more: every group of a job has another one.
    pub epoch: u32,
}
