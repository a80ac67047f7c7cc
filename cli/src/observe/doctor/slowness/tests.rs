//! Hints from hand-made records; `tests/cli/observe/doctor.rs` uses records of real runs.

use std::path::Path;

use serde_json::json;

use super::*;
use crate::observe::doctor::read::of_lines;
use crate::observe::record::format::EventLine;

/// Of a rank that computed, waited and copied for so many milliseconds, and received `bytes` from
/// each `from` in `ms`.
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
fn the_others_wait_for_a_rank_that_computes_longer() {
    let times = [[1000, 2000, 0], [3000, 50, 0], [1100, 1900, 0], [1000, 2100, 0]];
    let records = [0, 1, 2, 3].map(|rank| record(rank, times[rank as usize], &[(0, 10 * MIB, 10)], 0));
    assert_eq!(what(&records), [("slow-rank", vec![1])]);
    let text = &hints(&records)[0].text;
    assert!(text.contains("for 3.0 s, each of them for 1.0 s and waited for 2.0 s"), "{text}");
}

#[test]
fn a_little_more_computation_does_not_explain_long_waits() {
    let times = [[50, 2500, 0], [100, 2500, 0], [50, 2500, 0], [50, 2500, 0]];
    let records = [0, 1, 2, 3].map(|rank| record(rank, times[rank as usize], &[], 0));
    assert_eq!(what(&records), [("slow-network", vec![0, 1, 2, 3])]);
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
    let records =
        [0_u32, 1, 2, 3].map(|rank| record(rank, [1000, 900, 0], &[((rank + 3) % 4, 10 * MIB, 900)], 300));
    let found = hints(&records);
    let kinds: Vec<&str> = found.iter().map(|hint| hint.what).collect();
    assert_eq!(kinds, ["slow-network", "loss", "loss", "loss", "loss"]);
    assert!(found[0].text.starts_with("ranks 0, 1, 2, 3 have waited for messages 47 %"), "{}", found[0].text);
    assert!(found[1].text.starts_with("3.0 % of the packets from rank 0 to rank 1"), "{}", found[1].text);
}

/// The same of a rank that was also blocked, for so many milliseconds, by ranks that asked late for
/// messages that it had posted at the first time and by messages on their way.
fn blocked(mut record: Record, [credit, send]: [u64; 2], asked: &[(u32, u64, u64)]) -> Record {
    record.rank.spent.credit_blocked_ns = credit * 1_000_000;
    record.rank.spent.send_blocked_ns = send * 1_000_000;
    for (message, &(peer, posted, asked)) in (10..).zip(asked) {
        for (event, at) in [("send-posted", posted), ("asked", asked)] {
            let at_ns = at * 1_000_000;
            let (event, op, step, bytes) = (event.to_owned(), 0, 1, MIB);
            record.events.push(EventLine { at_ns, event, peer, op, message, step, bytes });
        }
    }
    record.events.sort_by_key(|event| event.at_ns);
    record
}

#[test]
fn a_rank_that_asks_late_and_waits_for_nobody_is_named() {
    let asked = [(2, 100, 1000), (3, 1200, 100), (3, 1300, 1400)];
    let records = [0, 1, 2, 3].map(|rank| record(rank, [1000, 100, 0], &[], 0));
    let [zero, one, two, three] = records;
    let one = blocked(one, [900, 0], &asked);
    let records = [zero, one, two, three];
    assert_eq!(what(&records), [("late-rank", vec![2])]);
    let text = &hints(&records)[0].text;
    assert!(text.contains("rank 1 waited 0.9 s for it to ask for messages"), "{text}");
    // A late rank that waited itself was delayed by another.
    let [zero, one, mut two, three] = records;
    two.rank.spent.receive_wait_ns = 500_000_000;
    assert_eq!(what(&[zero, one, two, three]), []);
}

#[test]
fn a_slow_rank_is_named_once_with_who_waited_for_it() {
    let times = [[1000, 2000, 0], [1000, 100, 0], [3000, 0, 0]];
    let [zero, one, two] = [0, 1, 2].map(|rank| record(rank, times[rank as usize], &[], 0));
    let records = [zero, blocked(one, [1900, 0], &[(2, 100, 2000)]), two];
    assert_eq!(what(&records), [("slow-rank", vec![2])]);
    let text = &hints(&records)[0].text;
    assert!(text.contains("(in the middle); rank 1 waited 1.9 s for it to ask for messages; give"), "{text}");
}

#[test]
fn a_sender_that_waits_for_arrival_indicates_a_slow_link() {
    let records = [0_u32, 1, 2, 3].map(|rank| {
        let took = if rank == 2 { 1000 } else { 100 };
        let record = record(rank, [1000, 100, 0], &[((rank + 3) % 4, 10 * MIB, took)], 0);
        blocked(record, [0, if rank == 1 { 800 } else { 0 }], &[])
    });
    assert_eq!(what(&records), [("slow-link", vec![1, 2])]);
    let text = &hints(&records)[0].text;
    assert!(text.contains("; rank 1 waited 0.8 s for messages that were on their way; look"), "{text}");
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
fn a_rank_that_mostly_copies_is_named() {
    let records = [0, 1].map(|rank| record(rank, [1000, 250, [0, 900][rank as usize]], &[], 0));
    assert_eq!(what(&records), [("slow-rank", vec![1]), ("copies", vec![1])]);
}
