//! Which rank of which group this process is: what flags, a file and the environments of launchers say, made one.
//!
//! What is given to the run comes first, then a launcher that starts the ranks itself (torchrun, MPI), then a scheduler
//! (Slurm, Kubernetes), under which such a launcher may run. Each may leave out what another says. Two that say
//! different things of rank or world are refused by both their words, with two exceptions: a scheduler counts tasks
//! that are launchers themselves, and an environment of one rank (an interactive shell) gives way to flags.

pub(crate) mod cluster_file;
mod given;
mod kubernetes;
mod mpi;
pub(crate) mod nodelist;
mod slurm;
mod source;
mod token;
mod torchrun;
mod variables;

use std::fmt::Display;

pub(crate) use self::given::{GroupArgs, IDENTITY, JOB_ID};
pub(crate) use self::source::{HostPort, Source};
use self::source::{Nearness, Said};
pub(crate) use self::token::{enrolled, invited};
pub(crate) use self::variables::Variables;
use crate::devices::DeviceRequest;
use crate::failure::{Failure, Result};

/// This process is one rank of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launched {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// Place of this rank among those of its host.
    pub(crate) local_rank: u32,
    pub(crate) local_world: u32,
    /// Started by `kyklos launch`, not by somebody else's launcher.
    pub(crate) by_kyklos: bool,
    /// Where rank 0 is; a group of one needs no place to meet.
    pub(crate) coordinator: Option<HostPort>,
    /// The address of rank 0's host may appear only later.
    pub(crate) host_appears_late: bool,
    /// By rank, its host, where that is known.
    pub(crate) places: Vec<Option<String>>,
    /// The job that identities must be of, where one is named.
    pub(crate) job: Option<String>,
    /// What tells this run from an earlier one of the same job.
    pub(crate) run: Option<String>,
    /// What a cluster file says of this rank's device.
    pub(crate) device: Option<DeviceRequest>,
    /// Who said all this.
    pub(crate) because: String,
}

/// What the environment says of rank and world, whether or not that makes sense; `None` where it says nothing.
pub(crate) fn hints(variables: &Variables<'_>) -> Option<String> {
    let said: Vec<String> =
        HINTS.iter().filter_map(|name| variables.text(name)).map(|said| said.words).collect();
    (!said.is_empty()).then(|| said.join(" "))
}

/// Whether `kyklos launch` made the environment.
pub(crate) fn by_kyklos(variables: &Variables<'_>) -> bool {
    variables.text(LAUNCH).is_some()
}

/// Which rank flags and environment say this process is, before anybody else is asked.
pub(crate) fn rank_said(args: &GroupArgs, variables: &Variables<'_>) -> Result<Option<u32>> {
    let sources = without_nested(all_sources(args, variables)?);
    Ok(first(&sources, |source| source.rank.as_ref()).map(|rank| rank.value))
}

/// Which rank this process is; `None` where nothing says that there are several. `told` is what an invitation says, or
/// rank 0 has said.
pub(crate) fn find(
    args: &GroupArgs,
    variables: &Variables<'_>,
    told: Option<Source>,
) -> Result<Option<Launched>> {
    let by_kyklos = by_kyklos(variables);
    let sources = if by_kyklos {
        if let Some(flag) = args.first() {
            return Err(Failure::request(
                format!("{flag} under kyklos launch"),
                "leave it away: kyklos launch says who is which rank, and where",
            ));
        }
        vec![given::variables(variables)?, torchrun::source(variables)?]
    } else {
        let mut sources = all_sources(args, variables)?;
        sources.splice(0..0, told);
        sources
    };
    let sources = without_nested(sources);
    agree(&sources, |source| source.rank.as_ref())?;
    agree(&sources, |source| source.world.as_ref())?;
    let given: Vec<Source> =
        sources.iter().filter(|source| source.nearness == Nearness::Given).cloned().collect();
    agree(&given, |source| source.coordinator.as_ref())?;
    agree(&given, |source| source.job.as_ref())?;

    let (rank, world) = match (first(&sources, |s| s.rank.as_ref()), first(&sources, |s| s.world.as_ref())) {
        (Some(rank), Some(world)) => (rank, world),
        (Some(rank), None) => {
            return Err(Failure::request(
                format!("{}, and nothing says how many ranks there are", rank.words),
                "add --world N or KYKLOS_WORLD; --ranks N instead puts all ranks into this process",
            ));
        }
        (None, world) => {
            let said = world.map(|world| world.words.clone()).or_else(|| args.first());
            return match said {
                None => Ok(None),
                Some(said) => Err(Failure::request(
                    format!("{said}, and nothing says which rank this process is"),
                    "add --rank R, or start the processes with a launcher",
                )),
            };
        }
    };
    if rank.value >= world.value {
        return Err(Failure::request(
            format!("{} with {}", rank.words, world.words),
            "ranks go from 0 to the world's size less one",
        ));
    }
    let coordinator = first(&sources, |source| source.coordinator.as_ref());
    if coordinator.is_none() && world.value > 1 {
        return Err(Failure::request(
            format!("{} with {}, and nothing says where rank 0 is", rank.words, world.words),
            "set MASTER_ADDR and MASTER_PORT or KYKLOS_COORDINATOR, or add --coordinator HOST:PORT",
        ));
    }
    let at = coordinator.map(|said| format!("; rank 0 at {} ({})", said.value, said.words));
    Ok(Some(Launched {
        rank: rank.value,
        world: world.value,
        local_rank: sources.iter().find_map(|source| source.local_rank).unwrap_or(0),
        local_world: sources.iter().find_map(|source| source.local_world).unwrap_or(1),
        by_kyklos,
        coordinator: coordinator.map(|said| said.value.clone()),
        host_appears_late: sources.iter().any(|source| source.host_appears_late),
        places: sources.iter().map(|s| &s.places).find(|all| !all.is_empty()).cloned().unwrap_or_default(),
        job: first(&sources, |source| source.job.as_ref()).map(|job| job.value.clone()),
        run: sources.iter().find_map(|source| source.run.clone()),
        device: sources.iter().find_map(|source| source.devices.get(rank.value as usize).copied().flatten()),
        because: format!(
            "rank {} of {} ({}, {}){}",
            rank.value,
            world.value,
            rank.words,
            world.words,
            at.unwrap_or_default()
        ),
    }))
}

/// All sources, the ones that count first in front.
fn all_sources(args: &GroupArgs, variables: &Variables<'_>) -> Result<Vec<Source>> {
    let mut sources = vec![given::flags(args)?, given::variables(variables)?];
    let environment = [
        torchrun::source(variables)?,
        mpi::open_mpi(variables)?,
        mpi::pmi(variables)?,
        slurm::source(variables)?,
        kubernetes::source(variables)?,
    ];
    if let Some(path) = &args.cluster {
        let said = sources.iter().chain(&environment).find_map(|source| source.rank.as_ref());
        let file = cluster_file::source(path, said.map(|rank| rank.value))?;
        sources.push(file);
    }
    sources.extend(environment);
    Ok(sources)
}

/// Leaves out the environments that count something else than ranks.
fn without_nested(sources: Vec<Source>) -> Vec<Source> {
    let of = |nearness: Nearness| {
        let mut said = sources.iter().filter(|source| source.nearness == nearness);
        let rank_and_world =
            |source: &Source| Some((source.rank.as_ref()?.value, source.world.as_ref()?.value));
        said.find_map(rank_and_world)
    };
    let given = |source: &Source| source.nearness == Nearness::Given;
    let given_rank = first(&sources, |s| s.rank.as_ref().filter(|_| given(s))).is_some();
    let given_world = first(&sources, |s| s.world.as_ref().filter(|_| given(s)));
    let given_several = given_rank && given_world.is_some_and(|world| world.value > 1);
    let inner = of(Nearness::Inner);
    let keep = |source: &Source| match source.nearness {
        Nearness::Given => true,
        // An interactive shell of one task, from which somebody starts ranks by hand.
        _ if given_several && source.world.as_ref().is_some_and(|world| world.value == 1) => false,
        Nearness::Inner => true,
        Nearness::Outer => match (inner, &source.rank, &source.world) {
            (Some((rank, world)), said_rank, said_world) => {
                said_rank.as_ref().is_none_or(|said| said.value == rank)
                    && said_world.as_ref().is_none_or(|said| said.value == world)
            }
            _ => true,
        },
    };
    sources.iter().filter(|source| keep(source)).cloned().collect()
}

/// Refuses two sources that say different things.
fn agree<T: PartialEq>(sources: &[Source], pick: impl Fn(&Source) -> Option<&Said<T>>) -> Result<()> {
    let mut said = sources.iter().filter_map(pick);
    let Some(one) = said.next() else {
        return Ok(());
    };
    match said.find(|other| other.value != one.value) {
        Some(other) => Err(contradiction(&one.words, &other.words)),
        None => Ok(()),
    }
}

fn contradiction(one: impl Display, other: impl Display) -> Failure {
    Failure::request(
        format!("{one} and {other} contradict each other"),
        "leave one of them away, or unset it; --ranks N puts all ranks into this process",
    )
}

fn first<T>(sources: &[Source], pick: impl Fn(&Source) -> Option<&Said<T>>) -> Option<&Said<T>> {
    sources.iter().find_map(pick)
}

/// Set by `kyklos launch` for its processes.
pub(crate) const LAUNCH: &str = "KYKLOS_LAUNCH";

/// The variables that say which rank a process is, or how many there are.
const HINTS: [&str; 9] = [
    "RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
    "KYKLOS_WORLD",
];

#[cfg(test)]
mod tests;
