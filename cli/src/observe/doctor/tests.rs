//! Hand-made records, for cases that no test run can produce.

use std::path::Path;

use super::diagnose::diagnose;
use super::read::{Record, of_lines};
use super::words::Finding;

fn rank_line(rank: u32, step: u32) -> String {
    serde_json::json!({
        "kind": "rank", "format": 1, "version": "0.1.0", "rank": rank, "world": 3, "job": "j", "plan_hash": "aa",
        "strategy": "ring", "mesh": "1x3", "pid": 1, "started_unix_ms": 10, "written_unix_ms": 20,
        "now_ns": 9_000_000_000_u64, "why": "asked", "error": null, "forgotten": 0,
        "at": { "op": 0, "step": step, "doing": "attend q[0..8]" },
    })
    .to_string()
}

fn wait_for(peer: u32, waited_s: u64) -> String {
    serde_json::json!({
        "kind": "call", "call": "receive", "peer": peer, "op": 0, "message": 4, "bytes_done": 0, "bytes_expected": 64,
        "waited_ns": waited_s * 1_000_000_000, "ended": false,
    })
    .to_string()
}

fn event(kind: &str, peer: u32) -> String {
    serde_json::json!({
        "kind": "event", "at_ns": 5, "event": kind, "peer": peer, "op": 0, "message": 4, "step": 1, "bytes": 64,
    })
    .to_string()
}

const END: &str = r#"{"kind":"end"}"#;

fn record(lines: &[String]) -> Record {
    let text = lines.iter().map(String::as_str).chain([END]).collect::<Vec<_>>().join("\n");
    of_lines(Path::new("a.jsonl"), text.as_bytes()).unwrap()
}

fn findings(records: &[Vec<String>]) -> Vec<Finding> {
    diagnose(&mut records.iter().map(|lines| record(lines)).collect())
}

/// The kind of each finding and its ranks.
fn what(findings: &[Finding]) -> Vec<(&str, &[u32])> {
    findings.iter().map(|finding| (finding.what, &finding.ranks[..])).collect()
}

#[test]
fn short_waits_are_part_of_every_run() {
    let records = [0, 1, 2].map(|rank| vec![rank_line(rank, 3), wait_for((rank + 2) % 3, 1)]);
    assert_eq!(what(&findings(&records)), []);
}

#[test]
fn the_cause_is_a_rank_that_others_wait_for_and_that_waits_for_none() {
    let records =
        [vec![rank_line(0, 5), wait_for(2, 9)], vec![rank_line(1, 5), wait_for(0, 8)], vec![rank_line(2, 4)]];
    let found = findings(&records);
    assert_eq!(what(&found), [("stands-still", &[2][..])]);
    for words in ["step 4 of operation 0 (attend", "rank 0 waited for its message #4", "9.0 s"] {
        assert!(found[0].text.contains(words), "{}", found[0].text);
    }
}

#[test]
fn a_rank_without_a_record_can_be_the_cause() {
    let records = [vec![rank_line(0, 5), wait_for(2, 9)], vec![rank_line(1, 5), wait_for(2, 9)]];
    let found = findings(&records);
    assert_eq!(what(&found), [("stands-still", &[2][..]), ("no-record", &[2][..])]);
    assert!(found[0].text.contains("ranks 0, 1 waited"), "{}", found[0].text);
}

#[test]
fn cycles_of_waits_are_distinguished_from_messages_in_flight() {
    let circle = [0, 1, 2].map(|rank| vec![rank_line(rank, 3), wait_for((rank + 1) % 3, 9)]);
    assert_eq!(what(&findings(&circle)), [("circle", &[0, 1, 2][..])]);
    let mut under_way = circle.map(|mut lines| {
        lines.truncate(1);
        lines
    });
    under_way[0].push(wait_for(1, 9));
    under_way[1].push(event("send-posted", 0));
    let found = findings(&under_way);
    assert_eq!(what(&found), [("under-way", &[1, 0][..])]);
    assert!(found[0].text.contains("look at the network"), "{}", found[0].text);
}

#[test]
fn records_that_do_not_belong_together_are_named_and_left_out() {
    let mut records = [0, 1, 2].map(|rank| vec![rank_line(rank, 3)]);
    records[1][0] = records[1][0].replace("\"aa\"", "\"bb\"");
    assert_eq!(what(&findings(&records)), [("plan-hash", &[1][..])]);
    records[1][0] = rank_line(1, 3).replace("\"job\":\"j\"", "\"job\":\"k\"");
    assert_eq!(what(&findings(&records)), [("no-record", &[1][..]), ("other-group", &[1][..])]);
    records[1][0] = rank_line(1, 3).replace("\"written_unix_ms\":20", "\"written_unix_ms\":9");
    assert_eq!(what(&findings(&records)), [("no-record", &[1][..]), ("old", &[1][..])]);
    records[1][0] = rank_line(0, 2);
    assert_eq!(what(&findings(&records)), [("no-record", &[1][..]), ("twice", &[0][..])]);
}

/// A rank with a communicator of all three ranks.
fn by_nccl(rank: u32, posted: u64, ended: u64, failure: Option<&str>) -> Vec<String> {
    let nccl = serde_json::json!({
        "version": "2.28.9", "library": "/opt/lib/libnccl.so.2", "ranks": [0, 1, 2], "posted": posted, "ended": ended,
        "failure": failure,
    });
    let messages = serde_json::json!({ "ways": "NCCL 2.28.9", "nccl": nccl });
    let line = rank_line(rank, 3).replacen('{', &format!("{{\"messages\":{messages},"), 1);
    vec![line]
}

#[test]
fn exchanges_of_nccl_that_did_not_end_are_told_with_the_ranks_that_are_behind() {
    let late = "the exchange of op 0 message 1 had not ended";
    let records = [by_nccl(0, 3, 1, Some(late)), by_nccl(1, 3, 1, Some(late)), by_nccl(2, 1, 1, None)];
    let found = findings(&records);
    assert_eq!(what(&found), [("nccl", &[2][..])]);
    for words in [
        "NCCL 2.28.9 was aborted: rank 2 has posted 1 exchanges, of which 1 have ended; ranks 0, 1 have posted 3",
        "look at rank 2 first",
        "ranks 0, 1: the exchange of op 0 message 1",
    ] {
        assert!(found[0].text.contains(words), "{}", found[0].text);
    }
    // All have posted as many: nobody is blamed.
    let found = findings(&[0, 1, 2].map(|rank| by_nccl(rank, 2, 1, Some(late))));
    assert_eq!(what(&found), [("nccl", &[][..])]);
    // Without a failure, messages may be under way.
    assert_eq!(
        what(&findings(&[by_nccl(0, 3, 1, None), by_nccl(1, 3, 2, None), by_nccl(2, 1, 1, None)])),
        []
    );
    let ways = super::nccl::ways(&[record(&by_nccl(0, 3, 3, None)), record(&by_nccl(2, 3, 3, None))]);
    assert_eq!(ways, ["messages of ranks 0, 2 went by NCCL 2.28.9 (/opt/lib/libnccl.so.2)"]);
}

#[test]
fn every_cut_and_every_flipped_byte_is_survived() {
    let whole = [rank_line(0, 5), wait_for(2, 9), event("step", 0), END.to_owned()].join("\n");
    let whole = whole.as_bytes();
    let good = of_lines(Path::new("a"), whole).unwrap();
    assert_eq!((good.damage, good.calls.len(), good.events.len()), (None, 1, 1));
    for at in 0..whole.len() {
        if let Ok(cut) = of_lines(Path::new("a"), &whole[..at]) {
            assert!(cut.damage.is_some(), "cut at {at}");
            diagnose(&mut vec![cut]);
        }
        for flip in [0x01, 0x10, 0x80] {
            let mut bytes = whole.to_vec();
            bytes[at] ^= flip;
            if let Ok(record) = of_lines(Path::new("a"), &bytes[..]) {
                diagnose(&mut vec![record]);
            }
        }
    }
}

#[test]
fn hostile_numbers_and_texts_do_no_harm() {
    for hostile in [
        rank_line(0, 1).replace("\"world\":3", "\"world\":4294967295"),
        rank_line(0, 1).replace("\"rank\":0", "\"rank\":3"),
        rank_line(0, 1).replace("\"format\":1", "\"format\":2"),
        "[".repeat(100_000),
        String::new(),
    ] {
        assert!(of_lines(Path::new("a"), hostile.as_bytes()).is_err(), "{hostile:.80}");
    }
    let most = wait_for(2, 9).replace("9000000000", "18446744073709551615");
    let stranger = wait_for(2, 9).replace("\"peer\":2", "\"peer\":3");
    let loud = rank_line(0, u32::MAX).replace("attend", "\\u001b[31m");
    let record = record(&[loud, most, stranger]);
    assert!(record.damage.as_deref().unwrap().starts_with("1 of its lines"), "{:?}", record.damage);
    assert!(!record.rank.at.doing.as_deref().unwrap().contains('\u{1b}'));
    diagnose(&mut vec![record]);
}
