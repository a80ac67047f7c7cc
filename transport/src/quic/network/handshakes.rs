//! Limits on pending handshakes. Anybody can begin as many connections as they like, and each costs memory
//! until its handshake has proven an identity.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts the handshakes that have not ended.
#[derive(Clone, Debug)]
pub(crate) struct PendingHandshakes {
    counts: Arc<Mutex<PendingCounts>>,
    limits: Limits,
}

/// How many handshakes may be pending.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// From this many on, QUIC Retry is required.
    without_retry: usize,
    per_network: usize,
    in_all: usize,
}

impl Default for PendingHandshakes {
    fn default() -> Self {
        Self::within(Limits {
            without_retry: MAX_WITHOUT_RETRY,
            per_network: MAX_PER_NETWORK,
            in_all: MAX_PENDING,
        })
    }
}

#[derive(Debug, Default)]
struct PendingCounts {
    pending: usize,
    by_network: HashMap<IpAddr, usize>,
}

/// Handshake admission decision.
#[derive(Debug)]
pub(crate) enum HandshakeDecision {
    /// The handshake may continue, and counts until this is dropped.
    Accept(HandshakeSlot),
    /// QUIC Retry is required: the peer must prove its address first, because a forged one costs its sender nothing.
    RequireRetry,
    Refuse,
}

impl PendingHandshakes {
    /// Streams of peers that have not proven who they are, at most. Each takes a descriptor of the process.
    pub(crate) const MAX_STREAMS: usize = 256;

    /// For TCP streams whose peers have not proven who they are.
    pub(crate) fn of_streams() -> Self {
        let in_all = Self::MAX_STREAMS;
        Self::within(Limits { without_retry: usize::MAX, per_network: in_all / 2, in_all })
    }

    fn within(limits: Limits) -> Self {
        Self { counts: Arc::default(), limits }
    }

    /// Decides about a handshake from the address `from`, which has been `proven` or not.
    pub(crate) fn decide(&self, from: IpAddr, proven: bool) -> HandshakeDecision {
        let network = network(from);
        let mut counts = self.lock();
        let same_network = counts.by_network.get(&network).copied().unwrap_or(0);
        if !proven && counts.pending >= self.limits.without_retry {
            return HandshakeDecision::RequireRetry;
        }
        if counts.pending >= self.limits.in_all || same_network >= self.limits.per_network {
            return HandshakeDecision::Refuse;
        }
        counts.pending += 1;
        *counts.by_network.entry(network).or_default() += 1;
        HandshakeDecision::Accept(HandshakeSlot { pending: self.clone(), network })
    }

    fn lock(&self) -> MutexGuard<'_, PendingCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Held for each pending handshake.
#[derive(Debug)]
pub(crate) struct HandshakeSlot {
    pending: PendingHandshakes,
    network: IpAddr,
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        let mut counts = self.pending.lock();
        counts.pending -= 1;
        if let Some(same_network) = counts.by_network.get_mut(&self.network) {
            *same_network -= 1;
            if *same_network == 0 {
                counts.by_network.remove(&self.network);
            }
        }
    }
}

/// The network of an address: an owner of one IPv6 address has all of its /64.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into()),
        address @ IpAddr::V4(_) => address,
    }
}

/// Beyond this many pending handshakes, QUIC Retry is required. A smaller cluster starts without that round trip.
const MAX_WITHOUT_RETRY: usize = 128;

/// At most this many per network, so that one host cannot keep the others out. The ranks of one host need fewer.
const MAX_PER_NETWORK: usize = 512;

/// At most this many in all: about 60 KiB each, so 256 MiB at worst, from at least eight networks.
const MAX_PENDING: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn enter(pending: &PendingHandshakes, from: IpAddr, proven: bool) -> HandshakeSlot {
        match pending.decide(from, proven) {
            HandshakeDecision::Accept(place) => place,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn strangers_who_may_have_forged_their_address_take_few_places() {
        let pending = PendingHandshakes::default();
        let held: Vec<_> =
            (0..MAX_WITHOUT_RETRY).map(|at| enter(&pending, v4((at % 200) as u8), false)).collect();
        assert!(matches!(pending.decide(v4(250), false), HandshakeDecision::RequireRetry));
        let proven = enter(&pending, v4(250), true);
        drop(held);
        drop(proven);
        enter(&pending, v4(250), false);
    }

    #[test]
    fn one_network_leaves_places_to_others_and_all_together_have_an_end() {
        let pending = PendingHandshakes::default();
        let mut held = Vec::new();
        for host in 0..(MAX_PENDING / MAX_PER_NETWORK) as u8 {
            held.extend((0..MAX_PER_NETWORK).map(|_| enter(&pending, v4(host), true)));
            assert!(matches!(pending.decide(v4(host), true), HandshakeDecision::Refuse));
        }
        assert!(matches!(pending.decide(v4(250), true), HandshakeDecision::Refuse));
        held.pop();
        enter(&pending, v4(250), true);
        drop(held);
        assert!(pending.lock().by_network.is_empty());
        assert_eq!(pending.lock().pending, 0);
    }

    #[test]
    fn addresses_of_one_subnet_of_ipv6_count_as_one_and_mapped_ones_as_what_they_are() {
        let [same_network, other, far] = ["2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1"]
            .map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(network(same_network), network(other));
        assert_ne!(network(same_network), network(far));
        assert_eq!(network("::ffff:192.0.2.7".parse().unwrap()), v4(7));
    }
}
