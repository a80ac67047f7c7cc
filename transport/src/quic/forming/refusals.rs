//! For the error of a group that does not form: the connections that a rank has turned away, and
//! the words for a rank that another one does not reach.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::error::BootstrapKind;
use crate::quic::network::connection::cut;
use crate::quic::network::tcp::staggered::listed;
use crate::rank::Rank;

/// Why a connection was turned away.
#[derive(Debug)]
pub(crate) struct AdmissionRefusal {
    /// Whether the other side has shown an identity of the group, or a token of it.
    pub(crate) proven: bool,
    pub(crate) kind: BootstrapKind,
    pub(crate) text: String,
}

impl AdmissionRefusal {
    pub(crate) fn of_stranger(text: impl Into<String>) -> Self {
        Self { proven: false, kind: BootstrapKind::Other, text: text.into() }
    }

    pub(crate) fn of_member(text: impl Into<String>) -> Self {
        Self { proven: true, ..Self::of_stranger(text) }
    }

    pub(crate) fn of_kind(self, kind: BootstrapKind) -> Self {
        Self { kind, ..self }
    }
}

/// The first refusals with their reasons. Strangers cannot displace the reasons of members.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    members: Vec<(String, BootstrapKind)>,
    strangers: Vec<(String, BootstrapKind)>,
    /// Connections of strangers.
    count: u64,
}

impl Refusals {
    pub(crate) fn note(&mut self, from: IpAddr, AdmissionRefusal { proven, kind, text }: &AdmissionRefusal) {
        self.count += u64::from(!proven);
        let (refusals, most) =
            if *proven { (&mut self.members, MAX_MEMBERS) } else { (&mut self.strangers, MAX_STRANGERS) };
        let refusal = (format!("{}: {text}", from.to_canonical()), *kind);
        if refusals.len() < most && !refusals.contains(&refusal) {
            refusals.push(refusal);
        }
    }

    /// The kind of the first refusal that has one.
    pub(crate) fn kind(&self) -> BootstrapKind {
        let mut kinds = self.members.iter().chain(&self.strangers).map(|(_, kind)| *kind);
        kinds.find(|kind| *kind != BootstrapKind::Other).unwrap_or_default()
    }
}

/// The end of a sentence; empty without refusals.
impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (refusal, _) in self.members.iter().chain(&self.strangers) {
            write!(f, "; turned away: {}", cut(refusal))?;
        }
        match self.count {
            0 => Ok(()),
            1 => f.write_str(" (1 connection without a proven identity)"),
            count => write!(f, " ({count} connections without a proven identity)"),
        }
    }
}

/// A rank that another one dials in vain, and where: the address of its first lane.
pub(crate) fn unreached_text(from: Rank, to: Rank, addresses: &[SocketAddr], lanes: usize) -> String {
    let some = if lanes > 1 { "at least one lane of " } else { "" };
    format!("rank {from} did not reach {some}rank {to}{}", at_text(addresses))
}

/// Where a rank is, in few bytes; empty without an address.
pub(crate) fn at_text(addresses: &[SocketAddr]) -> String {
    let (first, more) = addresses.split_at(addresses.len().min(MAX_ADDRESSES));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    if first.is_empty() { String::new() } else { format!(" at {}{more}", listed(first)) }
}

/// What to do then, behind the carrier.
pub(crate) const UNREACHED_REMEDY: &str = "between their hosts, or let the rank that is dialled say an address that the other one can reach (advertise)";

/// Addresses of a rank that are shown.
const MAX_ADDRESSES: usize = 2;

/// Reasons of members that are kept.
const MAX_MEMBERS: usize = 4;

/// The same of strangers.
const MAX_STRANGERS: usize = 2;
