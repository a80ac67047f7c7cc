//! For any input, the transport's decoders neither panic nor hold more memory than the input's
//! length justifies. The targets are the targets of `fuzz/`. The encoders make the corpus.

#[path = "../../../fuzz/bounded.rs"]
mod bounded;
#[path = "../../../fuzz/wire.rs"]
mod wire;

use std::hint::black_box;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bounded::{Limit, corpus, corpus_with_keys, run};
use bytes::Bytes;
use kyklos_transport::quic::decoders;
use kyklos_transport::wire::{
    Candidates, Frame, MAX_TEXT_BYTES, MessageHeader, Notes, Purpose, RejectCode, part_digest,
};
use kyklos_transport::{Abort, AbortCause, Claim, MAX_NOTE_BYTES, Progress, Rank, RefusalReason, Tag, Vote};

/// The limit: a few copies of the input, one of them decoded.
const BY_LENGTH: Limit = Limit { fixed: 2 << 10, per_byte: 8 };

fn frames() -> Vec<(String, Vec<u8>)> {
    let tag = Tag { op: 9, message: 5 };
    let progress = Progress { op: 9, step: 2 };
    let addresses: Vec<SocketAddr> = ["127.0.0.1:7000", "[2001:db8::1]:258"]
        .iter()
        .map(|address| address.parse().expect("an address"))
        .collect();
    let claims = vec![Claim { epoch: 5, started: true, members: vec![Rank(0), Rank(2)] }];
    let purpose = Purpose::Control;
    let cause = AbortCause::Died("gone".into());
    let note = Bytes::from_static(b"rank 1 has 40 tokens");
    let notes = |notes: &[Bytes]| Frame::Notes { round: 1, notes: Notes::split(notes).remove(0) };
    let all = [
        ("hello", Frame::Hello { protocol: 1, purpose, job: [7; 16], epoch: 1, rank: Rank(1), size: 4 }),
        (
            "welcome",
            Frame::Welcome { protocol: 1, lane_ports: vec![7001, 258], heartbeat_us: 200_000, wan: true },
        ),
        ("reject", Frame::Reject { code: RejectCode::Size, text: "no".into() }),
        ("advertise", Frame::Advertise { addresses: addresses.clone() }),
        (
            "addresses",
            Frame::AddressTable { candidates: Candidates::split(&[Vec::new(), addresses]).remove(0) },
        ),
        ("apply", Frame::Apply { rank: Some(Rank(3)), request: vec![0x30; 300], proof: [0xcd; 32] }),
        ("grant", Frame::Grant { rank: Rank(3), size: 4, certificate: vec![0x30; 600] }),
        ("unreached", Frame::Unreached { peers: vec![Rank(1), Rank(2)] }),
        ("start", Frame::Start),
        ("ready", Frame::Vote { vote: Vote::ready([3; 32]) }),
        ("ready_with_a_note", Frame::Vote { vote: Vote::Ready { plan_hash: [3; 32], note: note.clone() } }),
        ("notes", notes(&[Bytes::new(), note.clone(), Bytes::from_static(b"x")])),
        ("longest_notes", notes(&vec![Bytes::from(vec![b'n'; MAX_NOTE_BYTES]); 3])),
        (
            "refuse_vote",
            Frame::Vote { vote: Vote::Refuse { reason: RefusalReason::WrongRequest, text: "é".into() } },
        ),
        (
            "verdict",
            Frame::Verdict { round: 1, refusal: Some((Rank(2), RefusalReason::WrongRequest, "x".into())) },
        ),
        ("missing", Frame::Missing { round: 1, rank: Rank(2), left: true }),
        ("join", Frame::Join { claims, patience_ms: 7 }),
        ("members", Frame::Members { epoch: 6, members: vec![Rank(2)] }),
        ("ping", Frame::Ping { progress, beats: 7, works: false, waits_for: vec![Rank(3), Rank(4)] }),
        ("abort", Frame::Abort { abort: Abort { culprit: Rank(1), cause, progress } }),
        ("link_lost", Frame::LinkLost { peer: Rank(6), text: "lost".into() }),
        ("want", Frame::Want { tag }),
        ("refuse", Frame::Refuse { tag, text: "é".repeat(usize::from(MAX_TEXT_BYTES)) }),
    ];
    let mut made: Vec<_> = all.map(|(name, frame)| (name.to_owned(), frame.encode())).into();
    // A body whose text is one byte above the limit.
    let mut long = [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
    long.splice(0..0, [17, 1]);
    long.extend_from_slice(&(MAX_TEXT_BYTES + 1).to_le_bytes());
    long.resize(long.len() + usize::from(MAX_TEXT_BYTES) + 1, b'a');
    made.push(("a_text_that_is_too_long".to_owned(), long));
    // A body whose note is one byte above the limit, and one with more notes than it has bytes for.
    let too_long = u16::try_from(MAX_NOTE_BYTES + 1).expect("a length");
    let mut long = [&[7, 2, 0][..], &[3; 32], &too_long.to_le_bytes()].concat();
    long.resize(long.len() + usize::from(too_long), b'a');
    made.push(("a_note_that_is_too_long".to_owned(), long));
    let many = [&[24, 1][..], &[0; 8], &2048_u32.to_le_bytes(), &[0; 100]].concat();
    made.push(("notes_that_are_cut".to_owned(), many));
    made
}

#[test]
fn frames_of_any_bytes() {
    let times = run("frame", &corpus("frame", &frames()), BY_LENGTH, wire::frame);
    assert!(times > 1000, "{times}");
}

#[test]
fn headers_of_any_bytes() {
    let header = MessageHeader {
        job_low: 7,
        epoch: 1,
        from: Rank(0),
        to: Rank(1),
        tag: Tag { op: 9, message: 5 },
        part_count: 2,
        part_digest: part_digest([16, 3].into_iter()),
        total_bytes: 19,
        chunk: 0,
    };
    let made = [("parts".to_owned(), header.encode().to_vec())];
    let times = run("header", &corpus("header", &made), BY_LENGTH, wire::header);
    assert!(times > 1000, "{times}");
}

/// The target builds a frame for each two-byte length, and holds its input twice.
const OF_STREAMS: Limit = Limit { fixed: 4 << 10, per_byte: 32 };

#[test]
fn streams_of_frames_in_any_pieces() {
    // Every frame once, in pieces of this many bytes; then all frames, and after them the start of
    // another frame.
    let bodies = frames().into_iter().map(|(_, bytes)| bytes[4..bytes.len() - 4].to_vec());
    let bodies: Vec<Vec<u8>> = bodies.filter(|body| body.len() < 1000).collect();
    let of = |piece: u8, bodies: &[Vec<u8>]| {
        let mut bytes = vec![piece];
        for body in bodies {
            bytes.extend_from_slice(&u16::try_from(body.len()).expect("a short body").to_le_bytes());
            bytes.extend_from_slice(body);
        }
        bytes
    };
    let mut cut = of(200, &bodies);
    cut.extend_from_slice(&[9, 0, 4, 0, 0, 0, 1]);
    let made = [("bytewise", of(1, &bodies[..4])), ("sevens", of(7, &bodies[4..])), ("cut", cut)];
    let made = made.map(|(name, bytes)| (name.to_owned(), bytes));
    let times = run("stream", &corpus("stream", &made), OF_STREAMS, wire::stream);
    assert!(times > 1000, "{times}");
}

/// The limit for files and certificates: a few copies, and the memory of the parsers.
const OF_FILES: Limit = Limit { fixed: 64 << 10, per_byte: 16 };

#[test]
fn identities_of_any_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("identity.pem");
    wire::seed().write_file(&path).expect("a file");
    let made = [std::fs::read(&path).expect("the file")];
    let times = run("identity", &corpus_with_keys("identity", &made), OF_FILES, wire::identity);
    assert!(times > 100, "{times}");
}

#[test]
fn tokens_of_any_bytes() {
    let made = [wire::invitation().token().to_string().into_bytes()];
    let times = run("token", &corpus_with_keys("token", &made), BY_LENGTH, wire::token);
    assert!(times > 1000, "{times}");
}

#[test]
fn invitations_of_any_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("invitation.pem");
    wire::invitation().write_file(&path).expect("a file");
    let made = [std::fs::read(&path).expect("the file")];
    let times = run("invitation", &corpus_with_keys("invitation", &made), OF_FILES, wire::invitation_file);
    assert!(times > 100, "{times}");
}

#[test]
fn certificates_of_any_bytes() {
    let made = decoders::certificates();
    let times = run("certificate", &corpus_with_keys("certificate", &made), OF_FILES, wire::certificate);
    assert!(times > 1000, "{times}");
}

#[test]
fn requests_for_a_signature_of_any_bytes() {
    let made = [decoders::request_of_mine()];
    let times = run("application", &corpus_with_keys("application", &made), OF_FILES, wire::application);
    assert!(times > 100, "{times}");
}

#[test]
fn certificates_that_are_given_of_any_bytes() {
    let made = [decoders::certificate_of_mine()];
    let times = run("grant", &corpus_with_keys("grant", &made), OF_FILES, wire::grant);
    assert!(times > 1000, "{times}");
}

#[test]
fn lists_of_revoked_keys_of_any_bytes() {
    let (one, two) = ("0123456789abcdef".repeat(4), "f".repeat(64));
    let list = format!("# lost laptops\n\n{one}  rank 1, since Monday\r\n  {two}\n");
    let made = [("list".to_owned(), list.into_bytes())];
    let times =
        run("revoked", &corpus("revoked", &made), Limit { fixed: 8 << 10, per_byte: 16 }, wire::revoked);
    assert!(times > 1000, "{times}");
}

#[test]
fn names_of_any_bytes() {
    let texts = [
        ("key", "0123456789abcdef".repeat(4)),
        ("job", "0123456789ABCDEF".repeat(2)),
        ("host", "Node1,10.0.0.1,fd00::1,a-b.c_d.example".to_owned()),
    ];
    let made = texts.map(|(name, text)| (name.to_owned(), text.into_bytes()));
    let times = run("names", &corpus("names", &made), Limit { fixed: 8 << 10, per_byte: 64 }, wire::names);
    assert!(times > 1000, "{times}");
}

#[test]
fn tables_of_the_system_of_any_bytes() {
    let v4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
              eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
              eth1\t0002A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
    let v6 = "fd000000000000000000000000000002 04 40 00 82     eth0\n";
    let mut v6_address = [0; 16];
    (v6_address[0], v6_address[15]) = (0xfd, 2);
    let mut v4_address = [0; 16];
    v4_address[12..].copy_from_slice(&[192, 168, 2, 7]);
    let made = [("v4", [&v4_address, v4.as_bytes()].concat()), ("v6", [&v6_address, v6.as_bytes()].concat())];
    let made = made.map(|(name, bytes)| (name.to_owned(), bytes));
    let times = run("routes", &corpus("routes", &made), Limit { fixed: 8 << 10, per_byte: 16 }, wire::routes);
    assert!(times > 1000, "{times}");
}

/// Planted bugs. A run must find each of them.
#[test]
fn decoders_with_bugs_are_caught() {
    let found = |bug: fn(&[u8])| {
        let made: Vec<_> = frames().into_iter().map(|(_, bytes)| bytes).collect();
        catch_unwind(AssertUnwindSafe(|| run("a bug", &made, BY_LENGTH, bug))).is_err()
    };
    assert!(!found(|bytes| drop(black_box(bytes.to_vec()))), "a decoder without a bug");
    // Allocates the number of bytes that the first four bytes claim.
    assert!(found(|bytes| {
        let length = bytes.first_chunk().map_or(0, |length| u32::from_le_bytes(*length) as usize);
        drop(black_box(Vec::<u8>::with_capacity(length.min(1 << 16))));
    }));
    // Takes a slice as long as the first four bytes claim.
    assert!(found(|bytes| {
        let length = bytes.first_chunk().map_or(0, |length| u32::from_le_bytes(*length) as usize);
        black_box(&bytes[..length]);
    }));
    // Indexes with an unchecked byte.
    assert!(found(|bytes| {
        black_box([0_u8; 20][usize::from(bytes.get(4).copied().unwrap_or(0))]);
    }));
}
