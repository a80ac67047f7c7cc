//! Limits on pending handshakes. Anybody can begin as many connections as they like, and each costs
//! memory until its handshake has proven an identity.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

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
    /// Whether a new handshake takes the place of an old one where no place is free. Otherwise it
    /// is refused.
    takes_over: bool,
}

impl Default for PendingHandshakes {
    fn default() -> Self {
        Self::within(Limits {
            without_retry: MAX_WITHOUT_RETRY,
            per_network: MAX_PER_NETWORK,
            in_all: MAX_PENDING,
            takes_over: false,
        })
    }
}

/// Handshakes are numbered in the order of their beginning.
#[derive(Debug, Default)]
struct PendingCounts {
    begun: u64,
    pending: BTreeMap<u64, Pending>,
    by_network: HashMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Pending {
    network: IpAddr,
    /// Notified when another handshake takes the place.
    taken: Arc<Notify>,
}

impl PendingCounts {
    fn begin(&mut self, network: IpAddr) -> (u64, Arc<Notify>) {
        self.begun += 1;
        let (number, taken) = (self.begun, Arc::<Notify>::default());
        self.pending.insert(number, Pending { network, taken: Arc::clone(&taken) });
        self.by_network.entry(network).or_default().insert(number);
        (number, taken)
    }

    /// Frees the place of a handshake, if it has one.
    fn end(&mut self, number: u64) -> Option<Pending> {
        let pending = self.pending.remove(&number)?;
        if let Some(same_network) = self.by_network.get_mut(&pending.network) {
            same_network.remove(&number);
            if same_network.is_empty() {
                self.by_network.remove(&pending.network);
            }
        }
        Some(pending)
    }

    fn of_network(&self, network: IpAddr) -> usize {
        self.by_network.get(&network).map_or(0, BTreeSet::len)
    }

    /// The oldest handshake of the network that has most of them.
    fn oldest_of_the_largest(&self) -> Option<u64> {
        let largest = self.by_network.values().max_by_key(|same| (same.len(), Reverse(same.first())));
        largest.and_then(BTreeSet::first).copied()
    }

    fn oldest_of(&self, network: IpAddr) -> Option<u64> {
        self.by_network.get(&network).and_then(BTreeSet::first).copied()
    }
}

/// Handshake admission decision.
#[derive(Debug)]
pub(crate) enum HandshakeDecision {
    /// The handshake may continue, and counts until this is dropped.
    Accept(HandshakeSlot),
    /// QUIC Retry is required: the peer must prove its address first, because a forged one costs
    /// its sender nothing.
    RequireRetry,
    Refuse,
}

impl PendingHandshakes {
    /// Streams of peers that have not proven who they are, at most. Each takes a descriptor of the
    /// process.
    pub(crate) const MAX_STREAMS: usize = 256;

    /// For TCP streams whose peers have not proven who they are.
    ///
    /// A stream costs its peer three small packets, and strangers can open thousands a second. If
    /// the places were kept by those that have them, a rank would get one by chance only. The
    /// network that has most places gives one up instead, so that strangers with a few
    /// addresses displace each other.
    pub(crate) fn of_streams() -> Self {
        let in_all = Self::MAX_STREAMS;
        let (without_retry, per_network) = (usize::MAX, in_all / 2);
        Self::within(Limits { without_retry, per_network, in_all, takes_over: true })
    }

    fn within(limits: Limits) -> Self {
        Self { counts: Arc::default(), limits }
    }

    /// Decides about a handshake from the address `from`, which has been `proven` or not.
    pub(crate) fn decide(&self, from: IpAddr, proven: bool) -> HandshakeDecision {
        let network = network(from);
        let mut counts = self.lock();
        if !proven && counts.pending.len() >= self.limits.without_retry {
            return HandshakeDecision::RequireRetry;
        }
        let older = if counts.of_network(network) >= self.limits.per_network {
            counts.oldest_of(network)
        } else if counts.pending.len() >= self.limits.in_all {
            counts.oldest_of_the_largest()
        } else {
            None
        };
        if let Some(older) = older {
            if !self.limits.takes_over {
                return HandshakeDecision::Refuse;
            }
            if let Some(pending) = counts.end(older) {
                pending.taken.notify_one();
            }
        }
        let (number, taken) = counts.begin(network);
        HandshakeDecision::Accept(HandshakeSlot { pending: self.clone(), number, taken })
    }

    fn lock(&self) -> MutexGuard<'_, PendingCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Held for each pending handshake.
#[derive(Debug)]
pub(crate) struct HandshakeSlot {
    pending: PendingHandshakes,
    number: u64,
    taken: Arc<Notify>,
}

impl HandshakeSlot {
    /// Completes when another handshake has taken the place.
    pub(crate) async fn taken(&self) {
        self.taken.notified().await;
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        self.pending.lock().end(self.number);
    }
}

/// The network of an address: an owner of one IPv6 address has all of its /64.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into()),
        address @ IpAddr::V4(_) => address,
    }
}

/// Beyond this many pending handshakes, QUIC Retry is required. A smaller cluster starts without
/// that round trip.
const MAX_WITHOUT_RETRY: usize = 128;

/// At most this many per network, so that one host cannot keep the others out. The ranks of one
/// host need fewer.
const MAX_PER_NETWORK: usize = 512;

/// At most this many in all, from at least eight networks. Each holds 34 KiB of state and a buffer
/// for the packets that it sends: 64 KiB on loopback, at most ten packets (14 KiB) elsewhere. So
/// all hold 400 MiB or 200 MiB at worst, and the first 128 hold 12 MiB or 6 MiB.
const MAX_PENDING: usize = 4096;

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::{Context, Waker};

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
        assert!(pending.lock().pending.is_empty());
    }

    fn is_taken(slot: &HandshakeSlot) -> bool {
        let mut waiting = std::pin::pin!(slot.taken());
        waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn streams_of_strangers_displace_each_other_and_not_those_of_other_networks() {
        let pending = PendingHandshakes::of_streams();
        let (honest, most) = (enter(&pending, v4(250), true), PendingHandshakes::MAX_STREAMS);
        let mut strangers = VecDeque::new();
        for at in 0..10_000 {
            strangers.push_back(enter(&pending, v4((at % 8) as u8), true));
            if strangers.len() == most {
                let oldest = strangers.pop_front().unwrap();
                assert!(is_taken(&oldest), "{at}");
            }
        }
        assert!(!is_taken(&honest) && !strangers.iter().any(is_taken));
        assert_eq!(pending.lock().pending.len(), most);
        drop((honest, strangers));
        assert!(pending.lock().by_network.is_empty() && pending.lock().pending.is_empty());
    }

    #[test]
    fn one_network_has_half_of_the_streams_and_its_newest_ones() {
        let pending = PendingHandshakes::of_streams();
        let half = PendingHandshakes::MAX_STREAMS / 2;
        let all: Vec<_> = (0..3 * half).map(|_| enter(&pending, v4(1), true)).collect();
        let (old, new) = all.split_at(2 * half);
        assert!(old.iter().all(is_taken) && !new.iter().any(is_taken));
        // All networks have the same number: the oldest of all gives way.
        let pending = PendingHandshakes::of_streams();
        let all: Vec<_> = (0..=255).map(|network| enter(&pending, v4(network), true)).collect();
        let _more = enter(&pending, "192.0.3.1".parse().unwrap(), true);
        assert!(is_taken(&all[0]) && !all[1..].iter().any(is_taken));
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
