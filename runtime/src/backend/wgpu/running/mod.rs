//! Running kernels: compiled pipelines, dispatches in pieces, completion, failures and times.

pub(super) mod clock;
pub(super) mod completion;
pub(super) mod dispatch;
pub(super) mod health;
pub(super) mod items;
pub(super) mod pacing;
pub(super) mod pieces;
pub(super) mod pipeline;
pub(super) mod stopwatch;
