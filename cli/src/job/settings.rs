//! What the options say about a job, apart from the problem itself.

use std::path::PathBuf;
use std::time::Duration;

use crate::observe::page::target::PageTarget;
use crate::options::{OnLoss, ProgressKind};
use crate::tensors::output::OutputTarget;

/// What a job writes and prints.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outputs {
    pub(crate) result: Option<OutputTarget>,
    /// The timelines, of each rank or of all ranks together.
    pub(crate) trace: Option<PathBuf>,
    /// The page of the report, which rank 0 writes.
    pub(crate) page: Option<PageTarget>,
    /// The folder of records.
    pub(crate) record: Option<PathBuf>,
    /// Whether the report is a JSON object instead of a table.
    pub(crate) json: bool,
}

/// What the options say about the runs of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) repeat: u64,
    /// Longest wait for one message.
    pub(crate) deadline: Duration,
    pub(crate) verify: bool,
    pub(crate) progress: ProgressKind,
    /// Ranks on this machine: the progress bar counts their steps.
    pub(crate) ranks_here: u32,
    /// Whether each of them is a process.
    pub(crate) are_processes: bool,
    pub(crate) on_loss: OnLoss,
}
