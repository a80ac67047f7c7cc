//! What a page shows, without any HTML. Commands fill it in; `draw` reads it.

use serde::{Deserialize, Serialize};

use super::mask::MaskPicture;

/// A page about one call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    pub(crate) origin: Origin,
    pub(crate) title: String,
    /// What went wrong: a wrong result, missing rows.
    pub(crate) alerts: Vec<String>,
    /// The problem and how ranks share it: names and values.
    pub(crate) facts: Vec<(&'static str, String)>,
    /// Of `plan --explain`: the plans among which this one was chosen.
    pub(crate) choice: Option<Choice>,
    /// From the start to the end of the last rank.
    pub(crate) wall_s: Option<f64>,
    /// Beside a measured time, or alone.
    pub(crate) predicted_s: Option<f64>,
    pub(crate) ranks: Vec<RankFigures>,
    /// Different pictures only, of the first batch entries.
    pub(crate) masks: Vec<MaskPicture>,
    /// What the colours of these pictures mean.
    pub(crate) mask_note: String,
    pub(crate) timeline: Option<Timeline>,
    /// Ordered pairs of ranks between which bytes move.
    pub(crate) traffic: Vec<Traffic>,
    /// Links of a description, the busiest first.
    pub(crate) links: Vec<LinkLoad>,
    /// The report of `--json`.
    pub(crate) json: String,
    /// Of a call with gradients: what the page shows of the backward pass. The rest of this page is
    /// of the forward pass.
    pub(crate) backward: Option<Box<Self>>,
}

/// The plans that could run, and why the first of them is the fastest.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Choice {
    /// Sentences about the choice.
    pub(crate) reasons: Vec<String>,
    /// The fastest first, refused plans last.
    pub(crate) plans: Vec<PossiblePlan>,
}

/// A plan that could run, or why it cannot.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PossiblePlan {
    pub(crate) name: String,
    pub(crate) priced: Result<Price, String>,
    /// With `--measure`.
    pub(crate) measured_s: Option<f64>,
}

/// What a plan is predicted to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Price {
    pub(crate) predicted_s: f64,
    /// With gradients: of the forward and of the backward pass.
    pub(crate) passes_s: Option<[f64; 2]>,
    /// Of the time of all ranks, from 0 to 1.
    pub(crate) idle: f64,
    /// Of the rank that sends most.
    pub(crate) bytes_sent: u64,
    /// Of the rank that needs most.
    pub(crate) peak_bytes: u64,
}

/// Where the numbers come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The plans and a description of devices and links: nothing was run.
    #[default]
    Predicted,
    /// A run.
    Measured,
}

/// The numbers of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RankFigures {
    /// Its number in the first group.
    pub(crate) rank: u32,
    /// Empty where no device is known.
    pub(crate) device: String,
    pub(crate) queries: u64,
    pub(crate) keys: u64,
    /// Its query tokens as ranges, shortened.
    pub(crate) tokens: String,
    /// Visible (query, key) pairs that it computes, times heads.
    pub(crate) pairs: f64,
    /// None without a run and without a description.
    pub(crate) times: Option<Times>,
    /// Beside measured times: what a description predicts.
    pub(crate) predicted: Option<Times>,
    pub(crate) bytes_sent: u64,
    pub(crate) messages_sent: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) budget: Option<Budget>,
}

/// How a rank spends its time, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Times {
    pub(crate) compute_s: f64,
    pub(crate) wait_s: f64,
    pub(crate) copy_s: f64,
    /// From its start to its end.
    pub(crate) wall_s: f64,
}

/// The memory that a rank may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) bytes: u64,
    /// Ranks that share these bytes.
    pub(crate) shared_by: u32,
}

/// The plan payload from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) bytes: u64,
    pub(crate) messages: u64,
}

/// The load of one direction of a link of a description.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LinkLoad {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) busy_s: f64,
}

/// What all ranks did, on one clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Timeline {
    /// By rank.
    pub(crate) rows: Vec<TimelineRow>,
}

/// What one rank did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TimelineRow {
    pub(crate) segments: Vec<Segment>,
    /// Ranks whose message ended a wait, and the nanoseconds of these waits; the longest first.
    pub(crate) waited_for: Vec<(u32, u64)>,
    /// The most by which its clock may differ from that of rank 0.
    pub(crate) clock_within_ns: u64,
    /// Events before any was left out.
    pub(crate) events: u64,
}

/// An interval in which a rank did one kind of thing, or a stretch of time with several such
/// intervals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Segment {
    pub(crate) kind: Kind,
    /// On the clock of rank 0.
    pub(crate) start_ns: i64,
    pub(crate) end_ns: i64,
    /// The part in which it did that.
    pub(crate) busy_ns: u64,
    /// Events that begin in it.
    pub(crate) events: u64,
    /// Of one event: what it is.
    pub(crate) text: String,
}

/// Kinds of things on a timeline, in the order in which they are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Wait,
    Compute,
    Copy,
    Send,
    Receive,
}

/// Of more ranks, timelines have no messages.
pub(crate) const MOST_WITH_MESSAGES: u32 = 24;

impl Kind {
    pub(crate) const fn is_message(self) -> bool {
        matches!(self, Self::Send | Self::Receive)
    }

    pub(crate) const ALL: [Self; 5] = [Self::Compute, Self::Wait, Self::Copy, Self::Send, Self::Receive];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Compute => "compute",
            Self::Copy => "copy",
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }
}

impl Timeline {
    /// Start and end over all ranks; the end is later than the start.
    pub(crate) fn ends_ns(&self) -> (i64, i64) {
        let segments = || self.rows.iter().flat_map(|row| &row.segments);
        let start = segments().map(|segment| segment.start_ns).min().unwrap_or(0);
        let end = segments().map(|segment| segment.end_ns).max().unwrap_or(0);
        (start, end.max(start.saturating_add(1)))
    }
}

impl Page {
    /// Whether this rank, by its index, spends a share of its time in waits; between 0 and 1.
    pub(crate) fn wait_share(&self, rank: usize) -> Option<f64> {
        let times = self.ranks.get(rank)?.times?;
        let whole_s = self.wall_s.unwrap_or(times.wall_s);
        (whole_s > 0.0).then(|| (times.wait_s / whole_s).clamp(0.0, 1.0))
    }
}
