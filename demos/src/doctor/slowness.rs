//! What made a run slower than it could be: a rank that computes longer than the others, a link that is slower than the
//! others, or all of the network.

use std::collections::BTreeMap;

use super::diagnose::{Finding, seconds, verb};
use super::read::Record;
use crate::record::format::Spent;

/// What others waited for, most likely. Needs the records of at least two ranks.
pub(super) fn hints(records: &[Record]) -> Vec<Finding> {
    let waits = median(records.iter().map(|record| share(waited_ns(record.rank.spent), record.rank.spent)));
    let longest = records.iter().map(|record| waited_ns(record.rank.spent)).max().unwrap_or(0);
    if records.len() < 2 || longest < LEAST_NS {
        return Vec::new();
    }
    let mut hints = Vec::new();
    hints.extend(slow_rank(records));
    let links = links(records);
    // A rank that computes all the time is also slow to send, where its cores do both.
    let slow = slow_link(&links, records)
        .filter(|link| !hints.iter().any(|rank: &Finding| link.ranks.contains(&rank.ranks[0])));
    // Ranks that compute equally long and wait all the same, wait for the network.
    if hints.is_empty() && slow.is_none() && waits >= MUCH {
        hints.push(slow_network(records, &links, waits));
    }
    hints.extend(slow);
    hints.extend(losses(records));
    hints.extend(copies(records));
    hints
}

/// Time in which a rank could not go on because of others.
pub(super) fn waited_ns(spent: Spent) -> u64 {
    spent.receive_wait_ns.saturating_add(spent.send_blocked_ns)
}

fn busy_ns(spent: Spent) -> u64 {
    spent.compute_ns.saturating_add(spent.device_copy_ns)
}

/// Which part of a rank's time this is.
fn share(part_ns: u64, spent: Spent) -> f64 {
    part_ns as f64 / (busy_ns(spent).saturating_add(waited_ns(spent)).max(1)) as f64
}

fn slow_rank(records: &[Record]) -> Option<Finding> {
    let slowest = records.iter().max_by_key(|record| busy_ns(record.rank.spent))?;
    let rank = slowest.rank.rank;
    let others: Vec<Spent> = records
        .iter()
        .map(|record| &record.rank)
        .filter(|line| line.rank != rank)
        .map(|line| line.spent)
        .collect();
    let busy = median(others.iter().map(|&spent| busy_ns(spent) as f64));
    let waited = median(others.iter().map(|&spent| waited_ns(spent) as f64));
    let waits = median(others.iter().map(|&spent| share(waited_ns(spent), spent)));
    let own = busy_ns(slowest.rank.spent);
    if own as f64 <= busy * LONGER || waits < SOME {
        return None;
    }
    let text = format!(
        "rank {rank} is what the others waited for: it computed and copied for {}, each of them for {} and waited for {} (in \
         the middle); give it less work (--split, --split work:…), or look at its device",
        seconds(own),
        seconds(busy as u64),
        seconds(waited as u64)
    );
    Some(Finding::new("slow-rank", [rank], text))
}

/// How fast messages came from one rank to another.
#[derive(Clone, Copy, Debug)]
struct Link {
    from: u32,
    to: u32,
    bytes: u64,
    ns: u64,
}

impl Link {
    fn bytes_per_s(self) -> f64 {
        self.bytes as f64 * 1e9 / self.ns.max(1) as f64
    }
}

/// Links by what the receivers' events say, of those on which enough has come.
fn links(records: &[Record]) -> Vec<Link> {
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

fn slow_link(links: &[Link], records: &[Record]) -> Option<Finding> {
    let slowest = *links.iter().min_by(|one, other| one.bytes_per_s().total_cmp(&other.bytes_per_s()))?;
    let others: Vec<Link> =
        links.iter().copied().filter(|link| (link.from, link.to) != (slowest.from, slowest.to)).collect();
    let usual = median(others.iter().map(|link| link.bytes_per_s()));
    let receiver = records.iter().find(|record| record.rank.rank == slowest.to)?.rank.spent;
    if others.is_empty()
        || slowest.bytes_per_s() * SLOWER > usual
        || share(waited_ns(receiver), receiver) < SOME
    {
        return None;
    }
    let Link { from, to, .. } = slowest;
    let text = format!(
        "messages from rank {from} to rank {to} came at {}, those on the other links at {} (in the middle){}; look at the \
         network between them",
        rate(slowest.bytes_per_s()),
        rate(usual),
        connection(records, from, to)
    );
    Some(Finding::new("slow-link", [from, to], text))
}

fn slow_network(records: &[Record], links: &[Link], waits: f64) -> Finding {
    let ranks: Vec<u32> = records.iter().map(|record| record.rank.rank).collect();
    let speed = match links {
        [] => String::new(),
        _ => format!(
            "; messages came at {} (in the middle)",
            rate(median(links.iter().map(|link| link.bytes_per_s())))
        ),
    };
    let text = format!(
        "{} waited for messages {:.0} % of their time and computed equally long{speed}: the network is slower than the \
         devices; see which plan sends less (kyklos plan --explain), or --wire f16 or int8",
        verb(&ranks, "has", "have"),
        waits * 100.0
    );
    Finding::new("slow-network", ranks, text)
}

/// Connections that lose what slows them down.
fn losses(records: &[Record]) -> Vec<Finding> {
    let mut found = Vec::new();
    for record in records {
        let rank = record.rank.rank;
        for peer in &record.peers {
            let Some(connection) = peer.connection else { continue };
            let lost = connection.packets_lost as f64 / connection.packets_sent.max(1) as f64;
            if connection.packets_sent >= LEAST_PACKETS && lost >= LOSSY {
                let text = format!(
                    "{:.1} % of the packets from rank {rank} to rank {} were lost: look at the network between them, and at the \
                     socket buffers that rank {} was granted",
                    lost * 100.0,
                    peer.rank,
                    peer.rank
                );
                found.push(Finding::new("loss", [rank, peer.rank], text));
            }
        }
    }
    found.truncate(MOST_HINTS);
    found
}

/// Ranks that copy between host and device instead of computing.
fn copies(records: &[Record]) -> Vec<Finding> {
    let copying =
        records.iter().filter(|record| share(record.rank.spent.device_copy_ns, record.rank.spent) >= MUCH);
    let finding = |record: &Record| {
        let (rank, spent) = (record.rank.rank, record.rank.spent);
        let text = format!(
            "rank {rank} spent {:.0} % of its time packing and copying between host and device",
            share(spent.device_copy_ns, spent) * 100.0
        );
        Finding::new("copies", [rank], text)
    };
    copying.map(finding).take(MOST_HINTS).collect()
}

/// What the sender knows of its connection, as the end of a sentence.
fn connection(records: &[Record], from: u32, to: u32) -> String {
    let sender = records.iter().find(|record| record.rank.rank == from);
    let peer = sender.and_then(|record| record.peers.iter().find(|peer| peer.rank == to));
    peer.and_then(|peer| peer.connection).map_or_else(String::new, |connection| {
        let lost = connection.packets_lost as f64 * 100.0 / connection.packets_sent.max(1) as f64;
        format!("; round trip {:.1} ms, {lost:.1} % of packets lost", connection.round_trip_ns as f64 / 1e6)
    })
}

fn rate(bytes_per_s: f64) -> String {
    format!("{:.1} MB/s", bytes_per_s / 1e6)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Shorter waits belong to every run.
const LEAST_NS: u64 = 200_000_000;

/// A part of a rank's time that is worth a word, and one that is most of what could be gained.
const SOME: f64 = 0.15;
const MUCH: f64 = 0.3;

/// So much longer than the others a rank computes that it is the slow one.
const LONGER: f64 = 1.25;

/// So many times slower than the others a link is the slow one.
const SLOWER: f64 = 2.0;

/// Less says little about a link.
const LEAST_BYTES: u64 = 1 << 20;

/// Packets that are lost at random on a path that is good.
const LOSSY: f64 = 0.02;
const LEAST_PACKETS: u64 = 1000;

/// More of one kind do not make a report clearer.
const MOST_HINTS: usize = 8;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::doctor::read::of_lines;

    /// Of a rank that computed, waited and copied for so many milliseconds, and received `bytes` from each `from` in `ms`.
    fn record(rank: u32, [compute, wait, copy]: [u64; 3], received: &[(u32, u64, u64)], lost: u64) -> Record {
        let ms = 1_000_000;
        let line = json!({
            "kind": "rank", "format": 1, "version": "0.1.0", "rank": rank, "world": 4, "job": "j", "plan_hash": "aa",
            "strategy": "ring", "mesh": "1x4", "pid": 1, "started_unix_ms": 10, "written_unix_ms": 20, "now_ns": 9,
            "why": "done", "error": null, "forgotten": 0, "at": { "op": 0, "step": 1, "doing": null },
            "spent": {
                "compute_ns": compute * ms, "receive_wait_ns": wait * ms, "send_blocked_ns": 0,
                "device_copy_ns": copy * ms,
            },
        });
        let mut lines = vec![line];
        lines.push(json!({
            "kind": "peer", "rank": (rank + 1) % 4, "messages_sent": 1, "bytes_sent": 1, "messages_received": 1,
            "bytes_received": 1, "heard_ns": 1, "at": null, "bytes_done": 0, "bytes_expected": 0,
            "connection": { "round_trip_ns": 12 * ms, "packets_sent": 10_000, "packets_lost": lost },
        }));
        for &(from, bytes, took) in received {
            for (event, at) in [("first-byte", 5), ("received", 5 + took)] {
                lines.push(json!({
                    "kind": "event", "at_ns": at * ms, "event": event, "peer": from, "op": 0, "message": 4, "step": 1,
                    "bytes": bytes,
                }));
            }
        }
        lines.push(json!({ "kind": "end" }));
        let text: Vec<String> = lines.iter().map(ToString::to_string).collect();
        of_lines(Path::new("a.jsonl"), text.join("\n").as_bytes()).unwrap()
    }

    fn what(records: &[Record]) -> Vec<(&'static str, Vec<u32>)> {
        hints(records).into_iter().map(|hint| (hint.what, hint.ranks)).collect()
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_rank_that_computes_longer_is_what_the_others_wait_for() {
        let times = [[1000, 2000, 0], [3000, 50, 0], [1100, 1900, 0], [1000, 2100, 0]];
        let records = [0, 1, 2, 3].map(|rank| record(rank, times[rank as usize], &[(0, 10 * MIB, 10)], 0));
        assert_eq!(what(&records), [("slow-rank", vec![1])]);
        let text = &hints(&records)[0].text;
        assert!(text.contains("for 3.0 s, each of them for 1.0 s and waited for 2.0 s"), "{text}");
    }

    #[test]
    fn a_link_that_is_slower_than_the_others_is_named() {
        let records = [0_u32, 1, 2, 3].map(|rank| {
            let took = if rank == 2 { 1000 } else { 100 };
            record(rank, [1000, 800, 0], &[((rank + 3) % 4, 10 * MIB, took)], 0)
        });
        assert_eq!(what(&records), [("slow-link", vec![1, 2])]);
        let text = &hints(&records)[0].text;
        assert!(text.contains("came at 10.5 MB/s, those on the other links at 104.9 MB/s"), "{text}");
        assert!(text.contains("round trip 12.0 ms, 0.0 % of packets lost"), "{text}");
    }

    #[test]
    fn ranks_that_all_wait_and_compute_alike_wait_for_the_network() {
        let records = [0_u32, 1, 2, 3]
            .map(|rank| record(rank, [1000, 900, 0], &[((rank + 3) % 4, 10 * MIB, 900)], 300));
        let found = hints(&records);
        let kinds: Vec<&str> = found.iter().map(|hint| hint.what).collect();
        assert_eq!(kinds, ["slow-network", "loss", "loss", "loss", "loss"]);
        assert!(
            found[0].text.starts_with("ranks 0, 1, 2, 3 have waited for messages 47 %"),
            "{}",
            found[0].text
        );
        assert!(found[1].text.starts_with("3.0 % of the packets from rank 0 to rank 1"), "{}", found[1].text);
    }

    #[test]
    fn a_good_run_gets_no_hint_and_neither_does_a_short_one() {
        let good =
            [0_u32, 1, 2, 3].map(|rank| record(rank, [1000, 100, 50], &[((rank + 3) % 4, 10 * MIB, 90)], 3));
        assert_eq!(what(&good), []);
        let short = [0_u32, 1].map(|rank| record(rank, [10, 90, 0], &[], 0));
        assert_eq!(what(&short), []);
        assert_eq!(what(&good[..1]), []);
    }

    #[test]
    fn a_rank_that_copies_is_told_so() {
        let records = [0, 1].map(|rank| record(rank, [1000, 250, [0, 900][rank as usize]], &[], 0));
        assert_eq!(what(&records), [("slow-rank", vec![1]), ("copies", vec![1])]);
    }
}
