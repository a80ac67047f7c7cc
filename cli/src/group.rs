//! Joining the group of processes that a launcher, flags or a file speak of.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kyklos_transport::quic::{Claims, Date, Identity, JobId, QuicConfig, QuicTransport, Revoked};
use kyklos_transport::{Rank, Reformed, in_process_group};

use crate::entrance::Entrance;
use crate::failure::{Failure, Result, note};
use crate::interrupt;
use crate::launchers::{GroupArgs, HostPort, IDENTITY, Launched, Variables};
use crate::network::NetworkArgs;
use crate::observe::record;
use crate::options::RANK;

impl Launched {
    /// Joins the group, and says on standard error who made this process which rank.
    pub(crate) fn connect(
        &self,
        args: &GroupArgs,
        network: &NetworkArgs,
        entrance: &Entrance,
    ) -> Result<Reformed> {
        let Some(coordinator) = self.coordinator.as_ref().filter(|_| self.world > 1) else {
            let alone = in_process_group(1).pop();
            let transport = alone.ok_or_else(|| Failure::run("a group of one rank has no rank"))?;
            return Ok(Reformed { transport, members: vec![Rank(0)], epoch: 0 });
        };
        let (identity, proof) = match entrance {
            Entrance::File => {
                let path = self.identity_path(args)?;
                (Identity::read_file(&path)?, format!("identity {}", path.display()))
            }
            Entrance::Invites(invitation, path) => {
                (invitation.identity().clone(), format!("invitation {}", path.display()))
            }
            Entrance::Enrolled(enrolled, _) => (enrolled.identity.clone(), "identity by token".to_owned()),
        };
        let claims = identity.claims()?;
        let patience = Duration::from_secs(u64::from(args.join_deadline.get()));
        if !self.by_kyklos {
            let until = Date(claims.validity.until);
            note(&format!("{}; {proof}: {claims}, until {until}", self.because));
        }
        warn_of_expiry(&claims, args.warn_days, &proof);
        let job = self.job.as_deref().map_or(claims.job, JobId::of_text);
        let by = Instant::now() + patience;
        let address = resolve(coordinator, self.host_appears_late, by)?;
        let mut config = QuicConfig::new(Rank(self.rank), self.world, job, address, identity);
        if let Entrance::Invites(invitation, _) = entrance {
            config.invitation = Some(Arc::clone(invitation));
        }
        config.revoked = args.revoked.as_deref().map(Revoked::read_file).transpose()?;
        config.coordinator_name = Some(coordinator.host.clone());
        config.places.clone_from(&self.places);
        // In whole seconds, because errors quote it.
        let left = by.saturating_duration_since(Instant::now()).as_millis().div_ceil(1000);
        config.connect_deadline = Duration::from_secs(u64::try_from(left).unwrap_or(1).max(1));
        config.bind = args.bind.unwrap_or(config.bind);
        if let Some(seconds) = args.stuck_after {
            config.stuck_after = Duration::from_secs(u64::from(seconds.get()));
        }
        config.warn = |text| note(&format!("warning: {text}"));
        config.note = note;
        config.epoch = self.run.as_deref().map_or(0, epoch);
        config.link = network.settings(config.bind, self.world)?;
        if let Some(port) = args.port {
            let lanes = u32::from(config.link.lanes);
            let first = u32::from(port) + self.local_rank * lanes;
            let on_host = |lane| {
                u16::try_from(first + lane).map_err(|_| {
                    Failure::request(
                        format!("--port {port} for rank {} on its host", self.local_rank),
                        "ports go up to 65535",
                    )
                })
            };
            on_host(lanes - 1)?;
            (config.port, config.lane_port) = (on_host(0)?, if lanes > 1 { on_host(1)? } else { 0 });
        }
        let group = if args.rejoin {
            QuicTransport::rejoin(config)?
        } else {
            let (epoch, members) = (config.epoch, (0..self.world).map(Rank).collect());
            Reformed { transport: QuicTransport::connect(config)?, members, epoch }
        };
        if let Some(line) = group.transport.network().filter(|_| !self.by_kyklos) {
            note(&format!("rank {}: {line}", self.rank));
        }
        Ok(group)
    }

    fn identity_path(&self, args: &GroupArgs) -> Result<PathBuf> {
        let said = args.identity.as_ref().map(|path| path.to_string_lossy().into_owned());
        let said = said.or_else(|| Variables::of_this_process().text(IDENTITY).map(|said| said.value));
        let said = said.ok_or_else(|| {
            Failure::request(
                format!(
                    "{}: neither --identity nor {IDENTITY} says which file proves this rank to the others",
                    self.because
                ),
                "make identities with kyklos certs init and kyklos certs issue, or a token with kyklos certs invite",
            )
        })?;
        let path = said.replace(RANK, &self.rank.to_string());
        match (path.contains(HOST), self.places.get(self.rank as usize).cloned().flatten()) {
            (false, _) => Ok(PathBuf::from(path)),
            (true, Some(place)) => Ok(PathBuf::from(path.replace(HOST, &place))),
            (true, None) => Err(Failure::request(
                format!(
                    "the identity {path}, and nothing says on which host rank {} has its place",
                    self.rank
                ),
                "a Slurm step or a cluster file does; else name the file without {host}",
            )),
        }
    }

    /// A process of `kyklos launch` ends when its launcher does, whatever happened to it: the launcher holds the
    /// other end of standard input.
    pub(crate) fn end_with_launcher(&self) {
        if self.by_kyklos {
            std::thread::spawn(|| {
                let mut bytes = [0; 64];
                // A byte asks for this rank's record.
                while std::io::stdin().read(&mut bytes).is_ok_and(|read| read > 0) {
                    record::write_all();
                }
                interrupt::end(1);
            });
        }
    }
}

fn warn_of_expiry(claims: &Claims, days: u32, proof: &str) {
    let left = claims.validity.days_left(SystemTime::now());
    if left < u64::from(days) && claims.validity.complaint(SystemTime::now()).is_none() {
        note(&format!(
            "warning: the {proof} of {claims} expires on {}: issue a new one with kyklos certs issue",
            Date(claims.validity.until)
        ));
    }
}

/// Ranks of another run of the same job are strangers. What is cut off counts the groups of this run.
fn epoch(run: &str) -> u32 {
    let [a, b, c, d, ..] = JobId::from_name(run).0;
    u32::from_be_bytes([a, b, c, d]) & !0xFFF
}

/// The address of rank 0. A name that may appear late is looked up until then.
pub(crate) fn resolve(HostPort { host, port }: &HostPort, late: bool, until: Instant) -> Result<SocketAddr> {
    // Names under localhost are this host's (RFC 6761), and not every resolver knows.
    if host == "localhost" || host.ends_with(".localhost") {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), *port));
    }
    let mut told = false;
    loop {
        let why = match (host.as_str(), *port).to_socket_addrs() {
            Ok(mut addresses) => match addresses.next() {
                Some(address) => return Ok(address),
                None => "the name has no address".to_owned(),
            },
            Err(error) => error.to_string(),
        };
        if !late || Instant::now() >= until {
            return Err(Failure::request(
                format!("rank 0 cannot be found at {host}: {why}"),
                "name a host and a UDP port that all ranks can reach",
            ));
        }
        if !told {
            note(&format!("waiting for the address of {host}: {why}"));
            told = true;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// In the name of an identity's file: the host on which the rank has its place.
const HOST: &str = "{host}";
