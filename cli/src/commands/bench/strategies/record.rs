//! What the bench keeps of a cell.

use std::collections::BTreeMap;

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
    /// By rank; of an extrapolated number of ranks empty.
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
    /// By how much the first run, in which kernels are compiled and memory is allocated, takes
    /// longer than the median run.
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
    /// Bytes of all packets of one run, on average, with headers and repeated packets; none within
    /// one process.
    pub(super) wire_bytes: Option<u64>,
    /// To each rank that it sends to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) links: Vec<Link>,
    /// Most bytes of plan buffers alive at once.
    pub(super) peak_bytes: u64,
    /// Most memory of the whole process during the cell; Linux only.
    pub(super) process_peak_bytes: Option<u64>,
}

/// The messages of one run from a rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Link {
    pub(super) to: u32,
    /// Bytes that have moved, on average.
    pub(super) bytes: u64,
    /// Bytes that the plan sends.
    pub(super) plan_bytes: u64,
}

impl Measured {
    /// The compute time of the rank that takes longest.
    pub(super) fn compute_s(&self) -> f64 {
        let slowest = self.per_rank.iter().max_by(|a, b| a.wall_s.total_cmp(&b.wall_s));
        slowest.map_or(0.0, |rank| rank.compute_s)
    }

    /// The most bytes from one rank to another, and the least and the largest share of what the
    /// plans send between two ranks.
    pub(super) fn links(&self) -> Option<(u64, [f64; 2])> {
        let links = || self.per_rank.iter().flat_map(|rank| &rank.links);
        let shares = || links().map(|link| link.bytes as f64 / link.plan_bytes as f64);
        let most = links().map(|link| link.bytes).max()?;
        Some((most, [shares().fold(f64::INFINITY, f64::min), shares().fold(0.0, f64::max)]))
    }
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

/// Records of each case, in the order of their first cells.
pub(super) fn by_case(records: &[Record]) -> Vec<(String, Vec<&Record>)> {
    let mut cases: Vec<(String, Vec<&Record>)> = Vec::new();
    let mut places = BTreeMap::new();
    for record in records {
        let case = record.name.case();
        let place = *places.entry(case.clone()).or_insert(cases.len());
        if place == cases.len() {
            cases.push((case, Vec::new()));
        }
        cases[place].1.push(record);
    }
    cases
}

/// The reasons of refused cells and the number of their cells, the most frequent first.
pub(super) fn refusals(records: &[Record]) -> Vec<(String, usize)> {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for record in records.iter().filter(|record| record.state == State::Refused) {
        *reasons.entry(record.why.as_deref().unwrap_or_default()).or_default() += 1;
    }
    let mut reasons: Vec<_> = reasons.into_iter().map(|(why, count)| (why.to_owned(), count)).collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    reasons
}

/// The median time, or infinity.
pub(super) fn median_s(record: &Record) -> f64 {
    record.measured.as_ref().map_or(f64::INFINITY, |measured| measured.median_s)
}
