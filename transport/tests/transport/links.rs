//! Connections follow the link settings.

use std::time::Duration;

use crate::common::{Job, SOON, connect, over_quic};
use bytes::Bytes;
use kyklos_transport::quic::{
    Carrier, Congestion, LinkProfile, LinkSettings, QuicConfig, quic_loopback_group_over,
};
use kyklos_transport::{ConnectionFigures, Group, Rank, Tag};
use pollster::block_on;

const LONG: Duration = Duration::from_secs(60);

/// Sends `messages` of 8 MiB from rank 0 to rank 1. Returns rank 0's figures of that connection,
/// and the line in which rank 0 describes its network.
fn send(link: LinkSettings, messages: u32) -> (ConnectionFigures, String) {
    let group: Vec<Group> = quic_loopback_group_over(2, link).unwrap();
    let payload = Bytes::from(vec![7; 8 << 20]);
    for message in 0..messages {
        let tag = Tag { op: 0, message };
        let received = group[1].post_recv(Rank(0), tag, &[payload.len()], LONG);
        let sent = group[0].post_send(Rank(1), tag, vec![payload.clone()], LONG);
        assert!(block_on(received).unwrap() == [payload.clone()]);
        block_on(sent).unwrap();
    }
    let figures = group[0].connections();
    let lines = (figures[1].unwrap(), group[0].network().unwrap());
    assert_eq!(figures[0], None);
    let closing: Vec<_> = group.iter().map(|rank| rank.close(LONG)).collect();
    closing.into_iter().for_each(|closed| block_on(closed).unwrap());
    lines
}

#[test]
fn jumbo_packets_arrive_as_they_are() {
    let (figures, line) = send(LinkSettings { mtu: Some(9000), ..over_quic() }, 8);
    assert_eq!((figures.packet_bytes, figures.black_holes), (8952, 0), "{figures:?}");
    let packets = 8 * (8 << 20) / 8952;
    assert!((packets..2 * packets).contains(&figures.packets_sent), "{figures:?}");
    assert!(figures.bytes_sent > 64 << 20 && figures.bytes_received > 0, "{figures:?}");
    for part in ["127.0.0.1:", "packets of 8952 bytes as stated", "cubic", "TLS13_AES", "socket buffers of"] {
        assert!(line.contains(part), "no {part} in {line}");
    }
}

#[test]
fn packets_fill_an_ethernet_frame() {
    let (figures, line) = send(LinkSettings { mtu: Some(1500), ..over_quic() }, 2);
    assert_eq!((figures.packet_bytes, figures.black_holes), (1452, 0), "{figures:?}");
    assert!(line.contains("packets of 1452 bytes"), "{line}");
}

#[test]
fn a_fixed_window_stays_fixed() {
    let congestion = Congestion::Fixed { window_bytes: 1_500_000 };
    let (figures, line) = send(LinkSettings { mtu: Some(1500), congestion, ..over_quic() }, 4);
    assert_eq!(figures.window_bytes, 1_500_000);
    assert!(line.contains("fixed:1500000"), "{line}");
    let (figures, _) = send(LinkSettings { mtu: Some(1500), ..over_quic() }, 4);
    assert_ne!(figures.window_bytes, 1_500_000);
}

#[test]
fn a_group_works_with_the_least_memory_that_is_taken() {
    let refusal = |memory_bytes| {
        let link = LinkSettings { memory_bytes: Some(memory_bytes), ..over_quic() };
        quic_loopback_group_over(2, link).unwrap_err().to_string()
    };
    let words = refusal(0);
    let least: u64 = words.split("need ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(refusal(least - 1).contains(&format!("{} bytes for connections", least - 1)));
    let (_, line) = send(LinkSettings { memory_bytes: Some(least), ..over_quic() }, 4);
    assert!(line.contains("windows of 6.0 MiB in and 3.0 MiB out"), "{line}");
}

/// The errors of ranks 0 and 1 of two whose settings differ.
fn refused(job: &Job, set: impl Fn(u32, &mut QuicConfig)) -> [String; 2] {
    let ranks = [0, 1].map(|rank| {
        let mut config = QuicConfig { connect_deadline: SOON, ..job.config(rank, 2) };
        set(rank, &mut config);
        connect(config)
    });
    ranks.map(|rank| rank.join().unwrap().unwrap_err().to_string())
}

#[test]
fn ranks_with_other_times_are_told_so_by_name() {
    let heartbeats = refused(&Job::new(), |rank, config| {
        config.heartbeat = (rank == 1).then_some(Duration::from_millis(350));
    });
    let links = refused(&Job::new(), |rank, config| {
        config.link.profile = if rank == 0 { LinkProfile::Wan } else { LinkProfile::Lan };
    });
    for (errors, said) in [
        (heartbeats, "rank 0 has a heartbeat of 200ms, rank 1 of 350ms: say the same heartbeat on all ranks"),
        (links, "rank 0 has the times of link wan, rank 1 those of link lan: say the same link on all ranks"),
    ] {
        assert!(errors.iter().all(|error| error.contains(said)), "{errors:?}");
    }
}

#[test]
fn a_heartbeat_that_is_said_may_be_that_of_the_link() {
    let job = Job::new();
    let ranks = [0, 1].map(|rank| {
        let heartbeat = (rank == 1).then_some(Duration::from_millis(200));
        connect(QuicConfig { connect_deadline: SOON, heartbeat, ..job.config(rank, 2) })
    });
    let _group = ranks.map(|rank| rank.join().unwrap().unwrap());
}

#[cfg(unix)]
#[test]
fn ranks_of_two_carriers_both_say_why_they_do_not_meet() {
    for (mine, other) in [(Carrier::Tcp, "UDP"), (Carrier::Udp, "TCP")] {
        let [zero, one] = refused(&Job::new(), |rank, config| {
            config.link.carrier = match (rank, mine) {
                (0, mine) => mine,
                (_, Carrier::Tcp) => Carrier::Udp,
                (_, Carrier::Udp) => Carrier::Tcp,
            };
            // Nothing but the deadline ends the wait of rank 0, and of a rank that dials by TCP.
            config.connect_deadline = Duration::from_secs(15);
        });
        let said = format!(
            "it came over {other}, and rank 0 is reached over {mine}: use the same carrier on all ranks"
        );
        assert!(zero.contains(&said) && zero.contains("rank 1 did not come"), "{zero}");
        assert!(one.contains("use the same carrier on all ranks"), "{one}");
    }
}
