//! What a run has to tell: a table for people, an object for programs.

use kyklos::backend::DeviceInfo;
use kyklos::plan::{bytes, table};
use kyklos::{BiasKind, RankReport, TokenRuns};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Result};
use crate::rank::Job;
use crate::request::Request;
use crate::verify::Verdict;

/// What a rank sends to rank 0 about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankNote {
    pub(crate) device: Device,
    pub(crate) figures: Figures,
    pub(crate) wall_s: f64,
}

/// A device in reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    pub(crate) backend: String,
    pub(crate) name: String,
    pub(crate) driver: String,
    pub(crate) class: String,
    pub(crate) kernel: String,
}

/// One entry of `per_rank`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    tokens: u64,
    pub(crate) compute_s: f64,
    pub(crate) wait_s: f64,
    pub(crate) copy_s: f64,
    bytes_sent: u64,
    messages_sent: u64,
    peak_bytes: u64,
}

/// What rank 0 knows at the end.
#[derive(Clone, Debug)]
pub(crate) struct Summary {
    pub(crate) ranks: Vec<RankNote>,
    pub(crate) wall_s: f64,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) output_bytes: u64,
    /// Where ranks were lost and the others have finished.
    pub(crate) lost: Option<Lost>,
}

/// What went with the ranks that were lost.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Lost {
    /// By rank of those who are left, its number in the first group.
    members: Vec<u32>,
    /// Queries that have no answer.
    queries: TokenRuns,
}

impl Lost {
    pub(crate) fn of(job: &Job) -> Option<Self> {
        job.begun.is_some().then(|| Self {
            members: job.members.iter().map(|rank| rank.0).collect(),
            queries: job.world.lost.queries.clone(),
        })
    }
}

/// The object of `--json`.
#[derive(Serialize)]
struct Json<'a> {
    ranks: usize,
    mesh: String,
    strategy: &'a str,
    placement: &'a str,
    devices: Vec<&'a Device>,
    wall_s: f64,
    per_rank: Vec<&'a Figures>,
    /// What the simulator expected, where devices and links were described.
    predicted_s: Option<f64>,
    max_abs_error: Option<f64>,
    tolerance: Option<f64>,
    /// Only where ranks were lost and the others have finished.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<&'a Lost>,
}

impl RankNote {
    pub(crate) fn new(device: &DeviceInfo, report: &RankReport, wall_ns: u64) -> Self {
        Self {
            device: Device::new(device),
            figures: Figures {
                tokens: report.tokens,
                compute_s: seconds(report.compute_ns),
                wait_s: seconds(report.wait_ns),
                copy_s: seconds(report.copy_ns),
                bytes_sent: report.bytes_sent,
                messages_sent: report.messages_sent,
                peak_bytes: report.peak_bytes,
            },
            wall_s: seconds(wall_ns),
        }
    }

    /// As [`NOTE_BYTES`] bytes.
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
        serde_json::from_slice(bytes)
            .map_err(|error| Failure::run(format!("a rank sent a report that cannot be read: {error}")))
    }
}

impl Device {
    pub(crate) fn new(info: &DeviceInfo) -> Self {
        let short = |text: &str| text.chars().take(200).collect();
        Self {
            backend: info.backend.to_owned(),
            name: short(&info.name),
            driver: short(&info.driver),
            class: serde_json::to_value(info.class)
                .ok()
                .and_then(|class| class.as_str().map(str::to_owned))
                .unwrap_or_default(),
            kernel: short(&info.kernel),
        }
    }

    /// Backend and name.
    pub(crate) fn label(&self) -> String {
        format!("{} {}", self.backend, self.name)
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
            lost: self.lost.as_ref(),
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
        if let Some(Lost { members, queries }) = &self.lost {
            let members: Vec<String> = members.iter().map(u32::to_string).collect();
            out.push_str(&format!(
                "lost       queries {queries} have no answer; those who are left were ranks {}\n",
                members.join(", ")
            ));
        }
        if let Some(verdict) = &self.verdict {
            out.push_str(&verdict_line(verdict));
        }
        out
    }

    pub(crate) fn rank_table(&self) -> String {
        let rows = self.ranks.iter().enumerate().map(|(rank, note)| {
            let figures = &note.figures;
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

/// The problem and how it is shared.
pub(crate) fn headline(request: &Request) -> String {
    let problem = &request.problem;
    let tokens = if problem.q_len == problem.kv_len {
        format!("{} tokens", problem.kv_len)
    } else {
        format!("{} queries to {} keys", problem.q_len, problem.kv_len)
    };
    format!(
        "problem    {} x {tokens}, {} query heads, {} kv heads, dim {}, {}, mask {}{}{}{}\n\
         shared     {} over {} (ulysses x ring), {} placement\n",
        problem.batch,
        problem.q_heads,
        problem.kv_heads,
        problem.head_dim,
        problem.dtype,
        problem.mask,
        if problem.sinks.is_empty() { "" } else { ", sinks" },
        match problem.bias.map(|pairs| pairs.kind) {
            None => "",
            Some(BiasKind::Mask) => ", mask tensor",
            Some(BiasKind::Additive) => ", bias",
        },
        if problem.fixed_order { ", in a fixed order" } else { "" },
        request.strategy,
        request.mesh,
        request.placement
    )
}

pub(crate) fn verdict_line(verdict: &Verdict) -> String {
    format!(
        "verified   max abs error {:.2e}, tolerance {:.2e} (a device alone: {:.2e}), {} rows against the f64 oracle{}\n",
        verdict.max_abs_error,
        verdict.tolerance,
        verdict.dense_error,
        verdict.rows,
        if verdict.failure.is_some() { ": WRONG" } else { "" }
    )
}

/// Seconds in the unit that reads best.
pub(crate) fn duration(seconds: f64) -> String {
    if seconds >= 1.0 {
        format!("{seconds:.2} s")
    } else if seconds >= 1e-3 {
        format!("{:.1} ms", seconds * 1e3)
    } else {
        format!("{:.0} µs", seconds * 1e6)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a report counts seconds")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Size of an encoded note: the same for all, so that rank 0 knows what to expect.
pub(crate) const NOTE_BYTES: usize = 8 << 10;
