//! Strangers that flood a rank with handshakes that never end: over UDP first packets of
//! handshakes, connection ids that nobody has, unknown versions and garbage; over TCP streams that
//! say nothing.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kyklos_transport::quic::Carrier;
use quinn::crypto::rustls::QuicClientConfig;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

/// A flood that lasts until it is stopped.
pub(crate) struct Flood {
    ends: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Counts {
    sent: AtomicUsize,
    /// Open sockets of the flood. Locked while it opens or closes one.
    sockets: Mutex<usize>,
}

impl Flood {
    /// A flood at its full rate.
    pub(crate) fn start(carrier: Carrier, to: SocketAddr) -> Self {
        Self::at(carrier, to, 1.0)
    }

    /// A flood at a share of its rate.
    pub(crate) fn at(carrier: Carrier, to: SocketAddr, share: f64) -> Self {
        let (ends, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(Counts::default()));
        let thread = std::thread::spawn({
            let (ends, counts) = (Arc::clone(&ends), Arc::clone(&counts));
            move || match carrier {
                Carrier::Udp => datagrams(to, Pace::of(share * DATAGRAMS_PER_SECOND), &ends, &counts),
                Carrier::Tcp => streams(to, Pace::of(share * STREAMS_PER_SECOND), &ends, &counts),
            }
        });
        Self { ends, counts, thread }
    }

    /// Datagrams or streams so far.
    pub(crate) fn sent(&self) -> usize {
        self.counts.sent.load(Ordering::Relaxed)
    }

    /// Descriptors of this process that `count` finds, without those of the strangers, who open and
    /// close none meanwhile. One more may be of a stranger that is about to connect.
    pub(crate) fn descriptors_beside(&self, count: impl FnOnce() -> usize) -> usize {
        let sockets = self.counts.sockets.lock().unwrap();
        count().saturating_sub(*sockets)
    }

    pub(crate) fn stop(self) -> usize {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.counts.sent.load(Ordering::Relaxed)
    }
}

/// So many of something in each second, also where a pause lasts longer than it should.
struct Pace {
    started: Option<Instant>,
    rate: f64,
    done: usize,
}

impl Pace {
    fn of(rate: f64) -> Self {
        Self { started: None, rate, done: 0 }
    }

    /// How many are due since the last time. The first time is the start.
    fn due(&mut self) -> usize {
        let started = *self.started.get_or_insert_with(Instant::now);
        let all = (started.elapsed().as_secs_f64() * self.rate) as usize;
        let due = all - self.done;
        self.done = all;
        due
    }
}

/// Addresses of strangers, so that the places of one of them are not the limit.
fn stranger(number: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2 + (number % STRANGERS) as u8), 0))
}

fn datagrams(to: SocketAddr, mut pace: Pace, ends: &AtomicBool, counts: &Counts) {
    let first_packets = first_packets();
    let sockets: Vec<_> = (0..STRANGERS).map(|number| UdpSocket::bind(stranger(number)).unwrap()).collect();
    *counts.sockets.lock().unwrap() = sockets.len();
    let (mut number, mut state) = (0, 1_u64);
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    while !ends.load(Ordering::Relaxed) {
        for _ in 0..pace.due() {
            let mut packet: Vec<u8>;
            let bytes = match number % 6 {
                0..=2 => &first_packets[number % first_packets.len()],
                kind => {
                    packet = (0..1200).map(|_| random()).collect();
                    match kind {
                        // Of a connection that does not exist: a short header, or a later packet of a
                        // handshake.
                        3 if number % 12 == 3 => packet[0] = 0x40 | packet[0] & 0x3f,
                        3 => packet[..6].copy_from_slice(&[0xe0, 0, 0, 0, 1, 8]),
                        // A version that does not exist, or an answer to one.
                        4 if number % 12 == 4 => {
                            packet[..6].copy_from_slice(&[0xc0, 0x1a, 0x2a, 0x3a, 0x4a, 8])
                        }
                        4 => packet[..6].copy_from_slice(&[0xc0, 0, 0, 0, 0, 8]),
                        _ => {}
                    }
                    &packet
                }
            };
            // Nobody listens before the group forms, and then the system says so.
            let _ = sockets[number % STRANGERS].send_to(bytes, to);
            number += 1;
        }
        counts.sent.store(number, Ordering::Relaxed);
        std::thread::sleep(PAUSE);
    }
}

/// The first packets of handshakes that clients have begun with a socket that does not answer.
fn first_packets() -> Vec<Vec<u8>> {
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    silent.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let to = silent.local_addr().unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"kyklos/1".to_vec()];
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut packets = Vec::new();
    while packets.len() < FIRST_PACKETS {
        runtime.block_on(async {
            let client = quinn::Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
            let begun: Vec<_> =
                (0..50).map(|_| client.connect_with(config.clone(), to, "rank-0").unwrap()).collect();
            tokio::time::sleep(Duration::from_millis(20)).await;
            drop(begun);
        });
        let mut buffer = [0; 2000];
        for _ in 0..50 {
            let bytes = silent.recv(&mut buffer).unwrap();
            packets.push(buffer[..bytes].to_vec());
        }
    }
    packets
}

fn streams(to: SocketAddr, mut pace: Pace, ends: &AtomicBool, counts: &Counts) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut open: VecDeque<TcpStream> = VecDeque::new();
        let mut number = 0;
        while !ends.load(Ordering::Relaxed) {
            for _ in 0..pace.due() {
                let socket = TcpSocket::new_v4().unwrap();
                socket.bind(stranger(number)).unwrap();
                if let Ok(Ok(stream)) = timeout(PAUSE, socket.connect(to)).await {
                    let mut sockets = counts.sockets.lock().unwrap();
                    open.push_back(stream);
                    if open.len() > MOST_STREAMS {
                        open.pop_front();
                    }
                    *sockets = open.len();
                }
                number += 1;
            }
            counts.sent.store(number, Ordering::Relaxed);
            tokio::time::sleep(PAUSE).await;
        }
    });
}

const STRANGERS: usize = 8;

/// Different ones: a rank keeps a place for each for seconds.
const FIRST_PACKETS: usize = 1000;

/// As many as a line of 100 Mbit/s carries: each of 1200 bytes has 66 of headers in an Ethernet.
const DATAGRAMS_PER_SECOND: f64 = 9_870.0;

/// Each needs three packets of the line, and much more of the system on both sides, which here
/// share the cores.
const STREAMS_PER_SECOND: f64 = 1_000.0;

/// Streams of strangers at one time: more than a rank has places.
const MOST_STREAMS: usize = 600;

const PAUSE: Duration = Duration::from_millis(10);
