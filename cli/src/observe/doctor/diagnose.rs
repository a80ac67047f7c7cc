//! Finds what is wrong, from the records of a group.

use std::collections::{BTreeMap, BTreeSet};

use super::read::Record;
use super::words::{Finding, name, place, seconds, verb, words_of};
use super::{nccl, waits};
use crate::observe::record::format::AbortLine;

/// Finds what is wrong, the cause first. Keeps in `records` one record for each rank of the group,
/// sorted by rank.
pub(super) fn diagnose(records: &mut Vec<Record>) -> Vec<Finding> {
    let mut about_files = one_group(records);
    about_files.extend(one_each(records));
    for record in records.iter() {
        if let Some(damage) = &record.damage {
            let text = format!("the record of rank {} is damaged: {damage}", record.rank.rank);
            about_files.push(Finding::new("damaged", [record.rank.rank], text));
        }
    }
    let mut findings = differences(records);
    findings.extend(failures(records));
    if findings.iter().all(|finding| finding.what != "died") {
        findings.extend(waits::stuck(records));
    }
    findings.extend(nccl::unended(records));
    findings.extend(without_record(records));
    findings.extend(about_files);
    findings
}

/// Keeps the records of the group with the most records.
fn one_group(records: &mut Vec<Record>) -> Vec<Finding> {
    let group = |record: &Record| (record.rank.job.clone(), record.rank.size);
    let mut counts: BTreeMap<(String, u32), usize> = BTreeMap::new();
    for record in records.iter() {
        *counts.entry(group(record)).or_default() += 1;
    }
    let Some(kept) = counts.into_iter().max_by_key(|(_, count)| *count).map(|(group, _)| group) else {
        return Vec::new();
    };
    let (job, size) = &kept;
    let others = records.extract_if(.., |record| group(record) != kept);
    let of_another = |record: Record| {
        let text = format!(
            "{} is of another group (job {}, {} ranks) than the others (job {job}, {size} ranks), and was left out",
            name(&record.path),
            record.rank.job,
            record.rank.size
        );
        Finding::new("other-group", [record.rank.rank], text)
    };
    others.map(of_another).collect()
}

/// Keeps the latest record of each rank, and drops records from before the run.
fn one_each(records: &mut Vec<Record>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let began = records.iter().map(|record| record.rank.started_unix_ms).max().unwrap_or(0);
    for record in records.extract_if(.., |record| record.rank.written_unix_ms < began) {
        let text = format!(
            "{} was written before the others started (or a clock is wrong), and was left out",
            name(&record.path)
        );
        findings.push(Finding::new("old", [record.rank.rank], text));
    }
    records.sort_by_key(|record| (record.rank.rank, std::cmp::Reverse(record.rank.written_unix_ms)));
    let mut seen = BTreeSet::new();
    for record in records.extract_if(.., |record| !seen.insert(record.rank.rank)) {
        let rank = record.rank.rank;
        let text =
            format!("{} is a second, older record of rank {rank}, and was left out", name(&record.path));
        findings.push(Finding::new("twice", [rank], text));
    }
    findings
}

/// Ranks with different plans or versions.
fn differences(records: &[Record]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut compare = |what, thing: &str, value: &dyn Fn(&Record) -> String| {
        let mut ranks: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for record in records {
            ranks.entry(value(record)).or_default().push(record.rank.rank);
        }
        if ranks.len() < 2 {
            return;
        }
        let most = ranks.values().map(Vec::len).max().unwrap_or(0);
        let words: Vec<String> =
            ranks.iter().map(|(value, ranks)| format!("{} {value}", words_of(ranks))).collect();
        let few = ranks.into_values().filter(|ranks| ranks.len() < most).flatten();
        findings.push(Finding::new(what, few, format!("the {thing} differ: {}", words.join("; "))));
    };
    compare("plan-hash", "plan hashes", &|record| short(&record.rank.plan_hash));
    compare("version", "versions of kyklos", &|record| record.rank.version.clone());
    findings
}

/// The causes that the ranks recorded for the end of their group.
fn failures(records: &[Record]) -> Vec<Finding> {
    let mut by_culprit: BTreeMap<u32, Vec<(&Record, &AbortLine)>> = BTreeMap::new();
    for record in records {
        if let Some(abort) = &record.abort {
            by_culprit.entry(abort.culprit).or_default().push((record, abort));
        }
    }
    let mut findings: Vec<Finding> =
        by_culprit.iter().map(|(culprit, said)| failure(records, *culprit, said)).collect();
    if by_culprit.len() > 1 {
        let words: Vec<String> = by_culprit
            .iter()
            .map(|(culprit, said)| {
                let ranks: Vec<u32> = said.iter().map(|(record, _)| record.rank.rank).collect();
                format!("{} rank {culprit}", verb(&ranks, "blames", "blame"))
            })
            .collect();
        let text = format!("the ranks do not agree: {}", words.join("; "));
        findings.push(Finding::new("no-agreement", by_culprit.keys().copied(), text));
    }
    // Errors without an abort.
    for record in records.iter().filter(|record| record.abort.is_none()) {
        if let Some(error) = &record.rank.error {
            let text = format!("rank {} failed: {error}", record.rank.rank);
            findings.push(Finding::new("failed", [record.rank.rank], text));
        }
    }
    findings
}

fn failure(records: &[Record], culprit: u32, said: &[(&Record, &AbortLine)]) -> Finding {
    let own = records.iter().find(|record| record.rank.rank == culprit);
    let told = said.iter().map(|(_, abort)| *abort).max_by_key(|abort| (abort.at.op, abort.at.step));
    let died = said.iter().any(|(_, abort)| abort.died);
    let at = own.map(|own| &own.rank.at).or_else(|| told.map(|abort| &abort.at));
    let mut text = format!("rank {culprit} {}", if died { "stopped" } else { "failed" });
    if let Some(at) = at {
        text.push_str(&format!(" at {}", place(at)));
    }
    // The latest message from the culprit to any rank, by the clock of that rank.
    let silence = |(record, abort): &(&Record, &AbortLine)| {
        let heard = record.peers.iter().find(|peer| peer.rank == culprit)?.heard_ns?;
        abort.at_ns.checked_sub(heard)
    };
    if let (Some(ns), true) = (said.iter().filter_map(silence).min(), died) {
        text.push_str(&format!(", {} before the others noticed", seconds(ns)));
    }
    if let Some(abort) = told {
        text.push_str(&format!(" ({})", abort.text));
    }
    let waits = waits::for_rank(records, culprit);
    if !waits.is_empty() {
        text.push_str(&format!("; {}", waits.join("; ")));
    }
    Finding::new(if died { "died" } else { "failed" }, [culprit], text)
}

fn without_record(records: &[Record]) -> Option<Finding> {
    let size = records.first()?.rank.size;
    let present: BTreeSet<u32> = records.iter().map(|record| record.rank.rank).collect();
    let missing: Vec<u32> = (0..size).filter(|rank| !present.contains(rank)).collect();
    let text = format!("{} no record", verb(&missing, "left", "left"));
    (!missing.is_empty()).then(|| Finding::new("no-record", missing, text))
}

fn short(hash: &str) -> String {
    hash.chars().take(12).collect()
}
