//! A group over a link that is slow and healthy: its ranks take their time, and no rank counts as
//! dead.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::quic::{Carrier, QuicConfig};
use kyklos_transport::{Rank, Tag};
use pollster::block_on;

use crate::common::*;

/// How far a link may fall behind its rate and catch up: a loaded machine lets its threads wait.
const CATCH_UP: Duration = Duration::from_secs(1);
/// The message takes 5 s on this link; the test asks that it arrives, not when.
const PATIENCE: Duration = Duration::from_secs(600);

/// Forwards streams to `to`, in each direction so many bytes in a second, until the process ends.
fn throttled(to: SocketAddr, bytes_per_second: u32) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let (near, Ok(far)) = (near.unwrap(), TcpStream::connect(to)) else { continue };
            for (from, to) in [(&near, &far), (&far, &near)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || forward(from, to, bytes_per_second));
            }
        }
    });
    address
}

fn forward(mut from: TcpStream, mut to: TcpStream, bytes_per_second: u32) {
    let mut piece = [0; 16384];
    let mut free = Instant::now();
    while let Ok(read @ 1..) = from.read(&mut piece) {
        free = free.max(Instant::now() - CATCH_UP)
            + Duration::from_secs(1) * u32::try_from(read).unwrap() / bytes_per_second;
        std::thread::sleep(free.saturating_duration_since(Instant::now()));
        if to.write_all(&piece[..read]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[test]
fn ranks_at_the_ends_of_a_slow_tcp_link_do_not_count_as_dead() {
    let job = Job::new();
    // 8 Mbit/s.
    let link = throttled(job.coordinator, 1_000_000);
    let far = QuicConfig { coordinator: link, ..job.over(Carrier::Tcp, 1, 2) };
    let group = formed(vec![connect(job.over(Carrier::Tcp, 0, 2)), connect(far)]);
    let (tag, bytes) = (Tag { op: 0, message: 0 }, 5 << 20);
    let other = |rank: Rank| Rank(1 - rank.0);
    let received: Vec<_> =
        group.iter().map(|one| one.post_recv(other(one.rank()), tag, &[bytes], PATIENCE)).collect();
    let sent: Vec<_> = group
        .iter()
        .map(|one| one.post_send(other(one.rank()), tag, vec![Bytes::from(vec![7; bytes])], PATIENCE))
        .collect();
    let started = Instant::now();
    for posted in received {
        assert!(block_on(posted).unwrap()[0].iter().all(|&byte| byte == 7));
    }
    for posted in sent {
        block_on(posted).unwrap();
    }
    println!("{bytes} bytes in each direction took {:?}", started.elapsed());
    close(&group);
}
