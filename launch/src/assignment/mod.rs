//! Which rank of which group this process is, from all sources together.
//!
//! Explicit settings come first, then a launcher that starts the ranks itself (torchrun, MPI), then
//! a scheduler (Slurm, Kubernetes), under which such a launcher may run. A source may provide what
//! another one does not. Two sources with different ranks or sizes are refused, and the error names
//! both, with two exceptions: the tasks of a scheduler may be launchers, which count other things;
//! and explicit settings win over an environment of one rank (an interactive shell).

use std::net::SocketAddr;

use kyklos_transport::MAX_RANKS;
use kyklos_transport::quic::{Identity, LinkSettings};

use crate::address::{HostPort, parse_advertised};
use crate::credentials::Credentials;
use crate::error::{Error, RequestKind, Result};
use crate::explicit;
use crate::launchers::{LAUNCHERS, Launcher, torchrun};
use crate::options::{Options, named};
use crate::source::{Precedence, Setting, Source};
use crate::sources::{all_sources, first, without_enclosing};
use crate::variables::{ADVERTISE, SHARED_MEMORY, Variables, WORLD};

/// This process's rank in a group, before the group is formed ([`Self::join`]).
#[derive(Clone, Debug)]
pub struct Assignment {
    /// This rank, `0..size`.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// This rank's index among the ranks of its host.
    pub local_rank: u32,
    /// Number of ranks on its host.
    pub local_size: u32,
    /// `kyklos launch` has started this process and holds the other end of its standard input,
    /// which closes when the launcher ends. Through it comes the identity of the rank
    /// ([`Self::set_identity`]). [`Self::join`] gives no notes then: the launcher's user knows
    /// rank, size and address.
    pub by_kyklos_launch: bool,
    /// Where rank 0 listens; a group of one needs no address.
    pub coordinator: Option<HostPort>,
    /// By rank, the host on which it runs; empty or `None` where no source says.
    pub hosts: Vec<Option<String>>,
    /// Name of the job that the identities must be of, if one is set.
    pub job: Option<String>,
    /// The device of this rank in the cluster file.
    pub device: Option<String>,
    /// Rank, size and coordinator with their origins, in one line to print.
    pub summary: String,
    /// Differs between two runs of the same job.
    pub(crate) run_id: Option<String>,
    /// The addresses that this rank says for itself.
    pub(crate) advertise: Vec<SocketAddr>,
    pub(crate) credentials: Credentials,
    pub(crate) options: Options,
}

impl Assignment {
    /// Proves this rank by `identity`, instead of by the credentials that options and environment
    /// name.
    pub fn set_identity(&mut self, identity: Identity) {
        self.credentials = Credentials::Given(Box::new(identity));
    }

    /// Combines options, environment and cluster file; `None` if nothing says that there are
    /// several ranks. With a token this asks rank 0 for an identity, and blocks until it
    /// answers.
    ///
    /// # Errors
    ///
    /// Settings that are incomplete or contradict each other, files that cannot be used, a rank 0
    /// that gives no identity.
    pub fn find(options: &Options) -> Result<Option<Self>> {
        let variables = Variables::of_process();
        let credentials = Credentials::obtain(options, &variables)?;
        assign(options, &variables, credentials)
    }
}

/// The variables in this environment that say which rank a process is or how many there are, as
/// `NAME=value` with spaces between, right or wrong; `None` if there are none.
pub fn rank_variables() -> Option<String> {
    let variables = Variables::of_process();
    let names = LAUNCHERS.iter().flat_map(|launcher| launcher.rank_variables).copied().chain([WORLD]);
    let set: Vec<String> = names.filter_map(|name| variables.text(name)).map(|set| set.origin).collect();
    (!set.is_empty()).then(|| set.join(" "))
}

/// The rank of this process as a launcher's environment says it, also where variables beside it
/// are wrong; `None` without a launcher.
pub fn rank_in_environment() -> Option<u32> {
    let variables = Variables::of_process();
    let is_set =
        |launcher: &&Launcher| launcher.rank_variables.iter().all(|name| variables.text(name).is_some());
    let rank = |launcher: &Launcher| variables.text(launcher.rank_variables[0])?.value.parse().ok();
    LAUNCHERS.iter().filter(is_set).find_map(rank)
}

/// The index of this process among those of its host, as the environment of a launcher says it;
/// `None` without a launcher, or if its variables are wrong.
pub fn local_rank() -> Option<u32> {
    local_rank_in(&Variables::of_process())
}

pub(crate) fn local_rank_in(variables: &Variables<'_>) -> Option<u32> {
    LAUNCHERS.iter().find_map(|launcher| launcher.source(variables).ok()?.local_rank)
}

/// Whether `kyklos launch` has started this process.
pub fn is_under_kyklos_launch() -> bool {
    Variables::of_process().under_kyklos_launch()
}

/// [`Assignment::find`] in any environment.
pub(crate) fn assign(
    options: &Options,
    variables: &Variables<'_>,
    credentials: Credentials,
) -> Result<Option<Assignment>> {
    let by_kyklos_launch = variables.under_kyklos_launch();
    let sources = if by_kyklos_launch {
        if let Some(option) = options.first_group_option() {
            return Err(Error::request(
                format!("{option} under kyklos launch"),
                "remove it: kyklos launch sets rank, size and coordinator",
            ));
        }
        vec![explicit::variables(variables)?, torchrun::LAUNCHER.source(variables)?]
    } else {
        let by_credentials = credentials.source()?;
        by_credentials.into_iter().chain(all_sources(options, variables)?).collect()
    };
    let sources = without_enclosing(sources);
    require_equal(&sources, |source| source.rank.as_ref())?;
    require_equal(&sources, |source| source.size.as_ref())?;
    let explicit: Vec<Source> =
        sources.iter().filter(|source| source.precedence == Precedence::Explicit).cloned().collect();
    require_equal(&explicit, |source| source.coordinator.as_ref())?;
    require_equal(&explicit, |source| source.job.as_ref())?;

    let (rank, size) = match (first(&sources, |s| s.rank.as_ref()), first(&sources, |s| s.size.as_ref())) {
        (Some(rank), Some(size)) => (rank, size),
        (Some(rank), None) => {
            return Err(Error::request(
                format!("{}, and nothing says how many ranks there are", rank.origin),
                "set the option size or KYKLOS_WORLD",
            )
            .of(RequestKind::Size));
        }
        (None, size) => {
            let set = size.map(|size| size.origin.clone()).or_else(|| options.first_group_option());
            return match set {
                None => Ok(None),
                Some(set) => Err(Error::request(
                    format!("{set}, and nothing says which rank this process is"),
                    "set the option rank, or start the processes with a launcher",
                )
                .of(RequestKind::Rank)),
            };
        }
    };
    // Before anything is made for each rank.
    if size.value > MAX_RANKS {
        return Err(Error::request(&size.origin, format!("a group has at most {MAX_RANKS} ranks")));
    }
    if rank.value >= size.value {
        return Err(Error::request(
            format!("{} with {}", rank.origin, size.origin),
            "ranks go from 0 to the number of ranks less one",
        ));
    }
    let coordinator = first(&sources, |source| source.coordinator.as_ref());
    if coordinator.is_none() && size.value > 1 {
        return Err(Error::request(
            format!("{} with {}, and nothing says where rank 0 is", rank.origin, size.origin),
            "set MASTER_ADDR and MASTER_PORT, or KYKLOS_COORDINATOR, or the option coordinator",
        )
        .of(RequestKind::Coordinator));
    }
    let at = coordinator.map(|at| format!("; rank 0 at {} ({})", at.value, at.origin));
    Ok(Some(Assignment {
        rank: rank.value,
        size: size.value,
        local_rank: sources.iter().find_map(|source| source.local_rank).unwrap_or(0),
        local_size: sources.iter().find_map(|source| source.local_size).unwrap_or(1),
        by_kyklos_launch,
        coordinator: coordinator.map(|at| at.value.clone()),
        hosts: sources.iter().map(|s| &s.hosts).find(|hosts| !hosts.is_empty()).cloned().unwrap_or_default(),
        job: first(&sources, |source| source.job.as_ref()).map(|job| job.value.clone()),
        run_id: sources.iter().find_map(|source| source.run_id.clone()),
        device: sources.iter().find_map(|source| source.devices.get(rank.value as usize).cloned().flatten()),
        summary: format!(
            "rank {} of {} ({}, {}){}",
            rank.value,
            size.value,
            rank.origin,
            size.origin,
            at.unwrap_or_default()
        ),
        advertise: advertise(options, variables)?,
        credentials,
        options: Options {
            link: LinkSettings {
                shared_memory: options.link.shared_memory && shared_memory(variables)?,
                ..options.link
            },
            ..options.clone()
        },
    }))
}

/// Whether the environment of this process lets ranks of one host share memory:
/// `KYKLOS_SHARED_MEMORY` is not `off`.
///
/// # Errors
///
/// A value that is neither `on` nor `off`.
pub fn may_share_memory() -> Result<bool> {
    shared_memory(&Variables::of_process())
}

fn shared_memory(variables: &Variables<'_>) -> Result<bool> {
    match variables.text(SHARED_MEMORY) {
        None => Ok(true),
        Some(Setting { value, origin }) => match value.as_str() {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(Error::request(origin, "say on or off")),
        },
    }
}

/// The addresses that this rank says for itself, by option or variable.
fn advertise(options: &Options, variables: &Variables<'_>) -> Result<Vec<SocketAddr>> {
    let variable = variables.text(ADVERTISE).filter(|_| !variables.under_kyklos_launch());
    match (&options.advertise, variable) {
        (Some(text), _) => parse_advertised(text, &named("advertise", text)),
        (None, Some(Setting { value, origin })) => parse_advertised(&value, &origin),
        (None, None) => Ok(Vec::new()),
    }
}

/// Refuses two sources with different values of a setting.
fn require_equal<T: PartialEq>(
    sources: &[Source],
    pick: impl Fn(&Source) -> Option<&Setting<T>>,
) -> Result<()> {
    let mut settings = sources.iter().filter_map(pick);
    let Some(one) = settings.next() else {
        return Ok(());
    };
    match settings.find(|other| other.value != one.value) {
        Some(other) => Err(Error::request(
            format!("{} and {} contradict each other", one.origin, other.origin),
            "remove one of them",
        )
        .of(RequestKind::Contradiction)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
