//! Decoding of any bytes ends with a value or an error. Encoding and decoding a value gives the
//! same value.

use std::net::SocketAddr;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::error::{Abort, AbortCause};
use crate::membership::{Claim, MOST_CLAIMS};
use crate::rank::{MAX_NOTE_BYTES, MAX_RANKS, Progress, Rank, RefusalReason, Tag, Vote};

fn any_tag() -> impl Strategy<Value = Tag> {
    (any::<u64>(), any::<u32>()).prop_map(|(op, message)| Tag { op, message })
}

fn any_progress() -> impl Strategy<Value = Progress> {
    (any::<u64>(), any::<u32>()).prop_map(|(op, step)| Progress { op, step })
}

fn any_address() -> impl Strategy<Value = SocketAddr> {
    prop_oneof![
        (any::<[u8; 4]>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::from((ip, port))),
        (any::<[u8; 16]>(), any::<u16>()).prop_map(|(mut ip, port)| {
            ip[0] |= 0x20; // never an IPv4-mapped address, which would come back as IPv4
            SocketAddr::from((ip, port))
        }),
    ]
}

fn any_reason() -> impl Strategy<Value = RefusalReason> {
    any::<u8>().prop_map(RefusalReason::from_code)
}

fn any_note() -> impl Strategy<Value = Bytes> {
    proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let purpose = prop_oneof![
        Just(Purpose::Control),
        Just(Purpose::Data),
        Just(Purpose::Reform),
        Just(Purpose::Rejoin),
        Just(Purpose::Lane)
    ];
    let code = prop_oneof![
        Just(RejectCode::Version),
        Just(RejectCode::Job),
        Just(RejectCode::Rank),
        Just(RejectCode::Size),
        Just(RejectCode::Duplicate),
        Just(RejectCode::Protocol),
        Just(RejectCode::Busy),
        Just(RejectCode::Gone),
        Just(RejectCode::Token),
    ];
    let vote = prop_oneof![
        (any::<[u8; 32]>(), any_note()).prop_map(|(plan_hash, note)| Vote::Ready { plan_hash, note }),
        (any_reason(), ".{0,40}").prop_map(|(reason, text)| Vote::Refuse { reason, text }),
    ];
    let cause = prop_oneof![
        ".{0,40}".prop_map(AbortCause::Died),
        ".{0,40}".prop_map(AbortCause::Failed),
        ".{0,40}".prop_map(AbortCause::Stuck),
    ];
    let ranks = || proptest::collection::vec(any::<u32>().prop_map(Rank), 0..20);
    let refusal = proptest::option::of((any::<u32>().prop_map(Rank), any_reason(), ".{0,40}"));
    prop_oneof![
        (any::<u16>(), purpose, any::<[u8; 16]>(), any::<u32>(), any::<u32>(), any::<u32>()).prop_map(
            |(protocol, purpose, job, epoch, rank, size)| Frame::Hello {
                protocol,
                purpose,
                job,
                epoch,
                rank: Rank(rank),
                size
            }
        ),
        (
            any::<u16>(),
            proptest::collection::vec(any::<u16>(), 0..MOST_LANES as usize),
            any::<u32>(),
            any::<bool>()
        )
            .prop_map(|(protocol, lane_ports, heartbeat_us, wan)| Frame::Welcome {
                protocol,
                lane_ports,
                heartbeat_us,
                wan
            }),
        ranks().prop_map(|peers| Frame::Unreached { peers }),
        (code, ".{0,40}").prop_map(|(code, text)| Frame::Reject { code, text }),
        proptest::collection::vec(any_address(), 0..=usize::from(MOST_ADVERTISED))
            .prop_map(|addresses| Frame::Advertise { addresses }),
        proptest::collection::vec(proptest::collection::vec(any_address(), 0..=9), 0..20)
            .prop_map(|rows| Frame::AddressTable { candidates: Candidates::split(&rows).remove(0) }),
        prop_oneof![
            Just(Frame::Meshed),
            Just(Frame::Start),
            Just(Frame::Pong),
            Just(Frame::Leave),
            Just(Frame::Goodbye)
        ],
        (
            proptest::option::of(any::<u32>().prop_map(Rank)),
            proptest::collection::vec(any::<u8>(), 0..40),
            any::<[u8; 32]>()
        )
            .prop_map(|(rank, request, proof)| Frame::Apply { rank, request, proof }),
        (any::<u32>(), any::<u32>(), proptest::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(rank, size, certificate)| Frame::Grant { rank: Rank(rank), size, certificate }),
        (any::<[u8; 16]>(), any::<[u8; 32]>(), any::<[u8; 32]>()).prop_map(
            |(socket, secret_of_guest, secret_of_host)| Frame::ShareMemory {
                offer: MemoryOffer { socket, secret_of_guest, secret_of_host }
            }
        ),
        ".{0,40}".prop_map(|text| Frame::NoSharedMemory { text }),
        vote.prop_map(|vote| Frame::Vote { vote }),
        (any::<u64>(), proptest::collection::vec(any_note(), 0..20)).prop_map(|(round, notes)| {
            Frame::Notes { round, notes: Notes::split(&notes).into_iter().next().unwrap_or_default() }
        }),
        (any::<u64>(), refusal).prop_map(|(round, refusal)| Frame::Verdict { round, refusal }),
        (any::<u64>(), any::<u32>(), any::<bool>()).prop_map(|(round, rank, left)| Frame::Missing {
            round,
            rank: Rank(rank),
            left
        }),
        (any_progress(), any::<u64>(), any::<bool>(), ranks()).prop_map(
            |(progress, beats, works, waits_for)| Frame::Ping { progress, beats, works, waits_for }
        ),
        (any::<u32>(), cause, any_progress()).prop_map(|(culprit, cause, progress)| Frame::Abort {
            abort: Abort { culprit: Rank(culprit), cause, progress }
        }),
        (any::<u32>(), ".{0,40}").prop_map(|(peer, text)| Frame::LinkLost { peer: Rank(peer), text }),
        (proptest::collection::vec((any::<u32>(), any::<bool>(), ranks()), 0..=MOST_CLAIMS), any::<u32>())
            .prop_map(|(claims, patience_ms)| {
                let claim = |(epoch, started, members)| Claim { epoch, started, members };
                Frame::Join { claims: claims.into_iter().map(claim).collect(), patience_ms }
            }),
        (any::<u32>(), ranks()).prop_map(|(epoch, members)| Frame::Members { epoch, members }),
        any_tag().prop_map(|tag| Frame::Want { tag }),
        any_tag().prop_map(|tag| Frame::Done { tag }),
        any_tag().prop_map(|tag| Frame::Withdraw { tag }),
        (any_tag(), ".{0,40}").prop_map(|(tag, text)| Frame::Refuse { tag, text }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_frame_comes_back_the_same_and_is_never_taken_early(frame in any_frame()) {
        let bytes = frame.encode();
        prop_assert!(bytes.len() <= MAX_FRAME_BYTES);
        prop_assert_eq!(Frame::decode(&bytes), Ok(Some((frame, bytes.len()))));
        for end in 0..bytes.len() {
            prop_assert_eq!(Frame::decode(&bytes[..end]), Ok(None));
        }
    }

    #[test]
    fn every_corrupted_byte_of_a_frame_is_noticed(frame in any_frame(), flip in 1_u8..) {
        let bytes = frame.encode();
        for at in 0..bytes.len() {
            let mut corrupt = bytes.clone();
            corrupt[at] ^= flip;
            // A corrupted length may ask for more bytes; it must never yield a frame.
            let decoded = Frame::decode(&corrupt);
            prop_assert!(!matches!(decoded, Ok(Some(_))), "byte {} of {:?}: {:?}", at, frame, decoded);
        }
    }

    #[test]
    fn every_corrupted_byte_of_a_header_is_noticed(job_low: u64, op: u64, message: u32, total_bytes: u64, chunk: u32, flip in 1_u8..) {
        let header = MessageHeader {
            job_low, epoch: 1, from: Rank(0), to: Rank(1), tag: Tag { op, message },
            part_count: 2, part_digest: 3, total_bytes, chunk,
        };
        let bytes = header.encode();
        prop_assert_eq!(MessageHeader::decode(&bytes), Ok(header));
        for at in 0..bytes.len() {
            let mut corrupt = bytes;
            corrupt[at] ^= flip;
            prop_assert!(MessageHeader::decode(&corrupt).is_err(), "byte {at}");
            prop_assert!(MessageHeader::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Frame::decode(&bytes);
        let _ = MessageHeader::decode(&bytes);
        // The same bytes in a valid envelope reach the decoder of the body.
        let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
        framed.extend_from_slice(&bytes);
        framed.extend_from_slice(&crc32c::crc32c(&framed).to_le_bytes());
        let _ = Frame::decode(&framed);
        // With a valid number and layout as well, they reach the fields.
        if let [number, layout, ..] = &mut framed[4..] {
            (*number, *layout) = (*number % 25, 1 + *layout % 2);
            let covered = framed.len() - 4;
            let checksum = crc32c::crc32c(&framed[..covered]);
            framed[covered..].copy_from_slice(&checksum.to_le_bytes());
            if let Ok(Some((frame, _))) = Frame::decode(&framed) {
                prop_assert_eq!(frame.encode(), framed);
            }
        }
    }
}

#[test]
fn the_largest_table_and_the_longest_text_fit_a_frame() {
    for (candidates, frames) in [(0, 1), (1, 1), (2, 2), (9, 6)] {
        let row = vec![SocketAddr::from(([1, 2, 3, 4], 5)); candidates];
        let parts = Candidates::split(&vec![row.clone(); MAX_RANKS as usize]);
        assert_eq!(parts.len(), frames);
        let mut rows = 0;
        for candidates in parts {
            rows += candidates.iter().filter(|found| *found == row).count();
            let table = Frame::AddressTable { candidates };
            assert_eq!(Frame::decode(&table.encode()).unwrap().unwrap().0, table);
        }
        assert_eq!(rows, MAX_RANKS as usize);
    }

    let text = "é".repeat(100_000);
    let bytes = Frame::Refuse { tag: Tag { op: 0, message: 0 }, text }.encode();
    let Ok(Some((Frame::Refuse { text, .. }, _))) = Frame::decode(&bytes) else { panic!("not a refusal") };
    assert_eq!(text.len(), usize::from(MAX_TEXT_BYTES));
}

/// The frames of these notes, decoded again. Each fits the limit of a frame.
fn split_and_back(notes: &[Bytes]) -> (usize, Vec<Bytes>) {
    let frames = Notes::split(notes);
    let decoded = frames.iter().flat_map(|notes| {
        let bytes = Frame::Notes { round: 3, notes: notes.clone() }.encode();
        assert!(bytes.len() <= MAX_FRAME_BYTES, "{} bytes", bytes.len());
        let Ok(Some((Frame::Notes { round: 3, notes }, _))) = Frame::decode(&bytes) else {
            panic!("no notes")
        };
        notes.iter().collect::<Vec<_>>()
    });
    (frames.len(), decoded.collect())
}

#[test]
fn notes_of_the_largest_group_come_back_from_as_few_frames_as_they_fit() {
    let note = |rank: u32, bytes: usize| Bytes::from(vec![rank as u8; bytes]);
    let of = |bytes: fn(u32) -> usize| (0..MAX_RANKS).map(|rank| note(rank, bytes(rank))).collect::<Vec<_>>();
    for (notes, frames) in [
        (of(|_| 0), 0),
        (of(|rank| if rank == 2047 { 1 } else { 0 }), 1),
        (of(|_| 29), 1),
        (of(|_| 30), 2),
        (of(|_| MAX_NOTE_BYTES), 33),
        (of(|rank| rank as usize % (MAX_NOTE_BYTES + 1)), 17),
    ] {
        let (count, back) = split_and_back(&notes);
        assert_eq!(count, frames);
        assert_eq!(back, if frames == 0 { Vec::new() } else { notes });
    }
}

#[test]
fn a_note_beyond_the_limit_is_refused_and_never_encoded() {
    let (longest, longer) = (Bytes::from(vec![7; MAX_NOTE_BYTES]), Bytes::from(vec![7; MAX_NOTE_BYTES + 1]));
    let vote = |note: &Bytes| Frame::Vote { vote: Vote::Ready { plan_hash: [3; 32], note: note.clone() } };
    let notes =
        |note: &Bytes| Frame::Notes { round: 1, notes: Notes::split(std::slice::from_ref(note)).remove(0) };
    for frame in [vote, notes] {
        assert_eq!(frame(&longer).encode(), frame(&longest).encode());
        // One byte more, with the length that goes with it.
        let mut body = frame(&longest).encode();
        body.truncate(body.len() - 4);
        body.push(7);
        let at = body.len() - (MAX_NOTE_BYTES + 1) - 2;
        body[at..at + 2].copy_from_slice(&1025_u16.to_le_bytes());
        let length = body.len() as u32 - 4;
        body[..4].copy_from_slice(&length.to_le_bytes());
        let checksum = crc32c::crc32c(&body);
        body.extend_from_slice(&checksum.to_le_bytes());
        let error = WireError::BadValue { field: "length of a note", value: 1025 };
        assert_eq!(Frame::decode(&body), Err(error));
    }
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_its_bytes_come() {
    let length = MAX_FRAME_BYTES as u32;
    assert_eq!(Frame::decode(&length.to_le_bytes()), Err(WireError::TooLong(u64::from(length))));
}
