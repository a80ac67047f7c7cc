//! Groups whose packets travel in TCP streams: who disturbs them, who comes another way, and who comes again.
#![cfg(all(feature = "quic", unix))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::quic::{Carrier, ClusterAuthority, JobId, LinkSettings, QuicConfig, QuicTransport};
use kyklos_transport::{Rank, Tag, Transport, TransportError};
use pollster::block_on;

type Formed = Result<Arc<dyn Transport>, TransportError>;

const LONG: Duration = Duration::from_secs(20);

struct Job {
    id: JobId,
    authority: ClusterAuthority,
    coordinator: SocketAddr,
}

impl Job {
    fn new() -> Self {
        let coordinator = free_address();
        let id = JobId::random().unwrap();
        Self { id, authority: ClusterAuthority::new(id).unwrap(), coordinator }
    }

    fn config(&self, rank: u32, world: u32, carrier: Carrier) -> QuicConfig {
        let identity = self.authority.issue(Rank(rank)).unwrap();
        let link = LinkSettings { carrier, ..LinkSettings::default() };
        QuicConfig { link, ..QuicConfig::new(Rank(rank), world, self.id, self.coordinator, identity) }
    }
}

fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

fn connect(config: QuicConfig) -> JoinHandle<Formed> {
    std::thread::spawn(move || QuicTransport::connect(config))
}

fn formed(ranks: Vec<JoinHandle<Formed>>) -> Vec<Arc<dyn Transport>> {
    ranks.into_iter().map(|rank| rank.join().unwrap().expect("an honest rank joins")).collect()
}

/// A megabyte from rank 0 to the last one arrives.
fn works(group: &[Arc<dyn Transport>]) {
    let (tag, last) = (Tag { op: 0, message: 0 }, group.len() - 1);
    let payload = Bytes::from(vec![9; 1 << 20]);
    let received = group[last].post_recv(Rank(0), tag, &[1 << 20], LONG);
    let sent = group[0].post_send(Rank(last as u32), tag, vec![payload.clone()], LONG);
    assert!(block_on(received).unwrap() == [payload]);
    block_on(sent).unwrap();
}

fn close(group: &[Arc<dyn Transport>]) {
    let closing: Vec<_> = group.iter().map(|rank| rank.close(LONG)).collect();
    closing.into_iter().for_each(|closed| block_on(closed).unwrap());
}

#[test]
fn strangers_who_stream_nonsense_keep_nobody_out() {
    let job = Job::new();
    let mut ranks = vec![connect(job.config(0, 3, Carrier::Tcp))];
    std::thread::sleep(Duration::from_millis(100));
    let mut strangers = Vec::new();
    for stranger in 0..60 {
        let mut stream = TcpStream::connect(job.coordinator).unwrap();
        let _ = match stranger % 6 {
            // Says nothing; half a length; a packet that never ends; nonsense of every length.
            0 => Ok(()),
            1 => stream.write_all(&[7]),
            2 => stream.write_all(&[0xff, 0xff, 1, 2, 3]),
            3 => (1..200_u16).try_for_each(|length| {
                stream.write_all(&length.to_le_bytes())?;
                stream.write_all(&vec![stranger as u8; usize::from(length)])
            }),
            // A packet larger than any, and a refusal of somebody who was not asked.
            4 => stream.write_all(&[&[0xff; 2][..], &[0xc0; 65_535]].concat()),
            _ => stream.write_all(b"\0\0nobody is here").and_then(|()| stream.shutdown(Shutdown::Write)),
        };
        strangers.push(stream);
    }
    ranks.extend((1..3).map(|rank| connect(job.config(rank, 3, Carrier::Tcp))));
    let group = formed(ranks);
    works(&group);
    assert!(group[1].network().unwrap().contains("TCP"), "{:?}", group[1].network());
    // Whoever said what no member says has been hung up on, the others wait.
    let mut refuser = strangers.pop().unwrap();
    refuser.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(refuser.read(&mut [0]).unwrap_or(0), 0);
    close(&group);
}

#[test]
fn ranks_that_come_another_way_are_told_soon() {
    let carriers = [Carrier::Udp, Carrier::Tcp];
    for (zero, one) in [(carriers[0], carriers[1]), (carriers[1], carriers[0])] {
        let job = Job::new();
        let short = |config| QuicConfig { connect_deadline: Duration::from_secs(8), ..config };
        let waiting = connect(short(job.config(0, 2, zero)));
        std::thread::sleep(Duration::from_millis(200));
        let started = Instant::now();
        let error = connect(short(job.config(1, 2, one))).join().unwrap().unwrap_err().to_string();
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
        let words = format!("rank 0 is reached over {zero}, and this rank came over {one}");
        assert!(error.contains(&words), "{error}");
        // Rank 0 still waits for a rank 1 that comes as it should.
        let group = formed(vec![waiting, connect(short(job.config(1, 2, zero)))]);
        works(&group);
        close(&group);
    }
}

#[test]
fn a_port_that_another_job_has_is_refused_and_is_free_afterwards() {
    let job = Job::new();
    let port = free_address().port();
    let one = || QuicConfig { port, ..job.config(1, 2, Carrier::Tcp) };
    for round in 0..2 {
        // The streams of the first round linger between the same ports.
        let group = formed(vec![connect(job.config(0, 2, Carrier::Tcp)), connect(one())]);
        works(&group);
        let other = Job { coordinator: job.coordinator, ..Job::new() };
        let error = connect(other.config(0, 2, Carrier::Tcp)).join().unwrap().unwrap_err().to_string();
        assert!(error.contains("cannot listen on") && error.contains("(TCP)"), "round {round}: {error}");
        close(&group);
        drop(group);
        std::thread::sleep(Duration::from_millis(1500));
    }
}
