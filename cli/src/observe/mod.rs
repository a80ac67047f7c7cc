//! What operators see of a run: progress, metrics, timelines, records, and the diagnosis of
//! records.

pub(crate) mod clocks;
pub(crate) mod doctor;
mod http;
pub(crate) mod live;
pub(crate) mod metrics;
pub(crate) mod page;
pub(crate) mod progress;
pub(crate) mod record;
mod totals;
pub(crate) mod trace;
