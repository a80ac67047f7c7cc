//! What is given to this very run: flags, and Kyklos' own variables, which say the same.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;

use super::source::{HostPort, Nearness, Said, Source};
use super::variables::Variables;
use crate::failure::{Failure, Result};

/// How this process joins a group of processes. The environment of a launcher supplies missing values.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options of a process in a group")]
pub(crate) struct GroupArgs {
    /// The rank of this process
    #[arg(long, value_name = "R")]
    pub(crate) rank: Option<u32>,
    /// Number of ranks [or KYKLOS_WORLD]
    #[arg(long, value_name = "N")]
    pub(crate) world: Option<NonZeroU32>,
    /// Address at which rank 0 listens, UDP [or KYKLOS_COORDINATOR]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) coordinator: Option<String>,
    /// TOML file with the host of every rank
    #[arg(long, value_name = "F", conflicts_with = "world")]
    pub(crate) cluster: Option<PathBuf>,
    /// File that proves this rank or its host to the others. {rank} or {host} in the name stands for the rank or the host
    /// [or KYKLOS_IDENTITY]
    #[arg(long, value_name = "F")]
    pub(crate) identity: Option<PathBuf>,
    /// This process is rank 0 and lets other ranks in with the token of this invitation (kyklos certs invite)
    #[arg(long, value_name = "F")]
    pub(crate) invite: Option<PathBuf>,
    /// Get the identity of this rank from rank 0 with this token. --identity F keeps the identity, --rank R asks for a rank
    /// [or KYKLOS_JOIN, which other users cannot see]
    #[arg(long, value_name = "TOKEN")]
    pub(crate) join: Option<String>,
    /// List of keys whose identities are refused; read again each time a group forms (--on-loss)
    #[arg(long, value_name = "F")]
    pub(crate) revoked: Option<PathBuf>,
    /// Warn if the identity expires within this many days
    #[arg(long, value_name = "DAYS", default_value_t = 3)]
    pub(crate) warn_days: u32,
    /// Seconds within which all processes must join
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    pub(crate) join_deadline: NonZeroU32,
    /// Declare a rank stuck, and end the run, if it makes no progress for this many seconds while others wait for it.
    /// Must be longer than a kernel takes to compile. The value of rank 0 counts; it warns after a quarter [default: 180]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) stuck_after: Option<NonZeroU32>,
    /// Replace a rank that died: join when the others form the group again (--on-loss rejoin)
    #[arg(long)]
    pub(crate) rejoin: bool,
    /// Local address of this process [default: all addresses, or loopback if rank 0 is there]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) bind: Option<IpAddr>,
    /// First UDP port of the ranks on this host, other than rank 0: each rank takes one port for each lane
    /// [default: the system chooses]
    #[arg(long, value_name = "N")]
    pub(crate) port: Option<u16>,
}

impl GroupArgs {
    /// The first option that makes a group, in the words it was given in.
    pub(crate) fn first(&self) -> Option<String> {
        let path = |name: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| format!("{name} {}", path.display()))
        };
        self.rank
            .map(|rank| format!("--rank {rank}"))
            .or_else(|| self.world.map(|world| format!("--world {world}")))
            .or_else(|| self.coordinator.as_ref().map(|address| format!("--coordinator {address}")))
            .or_else(|| path("--cluster", &self.cluster))
            .or_else(|| path("--identity", &self.identity))
            .or_else(|| path("--invite", &self.invite))
            .or_else(|| path("--revoked", &self.revoked))
            // Not its token, which is a secret.
            .or_else(|| self.join.as_ref().map(|_| "--join".to_owned()))
            .or_else(|| self.bind.map(|address| format!("--bind {address}")))
            .or_else(|| self.port.map(|port| format!("--port {port}")))
    }
}

pub(crate) fn flags(args: &GroupArgs) -> Result<Source> {
    Ok(Source {
        nearness: Nearness::Given,
        rank: args.rank.map(|rank| Said::new(rank, format!("--rank {rank}"))),
        world: args.world.map(|world| Said::new(world.get(), format!("--world {world}"))),
        coordinator: match &args.coordinator {
            Some(text) => {
                let words = format!("--coordinator {text}");
                Some(Said::new(HostPort::parse(text, &words)?, words))
            }
            None => None,
        },
        ..Source::default()
    })
}

pub(crate) fn variables(variables: &Variables<'_>) -> Result<Source> {
    let world = variables.number::<u32>(WORLD)?;
    if let Some(zero) = world.as_ref().filter(|world| world.value == 0) {
        return Err(Failure::request(&zero.words, "a group has at least one rank"));
    }
    Ok(Source {
        nearness: Nearness::Given,
        world,
        coordinator: match variables.text(COORDINATOR) {
            Some(text) => Some(Said::new(HostPort::parse(&text.value, &text.words)?, text.words)),
            None => None,
        },
        job: variables.text(JOB_ID),
        ..Source::default()
    })
}

const WORLD: &str = "KYKLOS_WORLD";
const COORDINATOR: &str = "KYKLOS_COORDINATOR";
/// Name of the job.
pub(crate) const JOB_ID: &str = "KYKLOS_JOB_ID";
/// Path of the file with which a rank proves itself.
pub(crate) const IDENTITY: &str = "KYKLOS_IDENTITY";
