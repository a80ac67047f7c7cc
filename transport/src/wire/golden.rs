//! The bytes of the wire, pinned. A change here is a change of the protocol: raise a version and
//! change `WIRE.md`.

use bytes::Bytes;

use super::*;
use crate::error::{Abort, AbortCause};
use crate::membership::Claim;
use crate::rank::{Progress, Rank, RefusalReason, Tag, Vote};

/// Bytes of hex text; spaces are ignored.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Length, body, checksum. The checksum is recomputed here: it is the fields that are pinned.
#[track_caller]
fn pinned(frame: &Frame, body: &[&str]) {
    let body = hex(&body.concat());
    let mut expected = (body.len() as u32).to_le_bytes().to_vec();
    expected.extend_from_slice(&body);
    expected.extend_from_slice(&crc32c::crc32c(&expected).to_le_bytes());
    assert_eq!(frame.encode(), expected, "{frame:?}");
    assert_eq!(Frame::decode(&expected), Ok(Some((frame.clone(), expected.len()))));
}

#[test]
fn whole_envelope_is_pinned() {
    let pong = hex(concat!(
        "02000000", // length of the body
        "0a",       // frame number: pong
        "01",       // layout version
        "1cac9cc4", // crc32c of the six bytes before
    ));
    assert_eq!(Frame::Pong.encode(), pong);
}

#[test]
fn frames_without_fields_are_pinned() {
    pinned(&Frame::Meshed, &["05", "01"]);
    pinned(&Frame::Start, &["06", "01"]);
    pinned(&Frame::Pong, &["0a", "01"]);
    pinned(&Frame::Leave, &["0d", "01"]);
    pinned(&Frame::Goodbye, &["0e", "01"]);
}

#[test]
fn frames_of_the_bootstrap_are_pinned() {
    let mut job = [0; 16];
    job[0] = 0xaa;
    job[15] = 0xbb;
    let hello = Frame::Hello { protocol: 1, purpose: Purpose::Data, job, epoch: 7, rank: Rank(3), size: 4 };
    pinned(
        &hello,
        &[
            "01",                               // frame number
            "01",                               // layout
            "0100",                             // protocol
            "01",                               // purpose: data
            "aa0000000000000000000000000000bb", // job
            "07000000",                         // epoch
            "03000000",                         // rank
            "04000000",                         // size
        ],
    );
    pinned(
        &Frame::Welcome { protocol: 1, lane_ports: vec![7001, 258], heartbeat_us: 200_000, wan: true },
        &["02", "03", "0100", "02", "591b", "0201", "400d0300", "01"], // … ports, heartbeat, wan
    );
    pinned(
        &Frame::Reject { code: RejectCode::Duplicate, text: "no".into() },
        &[
            "03", "01",   // number, layout
            "05",   // code: duplicate
            "0200", // bytes of the text
            "6e6f", // text
        ],
    );
    let addresses = vec!["127.0.0.1:7000".parse().unwrap(), "[2001:db8::1]:258".parse().unwrap()];
    pinned(
        &Frame::AddressTable { candidates: Candidates::split(&[Vec::new(), addresses.clone()]).remove(0) },
        &[
            "04",
            "02",
            "02000000",                         // rows
            "00",                               // addresses of the first
            "02",                               // addresses of the second
            "00000000000000000000ffff7f000001", // 127.0.0.1, mapped into IPv6
            "581b",                             // port 7000
            "20010db8000000000000000000000001", // 2001:db8::1
            "0201",                             // port 258
        ],
    );
    pinned(
        &Frame::Advertise { addresses: addresses[1..].to_vec() },
        &["19", "01", "01", "20010db8000000000000000000000001", "0201"],
    );
}

#[test]
fn frames_of_forming_again_are_pinned() {
    let first = Claim { epoch: 4, started: true, members: vec![Rank(0), Rank(2)] };
    pinned(
        &Frame::Join {
            claims: vec![first, Claim { epoch: 5, started: false, members: Vec::new() }],
            patience_ms: 7,
        },
        &[
            "14", "01", "02",       // claims
            "04000000", // epoch
            "01",       // it saw the group start
            "02000000", // ranks of the group
            "00000000", "02000000", "05000000", "00", "00000000", "07000000", // milliseconds
        ],
    );
    pinned(
        &Frame::Members { epoch: 6, members: vec![Rank(2)] },
        &[
            "15", "02", "06000000", // epoch
            "01000000", // members
            "02000000",
        ],
    );
    let hello =
        |purpose| Frame::Hello { protocol: 2, purpose, job: [0; 16], epoch: 1, rank: Rank(3), size: 4 };
    for (purpose, number) in [(Purpose::Reform, "02"), (Purpose::Rejoin, "03"), (Purpose::Lane, "04")] {
        let job = "00".repeat(16);
        pinned(&hello(purpose), &["01", "01", "0200", number, &job, "01000000", "03000000", "04000000"]);
    }
    pinned(&Frame::Reject { code: RejectCode::Busy, text: String::new() }, &["03", "01", "07", "0000"]);
    pinned(&Frame::Reject { code: RejectCode::Gone, text: String::new() }, &["03", "01", "08", "0000"]);
}

#[test]
fn frames_of_joining_by_a_token_are_pinned() {
    let (request, proof) = (vec![0x30, 0x31], [0xcd; 32]);
    pinned(
        &Frame::Apply { rank: Some(Rank(3)), request: request.clone(), proof },
        &[
            "16",
            "01",
            "01",             // it asks for a rank
            "03000000",       // rank
            "0200",           // bytes of the request
            "3031",           // request
            &"cd".repeat(32), // proof
        ],
    );
    pinned(
        &Frame::Apply { rank: None, request, proof },
        &["16", "01", "00", "0200", "3031", &"cd".repeat(32)],
    );
    pinned(
        &Frame::Grant { rank: Rank(3), size: 4, certificate: vec![0x30] },
        &[
            "17", "01", "03000000", // rank
            "04000000", // ranks
            "0100",     // bytes of the certificate
            "30",       // certificate
        ],
    );
    pinned(&Frame::Reject { code: RejectCode::Token, text: String::new() }, &["03", "01", "09", "0000"]);
}

#[test]
fn frames_of_a_running_group_are_pinned() {
    let tag = Tag { op: 9, message: 5 };
    let progress = Progress { op: 9, step: 2 };
    pinned(
        &Frame::Vote { vote: Vote::ready([0xcd; 32]) },
        &["07", "02", "00", &"cd".repeat(32), "0000"], // number, layout, ready, hash, bytes of the note
    );
    let note = Bytes::from_static(&[0xee, 0xff, 0x00]);
    pinned(
        &Frame::Vote { vote: Vote::Ready { plan_hash: [0xcd; 32], note: note.clone() } },
        &["07", "02", "00", &"cd".repeat(32), "0300", "eeff00"],
    );
    pinned(
        &Frame::Vote { vote: Vote::Refuse { reason: RefusalReason::WrongRequest, text: "é".into() } },
        &["07", "02", "01", "02", "0200", "c3a9"], // number, layout, refuse, reason, bytes of the text, text
    );
    pinned(
        &Frame::Notes { round: 1, notes: Notes::split(&[note, Bytes::new(), Bytes::from("a")]).remove(0) },
        &[
            "18",
            "01",
            "0100000000000000", // round
            "03000000",         // notes
            "0300",             // bytes of each note
            "0000",
            "0100",
            "eeff00", // notes
            "61",
        ],
    );
    pinned(&Frame::Verdict { round: 1, refusal: None }, &["08", "01", "0100000000000000", "00"]);
    pinned(
        &Frame::Verdict { round: 1, refusal: Some((Rank(2), RefusalReason::WrongRequest, "x".into())) },
        &[
            "08",
            "01",
            "0100000000000000", // round
            "01",               // refused
            "02000000",         // rank
            "02",               // reason: wrong request
            "0100",             // bytes of the text
            "78",               // text
        ],
    );
    pinned(
        &Frame::Missing { round: 1, rank: Rank(2), left: true },
        &["12", "01", "0100000000000000", "02000000", "01"], // number, layout, round, rank, it has left
    );
    pinned(
        &Frame::Ping { progress, beats: 7, works: false, waits_for: vec![Rank(3), Rank(4)] },
        &[
            "09",
            "02",               // layout
            "0900000000000000", // op
            "02000000",         // step
            "0700000000000000", // beats
            "00",               // it does not work
            "02000000",         // ranks that it waits for
            "03000000",
            "04000000",
        ],
    );
    pinned(
        &Frame::Abort {
            abort: Abort { culprit: Rank(1), cause: AbortCause::Failed("oom".into()), progress },
        },
        &[
            "0b",
            "01",
            "01000000",         // culprit
            "01",               // cause: failed
            "0900000000000000", // progress: op
            "02000000",         // progress: step
            "0300",             // bytes of the text
            "6f6f6d",           // text
        ],
    );
    pinned(
        &Frame::Abort { abort: Abort { culprit: Rank(1), cause: AbortCause::Stuck("x".into()), progress } },
        &["0b", "01", "01000000", "02", "0900000000000000", "02000000", "0100", "78"], // cause: stuck
    );
    pinned(
        &Frame::LinkLost { peer: Rank(6), text: String::new() },
        &["0c", "01", "06000000", "0000"], // number, layout, peer, bytes of the text
    );
    pinned(&Frame::Want { tag }, &["0f", "01", "0900000000000000", "05000000"]); // op, message
    pinned(&Frame::Done { tag }, &["10", "01", "0900000000000000", "05000000"]);
    pinned(&Frame::Withdraw { tag }, &["13", "01", "0900000000000000", "05000000"]);
    pinned(
        &Frame::Refuse { tag, text: "a".into() },
        &["11", "01", "0900000000000000", "05000000", "0100", "61"],
    );
    let offer = MemoryOffer { socket: [0xaa; 16], secret_of_guest: [0xbb; 32], secret_of_host: [0xcc; 32] };
    pinned(
        &Frame::ShareMemory { offer },
        &["1a", "01", &"aa".repeat(16), &"bb".repeat(32), &"cc".repeat(32)], /* number, layout, socket,
                                                                              * secrets */
    );
    pinned(
        &Frame::Unreached { peers: vec![Rank(1), Rank(5)] },
        &["1c", "01", "02000000", "01000000", "05000000"], // number, layout, count, ranks
    );
    pinned(&Frame::NoSharedMemory { text: "a".into() }, &["1b", "01", "0100", "61"]);
}

#[test]
fn message_header_is_pinned() {
    let header = MessageHeader {
        job_low: 0x1122_3344_5566_7788,
        epoch: 7,
        from: Rank(1),
        to: Rank(2),
        tag: Tag { op: 9, message: 5 },
        part_count: 2,
        part_digest: part_digest([16, 3].into_iter()),
        total_bytes: 19,
        chunk: 3,
    };
    let expected = hex(concat!(
        "4b594b31",         // magic "KYK1"
        "02",               // layout
        "01",               // kind: parts
        "0000",             // reserved
        "8877665544332211", // job, low 64 bits
        "07000000",         // epoch
        "01000000",         // from
        "02000000",         // to
        "0900000000000000", // op
        "05000000",         // message
        "02000000",         // number of parts
        "3c35128f",         // digest of their lengths
        "1300000000000000", // bytes of all parts
        "03000000",         // chunk
        "48b4ea66",         // crc32c of all bytes before
    ));
    assert_eq!(header.encode().to_vec(), expected);
    assert_eq!(MessageHeader::decode(&expected), Ok(header));
}
