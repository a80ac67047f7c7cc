//! A peer with a valid certificate that misuses the memory it shares: each attempt ends in an error
//! that names it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use twox_hash::XxHash3_64;

use super::free_address::free_address;
use crate::error::{AbortCause, TransportError};
use crate::posted::Posted;
use crate::quic::shared_memory::meeting::{Meeting, MeetingPlace, accept};
use crate::quic::shared_memory::notices::{NOTICE_BYTES, Notice};
use crate::quic::shared_memory::segment::{SLOTS, SegmentSize};
use crate::quic::transport::bind;
use crate::quic::*;
use crate::rank::{Rank, Tag};
use crate::transport::Transport;
use crate::wire::{MessageHeader, part_digest};

const LONG: Duration = Duration::from_secs(60);
const TAG: Tag = Tag { op: 3, message: 1 };
const JOB: JobId = JobId([6; 16]);

/// Bytes of the message that rank 0 waits for: a whole chunk, and a part of one.
const BYTES: usize = 600_000;

/// Rank 0 shares memory with a peer that the test plays. Everything else of rank 1 is honest.
struct Stage {
    zero: QuicTransport,
    one: QuicTransport,
    hostile: Meeting,
    chunk_bytes: usize,
}

impl Stage {
    async fn set() -> Self {
        let authority = ClusterAuthority::new(JOB).unwrap();
        let coordinator = free_address();
        let [zero, one] = [0, 1].map(|rank| {
            let config = config(&authority, rank, coordinator);
            let source = bind(&config).unwrap();
            QuicTransport::form_on(config, source, None)
        });
        let (zero, one) = tokio::join!(zero, one);
        let (zero, one) = (zero.unwrap(), one.unwrap());
        let size = SegmentSize::of_group(2).unwrap();
        let (place, offer) = MeetingPlace::open().unwrap();
        let (honest, hostile) = tokio::join!(place.meet(size), accept(offer, size));
        zero.core.met(Rank(1), honest);
        Self { zero, one, hostile: hostile.unwrap(), chunk_bytes: size.chunk_bytes }
    }

    /// The header of a chunk of the message that rank 0 waits for.
    fn header(&self, chunk: u32) -> MessageHeader {
        MessageHeader {
            job_low: JOB.low(),
            epoch: 0,
            from: Rank(1),
            to: Rank(0),
            tag: TAG,
            part_count: 1,
            part_digest: part_digest([BYTES].into_iter()),
            total_bytes: BYTES as u64,
            chunk,
        }
    }

    fn payload() -> Vec<u8> {
        (0..BYTES).map(|at| (at * 7 + at / 251) as u8).collect()
    }

    /// Puts the bytes of a chunk where an honest rank puts them.
    fn fill(&self, slot: usize, chunk: usize) -> u64 {
        let payload = Self::payload();
        let bytes = payload.chunks(self.chunk_bytes).nth(chunk).unwrap();
        self.hostile.outgoing.write(slot, 0, bytes).unwrap();
        XxHash3_64::oneshot(bytes)
    }

    async fn say(&mut self, notice: Notice) {
        // Rank 0 may have hung up.
        let _ = self.hostile.socket.write_all(&notice.encode()).await;
    }

    async fn say_chunk(&mut self, header: MessageHeader, checksum: u64) {
        self.say(Notice::Chunk { header: header.encode(), checksum }).await;
    }

    fn receive(&self) -> Posted<Vec<Bytes>> {
        self.zero.post_recv(Rank(1), TAG, &[BYTES], LONG)
    }

    /// The group is aborted, rank 1 is named, and the error has these words.
    async fn assert_named(self, received: Posted<Vec<Bytes>>, words: &str) {
        let started = Instant::now();
        let error = received.await.unwrap_err();
        let later = self.zero.post_recv(Rank(1), Tag { op: 4, message: 0 }, &[1], LONG).await.unwrap_err();
        let TransportError::Aborted { abort, .. } = &later else { panic!("{later:?}") };
        assert!(abort.culprit == Rank(1) && matches!(abort.cause, AbortCause::Failed(_)), "{abort}");
        for text in [error.to_string(), abort.to_string()] {
            assert!(text.contains(words), "no `{words}` in: {text}");
        }
        assert!(started.elapsed() < LONG / 2);
        let (zero, one) = tokio::join!(self.zero.close(LONG), self.one.close(LONG));
        assert!(zero.is_err() && one.is_err());
    }
}

fn config(authority: &ClusterAuthority, rank: u32, coordinator: SocketAddr) -> QuicConfig {
    let identity = authority.issue(Rank(rank)).unwrap();
    let link = LinkSettings { shared_memory: false, ..LinkSettings::default() };
    QuicConfig { link, ..QuicConfig::new(Rank(rank), 2, JOB, coordinator, identity) }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test);
}

/// The control of the other tests: the played peer can also be honest.
#[test]
fn what_an_honest_peer_does_arrives() {
    run(async {
        let mut stage = Stage::set().await;
        let received = stage.receive();
        for chunk in [0, 1] {
            let checksum = stage.fill(chunk, chunk);
            stage.say_chunk(stage.header(chunk as u32), checksum).await;
        }
        assert_eq!(received.await.unwrap(), [Stage::payload()]);
        let figures = stage.zero.connections()[1].unwrap();
        assert_eq!((figures.shared_bytes_sent, figures.shared_bytes_received), (0, BYTES as u64));
    });
}

/// What the peer says of a chunk that rank 0 waits for, and what rank 0 says of the peer.
#[test]
fn headers_that_do_not_fit_the_plan_name_the_peer() {
    type Lie = fn(&mut MessageHeader);
    let lies: [(Lie, &str); 9] = [
        (|header| header.total_bytes = u64::MAX, "expects parts of"),
        (|header| header.total_bytes = 1, "expects parts of"),
        (|header| header.part_count = 2, "expects parts of"),
        (|header| header.part_digest ^= 1, "expects parts of"),
        (|header| header.chunk = 2, "more chunks than its bytes fill"),
        (|header| header.chunk = u32::MAX, "more chunks than its bytes fill"),
        (|header| header.to = Rank(1), "on the connection from rank 1 to rank 0"),
        (|header| header.from = Rank(0), "on the connection from rank 1 to rank 0"),
        (|header| header.epoch = 9, "another job or epoch"),
    ];
    for (lie, words) in lies {
        run(async {
            let mut stage = Stage::set().await;
            let received = stage.receive();
            let mut header = stage.header(0);
            lie(&mut header);
            stage.say_chunk(header, 0).await;
            stage.assert_named(received, words).await;
        });
    }
}

#[test]
fn bytes_that_change_or_were_never_there_name_the_peer() {
    run(async {
        let mut stage = Stage::set().await;
        let received = stage.receive();
        let checksum = stage.fill(0, 0);
        stage.hostile.outgoing.write(0, stage.chunk_bytes - 1, &[0xff]).unwrap();
        stage.say_chunk(stage.header(0), checksum ^ 1).await;
        stage.assert_named(received, "bytes that do not fit their checksum").await;
    });
}

#[test]
fn a_chunk_that_comes_twice_or_unasked_names_the_peer() {
    run(async {
        let mut stage = Stage::set().await;
        let received = stage.receive();
        let checksum = stage.fill(0, 0);
        stage.fill(1, 0);
        stage.say_chunk(stage.header(0), checksum).await;
        stage.say_chunk(stage.header(0), checksum).await;
        stage.assert_named(received, "a chunk that was sent twice").await;
    });
    for (bytes, words) in [(BYTES as u64, "before they were asked for"), (9, "before it was asked for")] {
        run(async {
            let mut stage = Stage::set().await;
            let other = stage.zero.post_recv(Rank(1), Tag { op: 3, message: 9 }, &[1], LONG);
            let header = MessageHeader { total_bytes: bytes, ..stage.header(0) };
            stage.say_chunk(header, 0).await;
            stage.assert_named(other, words).await;
        });
    }
}

#[test]
fn notices_that_no_honest_rank_sends_name_the_peer() {
    run(async {
        let mut stage = Stage::set().await;
        let received = stage.receive();
        stage.say(Notice::Free(1)).await;
        stage.assert_named(received, "more chunks read than were sent").await;
    });
    run(async {
        let mut stage = Stage::set().await;
        let received = stage.receive();
        let _ = stage.hostile.socket.write_all(&[0x55; NOTICE_BYTES]).await;
        stage.assert_named(received, "no notice").await;
    });
    run(async {
        let mut stage = Stage::set().await;
        let received = stage.receive();
        stage.say(Notice::Chunk { header: [7; 64], checksum: 0 }).await;
        stage.assert_named(received, "do not begin like").await;
    });
}

/// A peer that reads no answers cannot make this rank hold anything.
#[test]
fn notices_without_end_end_the_group() {
    run(async {
        let mut stage = Stage::set().await;
        // Given up at once: its chunks are dropped, and their slots are free again.
        let late = stage.zero.post_recv(Rank(1), TAG, &[BYTES], Duration::ZERO);
        assert!(matches!(late.await, Err(TransportError::Deadline { .. })));
        let other = stage.zero.post_recv(Rank(1), Tag { op: 3, message: 9 }, &[1], LONG);
        let notice = Notice::Chunk { header: stage.header(0).encode(), checksum: 0 }.encode();
        let flood = notice.repeat(1000);
        let until = Instant::now() + LONG / 2;
        while Instant::now() < until {
            let written = tokio::time::timeout(Duration::from_millis(200), async {
                stage.hostile.socket.write_all(&flood).await
            });
            if !matches!(written.await, Ok(Ok(()))) {
                break;
            }
        }
        stage.assert_named(other, "more chunks than its shared memory holds").await;
    });
}

#[test]
fn a_receiver_that_frees_nothing_ends_the_send_at_its_deadline() {
    run(async {
        let mut stage = Stage::set().await;
        let bytes = stage.chunk_bytes * (SLOTS + 3);
        let wanted = stage.one.post_recv(Rank(0), TAG, &[bytes], LONG);
        let sent =
            stage.zero.post_send(Rank(1), TAG, vec![Bytes::from(vec![1; bytes])], Duration::from_secs(1));
        let mut notices = vec![0; SLOTS * NOTICE_BYTES];
        stage.hostile.socket.read_exact(&mut notices).await.unwrap();
        let error = sent.await.unwrap_err();
        let TransportError::Deadline { pending, .. } = &error else { panic!("{error:?}") };
        let filled = (stage.chunk_bytes * SLOTS) as u64;
        assert_eq!((pending.bytes_done, pending.bytes_expected), (filled, bytes as u64));
        drop(wanted);
        // The group is as before.
        let small = stage.zero.post_send(Rank(1), Tag { op: 5, message: 0 }, vec!["a".into()], LONG);
        let received = stage.one.post_recv(Rank(0), Tag { op: 5, message: 0 }, &[1], LONG);
        assert_eq!(received.await.unwrap(), ["a"]);
        small.await.unwrap();
    });
}

#[test]
fn a_peer_that_leaves_its_memory_and_stays_in_the_group_assert_named() {
    run(async {
        let Stage { zero, one, hostile, .. } = Stage::set().await;
        let received = zero.post_recv(Rank(1), TAG, &[BYTES], LONG);
        drop(hostile);
        let error = received.await.unwrap_err();
        assert!(error.to_string().contains("left its shared memory and not the group"), "{error}");
        let _ = tokio::join!(zero.close(LONG), one.close(LONG));
    });
}

#[test]
fn an_offer_out_of_turn_names_the_peer() {
    run(async {
        let Stage { zero, one, .. } = Stage::set().await;
        let (_place, offer) = MeetingPlace::open().unwrap();
        let received = zero.post_recv(Rank(1), TAG, &[BYTES], LONG);
        one.core.link(Rank(0)).unwrap().say(crate::wire::Frame::ShareMemory { offer });
        let error = received.await.unwrap_err();
        assert!(error.to_string().contains("offers shared memory out of turn"), "{error}");
        let _ = tokio::join!(zero.close(LONG), one.close(LONG));
    });
}
