//! The commands. Their names and options are a contract: scripts use them. Every command is a room or a file of its own,
//! with its options; this one only lists them.

pub(crate) mod attend;
mod bench;
mod certs;
pub(crate) mod devices;
mod doctor;
mod launch;
mod plan;
mod support;
mod tune;

use clap::{Parser, Subcommand};

pub(crate) use self::bench::against;
use crate::failure::Result;

/// Exact attention over a sequence that is split across ranks. Without a command: a short demonstration.
#[derive(Debug, Parser)]
#[command(name = "kyklos", version, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Lists the devices of this machine and what each reached in a short probe
    Devices(devices::DevicesArgs),
    /// Computes attention over a file or made-up tensors, on one or many ranks
    Attend(Box<attend::AttendArgs>),
    /// Explains what `attend` would run, and what it would send and hold; needs no device
    Plan(plan::PlanArgs),
    /// Times attention kernels on the devices of this machine; each is checked against the f64 oracle before its time counts
    ///
    /// Every device runs every kernel on every shape, mask and dtype. Tensors are on the device already; a run is reset,
    /// attend and finalize, until the device is done. GFLOP/s count 4 x head dim for each visible pair and head.
    Bench(bench::BenchArgs),
    /// Finds the fastest attention kernel of a wgpu device for its usual shapes, and keeps the choice for later runs
    ///
    /// Nobody must tune: every device has a built-in choice, and KYKLOS_TUNE=off uses it. A candidate must equal the f64 oracle,
    /// and be 3 % faster than the built-in choice. Choices are kept in tuning.json in KYKLOS_CACHE_DIR, or in the user's cache folder.
    Tune(tune::TuneArgs),
    /// Runs `attend` with one process per rank on this host, joined over QUIC
    ///
    /// The processes find each other through RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    /// the names that torchrun uses. KYKLOS_IDENTITY is the path of the file with which a process proves its rank to the
    /// others. Lines that a rank writes to standard error are prefixed
    /// with its rank, except JSON progress, which names it; standard output passes unchanged.
    Launch(launch::LaunchArgs),
    /// Reads the records of all ranks of a run together, and says which rank stopped first and who waited for whom
    ///
    /// Exit code 0: nothing wrong found; 1: something found; 2: the files cannot be used.
    Doctor(doctor::DoctorArgs),
    /// Makes the authority of a cluster and the identities of its ranks and hosts
    Certs(certs::CertsArgs),
    /// Prints one table of what is correct here and what is refused: every strategy, mask, option, dtype, placement, device and transport
    ///
    /// Small problems run on every combination, with memory that holds NaN before; all rows of each result are held to the f64 oracle,
    /// within twice what the device is off alone. Exit code 1: a cell is neither correct nor refused by the validator; its command line
    /// is printed.
    Support(support::SupportArgs),
}

impl Command {
    /// Runs the command. Returns the exit code.
    pub(crate) fn run(&self) -> Result<u8> {
        let done = |()| 0;
        match self {
            Self::Devices(args) => devices::devices(args).map(done),
            Self::Attend(args) => attend::attend(args).map(done),
            Self::Plan(args) => plan::plan(args).map(done),
            Self::Bench(args) => bench::bench(args).map(done),
            Self::Tune(args) => tune::tune(args).map(done),
            Self::Launch(args) => launch::launch(args),
            Self::Doctor(args) => doctor::doctor(args),
            Self::Certs(args) => certs::certs(args).map(done),
            Self::Support(args) => support::support(args).map(done),
        }
    }
}
