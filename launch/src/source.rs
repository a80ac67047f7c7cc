//! The settings of the group from one launcher, file or set of options.

use crate::address::HostPort;

/// A value, and its origin as an error quotes it: `SLURM_PROCID=3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting<T> {
    pub(crate) value: T,
    pub(crate) origin: String,
}

impl<T> Setting<T> {
    pub(crate) fn new(value: T, origin: impl Into<String>) -> Self {
        Self { value, origin: origin.into() }
    }
}

/// The precedence of sources. A source that is more specific to this process comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Precedence {
    /// Set for this run: options, Kyklos' own variables, a cluster file, an invitation or a token.
    #[default]
    Explicit,
    /// A launcher that starts every rank itself: torchrun, MPI.
    Launcher,
    /// A scheduler, under which a launcher may run: Slurm, Kubernetes.
    Scheduler,
}

/// All settings of one source; other sources may provide what is `None` or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) precedence: Precedence,
    pub(crate) rank: Option<Setting<u32>>,
    pub(crate) size: Option<Setting<u32>>,
    /// This rank's index among the ranks of its host.
    pub(crate) local_rank: Option<u32>,
    /// Number of ranks on its host.
    pub(crate) local_size: Option<u32>,
    pub(crate) coordinator: Option<Setting<HostPort>>,
    /// By rank, the host on which it runs.
    pub(crate) hosts: Vec<Option<String>>,
    /// Name of the job that the identities must be of.
    pub(crate) job: Option<Setting<String>>,
    /// Differs between two runs of the same job.
    pub(crate) run_id: Option<String>,
    /// By rank, its device, which only the caller understands.
    pub(crate) devices: Vec<Option<String>>,
}
