//! Which rank waits for which.

use std::collections::{BTreeMap, BTreeSet};

use super::read::Record;
use super::words::{Finding, place, seconds, words_of};
use crate::observe::record::format::CallLine;

/// A call of one rank that another rank must serve.
#[derive(Clone, Debug)]
struct Wait<'a> {
    who: u32,
    call: &'a CallLine,
}

/// Describes the calls of other ranks that wait for `rank`.
pub(super) fn for_rank(records: &[Record], rank: u32) -> Vec<String> {
    let mut who: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.rank.rank != rank) {
        for call in record.calls.iter().filter(|call| call.peer == rank) {
            who.entry(thing(call)).or_default().insert(record.rank.rank);
        }
    }
    let words = |(thing, ranks): (String, BTreeSet<u32>)| {
        format!("{} {thing}", words_of(&ranks.into_iter().collect::<Vec<_>>()))
    };
    who.into_iter().take(MOST_SENTENCES).map(words).collect()
}

/// Follows long waits to the rank that causes them.
pub(super) fn stuck(records: &[Record]) -> Vec<Finding> {
    let mut findings = Vec::new();
    // By rank: the waits that end when another rank makes progress.
    let mut behind: BTreeMap<u32, Vec<Wait<'_>>> = BTreeMap::new();
    for record in records {
        let who = record.rank.rank;
        for call in record.calls.iter().filter(|call| call.waited_ns >= LONG_NS) {
            let peer = records.iter().find(|other| other.rank.rank == call.peer && call.peer != who);
            match (call.call.as_str(), peer) {
                ("receive", Some(peer)) if has_posted(peer, who, call) => findings.push(under_way(who, call)),
                ("receive" | "agree", _) => behind.entry(who).or_default().push(Wait { who, call }),
                // A send waits for its receive; the receiver's own waits say why that does not come.
                _ => {}
            }
        }
    }
    findings.truncate(MOST_SENTENCES);
    if let Some(circle) = circle(&behind) {
        let words: Vec<String> =
            circle.iter().map(|wait| format!("rank {} for rank {}", wait.who, wait.call.peer)).collect();
        let ranks = circle.iter().map(|wait| wait.who);
        let text = format!("ranks wait for each other in a cycle: {}", words.join("; "));
        findings.push(Finding::new("circle", ranks, text));
    }
    // The cause is a rank that others wait for, and that waits for no rank.
    let awaited: BTreeSet<u32> = behind.values().flatten().map(|wait| wait.call.peer).collect();
    for rank in awaited.into_iter().filter(|rank| !behind.contains_key(rank)).take(MOST_SENTENCES) {
        findings.push(beginning(records, &behind, rank));
    }
    findings
}

fn beginning(records: &[Record], behind: &BTreeMap<u32, Vec<Wait<'_>>>, rank: u32) -> Finding {
    let waits = || behind.values().flatten().filter(|wait| wait.call.peer == rank);
    let longest = waits().map(|wait| wait.call.waited_ns).max().unwrap_or(0);
    let at = match records.iter().find(|record| record.rank.rank == rank) {
        Some(record) => format!("is at {} and waits for no rank", place(&record.rank.at)),
        None => {
            let heard = records.iter().flat_map(|record| &record.peers).filter(|peer| peer.rank == rank);
            match heard.filter_map(|peer| peer.at.as_ref()).max_by_key(|at| (at.op, at.step)) {
                Some(at) => format!("left no record, and its last message came from {}", place(at)),
                None => "left no record".to_owned(),
            }
        }
    };
    let others = for_rank(records, rank).join("; ");
    let text =
        format!("rank {rank} makes no progress: it {at}; {others}, the longest for {}", seconds(longest));
    Finding::new("stands-still", [rank], text)
}

/// Whether `peer` has posted the message that `who` waits for.
fn has_posted(peer: &Record, who: u32, call: &CallLine) -> bool {
    let same = |to: u32, op: u64, message: u32| (to, op, message) == (who, call.op, call.message);
    let calls = peer.calls.iter().filter(|other| other.call == "send");
    let events = peer.events.iter().filter(|event| matches!(event.event.as_str(), "send-posted" | "sent"));
    calls.into_iter().any(|other| same(other.peer, other.op, other.message))
        || events.into_iter().any(|event| same(event.peer, event.op, event.message))
}

fn under_way(who: u32, call: &CallLine) -> Finding {
    let CallLine { peer, message, op, bytes_done, bytes_expected, waited_ns, .. } = call;
    let text = format!(
        "message #{message} of operation {op} was sent by rank {peer} and has not reached rank {who} after {}: \
         {bytes_done} of {bytes_expected} bytes; look at the network between them",
        seconds(*waited_ns)
    );
    Finding::new("under-way", [*peer, who], text)
}

/// A cycle of waits, if there is one.
fn circle<'w, 'a>(behind: &'w BTreeMap<u32, Vec<Wait<'a>>>) -> Option<Vec<&'w Wait<'a>>> {
    // Ranks that reach no cycle.
    let mut free = BTreeSet::new();
    for &start in behind.keys() {
        // The path from the start, and for each rank on it the next wait to follow.
        let mut way: Vec<(u32, usize)> = vec![(start, 0)];
        while let Some((rank, next)) = way.last_mut() {
            let waits = behind.get(rank).map_or(&[][..], Vec::as_slice);
            let Some(wait) = waits.get(*next).filter(|_| !free.contains(rank)) else {
                free.insert(*rank);
                way.pop();
                continue;
            };
            *next += 1;
            let to = wait.call.peer;
            if let Some(first) = way.iter().position(|(rank, _)| *rank == to) {
                let around = way[first..].iter().filter_map(|(rank, next)| behind.get(rank)?.get(next - 1));
                return Some(around.collect());
            }
            way.push((to, 0));
        }
    }
    None
}

/// Describes what a call waits for; the sentence begins with a rank.
fn thing(call: &CallLine) -> String {
    let CallLine { op, message, bytes_done, bytes_expected, .. } = call;
    match call.call.as_str() {
        "receive" => format!(
            "waited for its message #{message} of operation {op} ({bytes_done} of {bytes_expected} bytes)"
        ),
        "send" => format!(
            "still had message #{message} of operation {op} for it ({bytes_done} of {bytes_expected} bytes)"
        ),
        _ => format!("waited for its vote (agreement {op})"),
    }
}

/// Shorter waits are normal.
const LONG_NS: u64 = 5_000_000_000;

/// Most sentences of one kind in a report.
const MOST_SENTENCES: usize = 8;
