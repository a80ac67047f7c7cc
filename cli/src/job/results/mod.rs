//! The results of a job: rank 0 collects, verifies, reports and publishes them.

pub(super) mod bias_gradient;
pub(super) mod collect;
pub(super) mod gradients;
pub(super) mod page;
pub(super) mod publish;
pub(crate) mod report;
