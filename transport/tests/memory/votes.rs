//! Hostile votes and verdicts: the honest ranks name their sender, and hold no more memory because
//! of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::quic::{LinkProfile, LinkSettings, QuicConfig};
use kyklos_transport::wire::{Frame, Notes};
use kyklos_transport::{AbortCause, MAX_NOTE_BYTES, Rank, RefusalReason, TransportError, Vote};
use pollster::block_on;
use tokio::sync::oneshot;

use crate::common::coordinator::Coordinator;
use crate::common::*;
use crate::members::{Group, framed};

/// A body with the right length before it and the right checksum after it.
fn enveloped(body: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
    frame.extend_from_slice(body);
    frame.extend_from_slice(&crc32c::crc32c(&frame).to_le_bytes());
    frame
}

/// A vote whose note has `bytes` bytes, but says that it has `length`.
fn vote(length: u16, bytes: usize) -> Vec<u8> {
    enveloped(&[&[7, 2, 0][..], &[3; 32], &length.to_le_bytes(), &vec![b'n'; bytes]].concat())
}

fn note(bytes: usize) -> Bytes {
    Bytes::from(vec![b'n'; bytes])
}

#[test]
fn early_votes_are_limited() {
    for bytes in [0, MAX_NOTE_BYTES] {
        let (begin, is_begun) = oneshot::channel::<()>();
        let (group, _done) = Group::with(async move |member, _| {
            let ready = Frame::Vote { vote: Vote::Ready { plan_hash: [3; 32], note: note(bytes) } };
            let votes = framed(&vec![ready; 50]);
            is_begun.await.unwrap();
            for _ in 0..1000 {
                member.control.say(&votes).await;
            }
        });
        // By now the honest ranks have allocated all memory that they need for each other.
        exchange(&group.honest, 2);
        let before = resident_kib();
        begin.send(()).unwrap();
        group.is_aborted_for_the_hostile_one("rounds that other ranks have not voted in");
        let took = resident_kib().saturating_sub(before);
        println!("{took} KiB for early votes with notes of {bytes} bytes");
        // The notes of 1024 rounds are 1 MiB, and what is on its way fits the windows of one connection.
        assert!(took < 16 << 10, "{took} KiB for early votes with notes of {bytes} bytes");
        group.end();
    }
}

#[test]
fn verdicts_with_notes_that_a_member_does_not_read_are_limited() {
    let vote = || Vote::Ready { plan_hash: [3; 32], note: note(MAX_NOTE_BYTES) };
    let reached = Arc::new(AtomicU64::new(0));
    let rounds = Arc::clone(&reached);
    let (group, _done) = Group::with(async move |member, _| {
        // It votes with the others, and never reads a verdict.
        let votes = framed(&vec![Frame::Vote { vote: vote() }; 50]);
        for round in (0..60_000).step_by(50) {
            while round > rounds.load(Ordering::Relaxed) + 500 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            member.control.say(&votes).await;
        }
    });
    exchange(&group.honest, 2);
    let before = resident_kib();
    let ended_after = std::thread::scope(|scope| {
        let ranks = group.honest.iter().map(|one| {
            let reached = Arc::clone(&reached);
            scope.spawn(move || {
                (0..60_000).find(|&round| {
                    reached.fetch_max(round, Ordering::Relaxed);
                    block_on(one.agree(vote(), LONG)).is_err()
                })
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    // The rest of the hostile votes are no longer waited for.
    reached.store(60_000, Ordering::Relaxed);
    let took = resident_kib().saturating_sub(before);
    println!("{took} KiB for unread verdicts, the group ended after {ended_after:?} agreements");
    group.is_aborted_for_the_hostile_one("frames wait for it, it reads none");
    // Of verdicts with three notes of 1 KiB, about 16,000 fit the limit of 64 MiB.
    assert!(took < 96 << 10, "{took} KiB for unread verdicts");
    group.end();
}

#[test]
fn votes_with_broken_notes_abort_the_group_and_name_the_sender() {
    let notes = Frame::Notes { round: 0, notes: Notes::split(&[note(3)]).remove(0) };
    for (bytes, words) in [
        // One byte too many, whether the bytes are there or not.
        (vote(1025, 1025), "broke the protocol: length of a note cannot be 1025"),
        (vote(u16::MAX, 10), "broke the protocol: length of a note cannot be 65535"),
        // Cut within the note, and bytes that follow it.
        (vote(100, 60), "broke the protocol: the frame ends too early"),
        (vote(100, 101), "broke the protocol: 1 bytes follow the last field"),
        // The layout of the last version.
        (enveloped(&[&[7, 1, 0][..], &[3; 32]].concat()), "version 1 of a frame is not known"),
        // Only the coordinator sends notes.
        (notes.encode(), "broke the protocol: Notes"),
    ] {
        let (group, _done) = Group::with(async move |member, _| member.control.say(&bytes).await);
        group.is_aborted_for_the_hostile_one(words);
        group.end();
    }
    // The stream ends in the middle of the note.
    let (group, _done) = Group::with(async move |member, _| {
        let mut send = member.control.send.lock().await;
        send.write_all(&vote(100, 100)[..80]).await.unwrap();
        send.finish().unwrap();
    });
    group.is_aborted_for_the_hostile_one("ends too early");
    group.end();
}

#[test]
fn verdicts_with_wrong_notes_end_the_call_and_name_the_coordinator() {
    let _alone = alone();
    let notes = |round, count| {
        let notes = Notes::split(&vec![note(3); count]).remove(0);
        Frame::Notes { round, notes }.encode()
    };
    let verdict = |round| Frame::Verdict { round, refusal: None }.encode();
    let refusal = Some((Rank(0), RefusalReason::Failed, "no".to_owned()));
    let refused = Frame::Verdict { round: 0, refusal }.encode();
    // Two notes: number and layout, round, count, then only one of the two lengths.
    let cut = enveloped(&[&[24, 1][..], &[0; 8], &[2, 0, 0, 0], &[3, 0]].concat());
    let short = enveloped(&[&[24, 1][..], &[0; 8], &[2, 0, 0, 0], &[3, 0, 3, 0], b"nnnn"].concat());
    let long = enveloped(&[&[24, 1][..], &[0; 8], &[1, 0, 0, 0], &1025_u16.to_le_bytes()].concat());
    let many = enveloped(&[&[24, 1][..], &[0; 8], &2049_u32.to_le_bytes()].concat());
    for (said, words) in [
        ([notes(0, 1), verdict(0)].concat(), "1 notes in agreement 0 of 2 ranks"),
        (notes(0, 3), "3 notes in agreement 0 of 2 ranks"),
        ([notes(0, 1), notes(0, 2)].concat(), "3 notes in agreement 0 of 2 ranks"),
        ([notes(1, 1), verdict(0)].concat(), "agreement 0 follows notes of agreement 1"),
        ([notes(0, 1), notes(1, 1)].concat(), "agreement 1 follows notes of agreement 0"),
        ([notes(0, 2), refused].concat(), "notes in agreement 0, which was refused"),
        (cut, "the frame ends too early"),
        (short, "the frame ends too early"),
        (long, "length of a note cannot be 1025"),
        (many, "number of notes cannot be 2049"),
    ] {
        let job = Job::new();
        // The coordinator sends no heartbeats, and is to be dead only after 15 s.
        let link = LinkSettings { profile: LinkProfile::Wan, ..over_quic() };
        let honest = connect(QuicConfig { link, ..job.config(1, 2) });
        let (over, is_over) = oneshot::channel::<()>();
        let hostile = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let welcome = welcome_over(LinkProfile::Wan);
                let mut coordinator = Coordinator::form_as(&job, 0, &welcome).await;
                while !matches!(coordinator.control.hear(LONG).await.unwrap(), Frame::Vote { .. }) {}
                coordinator.control.say(&said).await;
                let _ = is_over.await;
            });
        });
        let honest = honest.join().unwrap().unwrap();
        let error = block_on(honest.agree(Vote::ready([3; 32]), LONG)).unwrap_err();
        let TransportError::Aborted { abort, .. } = &error else { panic!("{error:?}") };
        assert_eq!(abort.culprit, Rank(0), "{abort}");
        assert!(matches!(abort.cause, AbortCause::Failed(_)), "{abort}");
        assert!(abort.to_string().contains(&format!("broke the protocol: {words}")), "`{words}`: {abort}");
        drop(over);
        hostile.join().unwrap();
    }
}
