//! Limits the number of wrong tokens.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use crate::quic::network::handshakes::network;

/// Wrong tokens by network. A secret of 128 bits is not guessed; this keeps trying from costing
/// anything.
#[derive(Debug, Default)]
pub(super) struct WrongTokens {
    /// How many are counted, and when the last one was.
    by_network: HashMap<IpAddr, (u32, Instant)>,
}

impl WrongTokens {
    /// Whether a token from this address is checked now.
    pub(super) fn may(&self, from: IpAddr, now: Instant) -> bool {
        self.by_network.get(&network(from)).is_none_or(|counted| left(*counted, now) < MOST)
    }

    /// Counts a wrong token from this address.
    pub(super) fn wrong(&mut self, from: IpAddr, now: Instant) {
        self.by_network.retain(|_, counted| left(*counted, now) > 0);
        let network = network(from);
        if self.by_network.len() >= MOST_NETWORKS && !self.by_network.contains_key(&network) {
            let oldest =
                self.by_network.iter().min_by_key(|(_, (_, last))| *last).map(|(network, _)| *network);
            oldest.map(|oldest| self.by_network.remove(&oldest));
        }
        let counted = self.by_network.entry(network).or_insert((0, now));
        *counted = (left(*counted, now) + 1, now);
    }
}

/// How many still count: one is forgotten with every [`FORGET`].
fn left((count, last): (u32, Instant), now: Instant) -> u32 {
    let forgotten = now.saturating_duration_since(last).as_millis() / FORGET.as_millis();
    count.saturating_sub(u32::try_from(forgotten).unwrap_or(u32::MAX))
}

/// Mistakes in a row: an operator pastes a wrong token on a few ranks of a host.
const MOST: u32 = 16;

/// After that, one mistake is forgotten in each interval of this length.
const FORGET: Duration = Duration::from_secs(1);

/// Number of networks whose mistakes are counted.
const MOST_NETWORKS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_wrong_too_often_waits_and_others_do_not() {
        let (mut wrong_tokens, now) = (WrongTokens::default(), Instant::now());
        let (bad, good) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        for _ in 0..MOST {
            assert!(wrong_tokens.may(bad, now));
            wrong_tokens.wrong(bad, now);
        }
        assert!(!wrong_tokens.may(bad, now) && wrong_tokens.may(good, now));
        assert!(!wrong_tokens.may(bad, now + FORGET - Duration::from_millis(1)));
        // One more a second, and no more than that.
        assert!(wrong_tokens.may(bad, now + FORGET));
        wrong_tokens.wrong(bad, now + FORGET);
        assert!(!wrong_tokens.may(bad, now + FORGET));
        assert!(wrong_tokens.may(bad, now + FORGET * 2));
    }

    #[test]
    fn the_table_has_an_end_and_forgets() {
        let (mut wrong_tokens, now) = (WrongTokens::default(), Instant::now());
        for host in 0..3 * MOST_NETWORKS as u32 {
            wrong_tokens.wrong(IpAddr::from(host.to_be_bytes()), now);
        }
        assert_eq!(wrong_tokens.by_network.len(), MOST_NETWORKS);
        wrong_tokens.wrong(IpAddr::from([1, 2, 3, 4]), now + FORGET * 2);
        assert_eq!(wrong_tokens.by_network.len(), 1);
    }
}
