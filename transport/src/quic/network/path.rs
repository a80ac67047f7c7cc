//! Settings of the network between the ranks, and packet sizes and memory limits by them.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, MtuDiscoveryConfig, TransportConfig, VarInt};

use super::acknowledged::Counted;
use super::congestion::Congestion;
use super::timing::LinkProfile;
use super::windows::{Limits, Windows};
use crate::error::TransportError;
use crate::quic::network::tcp::delay_window::DelayWindows;
use crate::quic::network::tcp::tunnel::STRANGERS_BYTES;
use crate::wire::MOST_LANES;

/// Settings of the links between ranks. Carrier, lanes and profile must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSettings {
    /// Bytes of the largest IP packet that every link carries, 1280 to 65535. A packet has 48 of
    /// them for its headers, so that IPv6 fits too. `None`: packets for 1500 are probed for,
    /// and over Linux' loopback they are as large as UDP allows. A wrong value costs speed, not
    /// bytes: packets that do not arrive become smaller ones.
    pub mtu: Option<u16>,
    /// Congestion control.
    pub congestion: Congestion,
    /// The carrier of the packets; must be the same on all ranks.
    pub carrier: Carrier,
    /// Most bytes that all connections of the rank may hold: received and not yet read, sent and
    /// not yet acknowledged, and the buffer into which packets come. `None`: 1 GiB, or more
    /// where the minimum for each rank needs it. Memory of messages themselves is the caller's,
    /// that of sockets the system's.
    pub memory_bytes: Option<u64>,
    /// Data connections between two ranks, 1 to [`MOST_LANES`]; must be the same on all ranks. Each
    /// lane of a rank has a port and a thread of its own, and larger messages are shared by all
    /// lanes: more than one is for links that are faster than one core encrypts.
    pub lanes: u8,
    /// Whether the links are within a data centre, which decides how patient a rank is.
    pub profile: LinkProfile,
    /// Whether messages of more than 64 KiB between ranks on one host go through memory that both
    /// share (64-bit Linux; in groups of up to 129 ranks). It is used between processes of one
    /// user, one network namespace and one process namespace that have shown their
    /// certificates; other ranks use QUIC, and so does a rank that says `false` here. It takes up
    /// to 4 MiB for each rank on the host and direction, 64 MiB in all, beside
    /// [`Self::memory_bytes`].
    pub shared_memory: bool,
}

impl Default for LinkSettings {
    fn default() -> Self {
        Self {
            mtu: None,
            congestion: Congestion::default(),
            carrier: Carrier::default(),
            memory_bytes: None,
            lanes: 1,
            profile: LinkProfile::default(),
            shared_memory: true,
        }
    }
}

/// The carrier of the packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carrier {
    /// UDP (the default).
    #[default]
    Udp,
    /// TCP streams, for networks that drop UDP (Unix only): the same packets inside of them. TCP
    /// finds out how large its own packets may be and how many of them the path takes; `fixed`
    /// then says how much QUIC hands to it at a time.
    Tcp,
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Udp => "UDP",
            Self::Tcp => "TCP",
        })
    }
}

impl LinkSettings {
    /// Checks the settings for a group of `size` ranks in which this one is bound to `bind`.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] with the setting that does not fit, and a setting that would.
    pub fn check(&self, bind: IpAddr, size: u32) -> Result<(), TransportError> {
        Path::new(self, bind, size).map(|_| ())
    }
}

/// The packets, windows and timeouts of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    kind: PathKind,
    pub(crate) profile: LinkProfile,
    payload: u16,
    congestion: Congestion,
    /// The window of a TCP stream is at most that of `congestion`, and follows the delay.
    follows_delay: bool,
    pub(crate) windows: Windows,
    /// How many other ranks there are, and connections for messages to each.
    peers: u64,
    lanes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathKind {
    /// Both ends are on this host, where one packet may be as large as UDP allows.
    Loopback,
    /// Packets of this size get through, as far as the operator knows.
    Stated,
    /// Any other path: packets that every Ethernet carries, once tests show that they arrive.
    Probed,
    /// In streams, which carry packets of any size.
    Streams,
}

impl Path {
    pub(crate) fn new(link: &LinkSettings, bind: IpAddr, size: u32) -> Result<Self, TransportError> {
        // Loopback interfaces of other systems than Linux carry smaller datagrams.
        let loopback = cfg!(target_os = "linux") && bind.is_loopback();
        let streams = link.carrier == Carrier::Tcp;
        if streams && !cfg!(unix) {
            return Err(TransportError::bootstrap(
                "TCP between ranks on a system that is not Unix: use UDP".to_owned(),
            ));
        }
        let (kind, payload) = match link.mtu {
            Some(mtu) if streams => {
                return Err(TransportError::bootstrap(format!(
                    "links that carry {mtu} bytes, and TCP between ranks: TCP finds that out by itself, leave it out"
                )));
            }
            None if streams => (PathKind::Streams, LARGE_PAYLOAD),
            Some(mtu) if mtu < LEAST_MTU => {
                return Err(TransportError::bootstrap(format!(
                    "links that carry {mtu} bytes: QUIC and IPv6 need {LEAST_MTU}, and Ethernet has 1500"
                )));
            }
            Some(mtu) => (PathKind::Stated, mtu - HEADER_BYTES),
            None if loopback => (PathKind::Loopback, LARGE_PAYLOAD),
            None => (PathKind::Probed, NETWORK_PAYLOAD),
        };
        let peers = u64::from(size.max(2) - 1);
        if link.lanes == 0 || link.lanes > MOST_LANES {
            let lanes = link.lanes;
            return Err(TransportError::bootstrap(format!(
                "{lanes} lanes between two ranks: use 1 to {MOST_LANES}"
            )));
        }
        let lanes = u64::from(link.lanes);
        let follows_delay = streams && link.congestion == Congestion::Cubic;
        let congestion = match link.congestion {
            // TCP controls the bytes in flight. But its queue must stay short for control frames.
            Congestion::Cubic if streams => Congestion::Fixed { window_bytes: STREAMS_WINDOW_BYTES },
            said => said,
        };
        let limits = Limits::of(congestion, payload, bind.is_loopback())?;
        let (windows, profile) = (limits.least, link.profile);
        let path = Self { kind, profile, payload, congestion, follows_delay, windows, peers, lanes };
        let windows = match link.memory_bytes {
            None => limits.share((USUAL_BYTES / (peers * lanes)).max(limits.least.both())),
            Some(memory) => {
                let needed = path.memory_bytes();
                if memory < needed {
                    return Err(TransportError::bootstrap(format!(
                        "{memory} bytes for connections to {}{}, which need {needed} at the least ({}, packets \
                         of {payload} bytes): allow more, or have fewer ranks",
                        if peers > 1 { format!("{peers} ranks") } else { "the other rank".to_owned() },
                        if lanes > 1 { format!(" over {lanes} lanes") } else { String::new() },
                        path.congestion
                    )));
                }
                limits.share(((memory - path.receive_buffers()) / peers - path.beside_bytes()) / lanes)
            }
        };
        Ok(Self { windows, ..path })
    }

    /// Largest UDP payload announced to peers; strangers may send what every Ethernet carries.
    pub(crate) fn largest_datagram(&self) -> u16 {
        self.payload.max(ETHERNET_PAYLOAD)
    }

    /// Packets that the system sends as one datagram. More would fail, as a loss to quinn.
    pub(crate) fn transmit_segments(&self) -> usize {
        usize::from(LARGEST_DATAGRAM / self.payload).max(1)
    }

    /// Packets in one received datagram. At least the number that fits, or it is truncated.
    pub(crate) fn receive_segments(&self) -> usize {
        usize::from(u16::MAX.div_ceil(self.largest_datagram()))
    }

    /// Bytes into which the endpoints receive, and what strangers can make them hold in streams.
    fn receive_buffers(&self) -> u64 {
        let segments = self.receive_segments() as u64;
        let datagrams = u64::from(self.largest_datagram()) * segments * quinn::udp::BATCH_SIZE as u64;
        let strangers = if self.kind == PathKind::Streams { STRANGERS_BYTES } else { 0 };
        self.lanes * (datagrams + strangers)
    }

    /// Bytes of packets that may wait for a TCP stream: what QUIC has in flight on a data
    /// connection and on a control connection, and their acknowledgements.
    pub(crate) fn stream_queue_bytes(&self) -> usize {
        usize::try_from(self.fixed_bytes() + 2 * CONTROL_BYTES).unwrap_or(usize::MAX)
    }

    /// Bytes for each rank besides windows for messages: windows for control, queue to a TCP
    /// stream.
    fn beside_bytes(&self) -> u64 {
        (1 + self.lanes) * CONTROL_BYTES
            + if self.kind == PathKind::Streams { self.lanes * self.stream_queue_bytes() as u64 } else { 0 }
    }

    /// Bytes that the connections of this rank hold at most, beside those whose peers have not
    /// shown who they are: see [`PendingHandshakes`](super::handshakes::PendingHandshakes).
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.receive_buffers() + self.peers * (self.lanes * self.windows.both() + self.beside_bytes())
    }

    /// How connections begin, whatever they are for.
    pub(crate) fn transport_config(&self, idle_timeout: Duration) -> TransportConfig {
        let mut config = TransportConfig::default();
        config
            .stream_receive_window(varint(STREAM_BYTES.max(self.fixed_bytes()).min(self.windows.receive)))
            // quinn's default is unlimited. This limit bounds the memory that a peer can make this rank hold.
            .receive_window(varint(CONTROL_BYTES))
            .send_window(CONTROL_BYTES)
            .max_concurrent_uni_streams(VarInt::from_u32(STREAMS))
            .max_concurrent_bidi_streams(VarInt::from_u32(1))
            .datagram_receive_buffer_size(None)
            .keep_alive_interval(Some(idle_timeout / 4))
            .max_idle_timeout(quinn::IdleTimeout::try_from(idle_timeout).ok())
            .initial_rtt(self.profile.initial_round_trip());
        config.congestion_controller_factory(Arc::new(Counted(match self.follows_delay {
            true => Arc::new(DelayWindows(self.fixed_bytes())),
            false => self.congestion.factory(),
        })));
        match self.kind {
            // Without a floor, a burst of loss would look like a path for small packets only.
            PathKind::Loopback | PathKind::Streams => config
                .initial_mtu(self.payload)
                .min_mtu(LARGE_PAYLOAD_FLOOR)
                .mtu_discovery_config(None)
                .enable_segmentation_offload(false),
            // If the operator is wrong, the discovery falls back and looks again.
            PathKind::Stated => {
                let mut discovery = MtuDiscoveryConfig::default();
                discovery.upper_bound(self.payload).black_hole_cooldown(BLACK_HOLE_COOLDOWN);
                config.initial_mtu(self.payload).mtu_discovery_config(Some(discovery))
            }
            PathKind::Probed => config.initial_mtu(1200),
        };
        config
    }

    fn fixed_bytes(&self) -> u64 {
        match self.congestion {
            Congestion::Cubic => 0,
            Congestion::Fixed { window_bytes } => window_bytes,
        }
    }

    /// Gives a connection that carries messages its windows. Until then it has those of control, so
    /// that a rank that is not admitted holds next to nothing.
    pub(crate) fn open_for_data(&self, connection: &Connection) {
        connection.set_receive_window(varint(self.windows.receive));
        connection.set_send_window(self.windows.send);
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.kind {
            PathKind::Loopback => "of loopback",
            PathKind::Stated => "as stated",
            PathKind::Probed => "if they get through",
            PathKind::Streams => "in streams",
        };
        let Self {
            payload, congestion, follows_delay, windows: Windows { receive, send }, peers, lanes, ..
        } = self;
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        write!(
            f,
            "packets of {payload} bytes {how}, {congestion}{}, windows of {} in and {} out ",
            if *follows_delay { " at most, less if packets wait" } else { "" },
            mib(*receive),
            mib(*send)
        )?;
        match lanes {
            1 => f.write_str("for ")?,
            _ => write!(f, "for each of {lanes} lanes to ")?,
        }
        match peers {
            1 => f.write_str("the other rank")?,
            _ => write!(f, "each of {peers} ranks")?,
        }
        write!(f, ", at most {} in all without handshakes of strangers", mib(self.memory_bytes()))
    }
}

fn varint(value: u64) -> VarInt {
    VarInt::from_u64(value).unwrap_or(VarInt::MAX)
}

/// What IPv6 promises everywhere, and QUIC's smallest packets fit.
pub(crate) const LEAST_MTU: u16 = 1280;

/// Headers of IPv6 and UDP.
const HEADER_BYTES: u16 = 48;

/// UDP payload in one Ethernet packet, as quinn's own MTU discovery would find.
const NETWORK_PAYLOAD: u16 = 1452;

/// The same over IPv4, in which others may send.
const ETHERNET_PAYLOAD: u16 = 1472;

/// Payload of a packet where nothing limits it but UDP.
const LARGE_PAYLOAD: u16 = 65_000;

/// Handshake packets are padded to the floor; quinn-proto panics on those of 16,384 bytes or more.
const LARGE_PAYLOAD_FLOOR: u16 = 16_000;

/// The most that IPv4 carries in one UDP datagram, however many packets it is cut into afterwards.
const LARGEST_DATAGRAM: u16 = 65_507;

/// After which larger packets are tried again on a path that swallowed them.
const BLACK_HOLE_COOLDOWN: Duration = Duration::from_secs(10);

/// Streams that a peer may have open to this rank: requested messages, and early small ones.
const STREAMS: u32 = 256;

/// Of one message's stream. Quinn ends a connection whose stream has a thousand gaps.
const STREAM_BYTES: u64 = 16 << 20;

/// In each direction of a connection for control: a few of its largest frames.
const CONTROL_BYTES: u64 = 256 << 10;

/// Bytes of all connections, if the settings do not set them.
const USUAL_BYTES: u64 = 1 << 30;

/// Most bytes handed to TCP and not yet acknowledged, if the settings do not set them: 25 ms of 1
/// Gb/s. Control frames wait behind them, so on a slow link there are fewer.
const STREAMS_WINDOW_BYTES: u64 = 3 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::MAX_RANKS;
    use std::net::Ipv4Addr;

    const ANY: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn of(mtu: Option<u16>, bind: IpAddr) -> Path {
        Path::new(&LinkSettings { mtu, ..LinkSettings::default() }, bind, 2).unwrap()
    }

    #[test]
    fn packets_have_the_size_of_the_link_and_never_more_segments_than_a_datagram_holds() {
        let sizes = |path: Path| (path.payload, path.transmit_segments(), path.receive_segments());
        assert_eq!(sizes(of(None, ANY)), (1452, 45, 45));
        assert_eq!(sizes(of(Some(9000), ANY)), (8952, 7, 8));
        assert_eq!(sizes(of(Some(9000), LOCAL)), (8952, 7, 8));
        assert_eq!(sizes(of(Some(65535), ANY)), (65487, 1, 2));
        #[cfg(target_os = "linux")]
        assert_eq!(sizes(of(None, LOCAL)), (65000, 1, 2));
        for mtu in LEAST_MTU..=u16::MAX {
            let path = of(Some(mtu), ANY);
            assert!(path.transmit_segments() * usize::from(path.payload) <= 65_507, "{mtu}");
            assert!(path.receive_segments() * usize::from(path.largest_datagram()) >= 65_535, "{mtu}");
        }
    }

    #[test]
    fn what_cannot_work_is_refused_with_the_reason() {
        let refusal = |link: LinkSettings, size| match link.check(ANY, size) {
            Err(TransportError::Bootstrap { text, .. }) => text,
            other => panic!("{other:?}"),
        };
        let mtu = refusal(LinkSettings { mtu: Some(1279), ..LinkSettings::default() }, 2);
        assert!(mtu.contains("1279") && mtu.contains("1280"), "{mtu}");
        let little = LinkSettings { memory_bytes: Some(20 << 20), ..LinkSettings::default() };
        little.check(ANY, 2).unwrap();
        let lanes = |lanes| LinkSettings { lanes, ..LinkSettings::default() };
        lanes(MOST_LANES).check(ANY, MAX_RANKS).unwrap();
        assert!(refusal(lanes(0), 2).contains("0 lanes between two ranks: use 1 to 16"));
        assert!(refusal(lanes(17), 2).contains("17 lanes"));
        assert!(refusal(LinkSettings { lanes: 2, ..little }, 2).contains("the other rank over 2 lanes"));
        assert!(refusal(little, 3).contains("20971520 bytes for connections to 2 ranks"));
    }
}
