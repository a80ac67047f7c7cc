//! Messages between ranks, from their recorded events.

use std::collections::{BTreeMap, BTreeSet};

use super::read::Record;

/// How fast messages came from one rank to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) from: u32,
    pub(super) to: u32,
    bytes: u64,
    ns: u64,
}

impl Link {
    pub(super) fn bytes_per_s(self) -> f64 {
        self.bytes as f64 * 1e9 / self.ns.max(1) as f64
    }
}

/// The links with enough traffic, from the events of the receivers.
pub(super) fn links(records: &[Record]) -> Vec<Link> {
    let mut links: BTreeMap<(u32, u32), Link> = BTreeMap::new();
    for record in records {
        let to = record.rank.rank;
        let mut begun = BTreeMap::new();
        for event in &record.events {
            let message = (event.peer, event.op, event.message);
            match event.event.as_str() {
                "first-byte" => {
                    begun.insert(message, event.at_ns);
                }
                "received" => {
                    let Some(first_ns) = begun.remove(&message) else { continue };
                    let from = event.peer;
                    let link = links.entry((from, to)).or_insert(Link { from, to, bytes: 0, ns: 0 });
                    link.bytes = link.bytes.saturating_add(event.bytes);
                    link.ns = link.ns.saturating_add(event.at_ns.saturating_sub(first_ns));
                }
                _ => {}
            }
        }
    }
    links.into_values().filter(|link| link.bytes >= LEAST_BYTES && link.ns > 0).collect()
}

/// The rank whose asking messages of this one waited for longest, though they may have waited while
/// this one computed.
pub(super) fn latest_to_ask(record: &Record) -> Option<u32> {
    let (mut posted, mut asked) = (BTreeMap::new(), BTreeSet::new());
    let mut unasked_ns: BTreeMap<u32, u64> = BTreeMap::new();
    for event in &record.events {
        let message = (event.peer, event.op, event.message);
        match event.event.as_str() {
            "send-posted" if !asked.remove(&message) => {
                posted.insert(message, event.at_ns);
            }
            "asked" => match posted.remove(&message) {
                Some(posted_ns) => {
                    let total = unasked_ns.entry(event.peer).or_default();
                    *total = total.saturating_add(event.at_ns.saturating_sub(posted_ns));
                }
                None => drop(asked.insert(message)),
            },
            _ => {}
        }
    }
    unasked_ns.into_iter().max_by_key(|(_, ns)| *ns).map(|(peer, _)| peer)
}

/// A link with fewer bytes is not judged.
const LEAST_BYTES: u64 = 1 << 20;
