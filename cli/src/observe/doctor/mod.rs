//! Diagnosis of a run from the records of its ranks.

mod diagnose;
mod messages;
mod nccl;
mod page;
pub(crate) mod read;
mod slowness;
mod waits;
mod words;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use kyklos::plan::table;
use serde::Serialize;

use crate::failure::{Failure, Result};
use crate::observe::record::format::{MessagesLine, Spent};
use diagnose::diagnose;
use read::Record;
use words::{Finding, seconds};

/// What is printed as JSON.
#[derive(Serialize)]
struct Report<'a> {
    ranks: Vec<RankState<'a>>,
    findings: &'a [Finding],
    /// What slowed the run down; no error.
    slow: &'a [Finding],
}

#[derive(Serialize)]
struct RankState<'a> {
    rank: u32,
    why: &'a str,
    op: u64,
    step: u32,
    doing: Option<&'a str>,
    spent: Spent,
    error: Option<&'a str>,
    waiting: usize,
    messages: Option<&'a MessagesLine>,
}

/// The records of a run, and the findings.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    records: Vec<Record>,
    /// Problems, the cause first.
    findings: Vec<Finding>,
    /// What slowed the run down.
    slow: Vec<Finding>,
}

impl Diagnosis {
    /// Reads `dumps`, files or folders, and compares the records in them.
    pub(crate) fn of(dumps: &[PathBuf]) -> Result<Self> {
        let mut records = Vec::new();
        let mut findings = Vec::new();
        for path in paths(dumps) {
            match read::read(&path) {
                Ok(record) => records.push(record),
                Err(why) => findings.push(Finding::unusable(&path, &why)),
            }
        }
        if records.is_empty() {
            let why = findings.into_iter().next().map(|finding| finding.text);
            return Err(Failure::request(
                why.unwrap_or_else(|| "the named files and folders hold no records".to_owned()),
                "name rank-R.jsonl files of a run with --record DIR, or their folder",
            ));
        }
        findings.extend(diagnose(&mut records));
        let slow = slowness::hints(&records);
        Ok(Self { records, findings, slow })
    }

    /// Whether anything is wrong.
    pub(crate) fn is_bad(&self) -> bool {
        !self.findings.is_empty()
    }

    /// For programs.
    pub(crate) fn json(&self) -> Result<String> {
        let Self { records, findings, slow } = self;
        let ranks = records.iter().map(|record| RankState {
            rank: record.rank.rank,
            why: &record.rank.why,
            op: record.rank.at.op,
            step: record.rank.at.step,
            doing: record.rank.at.doing.as_deref(),
            spent: record.rank.spent,
            error: record.rank.error.as_deref(),
            waiting: record.calls.len(),
            messages: record.rank.messages.as_ref(),
        });
        let report = Report { ranks: ranks.collect(), findings, slow };
        let text = serde_json::to_string_pretty(&report)
            .map_err(|error| Failure::run(format!("cannot print the report: {error}")))?;
        Ok(text + "\n")
    }

    /// For readers.
    pub(crate) fn text(&self) -> String {
        let Self { records, findings, slow } = self;
        let rows = records.iter().map(|record| {
            let rank = &record.rank;
            vec![
                rank.rank.to_string(),
                rank.why.clone(),
                rank.at.op.to_string(),
                rank.at.step.to_string(),
                record.calls.len().to_string(),
                seconds(rank.spent.compute_ns),
                seconds(slowness::waited_ns(rank.spent)),
                seconds(rank.spent.device_copy_ns),
                rank.at.doing.clone().unwrap_or_default(),
            ]
        });
        let head = ["rank", "record", "operation", "step", "waits", "computed", "waited", "copied", "doing"];
        let mut out = table(&head, rows.collect());
        out.push('\n');
        for line in nccl::ways(records) {
            out.push_str(&line);
            out.push('\n');
        }
        if findings.is_empty() {
            out.push_str("no problem found\n");
        }
        for Finding { text, .. } in findings.iter().chain(slow) {
            out.push_str(text);
            out.push('\n');
        }
        out
    }
}

/// The named files, and the records in named folders.
fn paths(named: &[PathBuf]) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for path in named {
        match std::fs::read_dir(path) {
            Ok(entries) => {
                let is_record = |path: &PathBuf| path.extension() == Some("jsonl".as_ref());
                let entries = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_record);
                let mut entries: Vec<_> = entries.take(MOST_FILES).collect();
                entries.sort();
                paths.append(&mut entries);
            }
            Err(_) => paths.push(path.clone()),
        }
    }
    paths
}

/// Most records that are read from one folder.
const MOST_FILES: usize = 1 << 14;
