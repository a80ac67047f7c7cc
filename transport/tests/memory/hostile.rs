//! Half-open connections and replayed packets: honest ranks finish, and memory stays
//! flat. Wrong certificates and wrong frames are tested in `strangers.rs`.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::*;
use kyklos_transport::quic::{Carrier, QuicConfig};
use quinn::crypto::rustls::QuicClientConfig;

/// The configuration of one of two ranks. Rank 1 may get another address for rank 0.
fn rank(job: &Job, rank: u32, coordinator: SocketAddr) -> JoinHandle<Formed> {
    connect(QuicConfig { coordinator, ..job.config(rank, 2) })
}

/// Starts `count` connections from an address that no rank has, and vanishes before any of them is
/// complete.
fn half_open(to: SocketAddr, count: usize) {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"kyklos/1".to_vec()];
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        let begun: Vec<_> =
            (0..count).map(|_| endpoint.connect_with(config.clone(), to, "rank-0").unwrap()).collect();
        // Long enough for their first packets, and for most to validate their address.
        tokio::time::sleep(Duration::from_millis(50)).await;
        // No close is sent: the socket is dropped with the runtime.
        drop(begun);
    });
}

#[test]
fn thousands_of_half_open_connections_leave_memory_flat_and_honest_ranks_finish() {
    let _alone = alone();
    let job = Job::new();
    let zero = rank(&job, 0, job.coordinator);
    std::thread::sleep(Duration::from_millis(200));
    // While rank 0 waits for the others.
    half_open(job.coordinator, 1000);
    let one = rank(&job, 1, job.coordinator);
    let group = formed(vec![zero, one]);
    let mut resident = Vec::new();
    for op in 0..8 {
        half_open(job.coordinator, 1000);
        exchange(&group, op);
        resident.push(resident_kib());
    }
    close(&group);
    println!("KiB after every 1000: {resident:?}");
    // The addresses of one network get 512 places of about 60 KiB each; 7000 connections would be 400
    // MiB.
    let (first, last) = (resident[0], resident[7]);
    assert!(last < first + (48 << 10), "7000 more half-open connections took more than 48 MiB: {resident:?}");
}

/// Sends packets of an unknown version of QUIC for a while, each of which asks for an answer, and
/// reads no answer.
fn ask_and_never_read(to: SocketAddr, patience: Duration) -> TcpStream {
    let mut packet = vec![0; 1200];
    // A long header, a version, and two numbers of the connection.
    packet[..15].copy_from_slice(&[0xc0, 0x1a, 0x2a, 0x3a, 0x4a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0]);
    let framed = [&1200_u16.to_le_bytes()[..], &packet].concat();
    let started = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(to) {
            Ok(stream) => break stream,
            // Rank 0 does not listen yet.
            Err(error) => assert!(started.elapsed() < SOON, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let until = Instant::now() + patience;
    let many = framed.repeat(100);
    while Instant::now() < until && stream.write_all(&many).is_ok() {}
    stream
}

#[test]
fn answers_to_a_stranger_that_never_reads_leave_memory_flat() {
    let _alone = alone();
    let job = Job::new();
    let zero = connect(job.over(Carrier::Tcp, 0, 2));
    drop(ask_and_never_read(job.coordinator, Duration::ZERO));
    std::thread::sleep(Duration::from_millis(300));
    let before = resident_kib();
    let _held: Vec<_> = (0..3).map(|_| ask_and_never_read(job.coordinator, Duration::from_secs(3))).collect();
    let after = resident_kib();
    println!("KiB before and after: {before} {after}");
    assert!(after < before + (24 << 10), "from {before} KiB to {after} KiB");
    let group = formed(vec![zero, connect(job.over(Carrier::Tcp, 1, 2))]);
    exchange(&group, 0);
    close(&group);
}

/// Forwards packets between a rank and rank 0, records the packets of the rank, and sends `copies`
/// of each.
struct Wire {
    address: SocketAddr,
    kept: Arc<Mutex<Vec<Vec<u8>>>>,
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Wire {
    fn to(coordinator: SocketAddr, copies: usize) -> Self {
        let [near, far] = [(); 2].map(|()| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let address = near.local_addr().unwrap();
        let (kept, over) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (keep, end) = (Arc::clone(&kept), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            let mut client = None;
            let mut buffer = vec![0; 1 << 16];
            for socket in [&near, &far] {
                socket.set_nonblocking(true).unwrap();
            }
            while !end.load(Ordering::Relaxed) {
                let mut idle = true;
                while let Ok((bytes, from)) = near.recv_from(&mut buffer) {
                    (client, idle) = (Some(from), false);
                    keep.lock().unwrap().push(buffer[..bytes].to_vec());
                    for _ in 0..copies {
                        let _ = far.send_to(&buffer[..bytes], coordinator);
                    }
                }
                while let Ok((bytes, _)) = far.recv_from(&mut buffer) {
                    idle = false;
                    for _ in 0..copies {
                        let _ = client.map(|client| near.send_to(&buffer[..bytes], client));
                    }
                }
                if idle {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        Self { address, kept, over, thread }
    }

    fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

#[test]
fn replayed_packets_change_nothing() {
    let _alone = alone();
    let job = Job::new();
    // Every packet twice, in both directions, while the group works.
    let wire = Wire::to(job.coordinator, 2);
    let ranks = [rank(&job, 0, job.coordinator), rank(&job, 1, wire.address)];
    let group = formed(ranks.into());
    (0..4).for_each(|op| exchange(&group, op));
    let said = wire.kept.lock().unwrap().clone();
    assert!(said.len() > 50, "{} packets", said.len());
    // All packets again, from another address: the group still works.
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    for packet in &said {
        stranger.send_to(packet, job.coordinator).unwrap();
    }
    exchange(&group, 4);
    close(&group);
    wire.end();
    // A rank keeps its port until it is dropped, and then until its last packets are sent.
    drop(group);
    let until = Instant::now() + SOON;
    while UdpSocket::bind(job.coordinator).is_err() {
        assert!(Instant::now() < until, "rank 0 keeps its port");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Again, before the same ranks form their next group: no rank accepts a replayed packet as a packet
    // of a rank.
    let zero = rank(&job, 0, job.coordinator);
    std::thread::sleep(Duration::from_millis(200));
    for packet in &said {
        let _ = stranger.send_to(packet, job.coordinator);
    }
    let one = rank(&job, 1, job.coordinator);
    let group = formed(vec![zero, one]);
    exchange(&group, 0);
    close(&group);
}
