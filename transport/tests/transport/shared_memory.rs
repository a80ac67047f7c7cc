//! Ranks on one host that share memory keep the contract, and say how much of it they use.

use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::quic::{LinkSettings, QuicConfig, quic_loopback_group_over};
use kyklos_transport::{Rank, Tag};
use pollster::block_on;

use crate::common::{Job, close, connect, formed, over_quic};
use crate::conformance::{Ranks, payload};

const LONG: Duration = Duration::from_secs(60);

fn make(size: u32) -> Ranks {
    quic_loopback_group_over(size, LinkSettings::default()).expect("a group over loopback")
}

conformance_tests!(make);

/// With more lanes the chunks of QUIC have another size than those in shared memory.
mod beside_lanes {
    use super::*;

    fn make(size: u32) -> Ranks {
        let link = LinkSettings { lanes: 2, ..LinkSettings::default() };
        quic_loopback_group_over(size, link).expect("a group over loopback")
    }

    conformance_tests!(make: payloads_of_all_sizes_and_part_counts_arrive_unchanged bursts_from_everyone_to_everyone_arrive);
}

/// Sends one message from rank `from` to the other one, and returns what arrived.
fn sent(group: &Ranks, from: u32, message: u32, parts: &[Bytes]) -> Vec<Bytes> {
    let (to, tag) = (Rank(1 - from), Tag { op: 0, message });
    let lengths: Vec<usize> = parts.iter().map(Bytes::len).collect();
    let received = group[to.0 as usize].post_recv(Rank(from), tag, &lengths, LONG);
    let posted = group[from as usize].post_send(to, tag, parts.to_vec(), LONG);
    let received = block_on(received).unwrap();
    block_on(posted).unwrap();
    received
}

/// Payload bytes that a rank has sent and received through shared memory.
fn shared(group: &Ranks, rank: usize) -> (u64, u64) {
    let figures = group[rank].connections()[1 - rank].unwrap();
    (figures.shared_bytes_sent, figures.shared_bytes_received)
}

#[test]
fn large_messages_go_through_shared_memory_and_small_ones_do_not() {
    let group = make(2);
    let small = payload(64 << 10, 1);
    let large = [payload((64 << 10) + 1, 2), payload(0, 3), payload(9 << 20, 4), payload(777, 5)];
    let bytes: usize = large.iter().map(Bytes::len).sum();
    for from in [0, 1] {
        assert_eq!(sent(&group, from, 0, std::slice::from_ref(&small)), std::slice::from_ref(&small));
        assert_eq!(sent(&group, from, 1, &large), large);
    }
    let bytes = bytes as u64;
    assert_eq!([shared(&group, 0), shared(&group, 1)], [(bytes, bytes); 2]);
    // What went through memory is in no packet.
    let packets = group[0].connections()[1].unwrap();
    assert!(packets.bytes_sent + packets.bytes_received < bytes / 10, "{packets:?}");
    close(&group);
}

#[test]
fn a_rank_that_shares_no_memory_gets_its_messages_over_quic() {
    for without in [0, 1] {
        let job = Job::new();
        let ranks = [0, 1].map(|rank| {
            let link = if rank == without { over_quic() } else { LinkSettings::default() };
            connect(QuicConfig { link, ..job.config(rank, 2) })
        });
        let group = formed(ranks.into());
        let parts = [payload(3 << 20, 1)];
        for from in [0, 1] {
            assert_eq!(sent(&group, from, 0, &parts), parts);
        }
        assert_eq!([shared(&group, 0), shared(&group, 1)], [(0, 0); 2], "rank {without} shares nothing");
        close(&group);
    }
}
