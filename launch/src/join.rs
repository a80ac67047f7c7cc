//! Forming the group.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use kyklos_transport::quic::{Claims, Date, Identity, JobId, QuicConfig, QuicTransport, Revoked};
use kyklos_transport::{BootstrapKind, Group, Rank, TransportError, in_process_group};

use crate::address::{bind_beyond_loopback, left, loopback_between_hosts, resolve};
use crate::assignment::Assignment;
use crate::credentials::Credentials;
use crate::error::{Error, RequestKind, Result};
use crate::options::{Options, RANK, named};
use crate::variables::{IDENTITY, Variables};

impl Options {
    /// Forms the group and returns this rank's end of it; a group of one if neither these options
    /// nor the environment mention ranks. Blocks until every rank is there.
    ///
    /// # Errors
    ///
    /// Options, environment or files that do not fit; a group that is not complete by
    /// [`Self::join_deadline`].
    pub fn join(&self) -> Result<Group> {
        match Assignment::find(self)? {
            Some(assignment) => assignment.join(),
            None => group_of_one(),
        }
    }
}

impl Assignment {
    /// Forms the group and returns this rank's end of it. Blocks until every rank is there. Notes
    /// contain the sources of rank, size and address, and the network path between the ranks.
    ///
    /// # Errors
    ///
    /// No identity or a wrong one, a name of rank 0 that has no address by the deadline, a group
    /// that is not complete by then.
    pub fn join(&self) -> Result<Group> {
        let options = &self.options;
        let Some(coordinator) = self.coordinator.as_ref().filter(|_| self.size > 1) else {
            return group_of_one();
        };
        let (identity, proof) = self.identity()?;
        let claims = identity.claims()?;
        if !self.by_kyklos_launch {
            let until = Date(claims.validity.until);
            (options.note)(&format!("{}; {proof}: {claims}, until {until}", self.summary));
        }
        warn_of_expiry(&claims, &proof, options);
        let job = self.job.as_deref().map_or(claims.job, JobId::of_text);
        let deadline = Instant::now() + options.join_deadline;
        let addresses = resolve(coordinator, deadline, options.note)?;
        let address = addresses[0];
        let mut config = QuicConfig::new(Rank(self.rank), self.size, job, address, identity);
        config.coordinator_also = addresses[1..].to_vec();
        config.coordinator_name = Some(coordinator.host.clone());
        config.advertise = self.advertise.clone();
        config.bind_both_families();
        if let Some(bind) = bind_beyond_loopback(&coordinator.host, address.ip(), self.is_on_one_host())
            && options.bind.is_none()
        {
            let text = format!(
                "rank {}: {} is {} on this host, an address that no other host can reach; this rank uses all addresses of the \
                 host",
                self.rank,
                coordinator.host,
                address.ip()
            );
            (options.warn)(&text, BootstrapKind::Other);
            config.bind = bind;
        } else if let Some(text) =
            loopback_between_hosts(address.ip(), &self.hosts).filter(|_| options.bind.is_none())
        {
            (options.warn)(&text, BootstrapKind::Other);
        }
        self.configure(&mut config, deadline)?;
        // The others are told of an identity that does not fit, so that is left to the transport.
        let fits = config.check_credentials().is_ok();
        let group = match options.on_loss {
            _ if options.rejoin => QuicTransport::rejoin(config),
            Some(who) => QuicTransport::connect_or_regroup(config, who),
            None => QuicTransport::connect(config),
        };
        let group = group.map_err(if fits { Error::Transport } else { Error::Credentials })?;
        if let Some(line) = group.network().filter(|_| !self.by_kyklos_launch) {
            (options.note)(&format!("rank {}: {line}", self.rank));
        }
        Ok(group)
    }

    /// Whether a source says that all ranks are on this host.
    fn is_on_one_host(&self) -> bool {
        let first = self.hosts.first().filter(|host| host.is_some());
        let one_name = first.is_some_and(|first| {
            self.hosts.len() == self.size as usize && self.hosts.iter().all(|host| host == first)
        });
        self.by_kyklos_launch || one_name || self.local_size >= self.size
    }

    /// This rank's identity, and its source for notes.
    fn identity(&self) -> Result<(Identity, String)> {
        Ok(match &self.credentials {
            Credentials::IdentityFile => {
                let path = self.identity_path()?;
                (
                    Identity::read_file(&path).map_err(Error::Credentials)?,
                    format!("identity {}", path.display()),
                )
            }
            Credentials::Given(identity) => ((**identity).clone(), "identity in memory".to_owned()),
            Credentials::Invitation(invitation, path) => {
                (invitation.identity().clone(), format!("invitation {}", path.display()))
            }
            Credentials::Enrolled(enrolled, _) => (enrolled.identity.clone(), "identity by token".to_owned()),
        })
    }

    /// Everything in the configuration that the options decide.
    fn configure(&self, config: &mut QuicConfig, deadline: Instant) -> Result<()> {
        let options = &self.options;
        if let Credentials::Invitation(invitation, _) = &self.credentials {
            config.invitation = Some(Arc::clone(invitation));
        }
        if matches!(self.credentials, Credentials::IdentityFile) {
            config.identity_file = Some(self.identity_path()?);
        }
        config.revoked =
            options.revoked.as_deref().map(Revoked::read_file).transpose().map_err(Error::Credentials)?;
        config.places.clone_from(&self.hosts);
        config.connect_deadline = left(deadline);
        config.bind = options.bind.unwrap_or(config.bind);
        config.heartbeat = options.heartbeat;
        config.stuck_after = options.stuck_after.unwrap_or(config.stuck_after);
        (config.warn, config.note, config.waits) = (options.warn, options.note, options.waits);
        config.epoch = self.run_id.as_deref().map_or(0, epoch);
        options.link.check(config.bind, self.size).map_err(Error::Link)?;
        config.link = options.link;
        if let Some(port) = options.port {
            (config.port, config.lane_port) =
                ports(port, self.local_rank, options.link.lanes).ok_or_else(|| {
                    Error::request(
                        format!("{} for rank {} on its host", named("port", port), self.local_rank),
                        "ports go up to 65535",
                    )
                })?;
        }
        Ok(())
    }

    /// The identity file of this rank.
    fn identity_path(&self) -> Result<PathBuf> {
        let options = &self.options;
        let path = options.identity.as_ref().map(|path| path.to_string_lossy().into_owned());
        let path = path.or_else(|| Variables::of_process().text(IDENTITY).map(|path| path.value));
        let path = path.ok_or_else(|| {
            Error::request(
                format!(
                    "{}: neither the option identity nor {IDENTITY} says which file proves this rank to the others",
                    self.summary
                ),
                "issue an identity for this rank, or set the option token",
            )
            .of(RequestKind::Identity)
        })?;
        let path = path.replace(RANK, &self.rank.to_string());
        match (path.contains(HOST), self.hosts.get(self.rank as usize).cloned().flatten()) {
            (false, _) => Ok(PathBuf::from(path)),
            (true, Some(host)) => Ok(PathBuf::from(path.replace(HOST, &host))),
            (true, None) => Err(Error::request(
                format!(
                    "the identity {path} contains {{host}}, but the host of rank {} is not known",
                    self.rank
                ),
                "a Slurm step or a cluster file does; else name the file without {host}",
            )),
        }
    }
}

/// This process as the only rank; no network is involved.
fn group_of_one() -> Result<Group> {
    in_process_group(1).pop().ok_or_else(|| {
        Error::Transport(TransportError::Bootstrap {
            text: "a group of one rank has no rank".to_owned(),
            kind: BootstrapKind::Other,
        })
    })
}

fn warn_of_expiry(claims: &Claims, proof: &str, options: &Options) {
    let left = claims.validity.days_left(SystemTime::now());
    if left < u64::from(options.expiry_warning_days) && claims.validity.complaint(SystemTime::now()).is_none()
    {
        let text =
            format!("the {proof} of {claims} expires on {}: issue a new one", Date(claims.validity.until));
        (options.warn)(&text, BootstrapKind::Certificate);
    }
}

/// The port of a rank and that of its second lane (0 if it has one lane), when the ranks of a host
/// share the ports from `first` on; `None` if they go beyond 65535.
fn ports(first: u16, local_rank: u32, lanes: u8) -> Option<(u16, u16)> {
    let lanes = u64::from(lanes);
    let port = |lane| u16::try_from(u64::from(first) + u64::from(local_rank) * lanes + lane).ok();
    port(lanes.saturating_sub(1))?;
    Some((port(0)?, if lanes > 1 { port(1)? } else { 0 }))
}

/// Ranks of different runs of a job refuse each other by their epochs. The lowest 12 bits count the
/// groups of one run.
fn epoch(run: &str) -> u32 {
    let [a, b, c, d, ..] = JobId::from_name(run).0;
    u32::from_be_bytes([a, b, c, d]) & !0xFFF
}

/// In the path of an identity file: the host of this rank.
const HOST: &str = "{host}";

#[cfg(test)]
mod tests {
    use super::ports;

    #[test]
    fn ranks_of_a_host_share_consecutive_ports() {
        assert_eq!(ports(4000, 0, 1), Some((4000, 0)));
        assert_eq!(ports(4000, 3, 1), Some((4003, 0)));
        assert_eq!(ports(4000, 3, 4), Some((4012, 4013)));
        assert_eq!(ports(65_532, 0, 4), Some((65_532, 65_533)));
        for (first, local_rank, lanes) in
            [(65_535, 1, 1), (65_533, 0, 4), (1, u32::MAX, 1), (1, u32::MAX, 16)]
        {
            assert_eq!(ports(first, local_rank, lanes), None, "{first} {local_rank} {lanes}");
        }
    }
}
