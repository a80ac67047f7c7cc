//! How a rank of QUIC is set up.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{BootstrapKind, TransportError};
use crate::quic::join::Invitation;
use crate::quic::network::binding::{bind_for_both, usual_bind};
use crate::quic::network::path::LinkSettings;
use crate::quic::network::timing::Timing;
use crate::quic::trust::identity::Identity;
use crate::quic::trust::job::JobId;
use crate::quic::trust::names::Known;
use crate::quic::trust::revoked::Revoked;
use crate::rank::{MAX_RANKS, Rank};

/// How a rank finds its group, and proves that it belongs to it.
#[derive(Clone, Debug)]
pub struct QuicConfig {
    /// This rank.
    pub rank: Rank,
    /// Number of ranks in the group, at most [`MAX_RANKS`].
    pub size: u32,
    /// The job; must be the job of the identity.
    pub job: JobId,
    /// Counts re-formations of the group within one job: ranks of different epochs refuse each
    /// other.
    pub epoch: u32,
    /// Where rank 0 listens (UDP).
    pub coordinator: SocketAddr,
    /// Other addresses of rank 0: all are dialled, and the first at which rank 0 answers is used.
    pub coordinator_also: Vec<SocketAddr>,
    /// The name from which that address came: an identity of rank 0's host may hold it instead of
    /// the address.
    pub coordinator_name: Option<String>,
    /// The certificate and key of this rank.
    pub identity: Identity,
    /// File from which this rank's identity is read again whenever a group forms again, so that a
    /// renewed one counts without a restart. It must be of the same rank or host, job and
    /// authority; otherwise the earlier one stays, with a warning.
    pub identity_file: Option<PathBuf>,
    /// Of rank 0: lets others in by its token while the first group forms. The identity must be the
    /// invitation's.
    pub invitation: Option<Arc<Invitation>>,
    /// Revoked identities, refused on both sides of a connection; read again when a group forms
    /// again.
    pub revoked: Option<Revoked>,
    /// By rank, the name or address of its host, as far as the launcher gives it; ranks without one
    /// are `None` or missing. An identity of a host is taken for a rank that has its place there;
    /// without a place it must hold the address at which the rank is seen.
    pub places: Vec<Option<String>>,
    /// Local address: of rank 0 to listen on, with the coordinator's port; of others to dial from,
    /// with any port.
    pub bind: IpAddr,
    /// Port of ranks other than 0; 0 lets the system choose.
    pub port: u16,
    /// Port of the second lane, if there are several; the others follow it. 0 lets the system
    /// choose.
    pub lane_port: u16,
    /// Where other ranks can reach this one, in the order in which they try it, besides the address
    /// at which it is seen: for hosts with several addresses and behind address translation. At
    /// most [`MOST_ADVERTISED`](crate::wire::MOST_ADVERTISED); port 0 stands for the port of
    /// this rank's socket.
    pub advertise: Vec<SocketAddr>,
    /// How long the group may take to form.
    pub connect_deadline: Duration,
    /// Period of heartbeats, at most an hour; `None` is that of [`LinkSettings::profile`]. A rank
    /// counts as dead after twelve silent ones, or later if the profile says so, and on a long
    /// path some round trips later. Must be the same on all ranks: one with another period does not
    /// join.
    pub heartbeat: Option<Duration>,
    /// How long a rank may hold [`Work`](crate::Work) without a beat of its [`Pulse`](crate::Pulse)
    /// while others wait for it; then it counts as stuck, and the group is aborted. Rank 0's
    /// setting counts. More than whatever one piece of work can take, such as the compilation
    /// of a kernel.
    pub stuck_after: Duration,
    /// Receives one line for each warning: on rank 0, a rank that has made no progress for a
    /// quarter of [`Self::stuck_after`]. With it the kind of failure of which the line warns.
    pub warn: fn(&str, BootstrapKind),
    /// Receives one line for each event worth a note: on rank 0, each identity that it has given
    /// away.
    pub note: fn(&str),
    /// While the group forms, or the next one: called with what this rank waits for, each time it
    /// changes, and maybe again while it is the same.
    pub waits: fn(Awaited<'_>),
    /// Settings of the network between the ranks.
    pub link: LinkSettings,
}

/// For what a rank waits while its group forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited<'a> {
    /// These ranks, at least one: those that rank 0 misses; on other ranks rank 0, until it
    /// answers.
    Ranks(&'a [Rank]),
    /// This rank forms the group and is there: others may be missing, or the ranks connect to each
    /// other.
    OthersOf(Rank),
    /// A rank was lost: those that are left form the next group.
    NextGroup,
    /// Nothing: the group has formed.
    Nothing,
}

impl QuicConfig {
    /// The usual settings: 20 s to connect, the times of a local network, 180 s to be stuck,
    /// warnings as events of `tracing`, bound to loopback if that is where the coordinator is
    /// and to all addresses otherwise.
    pub fn new(rank: Rank, size: u32, job: JobId, coordinator: SocketAddr, identity: Identity) -> Self {
        Self {
            rank,
            size,
            job,
            epoch: 0,
            coordinator,
            coordinator_also: Vec::new(),
            coordinator_name: None,
            identity,
            identity_file: None,
            invitation: None,
            revoked: None,
            places: Vec::new(),
            bind: usual_bind(coordinator),
            port: 0,
            lane_port: 0,
            advertise: Vec::new(),
            connect_deadline: Duration::from_secs(20),
            heartbeat: None,
            stuck_after: Duration::from_secs(180),
            warn: |text, _| tracing::warn!("{text}"),
            note: |text| tracing::info!("{text}"),
            waits: |_| {},
            link: LinkSettings::default(),
        }
    }

    /// Binds to all addresses of IPv4 and IPv6, if the addresses of rank 0 and of this rank are of
    /// both families and no single address was chosen. Call it when the addresses are set.
    pub fn bind_both_families(&mut self) {
        let all = [self.coordinator_candidates(), self.advertise.clone()].concat();
        self.bind = bind_for_both(self.bind, &all);
    }

    /// The times by which this rank judges its links.
    pub(crate) fn timing(&self) -> Timing {
        Timing::new(self.link.profile, self.heartbeat)
    }

    /// Where this rank's socket is bound.
    pub(crate) fn local_address(&self) -> SocketAddr {
        let port = if self.rank == Rank::COORDINATOR { self.coordinator.port() } else { self.port };
        SocketAddr::new(self.bind, port)
    }

    /// Where the sockets of all lanes are bound.
    pub(crate) fn lane_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let beside = (0..u16::from(self.link.lanes.saturating_sub(1))).map(|lane| match self.lane_port {
            0 => SocketAddr::new(self.bind, 0),
            first => SocketAddr::new(self.bind, first.saturating_add(lane)),
        });
        std::iter::once(self.local_address()).chain(beside)
    }

    /// The known place of a rank.
    pub(crate) fn known(&self, rank: Rank) -> Known<'_> {
        let place = self.places.get(rank.0 as usize).and_then(Option::as_deref);
        let name = self.coordinator_name.as_deref().filter(|_| rank == Rank::COORDINATOR);
        Known { place, name }
    }

    /// Checks that need no network.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        let Self { rank, size, identity, heartbeat, .. } = self;
        if *size == 0 || *size > MAX_RANKS {
            return Err(TransportError::bootstrap(format!("a group has 1 to {MAX_RANKS} ranks, not {size}")));
        }
        if rank.0 >= *size {
            return Err(TransportError::bootstrap(format!("rank {rank} is not in a group of {size} ranks")));
        }
        if let Some(heartbeat) = heartbeat
            && (heartbeat.is_zero() || *heartbeat > LONGEST_HEARTBEAT)
        {
            let text = format!(
                "the period of a heartbeat is more than 0 and at most {LONGEST_HEARTBEAT:?}, not {heartbeat:?}"
            );
            return Err(TransportError::bootstrap(text));
        }
        if let Some(invitation) = &self.invitation
            && (*rank, *size) != (Rank::COORDINATOR, invitation.size())
        {
            return Err(TransportError::bootstrap(format!(
                "rank {rank} of {size} has the invitation of rank 0 of {}: the others come with its token",
                invitation.size()
            )));
        }
        self.check_advertise()?;
        self.link.check(self.bind, *size)?;
        identity.claims().map(|_| ())
    }

    /// Checks the settings and the identity, as forming the group does first: nothing is sent.
    ///
    /// # Errors
    /// [`TransportError::Bootstrap`]: settings that fit no group, or an identity that is not this
    /// rank's, of another job, out of date or revoked.
    pub fn check_credentials(&self) -> Result<(), TransportError> {
        self.check()?;
        self.check_identity(&self.identity)
    }

    /// Checks that the identity fits this rank, as far as it can tell without the others.
    pub(crate) fn check_identity(&self, identity: &Identity) -> Result<(), TransportError> {
        let claims = identity.claims()?;
        if claims.job != self.job {
            return Err(TransportError::bootstrap(format!(
                "this is job {}, but the identity is of {claims}: use the files that were issued for this job",
                self.job
            )));
        }
        if self.revoked.as_ref().is_some_and(|revoked| revoked.has(&identity.certificate)) {
            let text = format!(
                "the certificate of {claims} has been revoked, by its own list: issue a new certificate"
            );
            return Err(BootstrapKind::Certificate.error(text));
        }
        if let Some((complaint, kind)) = claims.out_of_date() {
            return Err(kind.error(complaint));
        }
        // At which address others see it, they know better.
        claims.check_rank(self.rank, self.known(self.rank), None).map_err(TransportError::bootstrap)
    }
}

/// Multiples of it must be times that a clock can express.
const LONGEST_HEARTBEAT: Duration = Duration::from_secs(3600);
