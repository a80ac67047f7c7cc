//! The addresses at which the ranks of a group can be reached: those that a rank says
//! (`Advertise`), and the one at which it was seen.

use std::net::SocketAddr;

use super::advertised::once_each;
use crate::error::TransportError;
use crate::quic::forming::bootstrap::Forming;
use crate::quic::forming::config::Awaited;
use crate::quic::forming::peer_connection::{AddressTable, PeerConnection};
use crate::wire::{Candidates, Frame};

impl Forming<'_> {
    /// Of the coordinator: the addresses of each member. The same socket dials and listens, so the
    /// source address of a rank's packets is one of its addresses, unless a NAT changes it. The
    /// coordinator itself was reached already.
    pub(crate) fn address_table(&self, control: &[PeerConnection]) -> AddressTable {
        let others = control.iter().map(|member| {
            let seen = member.connection.remote_address();
            once_each([&member.advertised[..], &[seen]].concat())
        });
        std::iter::once(self.endpoint.advertised()).chain(others).collect()
    }

    /// Of the coordinator: tells a member the table.
    pub(crate) async fn say_table(
        &mut self,
        to: &mut PeerConnection,
        table: &AddressTable,
    ) -> Result<(), TransportError> {
        for candidates in Candidates::split(table) {
            self.say(to, &Frame::AddressTable { candidates }).await?;
        }
        Ok(())
    }

    /// Of every other member: the table.
    pub(crate) async fn hear_table(
        &mut self,
        from: &mut PeerConnection,
    ) -> Result<AddressTable, TransportError> {
        let mut table = AddressTable::new();
        // The last member decides when the table comes, and only the coordinator knows who is missing.
        (self.endpoint.config.waits)(Awaited::OthersOf(from.rank));
        while table.len() < self.members.len() {
            match self.next_frame(from).await? {
                Frame::AddressTable { candidates }
                    if !candidates.is_empty() && table.len() + candidates.len() <= self.members.len() =>
                {
                    table.extend(candidates.iter().map(<[_]>::to_vec));
                }
                other => {
                    return Err(TransportError::bootstrap(format!(
                        "rank {} sent {other:?} instead of the address table",
                        from.rank
                    )));
                }
            }
        }
        Ok(table)
    }

    /// Fails if a rank cannot be reached by a higher one, which would have to dial it.
    pub(crate) fn check_reachable(&self, table: &AddressTable) -> Result<(), TransportError> {
        let Some((hidden, far)) = hidden_by_loopback(table) else { return Ok(()) };
        let address =
            |place: usize| table[place].first().map_or("no address".into(), |at| at.ip().to_string());
        let (at, far_at) = (address(hidden), address(far));
        let [hidden, far] = [hidden, far].map(|place| self.members[place]);
        Err(TransportError::bootstrap(format!(
            "rank 0 sees rank {hidden} at {at}, an address of its own host that rank {far} at {far_at} cannot reach: on the host of \
             rank 0, let the name of rank 0 have an address that other hosts can reach"
        )))
    }
}

/// A rank on the loopback interface of rank 0's host, and a higher rank on another host, which
/// would have to dial it.
fn hidden_by_loopback(table: &[Vec<SocketAddr>]) -> Option<(usize, usize)> {
    let is_loopback =
        |place: &usize| table[*place].iter().all(|address| address.ip().to_canonical().is_loopback());
    let hidden = (1..table.len()).find(is_loopback)?;
    let far = (hidden + 1..table.len()).find(|place| !is_loopback(place))?;
    Some((hidden, far))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_rank_that_another_host_would_dial_on_loopback_is_found() {
        let hidden = |texts: &[&str]| {
            let rows = texts.iter().map(|text| text.split(' ').map(|ip| at(&format!("{ip}:1"))).collect());
            hidden_by_loopback(&rows.collect::<AddressTable>())
        };
        assert_eq!(hidden(&["127.0.1.1", "127.0.0.1", "10.0.0.2"]), Some((1, 2)));
        assert_eq!(hidden(&["127.0.1.1", "10.0.0.2", "127.0.0.1", "127.0.0.1", "10.0.0.3"]), Some((2, 4)));
        // It dials the rank on the other host itself.
        assert_eq!(hidden(&["127.0.1.1", "10.0.0.2", "127.0.0.1"]), None);
        assert_eq!(hidden(&["127.0.0.1", "127.0.0.1", "127.0.0.2"]), None);
        assert_eq!(hidden(&["10.0.0.1", "10.0.0.1", "[fd00::2]"]), None);
        // It says another address.
        assert_eq!(hidden(&["127.0.1.1", "10.0.0.1 127.0.0.1", "10.0.0.2"]), None);
    }
}
