//! Finds what slowed a run down: a rank that computes longer than the others or is late for another
//! reason, a slow link, or the whole network.

use super::messages::{Link, latest_to_ask, links};
use super::read::Record;
use super::words::{Finding, seconds, verb};
use crate::median::median;
use crate::observe::record::format::Spent;

/// The most likely reasons for waiting. Needs the records of at least two ranks.
pub(super) fn hints(records: &[Record]) -> Vec<Finding> {
    let waits = median(records.iter().map(|record| share(waited_ns(record.rank.spent), record.rank.spent)));
    let longest = records.iter().map(|record| waited_ns(record.rank.spent)).max().unwrap_or(0);
    if records.len() < 2 || longest < LEAST_NS {
        return Vec::new();
    }
    let late = late(records);
    let mut hints = Vec::new();
    hints.extend(slow_rank(records, &late));
    hints.extend(late_ranks(&late, &hints));
    let links = links(records);
    // A rank that computes all the time also sends slowly if the same cores do both.
    let slow = slow_link(&links, records)
        .filter(|link| !hints.iter().any(|rank: &Finding| link.ranks.contains(&rank.ranks[0])));
    // If all ranks compute equally long and still wait, they wait for the network.
    if hints.is_empty() && slow.is_none() && waits >= MUCH {
        hints.push(slow_network(records, &links, waits));
    }
    hints.extend(slow);
    hints.extend(losses(records));
    hints.extend(copies(records));
    hints
}

/// Time that a rank waited for others.
pub(super) fn waited_ns(spent: Spent) -> u64 {
    spent.receive_wait_ns.saturating_add(spent.credit_blocked_ns).saturating_add(spent.send_blocked_ns)
}

fn busy_ns(spent: Spent) -> u64 {
    spent.compute_ns.saturating_add(spent.device_copy_ns)
}

/// This part of the rank's time, from 0 to 1.
fn share(part_ns: u64, spent: Spent) -> f64 {
    part_ns as f64 / (busy_ns(spent).saturating_add(waited_ns(spent)).max(1)) as f64
}

fn slow_rank(records: &[Record], late: &[Late]) -> Option<Finding> {
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
    // If the others waited much longer than the difference, they waited for something else.
    let explains = own as f64 - busy >= waited * EXPLAINED;
    if own as f64 <= busy * LONGER || waits < SOME || !explains {
        return None;
    }
    let evidence = late.iter().filter(|late| late.rank == rank).map(|late| format!("; {}", late.words()));
    let text = format!(
        "rank {rank} is what the others waited for: it computed and copied for {}, each of them for {} and waited for {} (in \
         the middle){}; give it less work (--split, --split work:…), or look at its device",
        seconds(own),
        seconds(busy as u64),
        seconds(waited as u64),
        evidence.collect::<String>()
    );
    Some(Finding::new("slow-rank", [rank], text))
}

/// A rank that asked late for a message that another rank had ready, without waiting itself.
#[derive(Clone, Copy, Debug)]
struct Late {
    rank: u32,
    waiting: u32,
    ns: u64,
}

impl Late {
    fn words(self) -> String {
        format!("rank {} waited {} for it to ask for messages", self.waiting, seconds(self.ns))
    }
}

fn late(records: &[Record]) -> Vec<Late> {
    let waiting = records.iter().filter_map(|record| {
        let (waiting, spent) = (record.rank.rank, record.rank.spent);
        let ns = spent.credit_blocked_ns;
        let rank = latest_to_ask(record).filter(|_| ns >= LEAST_NS && share(ns, spent) >= SOME)?;
        Some(Late { rank, waiting, ns })
    });
    let waits = |rank: u32| {
        let its = records.iter().map(|record| &record.rank).find(|line| line.rank == rank);
        its.is_some_and(|its| share(waited_ns(its.spent), its.spent) >= SOME)
    };
    // A rank that waits itself is late because of another rank.
    waiting.filter(|late| !waits(late.rank)).collect()
}

/// Late ranks without a hint so far.
fn late_ranks(late: &[Late], said: &[Finding]) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    for late in late {
        if said.iter().chain(&found).any(|finding| finding.ranks == [late.rank]) {
            continue;
        }
        let text = format!(
            "rank {} was late without waiting for another rank: {}; its timeline shows why (kyklos attend --trace)",
            late.rank,
            late.words()
        );
        found.push(Finding::new("late-rank", [late.rank], text));
    }
    found.truncate(MOST_HINTS);
    found
}

fn slow_link(links: &[Link], records: &[Record]) -> Option<Finding> {
    let slowest = *links.iter().min_by(|one, other| one.bytes_per_s().total_cmp(&other.bytes_per_s()))?;
    let others: Vec<Link> =
        links.iter().copied().filter(|link| (link.from, link.to) != (slowest.from, slowest.to)).collect();
    let usual = median(others.iter().map(|link| link.bytes_per_s()));
    let Link { from, to, .. } = slowest;
    let spent = |rank: u32| {
        let its = records.iter().map(|record| &record.rank).find(|line| line.rank == rank);
        its.map_or_else(Spent::default, |its| its.spent)
    };
    let (sender, receiver) = (spent(from), spent(to));
    let blocked = share(sender.send_blocked_ns, sender) >= SOME;
    if others.is_empty()
        || slowest.bytes_per_s() * SLOWER > usual
        || !(blocked || share(waited_ns(receiver), receiver) >= SOME)
    {
        return None;
    }
    let evidence = if blocked {
        format!(
            "; rank {from} waited {} for messages that were on their way",
            seconds(sender.send_blocked_ns)
        )
    } else {
        String::new()
    };
    let text = format!(
        "messages from rank {from} to rank {to} came at {}, those on the other links at {} (in the middle){}{evidence}; look \
         at the network between them",
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

/// Connections with enough packet loss to slow them down.
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

/// Describes the sender's connection; the end of a sentence.
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

/// Shorter waits are normal.
const LEAST_NS: u64 = 200_000_000;

/// The smallest part of a rank's time to report, and a part that dominates.
const SOME: f64 = 0.15;
const MUCH: f64 = 0.3;

/// A rank is slow if it computes this factor longer than the others.
const LONGER: f64 = 1.25;

/// The extra time of a slow rank is at least this part of the others' waits.
const EXPLAINED: f64 = 0.5;

/// A link is slow if the others are faster by this factor.
const SLOWER: f64 = 2.0;

/// Share of packets that a good path may lose.
const LOSSY: f64 = 0.02;
const LEAST_PACKETS: u64 = 1000;

/// Most sentences of one kind in a report.
const MOST_HINTS: usize = 8;

#[cfg(test)]
mod tests;
