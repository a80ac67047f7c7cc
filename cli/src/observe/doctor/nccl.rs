//! How messages went between devices, and which exchanges by NCCL did not end.

use std::collections::BTreeMap;

use super::read::Record;
use super::words::{Finding, verb, words_of};
use crate::observe::record::format::NcclLine;

/// How messages went, in lines; none if the ranks had nothing to agree on.
pub(super) fn ways(records: &[Record]) -> Vec<String> {
    let mut ranks: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for record in records {
        let Some(messages) = &record.rank.messages else { continue };
        let library = messages.nccl.as_ref().and_then(|nccl| nccl.library.as_deref());
        let from = library.map(|file| format!(" ({file})")).unwrap_or_default();
        ranks.entry(format!("{}{from}", messages.ways)).or_default().push(record.rank.rank);
    }
    ranks
        .into_iter()
        .map(|(ways, ranks)| format!("messages of {} went by {ways}", words_of(&ranks)))
        .collect()
}

/// The exchanges of a communicator that did not end, of ranks that have failed: NCCL does not tell
/// which rank is the cause, but a rank that has not posted an exchange keeps the others waiting.
pub(super) fn unended(records: &[Record]) -> Vec<Finding> {
    let mut communicators: BTreeMap<&[u32], Vec<(u32, &NcclLine)>> = BTreeMap::new();
    for record in records {
        if let Some(nccl) = record.rank.messages.as_ref().and_then(|messages| messages.nccl.as_ref()) {
            communicators.entry(&nccl.ranks).or_default().push((record.rank.rank, nccl));
        }
    }
    let failed = |(_, nccl): &(u32, &NcclLine)| nccl.failure.is_some();
    communicators.into_values().filter(|members| members.iter().any(failed)).map(|all| of(&all)).collect()
}

fn of(members: &[(u32, &NcclLine)]) -> Finding {
    let mut counts: BTreeMap<(u64, u64), Vec<u32>> = BTreeMap::new();
    for (rank, nccl) in members {
        counts.entry((nccl.posted, nccl.ended)).or_default().push(*rank);
    }
    let words = counts.iter().map(|((posted, ended), ranks)| {
        format!(
            "{} {posted} exchanges, of which {ended} have ended",
            verb(ranks, "has posted", "have posted")
        )
    });
    let words: Vec<_> = words.collect();
    let version = members.first().map_or("", |(_, nccl)| &nccl.version);
    let mut text = format!("NCCL {version} was aborted: {}", words.join("; "));
    // Those who have posted the fewest, unless all have posted as many.
    let fewest = counts.keys().map(|(posted, _)| *posted).min().unwrap_or(0);
    let behind = counts.iter().filter(|((posted, _), _)| *posted == fewest);
    let behind: Vec<u32> = behind.flat_map(|(_, ranks)| ranks).copied().collect();
    let behind = if behind.len() < members.len() { behind } else { Vec::new() };
    if !behind.is_empty() {
        text.push_str(&format!("; look at {} first", words_of(&behind)));
    }
    let mut told: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for (rank, nccl) in members {
        if let Some(failure) = &nccl.failure {
            told.entry(failure).or_default().push(*rank);
        }
    }
    for (failure, ranks) in told.into_iter().take(MOST_REASONS) {
        text.push_str(&format!("; {}: {failure}", words_of(&ranks)));
    }
    Finding::new("nccl", behind, text)
}

/// Most reasons in a finding.
const MOST_REASONS: usize = 4;
