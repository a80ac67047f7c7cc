//! How many bytes of each connection may wait in memory.

use super::congestion::Congestion;
use crate::error::TransportError;

/// Bytes of a data connection that wait in memory, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Windows {
    pub(crate) receive: u64,
    pub(crate) send: u64,
}

impl Windows {
    pub(crate) fn both(self) -> u64 {
        self.receive + self.send
    }
}

/// The smallest and the largest useful windows on a network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The smallest windows with which everything works.
    pub(crate) least: Windows,
    /// Larger windows than these are not faster.
    most: Windows,
}

impl Limits {
    /// For packets of `payload` bytes, within one host or between hosts.
    pub(crate) fn of(congestion: Congestion, payload: u16, loopback: bool) -> Result<Self, TransportError> {
        let mut limits = match congestion {
            Congestion::Cubic => Self { least: LEAST, most: MOST },
            Congestion::Fixed { window_bytes } => Self::of_fixed(window_bytes, payload)?,
        };
        if loopback {
            // There the only queue is the receiver's socket buffer: more than it holds is lost and sent
            // again.
            limits.most.send = limits.least.send.max(LOOPBACK_SEND_BYTES);
        }
        Ok(limits)
    }

    fn of_fixed(window_bytes: u64, payload: u16) -> Result<Self, TransportError> {
        let refused = |text| TransportError::bootstrap(text);
        let ten_packets = 10 * u64::from(payload);
        if window_bytes < ten_packets {
            return Err(refused(format!(
                "a fixed window of {window_bytes} bytes for packets of {payload}: nothing is ever sent through one \
                 that is smaller than a packet, and little through a few; use at least {ten_packets}"
            )));
        }
        if window_bytes > MOST_FIXED {
            return Err(refused(format!(
                "a fixed window of {window_bytes} bytes: beyond {MOST_FIXED} packets are no longer spread over time; \
                 use rate x round-trip time, such as 3000000 for 1 Gb/s and 20 ms"
            )));
        }
        // The bytes in flight must fit both ends.
        let fitting = |windows: Windows| Windows {
            receive: windows.receive.max(2 * window_bytes),
            send: windows.send.max(window_bytes),
        };
        Ok(Self { least: fitting(LEAST), most: fitting(MOST) })
    }

    /// Splits `bytes` into the receive window and the send window of a connection.
    pub(crate) fn share(&self, bytes: u64) -> Windows {
        let Self { least, most } = self;
        // Two thirds for receiving: received bytes wait for their reader, sent ones for an acknowledgement
        // only.
        let receive = (bytes - bytes / 3).clamp(least.receive, most.receive);
        Windows { receive, send: (bytes - receive).clamp(least.send, most.send) }
    }
}

/// Messages that were not requested take up to 4 MiB of the receive window; requested ones must
/// still fit.
const LEAST: Windows = Windows { receive: 6 << 20, send: 3 << 20 };

/// More than the bytes in flight of a link of 10 Gb/s and 20 ms.
const MOST: Windows = Windows { receive: 64 << 20, send: 32 << 20 };

/// Bytes in flight to one rank over loopback, where socket buffers hold 4 to 16 MiB.
const LOOPBACK_SEND_BYTES: u64 = 4 << 20;

/// quinn does not pace larger windows.
const MOST_FIXED: u64 = u32::MAX as u64;

#[cfg(test)]
mod tests {
    use super::super::path::{Carrier, LEAST_MTU, LinkSettings, Path};
    use super::*;
    use crate::rank::MAX_RANKS;
    use crate::wire::MOST_LANES;
    use proptest::prelude::*;
    use std::net::{IpAddr, Ipv4Addr};

    const ANY: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn a_small_group_has_the_usual_windows_and_a_large_one_shares() {
        let windows = |size| Path::new(&LinkSettings::default(), ANY, size).unwrap().windows;
        assert_eq!(windows(2), MOST);
        assert_eq!(windows(11), MOST);
        let shared = windows(21);
        assert!(shared.both() < MOST.both() && shared.both() > LEAST.both(), "{shared:?}");
        assert_eq!(windows(MAX_RANKS), LEAST);
    }

    #[test]
    fn fixed_windows_that_cannot_work_are_refused_with_the_reason() {
        let fixed = |window_bytes| LinkSettings {
            congestion: Congestion::Fixed { window_bytes },
            ..LinkSettings::default()
        };
        let refusal = |link: LinkSettings| match link.check(ANY, 2) {
            Err(TransportError::Bootstrap { text, .. }) => text,
            other => panic!("{other:?}"),
        };
        assert!(refusal(fixed(14_519)).contains("use at least 14520"));
        fixed(14_520).check(ANY, 2).unwrap();
        let jumbo = LinkSettings { mtu: Some(9000), ..fixed(80_000) };
        assert!(refusal(jumbo).contains("use at least 89520"));
        fixed(MOST_FIXED).check(ANY, 2).unwrap();
        assert!(refusal(fixed(MOST_FIXED + 1)).contains("spread over time"));
    }

    proptest! {
        #[test]
        fn connections_stay_within_their_memory(
            memory in 0_u64..1 << 36,
            size in 1_u32..=MAX_RANKS,
            mtu in proptest::option::of(LEAST_MTU..=u16::MAX),
            window_bytes in proptest::option::of(700_000_u64..1 << 31),
            bind in prop_oneof![Just(ANY), Just(LOCAL)],
            streams in any::<bool>(),
            lanes in 1..=MOST_LANES,
        ) {
            let congestion = window_bytes.map_or(Congestion::Cubic, |window_bytes| Congestion::Fixed { window_bytes });
            let (mtu, carrier) = if streams { (None, Carrier::Tcp) } else { (mtu, Carrier::Udp) };
            let sized = LinkSettings { mtu, congestion, carrier, ..LinkSettings::default() };
            let link = LinkSettings { memory_bytes: Some(memory), lanes, ..sized };
            let unstated = LinkSettings { memory_bytes: None, ..link };
            prop_assert!(unstated.check(bind, size).is_ok(), "without a limit");
            if let Ok(path) = Path::new(&link, bind, size) {
                prop_assert!(path.memory_bytes() <= memory, "{path:?}");
                prop_assert!(path.windows.receive >= LEAST.receive && path.windows.send >= LEAST.send);
                prop_assert!(path.windows.send >= window_bytes.unwrap_or(0));
            }
        }
    }
}
