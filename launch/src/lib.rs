//! Which rank of which group this process is, and how it joins.
//!
//! A process that a launcher has started finds everything in its environment: [`from_env`] forms the group. [`Options`] add
//! or replace any of it. [`LAUNCHERS`] lists the environments that are read: torchrun, MPI (Open MPI and PMI), Slurm and
//! Kubernetes; [`variables`] lists Kyklos' own. Without all of these a process is a group of one.
//!
//! ```
//! // No launcher has started this process, so it is the only rank.
//! let group = kyklos_launch::from_env()?;
//! assert_eq!((group.transport.rank().0, group.transport.world()), (0, 1));
//! # Ok::<(), kyklos_launch::Error>(())
//! ```
//!
//! Ranks prove themselves to each other with an identity file each ([`variables::IDENTITY`]), or with one token for all
//! ([`variables::JOIN`]).
//!
//! [`Assignment::find`] gives rank and world before the group is formed, for programs that refuse a request or choose a
//! device first.
//!
//! This library prints nothing and ends no process: notes and warnings go to [`Options::note`] and [`Options::warn`].
//! Errors name options and remedies through a [`Wording`], so that a front end can say them in its own terms.
#![forbid(unsafe_code)]

mod address;
mod assignment;
mod cluster_file;
mod credentials;
#[doc(hidden)]
pub mod decoders;
mod error;
mod explicit;
mod join;
mod launchers;
mod options;
mod source;
mod sources;
#[cfg(test)]
mod test_support;
mod token;
pub mod variables;

use kyklos_transport::Reformed;

pub use self::address::{DEFAULT_PORT, HostPort};
pub use self::assignment::{Assignment, is_under_kyklos_launch, rank_variables};
pub use self::error::{Error, Remedy, Result};
pub use self::launchers::{LAUNCHERS, Launcher};
pub use self::options::{OptionName, Options, PlainWording, SecretText, Wording};

/// Forms the group that the environment describes, and returns this rank's end of it; a group of one if it describes none.
/// Blocks until every rank is there, at most 60 s.
///
/// ```no_run
/// // One of the processes of `torchrun --nproc-per-node 4 …`, `srun …` or `mpirun …`.
/// let group = kyklos_launch::from_env()?;
/// println!("rank {} of {}", group.transport.rank(), group.transport.world());
/// # Ok::<(), kyklos_launch::Error>(())
/// ```
///
/// # Errors
///
/// An environment that is incomplete or contradicts itself, an identity that cannot be used, a group that does not form.
pub fn from_env() -> Result<Reformed> {
    Options::default().join()
}

/// Most ranks that a group can be asked for; a plan or a transport may take fewer.
pub const MAX_WORLD: u32 = 4096;
