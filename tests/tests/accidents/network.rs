//! What a soak does to the network of its groups.

use std::io::Write;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::accident::Chance;
use crate::processes::Group;

/// Blocks all packets to a rank's address, or unblocks them.
pub(crate) fn cut(group: &Group, rank: u32, off: bool) {
    let address = format!("{}/32", group.address(rank));
    let what = if off { "add" } else { "del" };
    let status = Command::new("ip").args(["route", what, "blackhole", &address, "table", "local"]).status();
    assert!(status.unwrap().success(), "ip route {what} blackhole {address}");
}

/// Limits all packets of this network namespace until it is dropped.
pub(crate) struct SlowLinks;

impl SlowLinks {
    pub(crate) fn new() -> Self {
        traffic_control("add", &["tbf", "rate", "20mbit", "burst", "128k", "latency", "50ms"]);
        Self
    }
}

impl Drop for SlowLinks {
    fn drop(&mut self) {
        traffic_control("del", &[]);
    }
}

fn traffic_control(verb: &str, more: &[&str]) {
    let status = Command::new("tc").args(["qdisc", verb, "dev", "lo", "root"]).args(more).status();
    assert!(status.unwrap().success(), "tc qdisc {verb}");
}

/// Strangers that send to rank 0: datagrams of random bytes, datagrams of a version of QUIC that
/// does not exist, datagrams that look like the first of a handshake, and streams that say little
/// or nothing.
pub(crate) struct Flood {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Flood {
    pub(crate) fn start(to: SocketAddr, seed: u64) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let ends = ends.clone();
            move || flood(to, &mut Chance(seed), &ends)
        });
        Self { ends, thread }
    }

    /// Ends it. Returns how many packets and streams there were.
    pub(crate) fn stop(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn flood(to: SocketAddr, chance: &mut Chance, ends: &AtomicBool) -> u64 {
    let (mut sent, mut streams) = (0, Vec::new());
    while !ends.load(Ordering::Relaxed) {
        // A socket of its own for each burst: to rank 0 these are other peers.
        let socket = UdpSocket::bind((to.ip(), 0)).unwrap();
        for _ in 0..BURST {
            // Nobody listens before the group forms, and then the system says so.
            let _ = socket.send_to(&datagram(chance), to);
        }
        sent += BURST;
        if let Ok(mut stream) = TcpStream::connect_timeout(&to, PAUSE) {
            let _ = stream.write_all(&datagram(chance)[..chance.below(8) as usize]);
            streams.push(stream);
            sent += 1;
        }
        if streams.len() > MOST_STREAMS {
            drop(streams.remove(0));
        }
        std::thread::sleep(PAUSE);
    }
    sent
}

fn datagram(chance: &mut Chance) -> Vec<u8> {
    // The first datagram of a handshake has at least 1200 bytes.
    let mut bytes: Vec<u8> = (0..1200).map(|_| chance.below(256) as u8).collect();
    // A long header, then the version, then connection ids of eight bytes.
    match chance.below(3) {
        0 => {}
        1 => bytes[..6].copy_from_slice(&[0xc0, 0xba, 0xba, 0xba, 0xba, 8]),
        _ => {
            bytes[..6].copy_from_slice(&[0xc0, 0, 0, 0, 1, 8]);
            // The second id, no token, and the length of the rest.
            bytes[14] = 8;
            bytes[23..26].copy_from_slice(&[0, 0x44, 0x90]);
        }
    }
    bytes
}

/// Datagrams between two pauses.
const BURST: u64 = 30;

const PAUSE: Duration = Duration::from_millis(10);

/// Streams of strangers at one time.
const MOST_STREAMS: usize = 300;
