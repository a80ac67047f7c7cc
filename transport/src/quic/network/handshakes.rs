//! How many may be on their way in at once. Strangers can begin as many connections as they like, and each costs memory
//! until it has said who it is.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts those who are on their way in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Visitors(Arc<Mutex<Places>>);

#[derive(Debug, Default)]
struct Places {
    taken: usize,
    by_network: HashMap<IpAddr, usize>,
}

/// What becomes of one who has come.
#[derive(Debug)]
pub(crate) enum Answer {
    /// It may try, and holds its place until this is dropped.
    Enter(Place),
    /// It must show first that packets reach the address that it names: a false one costs its sender nothing.
    ProveAddress,
    Refuse,
}

impl Visitors {
    /// Of one who comes from `from`, which is `proven` to be its address or not.
    pub(crate) fn answer(&self, from: IpAddr, proven: bool) -> Answer {
        let network = network(from);
        let mut places = self.lock();
        let near = places.by_network.get(&network).copied().unwrap_or(0);
        if !proven && places.taken >= MOST_UNPROVEN {
            return Answer::ProveAddress;
        }
        if places.taken >= MOST || near >= MOST_OF_ONE_NETWORK {
            return Answer::Refuse;
        }
        places.taken += 1;
        *places.by_network.entry(network).or_default() += 1;
        Answer::Enter(Place { visitors: self.clone(), network })
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Held by one who is on its way in.
#[derive(Debug)]
pub(crate) struct Place {
    visitors: Visitors,
    network: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.visitors.lock();
        places.taken -= 1;
        if let Some(near) = places.by_network.get_mut(&self.network) {
            *near -= 1;
            if *near == 0 {
                places.by_network.remove(&self.network);
            }
        }
    }
}

/// Whoever has one IPv6 address has all of its /64.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into()),
        address @ IpAddr::V4(_) => address,
    }
}

/// Above so many visitors, who comes must prove its address. A cluster of fewer ranks starts without that round trip.
const MOST_UNPROVEN: usize = 128;

/// So that one host cannot keep all others out. Ranks of one host, with two connections to each of the others, stay below.
const MOST_OF_ONE_NETWORK: usize = 512;

/// About 60 KiB each, so 256 MiB at worst, of a few seconds' strangers from eight networks.
const MOST: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn enter(visitors: &Visitors, from: IpAddr, proven: bool) -> Place {
        match visitors.answer(from, proven) {
            Answer::Enter(place) => place,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn strangers_who_may_have_forged_their_address_take_few_places() {
        let visitors = Visitors::default();
        let held: Vec<_> =
            (0..MOST_UNPROVEN).map(|at| enter(&visitors, v4((at % 200) as u8), false)).collect();
        assert!(matches!(visitors.answer(v4(250), false), Answer::ProveAddress));
        let proven = enter(&visitors, v4(250), true);
        drop(held);
        drop(proven);
        enter(&visitors, v4(250), false);
    }

    #[test]
    fn one_network_leaves_places_to_others_and_all_together_have_an_end() {
        let visitors = Visitors::default();
        let mut held = Vec::new();
        for host in 0..(MOST / MOST_OF_ONE_NETWORK) as u8 {
            held.extend((0..MOST_OF_ONE_NETWORK).map(|_| enter(&visitors, v4(host), true)));
            assert!(matches!(visitors.answer(v4(host), true), Answer::Refuse));
        }
        assert!(matches!(visitors.answer(v4(250), true), Answer::Refuse));
        held.pop();
        enter(&visitors, v4(250), true);
        drop(held);
        assert!(visitors.lock().by_network.is_empty());
        assert_eq!(visitors.lock().taken, 0);
    }

    #[test]
    fn addresses_of_one_subnet_of_ipv6_count_as_one_and_mapped_ones_as_what_they_are() {
        let [near, other, far] = ["2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1"]
            .map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(network(near), network(other));
        assert_ne!(network(near), network(far));
        assert_eq!(network("::ffff:192.0.2.7".parse().unwrap()), v4(7));
    }
}
