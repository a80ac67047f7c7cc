//! Ranks with several addresses: those that a rank says, those of rank 0's name, and both families
//! of IP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kyklos_transport::Rank;
use kyklos_transport::quic::{Carrier, LinkProfile, LinkSettings, QuicConfig};
use kyklos_transport::wire::{Frame, PROTOCOL_VERSION, Purpose};
use quinn::crypto::rustls::QuicClientConfig;

use crate::common::*;

over_every_carrier! {
    a_rank_behind_address_translation_is_reached_where_it_says
    every_address_of_rank_0_is_tried
    addresses_of_both_families_are_tried
}

/// A router with address translation between one client and a listener.
struct Nat {
    /// At which the client reaches it.
    address: SocketAddr,
    /// Forgets what it knows: from now on the listener sees the client at another port.
    restart: Box<dyn Fn()>,
}

fn nat(carrier: Carrier, to: SocketAddr) -> Nat {
    match carrier {
        Carrier::Udp => udp_nat(to),
        Carrier::Tcp => tcp_nat(to),
    }
}

fn udp_nat(to: SocketAddr) -> Nat {
    let socket = || Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let (near, far) = (socket(), Arc::new(Mutex::new(socket())));
    let client = Arc::new(Mutex::new(None));
    let address = near.local_addr().unwrap();
    let back = {
        let (near, current, client) = (Arc::clone(&near), Arc::clone(&far), Arc::clone(&client));
        move |far: Arc<UdpSocket>| {
            let (near, current, client) = (Arc::clone(&near), Arc::clone(&current), Arc::clone(&client));
            std::thread::spawn(move || {
                let mut packet = [0; 1 << 16];
                while let Ok((length, from)) = far.recv_from(&mut packet) {
                    // Nobody else gets through, and nothing to an old port.
                    let passes = from == to && Arc::ptr_eq(&far, &current.lock().unwrap());
                    if let (true, Some(client)) = (passes, *client.lock().unwrap()) {
                        let _ = near.send_to(&packet[..length], client);
                    }
                }
            });
        }
    };
    let first = Arc::clone(&far.lock().unwrap());
    back(first);
    let current = Arc::clone(&far);
    std::thread::spawn(move || {
        let mut packet = [0; 1 << 16];
        while let Ok((length, from)) = near.recv_from(&mut packet) {
            *client.lock().unwrap() = Some(from);
            let _ = current.lock().unwrap().send_to(&packet[..length], to);
        }
    });
    let restart = Box::new(move || {
        let new = socket();
        back(Arc::clone(&new));
        *far.lock().unwrap() = new;
    });
    Nat { address, restart }
}

fn tcp_nat(to: SocketAddr) -> Nat {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let streams = Arc::new(Mutex::new(Vec::new()));
    let known = Arc::clone(&streams);
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let (near, Ok(far)) = (near.unwrap(), TcpStream::connect(to)) else { continue };
            for (from, to) in [(&near, &far), (&far, &near)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                known.lock().unwrap().push(from.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        }
    });
    let restart = Box::new(move || {
        for stream in streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    });
    Nat { address, restart }
}

fn a_rank_behind_address_translation_is_reached_where_it_says(carrier: Carrier) {
    let job = Job::new();
    let advertise = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
    let coordinator = nat(carrier, job.coordinator).address;
    let behind = QuicConfig { coordinator, advertise, ..job.over(carrier, 1, 3) };
    works(&formed(vec![connect(job.over(carrier, 0, 3)), connect(behind), connect(job.over(carrier, 2, 3))]));
}

#[test]
fn connections_outlive_the_port_of_address_translation() {
    let (job, carrier) = (Job::new(), Carrier::Udp);
    let nat = nat(carrier, job.coordinator);
    let link = LinkSettings { carrier, profile: LinkProfile::Wan, ..over_quic() };
    let [zero, one] = [0, 1].map(|rank| QuicConfig { link, ..job.config(rank, 2) });
    let group = formed(vec![connect(zero), connect(QuicConfig { coordinator: nat.address, ..one })]);
    exchange(&group, 0);
    for op in 1..3 {
        std::thread::scope(|scope| {
            scope.spawn(|| exchange(&group, op));
            (nat.restart)();
        });
        // Longer than a stranger may have a stream.
        std::thread::sleep(Duration::from_secs(6));
        exchange(&group, 10 + op);
    }
    close(&group);
}

/// A rank 0 of another cluster, which answers at this address until it is dropped.
fn another_rank_0(carrier: Carrier) -> (SocketAddr, std::thread::JoinHandle<Formed>) {
    let other = Job::new();
    let config = QuicConfig { connect_deadline: Duration::from_secs(10), ..other.over(carrier, 0, 2) };
    (other.coordinator, connect(config))
}

fn every_address_of_rank_0_is_tried(carrier: Carrier) {
    let job = Job::new();
    let ((stranger, strangers), nobody) = (another_rank_0(carrier), free_address());
    // The wrong ones come first.
    let dials = |rank| QuicConfig {
        coordinator: nobody,
        coordinator_also: vec![stranger, job.coordinator],
        connect_deadline: Duration::from_secs(8),
        ..job.over(carrier, rank, 3)
    };
    works(&formed(vec![connect(job.over(carrier, 0, 3)), connect(dials(1)), connect(dials(2))]));
    assert!(strangers.join().unwrap().is_err());
}

fn addresses_of_both_families_are_tried(carrier: Carrier) {
    if UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        println!("ignored: this host has no IPv6");
        return;
    }
    let job = Job::new();
    let port = job.coordinator.port();
    let (v4, v6) =
        (SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SocketAddr::from((Ipv6Addr::LOCALHOST, port)));
    let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let both = |rank, advertise: &[&str]| {
        let advertise = advertise.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect();
        QuicConfig { bind: any, advertise, ..job.over(carrier, rank, 4) }
    };
    // Nobody is at the other addresses of this network.
    let nobody = SocketAddr::new("127.7.7.7".parse().unwrap(), port);
    let zero = both(0, &[]);
    let one =
        QuicConfig { coordinator: nobody, coordinator_also: vec![v6], ..both(1, &["::1", "127.0.0.1"]) };
    let two = QuicConfig { coordinator: v4, ..both(2, &["127.0.0.1"]) };
    // It has a socket for IPv4 only.
    let three = QuicConfig { coordinator: v6, coordinator_also: vec![v4], ..job.over(carrier, 3, 4) };
    works(&formed([zero, one, two, three].map(connect).into()));
}

#[test]
fn a_host_with_addresses_of_both_families_listens_to_both() {
    let job = Job::new();
    let bind = |coordinator: &str, also: &[&str], advertise: &[&str]| {
        let identity = job.authority.issue(Rank(0)).unwrap();
        let at = |text: &&str| text.parse().unwrap();
        let mut config = QuicConfig::new(Rank(0), 2, job.id, coordinator.parse().unwrap(), identity);
        config.coordinator_also = also.iter().map(at).collect();
        config.advertise = advertise.iter().map(at).collect();
        config.bind_both_families();
        config.bind.to_string()
    };
    let both = if UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok() { "::" } else { "0.0.0.0" };
    assert_eq!(bind("10.0.0.1:1", &["[fd00::1]:1"], &[]), both);
    assert_eq!(bind("[fd00::1]:1", &["10.0.0.1:1"], &[]), both);
    assert_eq!(bind("10.0.0.1:1", &[], &["[fd00::1]:1"]), both);
    assert_eq!(bind("10.0.0.1:1", &["10.0.0.2:1"], &[]), "0.0.0.0");
    assert_eq!(bind("127.0.0.1:1", &["[::1]:1"], &[]), "127.0.0.1");
    // A loopback address of IPv4, written in IPv6.
    assert_eq!(bind("[::ffff:127.0.0.1]:1", &[], &[]), "127.0.0.1");
}

#[test]
fn a_rank_that_says_addresses_of_no_host_is_turned_away() {
    let job = Job::new();
    let refuse = |advertise: Vec<SocketAddr>| refused(QuicConfig { advertise, ..job.config(1, 2) });
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    assert!(
        refuse(vec![at("10.0.0.1:1"), at("224.0.0.1:1")]).contains("224.0.0.1 is no address of one host")
    );
    assert!(refuse(vec![at("10.0.0.1:1"); 9]).contains("at most 8"));
    // A member that says it all the same.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (group, why) = job.form_while(2, || {
        runtime.block_on(async {
            let endpoint = quinn::Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
            let tls = QuicClientConfig::try_from(job.tls(Some(1), "kyklos-ctl/1")).unwrap();
            let config = quinn::ClientConfig::new(Arc::new(tls));
            let connection =
                endpoint.connect_with(config, job.coordinator, &job.name(0)).unwrap().await.unwrap();
            let (mut send, _recv) = connection.open_bi().await.unwrap();
            let (protocol, purpose) = (PROTOCOL_VERSION, Purpose::Control);
            let hello = Frame::Hello { protocol, purpose, job: job.id.0, epoch: 0, rank: Rank(1), size: 2 };
            send.write_all(&hello.encode()).await.unwrap();
            let said = Frame::Advertise { addresses: vec![at("10.0.0.1:1"), at("10.0.0.2:0")] };
            send.write_all(&said.encode()).await.unwrap();
            connection.closed().await.to_string()
        })
    });
    assert!(why.contains("it advertises 10.0.0.2:0, which is no address of one host"), "{why}");
    works(&group);
}
