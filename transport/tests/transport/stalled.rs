//! Stalled ranks. Their I/O runs only while the test drives it, so messages stay partly sent.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::{free_address, over_quic};
use bytes::Bytes;
use kyklos_transport::quic::{Carrier, ClusterAuthority, JobId, LinkSettings, QuicConfig, QuicTransport};
use kyklos_transport::{
    Abort, AbortCause, Group, Pending, Posted, Progress, Rank, Tag, Taken, Transport, TransportError,
};
use pollster::block_on;

const LONG: Duration = Duration::from_secs(120);

/// A message of 512 MiB: far more than the windows hold, and more than a rank reads in a short
/// time.
const LARGE: [usize; 128] = [4 << 20; 128];

const TAG: Tag = Tag { op: 2, message: 1 };

over_every_carrier! {
    a_rank_that_stalls_for_less_than_the_timeout_is_not_dead
    closing_while_a_peer_is_stalled_ends_at_its_deadline
    a_stalled_rank_learns_of_a_close_that_timed_out
    an_abort_of_a_third_rank_ends_a_message_half_way
    a_sender_that_is_dropped_half_way_has_died
    a_message_that_is_abandoned_half_way_ends_only_itself
}

/// A group in which rank 1 is stalled unless the test drives it.
struct Members {
    /// Ranks 0, 2, 3, …; each has its own thread.
    others: Vec<Option<Group>>,
    still: Group,
    runtime: tokio::runtime::Runtime,
}

impl Members {
    fn new(carrier: Carrier, size: u32, heartbeat: Duration) -> Self {
        let coordinator = free_address();
        let job = JobId::random().unwrap();
        let authority = ClusterAuthority::new(job).unwrap();
        let config = |rank| {
            let identity = authority.issue(Rank(rank)).unwrap();
            let link = LinkSettings { carrier, ..over_quic() };
            QuicConfig {
                heartbeat: Some(heartbeat),
                link,
                ..QuicConfig::new(Rank(rank), size, job, coordinator, identity)
            }
        };
        let connecting: Vec<_> = (0..size)
            .map(|rank| {
                let config = config(rank);
                (rank != 1).then(|| std::thread::spawn(|| QuicTransport::connect(config).unwrap()))
            })
            .collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let still = runtime.block_on(QuicTransport::form(config(1))).unwrap();
        let others = connecting.into_iter().map(|rank| rank.map(|rank| rank.join().unwrap())).collect();
        Self { others, still, runtime }
    }

    fn rank(&self, rank: usize) -> &dyn Transport {
        &**self.others[rank].as_ref().unwrap()
    }

    /// Lets rank 1 run for a while.
    fn drive(&self, duration: Duration) {
        self.runtime.block_on(async { tokio::time::sleep(duration).await });
    }

    /// Lets rank 1 run until the condition is true.
    fn drive_until<T>(&self, happened: impl Future<Output = T>) -> T {
        let bounded = async { tokio::time::timeout(LONG, happened).await };
        self.runtime.block_on(bounded).expect("it happens long before")
    }
}

fn a_rank_that_stalls_for_less_than_the_timeout_is_not_dead(carrier: Carrier) {
    // Twelve heartbeats are 36 s.
    let group = Members::new(carrier, 2, Duration::from_secs(3));
    std::thread::sleep(Duration::from_millis(6500));
    let sent = group.rank(0).post_send(Rank(1), TAG, vec!["still here".into()], LONG);
    let received = group.still.post_recv(Rank(0), TAG, &[10], LONG);
    assert_eq!(group.drive_until(received).unwrap(), ["still here"]);
    group.drive_until(sent).unwrap();
}

fn closing_while_a_peer_is_stalled_ends_at_its_deadline(carrier: Carrier) {
    let patience = Duration::from_secs(1);
    let group = Members::new(carrier, 2, Duration::from_secs(3));
    let started = Instant::now();
    let error = block_on(group.rank(0).close(patience)).unwrap_err();
    let TransportError::Deadline { pending, waited } = &error else { panic!("{error:?}") };
    assert_eq!((pending.operation, pending.peer, *waited), ("close", Rank(1), patience));
    // Silence would end it after 36 s.
    assert!(started.elapsed() < Duration::from_secs(12), "{:?}", started.elapsed());
}

fn a_stalled_rank_learns_of_a_close_that_timed_out(carrier: Carrier) {
    let group = Members::new(carrier, 2, Duration::from_secs(3));
    let needed = group.still.post_recv(Rank(0), TAG, &LARGE, LONG);
    block_on(group.rank(0).close(Duration::from_millis(300))).unwrap_err();
    let error = group.drive_until(needed).unwrap_err();
    let TransportError::Aborted { abort, .. } = &error else { panic!("{error:?}") };
    assert_eq!(abort.culprit, Rank(0), "{abort}");
    assert!(abort.to_string().contains("left"), "{abort}");
}

/// Rank `from` sends to rank 1. Rank 1 has posted the receive and stalls in the middle of the
/// message.
fn in_flight(group: &Members, from: usize, patience: Duration) -> (Posted<Vec<Bytes>>, Posted<Taken>) {
    let received = group.still.post_recv(Rank(from as u32), TAG, &LARGE, LONG);
    // The sender learns that rank 1 has requested the message.
    group.drive(Duration::from_millis(300));
    // All parts share one buffer, and parts that have not arrived take no memory.
    let payload = vec![Bytes::from(vec![7; LARGE[0]]); LARGE.len()];
    let sent = group.rank(from).post_send(Rank(1), TAG, payload, patience);
    // The sender sends as much as the windows allow, and rank 1 reads some of it.
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(150));
        group.drive(Duration::from_millis(4));
    }
    (received, sent)
}

fn half_way(operation: &str, peer: u32, pending: &Pending) {
    let Pending { bytes_done, bytes_expected, .. } = *pending;
    assert_eq!((pending.operation, pending.peer, pending.tag), (operation, Rank(peer), TAG));
    assert!(bytes_done < bytes_expected && bytes_expected == LARGE.iter().sum::<usize>() as u64, "{pending}");
    assert!(operation == "receive" || bytes_done > 0, "{pending}");
}

fn aborted(error: TransportError) -> (Abort, Pending) {
    match error {
        TransportError::Aborted { abort, pending: Some(pending) } => (abort, pending),
        other => panic!("{other:?}"),
    }
}

fn an_abort_of_a_third_rank_ends_a_message_half_way(carrier: Carrier) {
    let group = Members::new(carrier, 3, Duration::from_secs(3));
    let (received, sent) = in_flight(&group, 0, LONG);
    let third = Abort {
        culprit: Rank(2),
        cause: AbortCause::Failed("out of memory".into()),
        progress: Progress { op: 2, step: 5 },
    };
    group.rank(2).abort(third.clone());
    let (abort, pending) = aborted(block_on(sent).unwrap_err());
    assert_eq!(abort, third);
    half_way("send", 1, &pending);
    let (abort, pending) = aborted(group.drive_until(received).unwrap_err());
    assert_eq!(abort, third);
    half_way("receive", 0, &pending);
}

fn a_sender_that_is_dropped_half_way_has_died(carrier: Carrier) {
    for sender in [2, 0] {
        let mut group = Members::new(carrier, 3, Duration::from_secs(3));
        let (received, sent) = in_flight(&group, sender, LONG);
        drop(group.others[sender].take());
        let (abort, pending) = aborted(block_on(sent).unwrap_err());
        assert_eq!(abort.culprit, Rank(sender as u32));
        half_way("send", 1, &pending);
        let (abort, pending) = aborted(group.drive_until(received).unwrap_err());
        assert_eq!(abort.culprit, Rank(sender as u32), "{abort}");
        assert!(matches!(abort.cause, AbortCause::Died(_)), "{abort}");
        half_way("receive", sender as u32, &pending);
    }
}

fn a_message_that_is_abandoned_half_way_ends_only_itself(carrier: Carrier) {
    let group = Members::new(carrier, 2, Duration::from_secs(3));
    let patience = Duration::from_secs(1);
    let (received, sent) = in_flight(&group, 0, patience);
    let error = block_on(sent).unwrap_err();
    let TransportError::Deadline { pending, waited } = &error else { panic!("{error:?}") };
    assert_eq!(*waited, patience);
    half_way("send", 1, pending);
    // The receive still waits, and the group still works.
    let next = Tag { op: 3, ..TAG };
    let next_received = group.still.post_recv(Rank(0), next, &[4 << 20], LONG);
    let next_sent = group.rank(0).post_send(Rank(1), next, vec![Bytes::from(vec![8; 4 << 20])], LONG);
    assert_eq!(group.drive_until(next_received).unwrap(), [vec![8; 4 << 20]]);
    group.drive_until(next_sent).unwrap();
    let mut received = received;
    let ended = group
        .drive_until(async { tokio::time::timeout(Duration::from_millis(300), &mut received).await.is_ok() });
    assert!(!ended, "the receive has a deadline of its own");
    assert!(!group.still.stop_flag().load(Ordering::Acquire));
    let closed = group.rank(0).close(LONG);
    group.drive_until(group.still.close(LONG)).unwrap();
    assert_eq!(group.drive_until(received), Err(TransportError::Closed));
    group.drive_until(closed).unwrap();
}
