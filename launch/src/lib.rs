//! Which rank of which group this process is, and how it joins.
//!
//! A process that a launcher has started finds everything in its environment: [`from_env`] forms
//! the group. [`Options`] add or replace any of it. Without a launcher and without options a
//! process is a group of one.
//!
//! ```
//! // No launcher has started this process, so it is the only rank.
//! let group = kyklos_launch::from_env()?;
//! assert_eq!((group.rank().0, group.size()), (0, 1));
//! # Ok::<(), kyklos_launch::Error>(())
//! ```
//!
//! # In `Cargo.toml`
//!
//! ```toml
//! [dependencies]
//! kyklos = "0.2"
//! kyklos-launch = "0.2"
//! kyklos-transport = { version = "0.2", features = ["quic"] } # only to use its types
//! ```
//!
//! The ranks of a launcher talk over QUIC, which is the feature `quic` of `kyklos-transport`. This
//! crate enables it, so [`from_env`] needs nothing else. A program that names
//! `kyklos_transport::quic` itself enables the feature too.
//!
//! # Variables
//!
//! [`LAUNCHERS`] in the order of precedence, with the variables that are read:
//!
//! | launcher | rank and ranks | local rank and ranks of the host | where rank 0 listens | which run |
//! |---|---|---|---|---|
//! | torchrun, `kyklos launch` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` (UDP) | `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT` |
//! | Open MPI (`mpirun`) | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` | no variable: set `KYKLOS_COORDINATOR` | |
//! | PMI (MPICH, Intel MPI) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | no variable: set `KYKLOS_COORDINATOR` | |
//! | Slurm (`srun`) | `SLURM_PROCID`; `SLURM_STEP_NUM_TASKS`, else `SLURM_NTASKS` | `SLURM_LOCALID`; `SLURM_NODEID` with `SLURM_STEP_TASKS_PER_NODE`, else `SLURM_TASKS_PER_NODE`; else `SLURM_NTASKS_PER_NODE` | first host of `SLURM_STEP_NODELIST`, else `SLURM_JOB_NODELIST`; the port follows from `SLURM_JOB_ID` | `SLURM_JOB_ID`, `SLURM_STEP_ID`, `SLURM_RESTART_COUNT` |
//! | Kubernetes (indexed Job) | `JOB_COMPLETION_INDEX`; set `KYKLOS_WORLD` | one rank in a pod | pod 0 in the headless service `KYKLOS_SERVICE`, by `HOSTNAME`; else set `KYKLOS_COORDINATOR` | |
//!
//! Slurm's `SLURM_DISTRIBUTION` and `SLURMD_NODENAME` say which host has which task.
//!
//! Kyklos' own variables, from [`variables`]. If two sources set the number of ranks, they must
//! agree:
//!
//! | variable | value |
//! |---|---|
//! | `KYKLOS_WORLD` | number of ranks |
//! | `KYKLOS_COORDINATOR` | where rank 0 listens, `HOST:PORT` (UDP); wins over a launcher's address |
//! | `KYKLOS_ADVERTISE` | addresses at which other ranks reach this one, as [`Options::advertise`] |
//! | `KYKLOS_SHARED_MEMORY` | `off` turns off [`LinkSettings::shared_memory`](kyklos_transport::quic::LinkSettings::shared_memory) |
//! | `KYKLOS_IDENTITY` | path of the file that proves this rank to the others, as [`Options::identity`] |
//! | `KYKLOS_JOIN` | a join token, instead of an identity file |
//! | `KYKLOS_JOB_ID` | name of the job that the identities must be of |
//! | `KYKLOS_LAUNCH` | set by `kyklos launch` for its processes; not for users |
//!
//! A group of several ranks needs an identity file for each rank (`kyklos certs`), or a token for
//! all. `kyklos launch` makes identities itself. `docs/deploy/identities.md` of the repository has
//! the steps.
//!
//! # More
//!
//! [`Assignment::find`] gives rank and size before the group is formed, for programs that refuse a
//! request or choose a device first.
//!
//! This library prints nothing and ends no process: notes and warnings go to [`Options::note`] and
//! [`Options::warn`]. Errors name options by their fields and have a kind, so that a program can
//! add what its users write instead.
#![forbid(unsafe_code)]

mod address;
mod assignment;
mod cluster_file;
mod credentials;
#[doc(hidden)]
pub mod decoders;
mod error;
mod explicit;
mod free_port;
mod join;
mod launchers;
mod options;
mod source;
mod sources;
#[cfg(test)]
mod test_support;
mod token;
pub mod variables;

use kyklos_transport::Group;

pub use self::address::{DEFAULT_PORT, HostPort, parse_advertised};
pub use self::assignment::{
    Assignment, is_under_kyklos_launch, local_rank, may_share_memory, rank_in_environment, rank_variables,
};
pub use self::error::{Error, RequestKind, Result};
pub use self::free_port::free_port;
pub use self::launchers::{LAUNCHERS, Launcher};
pub use self::options::{Options, SecretText};

/// Forms the group that the environment describes, and returns this rank's end of it; a group of
/// one if it describes none. Blocks until every rank is there, at most 60 s.
///
/// ```no_run
/// // One of the processes of `torchrun --nproc-per-node 4 …`, `srun …` or `mpirun …`.
/// let group = kyklos_launch::from_env()?;
/// println!("rank {} of {}", group.rank(), group.size());
/// # Ok::<(), kyklos_launch::Error>(())
/// ```
///
/// # Errors
///
/// An environment that is incomplete or contradicts itself, an identity that cannot be used, a
/// group that does not form.
pub fn from_env() -> Result<Group> {
    Options::default().join()
}
