//! A hostile member: its certificate is valid, it joins, and then it breaks the protocol. The
//! honest ranks name it as the culprit, or they continue undisturbed. They hold no more memory
//! because of it. Clients outside the group are tested in `strangers.rs`.

use std::time::{Duration, Instant};

use crate::common::member::Member;
use crate::common::*;
use bytes::Bytes;
use kyklos_transport::wire::{Frame, HEADER_BYTES, MessageHeader, part_digest};
use kyklos_transport::{AbortCause, Posted, Progress, Rank, Tag, TransportError, Vote};
use pollster::block_on;
use quinn::VarInt;
use tokio::sync::oneshot;

/// Ranks 0 and 1 are honest; rank 2 is hostile.
pub(crate) const WORLD: u32 = 3;
pub(crate) const HOSTILE: Rank = Rank(2);
const TAG: Tag = Tag { op: 1, message: 0 };

/// A group with a hostile member. Its attack is done when the receiver yields. The member stays
/// until the test drops the group.
pub(crate) struct Group {
    pub(crate) honest: Vec<kyklos_transport::Group>,
    hostile: std::thread::JoinHandle<()>,
    over: oneshot::Sender<()>,
    _alone: std::sync::MutexGuard<'static, ()>,
}

impl Group {
    /// The receiver yields the return value of the attack.
    pub(crate) fn with<T: Send + 'static>(
        deed: impl AsyncFnOnce(&mut Member, MessageHeader) -> T + Send + 'static,
    ) -> (Self, std::sync::mpsc::Receiver<T>) {
        let _alone = alone();
        let job = Job::new();
        let honest = [0, 1].map(|rank| connect(job.config(rank, WORLD)));
        let (over, is_over) = oneshot::channel();
        let (done, is_done) = std::sync::mpsc::channel();
        let hostile = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut member = Member::join(&job, WORLD).await;
                done.send(deed(&mut member, header(&job)).await).unwrap();
                let _ = is_over.await;
            });
        });
        (Self { honest: formed(honest.into()), hostile, over, _alone }, is_done)
    }

    /// Receives that the honest ranks post for each other. They end when the group is aborted. All
    /// must name the hostile rank.
    #[track_caller]
    pub(crate) fn is_aborted_for_the_hostile_one(&self, words: &str) {
        let waiting: Vec<Posted<Vec<Bytes>>> =
            self.honest.iter().map(|one| one.post_recv(Rank(1 - one.rank().0), TAG, &[9], LONG)).collect();
        let started = Instant::now();
        for posted in waiting {
            let error = block_on(posted).unwrap_err();
            let TransportError::Aborted { abort, .. } = &error else { panic!("{error:?}") };
            assert_eq!(abort.culprit, HOSTILE, "{abort}");
            assert!(matches!(abort.cause, AbortCause::Failed(_)), "{abort}");
            assert!(abort.to_string().contains(words), "`{words}` is not in: {abort}");
        }
        assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    }

    /// The honest ranks still exchange messages.
    pub(crate) fn goes_on(&self, op: u64) {
        exchange(&self.honest, op);
        assert!(self.honest.iter().all(|one| !one.recorder().is_aborted()));
    }

    pub(crate) fn end(self) {
        drop(self.over);
        drop(self.honest);
        self.hostile.join().unwrap();
    }
}

/// The header of an unrequested message of 9 bytes from the hostile rank to rank 0.
fn header(job: &Job) -> MessageHeader {
    let [_, _, _, _, _, _, _, _, low @ ..] = job.id.0;
    MessageHeader {
        job_low: u64::from_le_bytes(low),
        epoch: 0,
        from: HOSTILE,
        to: Rank(0),
        tag: TAG,
        part_count: 1,
        part_digest: part_digest([9].into_iter()),
        total_bytes: 9,
        chunk: 0,
    }
}

pub(crate) fn framed(frames: &[Frame]) -> Vec<u8> {
    frames.iter().flat_map(Frame::encode).collect()
}

const SOON: Duration = Duration::from_secs(3);

#[test]
fn a_rank_that_never_reads_is_named_at_the_deadline_and_costs_its_senders_nothing() {
    let large = Tag { op: 1, message: 1 };
    let (group, done) = Group::with(async move |member, _| {
        // It requests everything, reads nothing, and keeps sending heartbeats.
        let wants: Vec<Frame> =
            (1..2000).map(|message| Frame::Want { tag: Tag { op: 1, message } }).collect();
        for line in &member.data {
            line.say(&framed(&wants)).await;
        }
    });
    done.recv().unwrap();
    let before = resident_kib();
    // One message of 512 MiB in which all parts share memory, and two thousand small messages.
    let patience = Duration::from_secs(6);
    let piece = Bytes::from(vec![7; 4 << 20]);
    let mut sent = Vec::new();
    for one in &group.honest {
        sent.push(one.post_send(HOSTILE, large, vec![piece.clone(); 128], patience));
        for message in 2..2000 {
            let small = vec![Bytes::from_static(&[7; 1024])];
            sent.push(one.post_send(HOSTILE, Tag { op: 1, message }, small, patience));
        }
    }
    let started = Instant::now();
    group.goes_on(2);
    let took = resident_kib().saturating_sub(before);
    for (index, posted) in sent.into_iter().enumerate() {
        let error = block_on(posted).unwrap_err();
        let TransportError::Deadline { pending, .. } = &error else { panic!("{index}: {error:?}") };
        assert_eq!((pending.peer, pending.operation), (HOSTILE, "send"), "{error}");
        assert!(error.to_string().contains("rank 2"), "{error}");
    }
    assert!(started.elapsed() < patience + LONG / 2, "{:?}", started.elapsed());
    let after = resident_kib().saturating_sub(before);
    println!("KiB while it does not read: {took}, after: {after}");
    assert!(took.max(after) < 160 << 10, "{took} KiB, then {after} KiB for one that does not read");
    // The hostile rank does not answer a close either.
    let error = block_on(group.honest[0].close(Duration::from_secs(2))).unwrap_err().to_string();
    assert!(error.contains("rank"), "{error}");
    group.end();
}

#[test]
fn frames_to_a_peer_that_does_not_read_do_not_wait_forever() {
    let (group, done) = Group::with(async |_, _| ());
    done.recv().unwrap();
    // The hostile rank receives each of these requests, and never reads it.
    let waiting: Vec<_> = (1..80_000)
        .map(|message| group.honest[0].post_recv(HOSTILE, Tag { op: 1, message }, &[1], LONG))
        .collect();
    group.is_aborted_for_the_hostile_one("frames wait for it, it reads none");
    drop(waiting);
    group.end();
}

#[test]
fn control_frames_in_a_wrong_order_abort_the_group_and_name_the_sender() {
    let progress = Progress { op: 0, step: 0 };
    let ready = Frame::Vote { vote: Vote::ready([3; 32]) };
    let orders: [&[Frame]; 7] = [
        &[Frame::Meshed],
        &[Frame::Start],
        &[Frame::Pong],
        &[Frame::Goodbye, Frame::Leave],
        &[Frame::Leave, ready.clone(), Frame::Leave],
        &[Frame::Verdict { round: 0, refusal: None }, ready],
        &[Frame::Want { tag: TAG }],
    ];
    for frames in orders {
        let said = framed(frames);
        let (group, _done) = Group::with(async move |member, _| member.control.say(&said).await);
        group.is_aborted_for_the_hostile_one("rank 0 says: broke the protocol");
        group.end();
    }
    for frame in [
        Frame::Ping { progress, beats: 0, works: false, waits_for: Vec::new() },
        Frame::Vote { vote: Vote::ready([3; 32]) },
        Frame::Welcome { protocol: 2, lane_ports: Vec::new(), heartbeat_us: 200_000, wan: false },
        Frame::Grant { rank: Rank(1), size: 3, certificate: Vec::new() },
    ] {
        let said = frame.encode();
        let (group, _done) = Group::with(async move |member, _| member.data[1].say(&said).await);
        group.is_aborted_for_the_hostile_one("does not belong on a data connection");
        group.end();
    }
}

#[test]
fn answers_without_a_question_are_harmless() {
    let (group, done) = Group::with(async |member, _| {
        for line in &member.data {
            for message in 0..3000 {
                let tag = Tag { op: 1, message };
                let frames = [
                    Frame::Done { tag },
                    Frame::Withdraw { tag },
                    Frame::Want { tag },
                    Frame::Refuse { tag, text: "no".into() },
                ];
                line.say(&framed(&frames)).await;
            }
        }
    });
    done.recv().unwrap();
    (2..5).for_each(|op| group.goes_on(op));
    group.end();
    // More frames than any plan needs: the other rank must refuse them.
    for frame in [|tag| Frame::Withdraw { tag }, |tag| Frame::Want { tag }] {
        let (group, _done) = Group::with(async move |member, _| {
            let frames: Vec<Frame> = (0..70_000).map(|message| frame(Tag { op: 1, message })).collect();
            member.data[0].say(&framed(&frames)).await;
        });
        group.is_aborted_for_the_hostile_one("more messages than any plan has");
        group.end();
    }
}

#[test]
fn a_member_that_sends_a_wrong_frame_while_the_group_forms_is_named() {
    let _alone = alone();
    let job = Job::new();
    let honest = [0, 1].map(|rank| connect(job.config(rank, WORLD)));
    let hostile = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let member = Member::come(&job, WORLD).await;
            member.control.say(&framed(&[Frame::Leave, Frame::Meshed])).await;
            member.control.connection.closed().await;
        });
    });
    let [zero, one] = honest.map(|rank| rank.join().unwrap().unwrap_err().to_string());
    hostile.join().unwrap();
    assert!(zero.contains("rank 2 sent Leave instead of Meshed"), "{zero}");
    assert!(one.contains("rank 2 sent Leave instead of Meshed"), "{one}");
}

/// Which bytes the hostile rank sends on which stream, and which error the other ranks report.
#[test]
fn broken_frames_and_headers_abort_the_group_and_name_the_sender() {
    let ping = Frame::Pong.encode();
    let mut flipped = ping.clone();
    flipped[4] ^= 0x40;
    let frames = [
        (vec![0xff; 64], "longer than allowed"),
        (vec![0xf8, 0xff, 0xff, 0x00], "longer than allowed"),
        (flipped, "checksum"),
        (vec![0, 0, 0, 0, 0xc1, 0x4b, 0x67, 0x48], ""),
    ];
    for (bytes, words) in frames {
        let (group, _done) = Group::with(async move |member, _| member.data[0].say(&bytes).await);
        group.is_aborted_for_the_hostile_one(words);
        group.end();
    }
    // The stream ends in the middle of a frame.
    let (group, _done) = Group::with(async move |member, _| {
        member.data[0].say(&ping[..5]).await;
        member.data[0].send.lock().await.finish().unwrap();
    });
    group.is_aborted_for_the_hostile_one("ends too early");
    group.end();
    type Change = fn(&mut MessageHeader);
    let headers: [(Change, &str); 7] = [
        (|header| header.epoch = 7, "of another job or epoch (7)"),
        (|header| header.job_low ^= 1, "of another job or epoch"),
        (|header| header.from = Rank(1), "a message from rank 1 to rank 0 on the connection from rank 2"),
        (|header| header.to = Rank(1), "a message from rank 2 to rank 1"),
        (|header| header.total_bytes = u64::MAX, "were sent before they were asked for"),
        (|header| header.total_bytes = 1 << 20, "were sent before they were asked for"),
        (|_| (), "was sent twice"),
    ];
    for (change, words) in headers {
        let (group, _done) = Group::with(async move |member, mut header| {
            change(&mut header);
            let first = member.data[0].stream(&header.encode()).await;
            let second = member.data[0].stream(&header.encode()).await;
            // Nothing is withdrawn.
            std::mem::forget((first, second));
        });
        group.is_aborted_for_the_hostile_one(words);
        group.end();
    }
    let (group, _done) = Group::with(async |member, header: MessageHeader| {
        let mut cut = member.data[0].stream(&header.encode()[..HEADER_BYTES / 2]).await.unwrap();
        cut.finish().unwrap();
    });
    group.is_aborted_for_the_hostile_one("ends within its header");
    group.end();
}

#[test]
fn a_message_that_is_not_what_its_header_says_is_refused_where_it_is_awaited() {
    for (payload, words) in
        [(&b"123456789"[..], "checksum"), (b"1234", "ended"), (b"123456789 and much more than that", "more")]
    {
        let (group, _done) = Group::with(async move |member, header| {
            let mut stream = member.data[0].stream(&header.encode()).await.unwrap();
            let _ = stream.write_all(payload).await;
            // A wrong checksum, at the place of the checksum.
            let _ = if payload.len() == 9 { stream.write_all(&[0; 8]).await } else { Ok(()) };
            let _ = stream.finish();
        });
        let error = block_on(group.honest[0].post_recv(HOSTILE, TAG, &[9], LONG)).unwrap_err();
        println!("{words}: {error}");
        assert!(matches!(&error, TransportError::PeerMisbehaved { peer: HOSTILE, .. }), "{error:?}");
        group.is_aborted_for_the_hostile_one("broke the protocol");
        group.end();
    }
}

#[test]
fn streams_that_are_opened_and_left_empty_stay_few_and_disturb_nobody() {
    let (group, done) = Group::with(async |member, header| {
        let mut open = Vec::new();
        let byte = &header.encode()[..1];
        for _ in 0..5000 {
            match tokio::time::timeout(Duration::from_millis(300), member.data[0].stream(byte)).await {
                Ok(Some(stream)) => open.push(stream),
                _ => break,
            }
        }
        let more =
            tokio::time::timeout(Duration::from_millis(300), member.data[0].connection.open_bi()).await;
        let count = (open.len(), more.is_ok());
        std::mem::forget(open);
        count
    });
    let before = resident_kib();
    let (streams, another_conversation) = done.recv().unwrap();
    (2..5).for_each(|op| group.goes_on(op));
    // The messages of a plan that are in flight (`link.rs` has the limit), and the one stream of
    // frames.
    assert_eq!((streams, another_conversation), (256, false));
    let took = resident_kib().saturating_sub(before);
    assert!(took < 64 << 10, "{took} KiB for streams without a byte of a message");
    group.end();
}

#[test]
fn streams_that_are_reset_by_the_thousand_leave_nothing_behind() {
    let (group, done) = Group::with(async |member, header| {
        let line = &member.data[0];
        let mut resets = 0;
        for at in 0..20_000_usize {
            // The stream ends within the header, at every length.
            let Some(mut stream) = line.stream(&header.encode()[..at % HEADER_BYTES]).await else { break };
            resets += usize::from(stream.reset(VarInt::from_u32(1)).is_ok());
        }
        resets
    });
    group.goes_on(2);
    let before = resident_kib();
    assert_eq!(done.recv().unwrap(), 20_000);
    group.goes_on(3);
    let took = resident_kib().saturating_sub(before);
    assert!(took < 32 << 10, "{took} KiB for streams that are gone");
    group.end();
}

#[test]
fn a_member_that_keeps_misbehaving_is_answered_once() {
    let (group, done) = Group::with(async |member, header: MessageHeader| {
        let line = &mut member.data[0];
        let mut said = 0;
        for at in 0..2000 {
            let wrong = MessageHeader { total_bytes: 1 << 20, tag: Tag { op: 1, message: at }, ..header };
            match tokio::time::timeout(SOON, line.stream(&wrong.encode())).await {
                // The stream ends there. That makes room for the next stream.
                Ok(Some(_)) => said += 1,
                _ => break,
            }
        }
        let mut refusals = 0;
        while let Some(frame) = line.hear(Duration::from_millis(500)).await {
            refusals += usize::from(matches!(frame, Frame::Refuse { .. }));
        }
        (said, refusals)
    });
    group.is_aborted_for_the_hostile_one("were sent before they were asked for");
    let (said, answered) = done.recv().unwrap();
    // The frames that a rank reads before the first of them aborts the group.
    assert!(said == 2000 && answered < 50, "{said} broken messages were answered {answered} times");
    group.end();
}
