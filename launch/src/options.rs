//! The settings that a caller may make for the group and for this process's rank in it.

use std::fmt::{self, Debug, Display};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use kyklos_transport::quic::{Awaited, LinkSettings};
use kyklos_transport::{BootstrapKind, Regroup};

/// How this process joins its group. What is not set comes from the environment
/// ([`LAUNCHERS`](crate::LAUNCHERS)), then from defaults; with [`Options::default`] everything
/// does.
///
/// ```no_run
/// use std::num::NonZeroU32;
/// use kyklos_launch::Options;
///
/// let options = Options {
///     rank: Some(1),
///     size: NonZeroU32::new(4),
///     coordinator: Some("node1:29600".into()),
///     identity: Some("/etc/kyklos/rank-{rank}.pem".into()),
///     ..Options::default()
/// };
/// let group = options.join()?;
/// assert_eq!(group.transport.rank().0, 1);
/// # Ok::<(), kyklos_launch::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// This process's rank, `0..size`.
    pub rank: Option<u32>,
    /// Number of ranks in the group, at most [`MAX_RANKS`](kyklos_transport::MAX_RANKS). Also by
    /// `KYKLOS_WORLD`.
    pub size: Option<NonZeroU32>,
    /// Where rank 0 listens, `HOST:PORT` (UDP, or TCP with that carrier); an IPv6 address is in
    /// brackets. Also by `KYKLOS_COORDINATOR`.
    pub coordinator: Option<String>,
    /// TOML file that lists the host of every rank, with `job`, `coordinator` and a `[[ranks]]`
    /// entry for each rank.
    pub cluster_file: Option<PathBuf>,
    /// PEM file that proves this rank or its host to the others; `{rank}` and `{host}` in it stand
    /// for this rank and the host that the environment or the cluster file gives it. With
    /// [`Self::token`]: where to keep the identity that the token obtains. Without a token also
    /// by `KYKLOS_IDENTITY`.
    pub identity: Option<PathBuf>,
    /// This process is rank 0, and admits the others by the token of this invitation file.
    pub invitation: Option<PathBuf>,
    /// Token with which this process gets its rank and its identity from rank 0; [`Self::rank`]
    /// asks for a rank. Also by `KYKLOS_JOIN`.
    pub token: Option<SecretText>,
    /// File with the keys of identities that are no longer accepted; read again each time the group
    /// forms again.
    pub revoked: Option<PathBuf>,
    /// Name of the job that the identities must be of; default: the job of this rank's identity.
    /// Also by `KYKLOS_JOB_ID`.
    pub job: Option<String>,
    /// [`Self::warn`] is called if the identity expires within so many days. Default: 3.
    pub expiry_warning_days: u32,
    /// Longest time until all ranks are there; for so long also a name of rank 0 without an address
    /// is looked up again. Whole seconds, at least one. Default: 60 s.
    pub join_deadline: Duration,
    /// How long a rank may compute without progress while others wait for it, before the run ends
    /// and names it. Rank 0's value counts. `None`: the transport's 180 s.
    pub stuck_after: Option<Duration>,
    /// Period of heartbeats, the same on all ranks: one with another period does not join. A rank
    /// counts as dead after twelve silent ones, or later if [`LinkSettings::profile`] says so.
    /// `None`: that of the profile.
    pub heartbeat: Option<Duration>,
    /// This process replaces one that died: it joins while the group forms, or when the others form
    /// it again.
    pub rejoin: bool,
    /// The next group, if a rank is lost while the group forms; the same on all ranks. `None`: the
    /// group does not form then.
    pub on_loss: Option<Regroup>,
    /// Local address. `None`: all, or loopback if rank 0's address is loopback.
    pub bind: Option<IpAddr>,
    /// First port of the ranks other than 0 on this host: a rank takes this one plus its local rank
    /// times [`LinkSettings::lanes`]. `None`: the system chooses.
    pub port: Option<u16>,
    /// IP addresses at which other ranks reach this one, with or without a port, separated by
    /// commas, in the order in which to try them: for hosts with several addresses, and behind
    /// address translation. Also by `KYKLOS_ADVERTISE`. `None`: the address at which rank 0
    /// sees this rank, which is tried last otherwise.
    pub advertise: Option<String>,
    /// Known properties of the network between the ranks.
    pub link: LinkSettings,
    /// Called with each device in the cluster file. This crate does not interpret the device; the
    /// function refuses a wrong one with its own text.
    pub check_device: fn(&str) -> Result<(), String>,
    /// Receives one line for each event of interest to an operator. Default: an `info` event of
    /// `tracing`.
    pub note: fn(&str),
    /// Receives one line for each problem that may become a failure, and the kind of that failure.
    /// Default: a `warn` event of `tracing`.
    pub warn: fn(&str, BootstrapKind),
    /// Called with what this rank waits for while the group forms, each time it changes:
    /// [`QuicConfig::waits`](kyklos_transport::quic::QuicConfig::waits). Default: does nothing.
    pub waits: fn(Awaited<'_>),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rank: None,
            size: None,
            coordinator: None,
            cluster_file: None,
            identity: None,
            invitation: None,
            token: None,
            revoked: None,
            job: None,
            expiry_warning_days: 3,
            join_deadline: Duration::from_secs(60),
            stuck_after: None,
            heartbeat: None,
            rejoin: false,
            on_loss: None,
            bind: None,
            port: None,
            advertise: None,
            link: LinkSettings::default(),
            check_device: |_| Ok(()),
            note: |text| tracing::info!("{text}"),
            warn: |text, _| tracing::warn!("{text}"),
            waits: |_| {},
        }
    }
}

impl Options {
    /// The first option that only makes sense for one process of several; `None` if none is set.
    pub(crate) fn first_group_option(&self) -> Option<String> {
        let path = |name, path: &Option<PathBuf>| path.as_ref().map(|path| named(name, path.display()));
        (self.rank.map(|rank| named("rank", rank)))
            .or_else(|| self.size.map(|size| named("size", size)))
            .or_else(|| self.coordinator.as_ref().map(|at| named("coordinator", at)))
            .or_else(|| path("cluster_file", &self.cluster_file))
            .or_else(|| path("identity", &self.identity))
            .or_else(|| path("invitation", &self.invitation))
            .or_else(|| path("revoked", &self.revoked))
            // Without its value, which is a secret.
            .or_else(|| self.token.as_ref().map(|_| "option token".to_owned()))
            .or_else(|| self.bind.map(|address| named("bind", address)))
            .or_else(|| self.port.map(|port| named("port", port)))
            .or_else(|| self.advertise.as_ref().map(|at| named("advertise", at)))
            .or_else(|| self.job.as_ref().map(|job| named("job", job)))
    }
}

/// An option and its value, as errors and notes name it: by its field.
pub(crate) fn named(option: &str, value: impl Display) -> String {
    format!("option {option}={value}")
}

/// A text that `Debug` does not print.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretText(pub String);

impl Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(…)")
    }
}

/// In the path of an identity file: this rank.
pub(crate) const RANK: &str = "{rank}";
