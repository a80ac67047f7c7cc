//! What the bench keeps of a cell.

use serde::{Deserialize, Serialize};

use super::cells::CellName;

/// A cell that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    #[serde(flatten)]
    pub(super) name: CellName,
    pub(super) state: State,
    /// Why it has no times.
    pub(super) why: Option<String>,
    pub(super) predicted: Option<Predicted>,
    pub(super) measured: Option<Measured>,
}

/// How a cell has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// Its result is right, and it has times.
    Done,
    /// It does not fit: no tensor has moved.
    Refused,
    /// An error, a wrong result, or the end of the program in it.
    Failed,
}

impl State {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// What the simulator says, in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Predicted {
    pub(super) wall_s: f64,
    /// By rank; of an extrapolated world empty.
    pub(super) per_rank: Vec<PredictedRank>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PredictedRank {
    pub(super) compute_s: f64,
    pub(super) wait_s: f64,
    pub(super) copy_s: f64,
}

/// The times of a right result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Of the timed runs: from the first step of a rank to its end, of the slowest rank.
    pub(super) median_s: f64,
    pub(super) min_s: f64,
    pub(super) max_s: f64,
    pub(super) runs: u32,
    /// Of sampled rows, against the oracle.
    pub(super) max_abs_error: f64,
    pub(super) tolerance: f64,
    pub(super) per_rank: Vec<RankMeasured>,
}

/// The phases of one rank in seconds, and what it has sent and used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RankMeasured {
    pub(super) rank: u32,
    pub(super) device: String,
    pub(super) tokens: u64,
    /// Making the plans of all ranks and proving them; once in each process.
    pub(super) plan_s: f64,
    /// Making the rank's tensors, lowering its plan, and bringing the tensors to the device.
    pub(super) load_s: f64,
    /// By how much the first run, in which kernels are compiled and memory is allocated, takes longer than the median run.
    pub(super) compile_s: f64,
    /// Of the run with the median time, as the next three.
    pub(super) wall_s: f64,
    pub(super) compute_s: f64,
    pub(super) wait_s: f64,
    pub(super) copy_s: f64,
    /// Bringing the output to rank 0.
    pub(super) collect_s: f64,
    /// Plan payload of one run.
    pub(super) bytes_sent: u64,
    pub(super) messages_sent: u64,
    /// Bytes of all packets of one run, on average, with headers and repeated packets; none within one process.
    pub(super) wire_bytes: Option<u64>,
    /// Most bytes of plan buffers alive at once.
    pub(super) peak_bytes: u64,
    /// Most memory of the whole process during the cell; Linux only.
    pub(super) process_peak_bytes: Option<u64>,
}

impl Record {
    /// A cell without times.
    pub(super) fn without_times(name: CellName, state: State, why: impl Into<String>) -> Self {
        Self { name, state, why: Some(why.into()), predicted: None, measured: None }
    }

    /// Bytes of the rank that sends most.
    pub(super) fn most_sent(&self) -> u64 {
        self.most(|rank| rank.bytes_sent)
    }

    /// Bytes of plan buffers of the rank that needs most.
    pub(super) fn most_memory(&self) -> u64 {
        self.most(|rank| rank.peak_bytes)
    }

    fn most(&self, of: fn(&RankMeasured) -> u64) -> u64 {
        self.measured.iter().flat_map(|measured| &measured.per_rank).map(of).max().unwrap_or(0)
    }
}
