//! Groups over TCP streams: clients that send garbage, ranks with another carrier, ports that are
//! reused.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::common::*;
use kyklos_transport::quic::{Carrier, QuicConfig};

/// A stream to rank 0, as soon as that listens.
fn dial(job: &Job) -> TcpStream {
    let started = Instant::now();
    loop {
        match TcpStream::connect(job.coordinator) {
            Ok(stream) => return stream,
            Err(error) => assert!(started.elapsed() < SOON, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn clients_that_stream_garbage_do_not_keep_a_group_from_forming() {
    let job = Job::new();
    let mut ranks = vec![connect(job.over(Carrier::Tcp, 0, 3))];
    let mut strangers = Vec::new();
    for stranger in 0..60 {
        let mut stream = dial(&job);
        let _ = match stranger % 6 {
            // Silence; half a length; a packet that never ends; garbage of every length.
            0 => Ok(()),
            1 => stream.write_all(&[7]),
            2 => stream.write_all(&[0xff, 0xff, 1, 2, 3]),
            3 => (1..200_u16).try_for_each(|length| {
                stream.write_all(&length.to_le_bytes())?;
                stream.write_all(&vec![stranger as u8; usize::from(length)])
            }),
            // A packet above every limit, and an unexpected refusal.
            4 => stream.write_all(&[&[0xff; 2][..], &[0xc0; 65_535]].concat()),
            _ => stream.write_all(b"\0\0nobody is here").and_then(|()| stream.shutdown(Shutdown::Write)),
        };
        strangers.push(stream);
    }
    ranks.extend((1..3).map(|rank| connect(job.over(Carrier::Tcp, rank, 3))));
    let group = formed(ranks);
    exchange(&group, 0);
    assert!(group[1].network().unwrap().contains("TCP"), "{:?}", group[1].network());
    // The connection with the invalid frame is closed; the others stay open.
    let mut refuser = strangers.pop().unwrap();
    refuser.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(refuser.read(&mut [0]).unwrap_or(0), 0);
    close(&group);
}

#[test]
fn streams_whose_owner_never_shows_an_identity_are_closed_and_leave_room() {
    let job = Job::new();
    let zero = connect(job.over(Carrier::Tcp, 0, 2));
    // More than one address may have at once.
    let idle: Vec<_> = (0..600).map(|_| dial(&job)).collect();
    let mut slow = dial(&job);
    let started = Instant::now();
    let group = formed(vec![zero, connect(job.over(Carrier::Tcp, 1, 2))]);
    // Sooner than the places of the others become free.
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    // A byte now and then is no handshake.
    let ended = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(200));
        slow.write_all(&[1]).is_err()
    });
    assert!(ended && started.elapsed() < SOON, "{:?}", started.elapsed());
    for mut stream in idle {
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        assert!(
            stream
                .read(&mut [0])
                .map_or_else(|error| error.kind() != ErrorKind::WouldBlock, |read| read == 0)
        );
    }
    // The streams of members outlive the time of a handshake.
    exchange(&group, 0);
    close(&group);
}

/// Packets of an unknown version of QUIC ask for an answer each. The rank must not wait for ever
/// until somebody takes the answers.
#[test]
fn a_stranger_that_asks_and_never_reads_is_given_up() {
    let job = Job::new();
    let zero = connect(job.over(Carrier::Tcp, 0, 2));
    let mut packet = [0; 1202];
    packet[..17].copy_from_slice(&[0xb0, 4, 0xc0, 0x1a, 0x2a, 0x3a, 0x4a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0]);
    let many = packet.repeat(100);
    let mut stream = dial(&job);
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let started = Instant::now();
    let (mut asked, mut waited) = (0, false);
    // A write that is not taken in time is no end: both directions are full.
    let ended = loop {
        match stream.write(&many) {
            Ok(bytes) => asked += bytes,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                waited = true
            }
            Err(_) => break true,
        }
        if started.elapsed() > LONG {
            break false;
        }
    };
    println!("{asked} bytes, full: {waited}, ended after {:?}", started.elapsed());
    assert!(ended, "{asked} bytes in {:?}", started.elapsed());
    // Its place is free.
    works(&formed(vec![zero, connect(job.over(Carrier::Tcp, 1, 2))]));
}

#[test]
fn a_refusal_that_anybody_can_send_ends_no_rank_and_is_not_repeated() {
    let job = Job::new();
    let forger = TcpListener::bind(job.coordinator).unwrap();
    let one = connect(job.over(Carrier::Tcp, 1, 2));
    for _ in 0..2 {
        let (mut stream, _) = forger.accept().unwrap();
        let _ = stream.write_all(b"\0\0go away\nerror: the authority is revoked");
    }
    drop(forger);
    let group = formed(vec![connect(job.over(Carrier::Tcp, 0, 2)), one]);
    works(&group);
}

#[test]
fn ranks_with_another_carrier_learn_the_reason() {
    let carriers = [Carrier::Udp, Carrier::Tcp];
    for (zero, one) in [(carriers[0], carriers[1]), (carriers[1], carriers[0])] {
        let job = Job::new();
        let short = |config, seconds| QuicConfig { connect_deadline: Duration::from_secs(seconds), ..config };
        let waiting = connect(short(job.over(zero, 0, 2), 12));
        std::thread::sleep(Duration::from_millis(200));
        let started = Instant::now();
        let error = connect(short(job.over(one, 1, 2), 3)).join().unwrap().unwrap_err().to_string();
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        let words = match zero {
            // Anybody could have said so: it is a hint at the deadline.
            Carrier::Udp => "answered a TCP stream with the refusal of a rank 0 that uses UDP",
            Carrier::Tcp => "rank 0 is reached over TCP, and this rank came over UDP",
        };
        assert!(error.contains(words), "{error}");
        // Rank 0 still waits for a rank 1 that uses the right carrier.
        let group = formed(vec![waiting, connect(short(job.over(zero, 1, 2), 8))]);
        exchange(&group, 0);
        close(&group);
    }
}

#[test]
fn a_port_that_another_job_has_is_refused_and_is_free_afterwards() {
    let job = Job::new();
    let port = free_address().port();
    let one = || QuicConfig { port, ..job.over(Carrier::Tcp, 1, 2) };
    for round in 0..2 {
        // The streams of the first round remain for a while between the same ports.
        let group = formed(vec![connect(job.over(Carrier::Tcp, 0, 2)), connect(one())]);
        exchange(&group, 0);
        let other = Job { coordinator: job.coordinator, ..Job::new() };
        let error = connect(other.over(Carrier::Tcp, 0, 2)).join().unwrap().unwrap_err().to_string();
        assert!(error.contains("cannot listen on") && error.contains("(TCP)"), "round {round}: {error}");
        close(&group);
        drop(group);
        // The system gives the same pair of ports again a second after both ends are closed, which a loaded
        // machine does late.
        std::thread::sleep(Duration::from_millis(4000));
    }
}
