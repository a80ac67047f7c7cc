//! What a run shows of itself: records, metrics and pages.

mod doctor;
mod metrics;
mod report;
pub(crate) mod watch;
