use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A socket that notes what it is given, unless it is blocked.
#[derive(Debug)]
struct Notes {
    segments: AtomicUsize,
    sent: Mutex<Vec<Sent>>,
    blocked: Mutex<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sent {
    to: SocketAddr,
    packets: Vec<Vec<u8>>,
}

impl Notes {
    fn new(segments: usize) -> Arc<Self> {
        let (sent, blocked) = (Mutex::default(), Mutex::new(false));
        Arc::new(Self { segments: AtomicUsize::new(segments), sent, blocked })
    }

    fn block(&self, blocked: bool) {
        *self.blocked.lock().unwrap() = blocked;
    }

    fn sent(&self) -> Vec<Sent> {
        self.sent.lock().unwrap().clone()
    }

    /// Packets of each datagram.
    fn sizes(&self) -> Vec<usize> {
        self.sent().iter().map(|datagram| datagram.packets.len()).collect()
    }
}

#[derive(Debug)]
struct Unblocked(Arc<Notes>);

impl UdpPoller for Unblocked {
    fn poll_writable(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self.0.blocked.lock().unwrap() {
            true => {
                // The test ends the waiting, and is single-threaded: asking again is enough.
                context.waker().wake_by_ref();
                Poll::Pending
            }
            false => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncUdpSocket for Notes {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Unblocked(self))
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if *self.blocked.lock().unwrap() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes = transmit.contents;
        let packets = bytes.chunks(transmit.segment_size.unwrap_or(bytes.len()));
        let packets: Vec<_> = packets.map(<[u8]>::to_vec).collect();
        self.sent.lock().unwrap().push(Sent { to: transmit.destination, packets });
        Ok(())
    }

    fn poll_recv(
        &self,
        _: &mut Context<'_>,
        _: &mut [IoSliceMut<'_>],
        _: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(address(1))
    }

    fn max_transmit_segments(&self) -> usize {
        self.segments.load(Ordering::Relaxed)
    }

    fn max_receive_segments(&self) -> usize {
        1
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// `packets` packets of `bytes` bytes, the last one of `last`, whose first bytes count from
/// `first`.
fn burst(first: u8, packets: u8, bytes: usize, last: usize) -> Vec<u8> {
    let sizes = (0..packets).map(|i| (first + i, if i + 1 == packets { last } else { bytes }));
    sizes.flat_map(|(number, size)| vec![number; size]).collect()
}

fn transmit(to: u16, contents: &[u8], bytes: usize) -> Transmit<'_> {
    let segment_size = (contents.len() > bytes).then_some(bytes);
    Transmit { destination: address(to), ecn: None, contents, segment_size, src_ip: None }
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
}

fn batching(notes: &Arc<Notes>, transmit: usize) -> Arc<BatchingSocket> {
    BatchingSocket::new(Arc::clone(notes) as Arc<dyn AsyncUdpSocket>, transmit, 1, &Handle::current())
}

/// Numbers of all packets that were sent, in order.
fn numbers(sent: &[Sent]) -> Vec<u8> {
    sent.iter().flat_map(|datagram| &datagram.packets).map(|packet| packet[0]).collect()
}

#[test]
fn full_bursts_leave_together_and_in_order() {
    run(async {
        let notes = Notes::new(64);
        let socket = batching(&notes, 45);
        for i in 0..9 {
            socket.try_send(&transmit(2, &burst(10 * i, 10, 100, 100), 100)).unwrap();
        }
        assert_eq!(notes.sizes(), [40, 40]);
        next_turn().await;
        next_turn().await;
        next_turn().await;
        assert_eq!(notes.sizes(), [40, 40, 10]);
        let sent = notes.sent();
        assert_eq!(numbers(&sent), (0..90).collect::<Vec<u8>>());
        assert!(sent.iter().flat_map(|datagram| &datagram.packets).all(|packet| packet.len() == 100));
    });
}

#[test]
fn less_than_a_full_burst_leaves_at_once_with_what_was_kept() {
    run(async {
        for (packets, last, then) in [(10, 99, vec![20]), (3, 100, vec![13]), (1, 40, vec![11])] {
            let notes = Notes::new(64);
            let socket = batching(&notes, 45);
            socket.try_send(&transmit(2, &burst(0, 10, 100, 100), 100)).unwrap();
            assert!(notes.sizes().is_empty());
            socket.try_send(&transmit(2, &burst(10, packets, 100, last), 100)).unwrap();
            assert_eq!(notes.sizes(), then);
            assert_eq!(numbers(&notes.sent()), (0..10 + packets).collect::<Vec<u8>>());
        }
    });
}

#[test]
fn what_does_not_fit_into_a_datagram_comes_after_it() {
    run(async {
        let notes = Notes::new(64);
        let socket = batching(&notes, 45);
        let send = |to, contents: &[u8], bytes| socket.try_send(&transmit(to, contents, bytes)).unwrap();
        // Another address, larger packets, smaller packets.
        send(2, &burst(0, 10, 100, 100), 100);
        send(3, &burst(10, 10, 100, 100), 100);
        send(3, &burst(20, 10, 120, 120), 120);
        send(3, &burst(30, 2, 110, 110), 110);
        send(3, &burst(32, 1, 200, 200), 200);
        let sent = notes.sent();
        assert_eq!(notes.sizes(), [10, 10, 10, 2, 1]);
        assert_eq!(numbers(&sent), (0..33).collect::<Vec<u8>>());
        let to: Vec<_> = sent.iter().map(|datagram| datagram.to.port()).collect();
        assert_eq!(to, [2, 3, 3, 3, 3]);
    });
}

#[test]
fn a_socket_of_few_packets_or_of_one_keeps_nothing() {
    run(async {
        for (system, path) in [(1, 45), (64, 7), (64, 19)] {
            let notes = Notes::new(system);
            let socket = batching(&notes, path);
            let packets = socket.max_transmit_segments().min(BURST) as u8;
            socket.try_send(&transmit(2, &burst(0, packets, 100, 100), 100)).unwrap();
            assert_eq!(notes.sizes(), [usize::from(packets)]);
        }
    });
}

#[test]
fn a_socket_that_is_blocked_loses_and_repeats_nothing() {
    run(async {
        let notes = Notes::new(64);
        let socket = batching(&notes, 45);
        notes.block(true);
        for i in 0..3 {
            socket.try_send(&transmit(2, &burst(10 * i, 10, 100, 100), 100)).unwrap();
        }
        // A smaller packet is the last one of a datagram. So the socket refuses the next packet.
        socket.try_send(&transmit(2, &burst(30, 1, 60, 60), 60)).unwrap();
        let next = burst(31, 1, 60, 60);
        let refused = socket.try_send(&transmit(2, &next, 60)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        for _ in 0..5 {
            next_turn().await;
        }
        assert!(notes.sizes().is_empty());
        notes.block(false);
        for _ in 0..5 {
            next_turn().await;
        }
        assert_eq!(notes.sizes(), [31]);
        socket.try_send(&transmit(2, &next, 60)).unwrap();
        assert_eq!(numbers(&notes.sent()), (0..32).collect::<Vec<u8>>());
    });
}

/// The system may turn out not to support datagrams of several packets: then it has said 64, and
/// says 1.
#[test]
fn what_was_kept_leaves_before_single_packets() {
    run(async {
        let notes = Notes::new(64);
        let socket = batching(&notes, 45);
        socket.try_send(&transmit(2, &burst(0, 10, 100, 100), 100)).unwrap();
        notes.segments.store(1, Ordering::Relaxed);
        for i in 10..13 {
            socket.try_send(&transmit(2, &burst(i, 1, 100, 100), 100)).unwrap();
        }
        assert_eq!(notes.sizes(), [10, 1, 1, 1]);
        assert_eq!(numbers(&notes.sent()), (0..13).collect::<Vec<u8>>());
    });
}

#[test]
fn two_addresses_share_a_socket_that_is_blocked() {
    run(async {
        let notes = Notes::new(64);
        let socket = batching(&notes, 45);
        notes.block(true);
        socket.try_send(&transmit(2, &burst(0, 10, 100, 100), 100)).unwrap();
        let other = burst(10, 10, 100, 100);
        let refused = socket.try_send(&transmit(3, &other, 100)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        notes.block(false);
        socket.try_send(&transmit(3, &other, 100)).unwrap();
        for _ in 0..3 {
            next_turn().await;
        }
        let to: Vec<_> = notes.sent().iter().map(|datagram| datagram.to.port()).collect();
        assert_eq!(to, [2, 3]);
        assert_eq!(numbers(&notes.sent()), (0..20).collect::<Vec<u8>>());
    });
}

#[test]
fn the_task_ends_with_the_socket() {
    run(async {
        let notes = Notes::new(64);
        let socket = batching(&notes, 45);
        socket.try_send(&transmit(2, &burst(0, 10, 100, 100), 100)).unwrap();
        drop(socket);
        assert_eq!(notes.sizes(), [10]);
        for _ in 0..3 {
            next_turn().await;
        }
        assert_eq!(Arc::strong_count(&notes), 1);
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
    });
}
