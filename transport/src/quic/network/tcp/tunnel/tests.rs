//! Peers that never read: each stream to one of them ends, whatever the peer has proven.

use std::cell::Cell;
use std::net::Ipv4Addr;
use std::time::Instant;

use super::*;
use crate::quic::network::binding::{SystemSocket, bind};
use crate::quic::network::path::Carrier;

fn local() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

fn tunnel() -> Tunnel {
    let SystemSocket::Tcp(listener) = bind(local(), Carrier::Tcp).unwrap() else { panic!("no listener") };
    Tunnel::new(listener, MEMBER_BYTES, LinkProfile::Lan).unwrap()
}

/// Sends packets to a peer without a pause, until its stream has ended. Returns the time that its
/// writes were blocked.
async fn blocked(tunnel: &Tunnel, to: SocketAddr) -> Duration {
    let (started, mut blocked, mut bytes) = (Instant::now(), None, 0);
    while started.elapsed() < PATIENCE {
        match tunnel.shared.routes.send(to, vec![7; PACKET]) {
            Sent::Queued => {}
            // As a member that is dialled the next time, or as a stranger.
            Sent::Dial(_) | Sent::Dropped => {
                println!("{bytes} bytes, ended after {:?}", started.elapsed());
                return blocked.map_or(Duration::ZERO, |blocked: Instant| blocked.elapsed());
            }
        }
        bytes += PACKET;
        if bytes > MOST_BUFFERED {
            blocked.get_or_insert_with(Instant::now);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("after {:?} the stream is still there", started.elapsed());
}

/// The buffers of the system for a stream over loopback, and the queue of a member.
const MOST_BUFFERED: usize = MEMBER_BYTES + (16 << 20);
const MEMBER_BYTES: usize = 1 << 20;
const PACKET: usize = 60_000;
const PATIENCE: Duration = Duration::from_secs(25);

/// Until a blocked write ends, and a machine that does something else meanwhile.
const LATEST: Duration = WRITE_TIMEOUT.saturating_add(Duration::from_secs(4));

#[test]
fn a_member_that_reads_nothing_is_given_up() {
    run(async {
        let tunnel = tunnel();
        let member = TcpStream::connect(tunnel.shared.local).await.unwrap();
        let from = member.local_addr().unwrap();
        tunnel.peers().prove(from);
        tokio::time::sleep(Duration::from_millis(100)).await;
        let blocked = blocked(&tunnel, from).await;
        assert!(blocked > STRANGER_TIMEOUT && blocked < LATEST, "{blocked:?}");
    });
}

#[test]
fn a_dialled_peer_that_reads_nothing_is_given_up_in_the_middle_of_its_handshake() {
    run(async {
        let (tunnel, deaf) = (tunnel(), std::net::TcpListener::bind(local()).unwrap());
        let to = deaf.local_addr().unwrap();
        tunnel.peers().will_dial(to);
        tunnel.shared.send(to, vec![7; PACKET]);
        let stream = tokio::task::spawn_blocking(move || deaf.accept().unwrap()).await.unwrap();
        let blocked = blocked(&tunnel, to).await;
        assert!(blocked > STRANGER_TIMEOUT && blocked < LATEST, "{blocked:?}");
        drop(stream);
    });
}

#[test]
fn a_stranger_that_reads_nothing_is_given_up_in_the_middle_of_its_handshake() {
    run(async {
        let tunnel = tunnel();
        let started = Instant::now();
        let stranger = TcpStream::connect(tunnel.shared.local).await.unwrap();
        let from = stranger.local_addr().unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        blocked(&tunnel, from).await;
        let took = started.elapsed();
        assert!(took >= STRANGER_TIMEOUT && took < LATEST.saturating_sub(STRANGER_TIMEOUT), "{took:?}");
    });
}

/// A scanner is none, and what speaks another protocol. All bytes are there before they are read,
/// so no deadline counts.
#[test]
fn only_a_stream_that_begins_with_a_first_packet_counts_as_a_rank_over_the_other_carrier() {
    run(async {
        let cases: [(&[u8], bool); 5] = [
            (b"GET / HTTP/1.1", false),
            (&[0xff, 0xff, 0xc0], false),
            (&[0xb0, 0x04, 0x40], false),
            (&[0xb0, 0x04], false),
            (&[0xb0, 0x04, 0xc3], true),
        ];
        for (start, is_rank) in cases {
            let (mut stream, refusing) = tokio::io::duplex(64);
            stream.write_all(start).await.unwrap();
            stream.shutdown().await.unwrap();
            let noted = Cell::new(false);
            refuse(refusing, "no", || noted.set(true)).await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            assert_eq!((answer.as_slice(), noted.get()), (&b"\0\0no"[..], is_rank), "{start:?}");
        }
    });
}
