//! Several connections between two ranks: all carry, none holds up the others, and both sides have as many.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::core::Link;
use super::*;

const LONG: Duration = Duration::from_secs(30);

const JOB: JobId = JobId([4; 16]);

fn config(authority: &ClusterAuthority, rank: u32, coordinator: SocketAddr, lanes: u8) -> QuicConfig {
    let identity = authority.issue(Rank(rank)).unwrap();
    let link = LinkSettings { lanes, ..LinkSettings::default() };
    let connect_deadline = Duration::from_secs(5);
    QuicConfig { link, connect_deadline, ..QuicConfig::new(Rank(rank), 2, JOB, coordinator, identity) }
}

fn free_address() -> SocketAddr {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn pair(lanes: [u8; 2]) -> [Result<QuicTransport, TransportError>; 2] {
    let authority = ClusterAuthority::new(JOB).unwrap();
    let coordinator = free_address();
    let [zero, one] = [0, 1].map(|rank| {
        let config = config(&authority, rank, coordinator, lanes[rank as usize]);
        let ground = bind(&config).unwrap();
        QuicTransport::form_on(config, ground, None)
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

async fn send(zero: &QuicTransport, one: &QuicTransport, bytes: usize) {
    let tag = Tag { op: 0, message: 0 };
    let payload: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
    let parts = vec![Bytes::from(payload[..99_999].to_vec()), Bytes::from(payload[99_999..].to_vec())];
    let received = one.post_recv(Rank(0), tag, &[99_999, bytes - 99_999], LONG);
    let posted = zero.post_send(Rank(1), tag, parts, LONG);
    assert_eq!(received.await.unwrap().concat(), payload);
    posted.await.unwrap();
}

async fn close(zero: QuicTransport, one: QuicTransport) {
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
