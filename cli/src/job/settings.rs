//! What the options say about a job, apart from the problem itself.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kyklos::machine::memory_bytes_of;

use crate::job::collective::CollectiveOptions;
use crate::observe::live::Live;
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
    /// Whether rank 0 serves a live page, which ends with the page of the report.
    pub(crate) watched: bool,
    /// That page, on rank 0.
    pub(crate) live: Option<Arc<Live>>,
    /// The folder of records.
    pub(crate) record: Option<PathBuf>,
    /// Whether the report is a JSON object instead of a table.
    pub(crate) json: bool,
}

impl Outputs {
    /// Whether rank 0 makes the page of the report.
    pub(crate) fn has_page(&self) -> bool {
        self.page.is_some() || self.watched
    }
}

/// What the options say about the runs of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) repeat: u64,
    /// Longest wait for one message.
    pub(crate) deadline: Duration,
    pub(crate) verify: bool,
    pub(crate) progress: ProgressKind,
    /// Ranks on this machine, which share its memory.
    pub(crate) ranks_here: u32,
    /// Whether each of them is a process.
    pub(crate) are_processes: bool,
    pub(crate) on_loss: OnLoss,
    pub(crate) ways: CollectiveOptions,
}

impl Settings {
    /// Bytes of memory that the ranks on this machine may use together. `None` where the system
    /// does not tell it.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        memory_bytes_of(if self.are_processes { self.ranks_here } else { 1 })
    }
}
