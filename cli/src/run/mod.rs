//! Runs of a plan on the ranks of this process.

pub(crate) mod alone;
pub(crate) mod resident;
pub(crate) mod timed;
