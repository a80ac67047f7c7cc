//! The report of a run: a table, or a JSON object.

use kyklos::RankReport;
use kyklos::backend::DeviceInfo;
use kyklos::plan::{bias_in_words, bytes, table};
use kyklos_transport::harmless;
use serde::{Deserialize, Serialize};

use crate::devices::DeviceReport;
use crate::failure::{Failure, Result};
use crate::observe::page::units::{duration, seconds};
use crate::request::Request;
use crate::verify::{GradientVerdict, Verdict};

/// The report of one rank, which it sends to rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankNote {
    pub(crate) device: DeviceReport,
    pub(crate) figures: Figures,
    pub(crate) wall_s: f64,
    /// With `--grad`.
    #[serde(default)]
    pub(crate) backward: Option<PassNote>,
}

/// The report of one rank on its backward pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PassNote {
    pub(crate) figures: Figures,
    pub(crate) wall_s: f64,
}

/// One entry of `per_rank`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    tokens: u64,
    pub(crate) compute_s: f64,
    pub(crate) wait_s: f64,
    pub(crate) copy_s: f64,
    pub(crate) bytes_sent: u64,
    pub(crate) messages_sent: u64,
    pub(crate) peak_bytes: u64,
}

/// The report of all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Summary {
    pub(crate) ranks: Vec<RankNote>,
    pub(crate) wall_s: f64,
    pub(crate) verdict: Option<Verdict>,
    /// With `--grad` and `--verify`.
    pub(crate) gradients: Option<GradientVerdict>,
    pub(crate) output_bytes: u64,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Json<'a> {
    ranks: usize,
    mesh: String,
    strategy: &'a str,
    placement: &'a str,
    devices: Vec<&'a DeviceReport>,
    wall_s: f64,
    per_rank: Vec<&'a Figures>,
    /// Predicted time, with `--hardware`.
    predicted_s: Option<f64>,
    max_abs_error: Option<f64>,
    tolerance: Option<f64>,
    /// Verified rows that prove nothing, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    unproved_rows: Option<usize>,
    /// Only with `--grad`.
    #[serde(skip_serializing_if = "Option::is_none")]
    backward: Option<JsonBackward<'a>>,
}

/// The backward pass in the object of `--json`.
#[derive(Serialize)]
struct JsonBackward<'a> {
    strategy: &'a str,
    wall_s: f64,
    per_rank: Vec<&'a Figures>,
    /// Predicted time, with `--hardware`.
    predicted_s: Option<f64>,
    max_abs_error: Option<f64>,
    tolerance: Option<f64>,
    /// Verified values that prove nothing, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    unproved_values: Option<usize>,
}

impl Figures {
    fn of(report: &RankReport) -> Self {
        Self {
            tokens: report.tokens,
            compute_s: seconds(report.compute_ns),
            wait_s: seconds(report.wait_ns),
            copy_s: seconds(report.copy_ns),
            bytes_sent: report.bytes_sent,
            messages_sent: report.messages_sent,
            peak_bytes: report.peak_bytes,
        }
    }
}

impl RankNote {
    pub(crate) fn new(device: &DeviceInfo, report: &RankReport, wall_ns: u64) -> Self {
        Self {
            device: DeviceReport::new(device),
            figures: Figures::of(report),
            wall_s: seconds(wall_ns),
            backward: None,
        }
    }

    /// The same with the backward pass: its report and its time in nanoseconds.
    pub(crate) fn with_backward(self, pass: Option<(&RankReport, u64)>) -> Self {
        let backward =
            pass.map(|(report, wall_ns)| PassNote { figures: Figures::of(report), wall_s: seconds(wall_ns) });
        Self { backward, ..self }
    }

    /// JSON, padded with spaces to [`NOTE_BYTES`] bytes.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut text =
            serde_json::to_vec(self).map_err(|error| Failure::run(format!("cannot report: {error}")))?;
        if text.len() > NOTE_BYTES {
            return Err(Failure::run(format!("a report of {} bytes", text.len())));
        }
        text.resize(NOTE_BYTES, b' ');
        Ok(text)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let note: Self = serde_json::from_slice(bytes).map_err(|error| {
            Failure::run(format!(
                "a rank sent a report that cannot be read: {}",
                harmless(&error.to_string())
            ))
        })?;
        Ok(Self { device: note.device.harmless(), ..note })
    }
}

impl Summary {
    pub(crate) fn json(&self, request: &Request) -> Result<String> {
        let json = Json {
            ranks: self.ranks.len(),
            mesh: request.mesh.to_string(),
            strategy: request.strategy.name(),
            placement: request.placement.name(),
            devices: self.ranks.iter().map(|rank| &rank.device).collect(),
            wall_s: self.wall_s,
            per_rank: self.ranks.iter().map(|rank| &rank.figures).collect(),
            predicted_s: request.predicted_s,
            max_abs_error: self.verdict.as_ref().map(|verdict| verdict.max_abs_error),
            tolerance: self.verdict.as_ref().map(|verdict| verdict.tolerance),
            unproved_rows: self.verdict.as_ref().map(|verdict| verdict.unproved).filter(|rows| *rows > 0),
            backward: self.backward().map(|(wall_s, per_rank)| JsonBackward {
                strategy: request.backward_strategy().name(),
                wall_s,
                per_rank,
                predicted_s: request.predicted_backward_s,
                max_abs_error: self.gradients.as_ref().map(|verdict| verdict.max_abs_error),
                tolerance: self.gradients.as_ref().map(|verdict| verdict.tolerance),
                unproved_values: self
                    .gradients
                    .as_ref()
                    .map(|verdict| verdict.unproved)
                    .filter(|values| *values > 0),
            }),
        };
        let text = serde_json::to_string_pretty(&json)
            .map_err(|error| Failure::run(format!("cannot print the report: {error}")))?;
        Ok(text + "\n")
    }

    pub(crate) fn table(&self, request: &Request) -> String {
        let mut out = headline(request);
        out.push('\n');
        out.push_str(&self.rank_table());
        out.push_str(&format!("\nwall       {}\n", duration(self.wall_s)));
        if let Some(predicted_s) = request.predicted_s {
            out.push_str(&format!("predicted  {}\n", duration(predicted_s)));
        }
        if self.output_bytes > 0 {
            out.push_str(&format!("collected  {}\n", bytes(self.output_bytes)));
        }
        if let Some(verdict) = &self.verdict {
            out.push_str(&verdict_line(verdict));
        }
        if let Some((wall_s, figures)) = self.backward() {
            out.push_str(&format!("\nbackward pass\n\n{}", self.table_of(&figures)));
            out.push_str(&format!("\nwall       {}\n", duration(wall_s)));
            if let Some(predicted_s) = request.predicted_backward_s {
                out.push_str(&format!("predicted  {}\n", duration(predicted_s)));
            }
        }
        if let Some(verdict) = &self.gradients {
            let GradientVerdict { max_abs_error, tolerance, values, unproved, failure } = verdict;
            let nothing = match unproved {
                0 => String::new(),
                _ => format!("; {unproved} of {values} values prove nothing (tied logits)"),
            };
            let wrong = if failure.is_some() { ": WRONG" } else { "" };
            out.push_str(&format!(
                "verified   error {max_abs_error:.2e}, tolerance {tolerance:.2e}, gradients of the last KV head against the f64 oracle{nothing}{wrong}\n"
            ));
        }
        out
    }

    /// The time of the backward pass, and the figures of all ranks.
    pub(crate) fn backward(&self) -> Option<(f64, Vec<&Figures>)> {
        let notes: Vec<&PassNote> = self.ranks.iter().filter_map(|rank| rank.backward.as_ref()).collect();
        let wall_s = notes.iter().map(|note| note.wall_s).fold(0.0, f64::max);
        (!notes.is_empty()).then(|| (wall_s, notes.into_iter().map(|note| &note.figures).collect()))
    }

    pub(crate) fn rank_table(&self) -> String {
        self.table_of(&self.ranks.iter().map(|note| &note.figures).collect::<Vec<_>>())
    }

    fn table_of(&self, all: &[&Figures]) -> String {
        let rows = self.ranks.iter().zip(all).enumerate().map(|(rank, (note, figures))| {
            vec![
                rank.to_string(),
                note.device.label(),
                figures.tokens.to_string(),
                duration(figures.compute_s),
                duration(figures.wait_s),
                duration(figures.copy_s),
                bytes(figures.bytes_sent),
                figures.messages_sent.to_string(),
                bytes(figures.peak_bytes),
            ]
        });
        table(
            &["rank", "device", "tokens", "computed", "waited", "copied", "sent", "messages", "peak"],
            rows.collect(),
        )
    }
}

/// The problem, and how the ranks share it.
pub(crate) fn headline(request: &Request) -> String {
    let values = facts(request);
    let named =
        |name: &str| values.iter().find(|(fact, _)| *fact == name).map_or("", |(_, value)| &value[..]);
    format!("problem    {}, mask {}\nshared     {}\n", named(PROBLEM), named(MASK), named(SHARED))
}

/// The same as names and values.
pub(crate) fn facts(request: &Request) -> Vec<(&'static str, String)> {
    let problem = &request.problem;
    let tokens = if problem.q_len == problem.kv_len {
        format!("{} tokens", problem.kv_len)
    } else {
        format!("{} queries to {} keys", problem.q_len, problem.kv_len)
    };
    let shape = format!(
        "{} x {tokens}, {} query heads, {} kv heads, dim {}, {}",
        problem.batch, problem.q_heads, problem.kv_heads, problem.head_dim, problem.dtype
    );
    let mask = format!(
        "{}{}{}{}",
        problem.mask,
        if problem.sinks.is_empty() { "" } else { ", sinks" },
        bias_in_words(problem),
        if problem.fixed_order { ", in a fixed order" } else { "" },
    );
    let shared = format!(
        "{} over {} (ulysses x ring), {} placement",
        request.strategy, request.mesh, request.placement
    );
    let mut facts = vec![(PROBLEM, shape), (MASK, mask), (SHARED, shared)];
    if request.gradients {
        facts.push(("gradients", format!("by {}", request.backward_strategy())));
    }
    facts
}

const PROBLEM: &str = "problem";
const MASK: &str = "mask";
const SHARED: &str = "shared";

pub(crate) fn verdict_line(verdict: &Verdict) -> String {
    format!(
        "verified   max abs error {:.2e}, tolerance {:.2e} (a device alone: {:.2e}), {} rows against the f64 oracle{}{}\n",
        verdict.max_abs_error,
        verdict.tolerance,
        verdict.dense_error,
        verdict.rows,
        match verdict.unproved {
            0 => String::new(),
            rows => format!("; {rows} of them prove nothing (tied logits)"),
        },
        if verdict.failure.is_some() { ": WRONG" } else { "" }
    )
}

/// Size of an encoded note; fixed, because a receiver must know the size of a message.
pub(crate) const NOTE_BYTES: usize = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_of_another_rank_cannot_begin_a_line_of_the_report() {
        let name = "cpu\nverified   max abs error 0\u{1b}[2J".to_owned();
        let device = DeviceReport { name, ..DeviceReport::default() };
        let figures = serde_json::json!({ "tokens": 1, "compute_s": 0.0, "wait_s": 0.0, "copy_s": 0.0, "bytes_sent": 0,
            "messages_sent": 0, "peak_bytes": 0 });
        let note = RankNote {
            device,
            figures: serde_json::from_value(figures).expect("figures"),
            wall_s: 0.0,
            backward: None,
        };
        let read = RankNote::decode(&note.encode().expect("it is short")).expect("it is a note");
        assert!(!read.device.label().contains(['\n', '\u{1b}']), "{read:?}");
    }
}
