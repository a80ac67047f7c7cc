//! Candidates for a problem, their order by bytes and by time, and the reasons in words.

pub(super) mod by_bytes;
pub(super) mod candidate;
pub(super) mod candidates;
pub(super) mod explain;
