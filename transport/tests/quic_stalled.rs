//! Ranks that stand still: their I/O runs only while the test drives it, so what is under way stays under way.
#![cfg(feature = "quic")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kyklos_transport::quic::{ClusterAuthority, JobId, QuicConfig, QuicTransport};
use kyklos_transport::{Rank, Tag, Transport, TransportError};
use pollster::block_on;

const LONG: Duration = Duration::from_secs(40);

/// Far more than all windows between two ranks hold.
const LARGE: usize = 64 << 20;

const TAG: Tag = Tag { op: 2, message: 1 };

/// A group in which rank 1 stands still unless it is driven.
struct Group {
    /// Ranks 0, 2, 3, …, each with a thread of its own.
    others: Vec<Option<Arc<dyn Transport>>>,
    still: Arc<dyn Transport>,
    runtime: tokio::runtime::Runtime,
}

impl Group {
    fn new(world: u32, heartbeat: Duration) -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let coordinator: SocketAddr = socket.local_addr().unwrap();
        drop(socket);
        let job = JobId::random().unwrap();
        let authority = ClusterAuthority::new(job).unwrap();
        let config = |rank| {
            let identity = authority.issue(Rank(rank)).unwrap();
            QuicConfig { heartbeat, ..QuicConfig::new(Rank(rank), world, job, coordinator, identity) }
        };
        let connecting: Vec<_> = (0..world)
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

    /// Lets rank 1 run until something has happened.
    fn drive_until<T>(&self, happened: impl Future<Output = T>) -> T {
        let bounded = async { tokio::time::timeout(LONG, happened).await };
        self.runtime.block_on(bounded).expect("it happens long before")
    }
}

#[test]
fn a_rank_that_stood_still_for_less_than_its_silence_is_not_dead() {
    // Twelve heartbeats are 36 s.
    let group = Group::new(2, Duration::from_secs(3));
    std::thread::sleep(Duration::from_millis(6500));
    let sent = group.rank(0).post_send(Rank(1), TAG, vec!["still here".into()], LONG);
    let received = group.still.post_recv(Rank(0), TAG, &[10], LONG);
    assert_eq!(group.drive_until(received).unwrap(), ["still here"]);
    group.drive_until(sent).unwrap();
}

#[test]
fn a_goodbye_to_a_rank_that_stands_still_ends_by_its_deadline() {
    let patience = Duration::from_secs(1);
    // The best of three: a busy machine delays one or the other.
    let overrun = (0..3).map(|_| {
        let group = Group::new(2, Duration::from_secs(3));
        let started = Instant::now();
        let error = block_on(group.rank(0).close(patience)).unwrap_err();
        let overrun = started.elapsed().saturating_sub(patience);
        let TransportError::Deadline { pending, waited } = &error else { panic!("{error:?}") };
        assert_eq!((pending.operation, pending.peer, *waited), ("close", Rank(1), patience));
        overrun
    });
    let overrun = overrun.min().unwrap();
    assert!(overrun < Duration::from_millis(200), "{overrun:?}");
}

#[test]
fn a_rank_that_stood_still_hears_of_a_goodbye_that_came_to_its_deadline() {
    let group = Group::new(2, Duration::from_secs(3));
    let needed = group.still.post_recv(Rank(0), TAG, &[LARGE], LONG);
    block_on(group.rank(0).close(Duration::from_millis(300))).unwrap_err();
    let error = group.drive_until(needed).unwrap_err();
    let TransportError::Aborted { abort, .. } = &error else { panic!("{error:?}") };
    assert_eq!(abort.culprit, Rank(0), "{abort}");
    assert!(abort.to_string().contains("left"), "{abort}");
}
