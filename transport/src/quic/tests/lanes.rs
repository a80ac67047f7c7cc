//! Several connections between two ranks: all of them carry messages, none delays the others, and
//! both sides have the same number.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tracing::Instrument;

use super::free_address::free_address;
use crate::error::TransportError;
use crate::quic::control::link::Link;
use crate::quic::transport::bind;
use crate::quic::*;
use crate::rank::{Rank, Tag};
use crate::transport::Transport;

const LONG: Duration = Duration::from_secs(30);

pub(super) const JOB: JobId = JobId([4; 16]);

pub(super) fn config(
    authority: &ClusterAuthority,
    rank: u32,
    coordinator: SocketAddr,
    lanes: u8,
) -> QuicConfig {
    let identity = authority.issue(Rank(rank)).unwrap();
    let link = LinkSettings { lanes, shared_memory: false, ..LinkSettings::default() };
    let connect_deadline = Duration::from_secs(5);
    QuicConfig { link, connect_deadline, ..QuicConfig::new(Rank(rank), 2, JOB, coordinator, identity) }
}

pub(super) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn pair(lanes: [u8; 2]) -> [Result<QuicTransport, TransportError>; 2] {
    let authority = ClusterAuthority::new(JOB).unwrap();
    let coordinator = free_address();
    let [zero, one] = [0, 1].map(|rank| {
        let config = config(&authority, rank, coordinator, lanes[rank as usize]);
        let source = bind(&config).unwrap();
        QuicTransport::form_on(config, source, None)
    });
    let (zero, one) = tokio::join!(zero, one);
    [zero, one]
}

fn link(rank: &QuicTransport, peer: u32) -> &Link {
    rank.core.link(Rank(peer)).unwrap()
}

/// Bytes that each lane of rank 0 to rank 1 has sent.
fn sent(zero: &QuicTransport) -> Vec<u64> {
    link(zero, 1).lanes.iter().map(|lane| lane.connection.stats().udp_tx.bytes).collect()
}

pub(super) async fn send(zero: &QuicTransport, one: &QuicTransport, bytes: usize) {
    let tag = Tag { op: 0, message: 0 };
    let payload: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
    let parts = vec![Bytes::from(payload[..99_999].to_vec()), Bytes::from(payload[99_999..].to_vec())];
    let received = one.post_recv(Rank(0), tag, &[99_999, bytes - 99_999], LONG);
    let posted = zero.post_send(Rank(1), tag, parts, LONG);
    assert_eq!(received.await.unwrap().concat(), payload);
    posted.await.unwrap();
}

pub(super) async fn close(zero: QuicTransport, one: QuicTransport) {
    let (zero, one) = tokio::join!(zero.close(LONG), one.close(LONG));
    zero.unwrap();
    one.unwrap();
}

#[test]
fn all_lanes_carry_a_large_message() {
    runtime().block_on(async {
        let [zero, one] = pair([3, 3]).await.map(Result::unwrap);
        send(&zero, &one, 24 << 20).await;
        let sent = sent(&zero);
        assert!(sent.len() == 3 && sent.iter().all(|&bytes| bytes > 2 << 20), "{sent:?}");
        let figures = zero.connections()[1].unwrap();
        assert!(figures.bytes_sent >= sent.iter().sum(), "{figures:?}");
        close(zero, one).await;
    });
}

#[test]
fn a_lane_that_is_slow_leaves_the_chunks_to_the_others() {
    runtime().block_on(async {
        let [zero, one] = pair([2, 2]).await.map(Result::unwrap);
        // A few KiB for each round trip, which takes a millisecond here when acknowledgements wait.
        link(&zero, 1).lanes[1].connection.set_send_window(4 << 10);
        let begun = Instant::now();
        send(&zero, &one, 24 << 20).await;
        let sent = sent(&zero);
        println!("{sent:?} in {:?}", begun.elapsed());
        assert!(sent[0] > 4 * sent[1], "{sent:?}");
        close(zero, one).await;
    });
}

/// The windows are smaller and larger than the messages: in the first case the connection has not
/// taken all of a message while another one could begin, in the second it has all of them before
/// most have left.
#[test]
fn large_messages_leave_one_after_the_other() {
    let bytes = 16 << 20;
    for window in [1 << 20, 1 << 30] {
        runtime().block_on(async {
            let [zero, one] = pair([1, 1]).await.map(Result::unwrap);
            link(&zero, 1).connection.set_send_window(window);
            let tag = |message| Tag { op: 0, message };
            let received: Vec<_> =
                (0..3).map(|message| one.post_recv(Rank(0), tag(message), &[bytes], LONG)).collect();
            let payload = Bytes::from(vec![1; bytes]);
            let sent: Vec<_> = (0..3)
                .map(|message| zero.post_send(Rank(1), tag(message), vec![payload.clone()], LONG))
                .collect();
            let (mut samples, mut mixed, until) = (0, Vec::new(), Instant::now() + LONG);
            loop {
                let mut done: Vec<_> = one.outstanding().into_iter().map(|call| call.pending).collect();
                if done.is_empty() || Instant::now() > until {
                    break;
                }
                done.sort_by_key(|call| call.tag.message);
                // What has arrived of the next message came when this one had left; what was lost of it may
                // still come.
                for pair in done.windows(2).filter(|pair| pair[1].bytes_done > bytes as u64 / 4) {
                    samples += 1;
                    if pair[0].bytes_done <= bytes as u64 * 3 / 4 {
                        mixed.push(done.clone());
                    }
                }
                tokio::task::yield_now().await;
            }
            println!("window {window}: {samples} samples with a message before its end beside a later one");
            for posted in received {
                posted.await.unwrap();
            }
            for posted in sent {
                posted.await.unwrap();
            }
            // The sender learns of a loss later than the receiver.
            let lost = zero.connections()[1].unwrap().packets_lost;
            assert!(lost > 0 || mixed.is_empty(), "window {window}: {mixed:?}");
            close(zero, one).await;
        });
    }
}

/// The windows limit the bytes of unrequested messages that can be sent. A connection that carries
/// messages has larger windows than a connection that is not admitted yet.
#[test]
fn a_lane_that_carries_messages_has_the_windows_for_it() {
    runtime().block_on(async {
        let [zero, one] = pair([1, 1]).await.map(Result::unwrap);
        let bytes = 60_000;
        let posted: Vec<_> = (0..40)
            .map(|message| {
                let parts = vec![Bytes::from(vec![1; bytes])];
                zero.post_send(Rank(1), Tag { op: 0, message }, parts, LONG)
            })
            .collect();
        let handed_over = || zero.outstanding().iter().map(|call| call.pending.bytes_done).sum::<u64>();
        let until = Instant::now() + Duration::from_secs(10);
        while handed_over() < 40 * bytes as u64 && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // All bytes are in flight or have arrived, and no receive has been posted.
        assert_eq!(handed_over(), 40 * bytes as u64);
        for (message, sent) in (0..).zip(posted) {
            one.post_recv(Rank(0), Tag { op: 0, message }, &[bytes], LONG).await.unwrap();
            sent.await.unwrap();
        }
        close(zero, one).await;
    });
}

/// Names of spans, each with that of its parent.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    all: Vec<(&'static str, Option<&'static str>)>,
    entered: Vec<usize>,
}

impl tracing::Subscriber for Spans {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &tracing::span::Attributes<'_>) -> tracing::Id {
        let mut seen = self.0.lock().unwrap();
        let number = |id: &tracing::Id| id.into_u64() as usize - 1;
        let parent = span
            .parent()
            .map(number)
            .or_else(|| seen.entered.last().copied().filter(|_| span.is_contextual()));
        let parent = parent.map(|parent| seen.all[parent].0);
        seen.all.push((span.metadata().name(), parent));
        tracing::Id::from_u64(seen.all.len() as u64)
    }

    fn enter(&self, id: &tracing::Id) {
        self.0.lock().unwrap().entered.push(id.into_u64() as usize - 1);
    }

    fn exit(&self, _: &tracing::Id) {
        self.0.lock().unwrap().entered.pop();
    }

    fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
}

#[test]
fn spans_lead_from_a_step_to_its_chunks() {
    let message = || {
        runtime().block_on(async {
            let [zero, one] = pair([2, 2]).await.map(Result::unwrap);
            send(&zero, &one, 1 << 20).instrument(tracing::info_span!("step")).await;
            close(zero, one).await;
        });
    };
    // With one subscriber, a span that another test's thread enters first stays off for ever: that
    // thread has none. With two, all of them are asked. A span whose first use was under way
    // meanwhile is asked again after the first message.
    let _another = tracing::Dispatch::new(Spans::default());
    let spans = Spans::default();
    let _seen = tracing::subscriber::set_default(spans.clone());
    message();
    tracing::callsite::rebuild_interest_cache();
    *spans.0.lock().unwrap() = Seen::default();
    message();
    let seen = spans.0.lock().unwrap();
    let count = |name, parent| seen.all.iter().filter(|span| **span == (name, Some(parent))).count();
    assert_eq!((count("send", "step"), count("receive", "step")), (1, 1));
    assert_eq!((count("chunk", "send"), count("chunk", "receive")), (4, 4));
}

#[test]
fn ranks_with_different_numbers_of_lanes_are_told_so() {
    runtime().block_on(async {
        for lanes in [[2, 1], [1, 3]] {
            let errors = pair(lanes).await.map(|formed| formed.err().unwrap().to_string());
            let said = format!("rank 0 has {} lanes to every other rank, rank 1 has {}", lanes[0], lanes[1]);
            assert!(errors.iter().all(|error| error.contains(&said)), "{errors:?}");
        }
    });
}
