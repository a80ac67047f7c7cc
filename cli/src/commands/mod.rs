//! The commands. Names and options are a contract: scripts use them. Each command has its own
//! module with its options; this module only lists them.

pub(crate) mod attend;
mod bench;
mod certs;
mod completions;
pub(crate) mod devices;
mod doctor;
mod help;
mod help_out;
mod helpers;
mod launch;
mod man;
mod plan;
mod tune;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

pub(crate) use self::bench::against;
use crate::activity;
use crate::failure::Result;

/// Exact attention over a sequence that is split across ranks.
#[derive(Debug, Parser)]
#[command(name = "kyklos", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Lists the devices of this machine with the speed of each in a short probe
    Devices(devices::DevicesArgs),
    /// Computes attention over a file or random tensors, on one or many ranks
    Attend(Box<attend::AttendArgs>),
    /// Shows the plan that `attend` would run: its steps, bytes and memory; needs no device
    Plan(Box<plan::PlanArgs>),
    /// Times attention kernels on the devices of this machine, and checks each against the f64
    /// oracle
    ///
    /// Every device runs every kernel on every shape, mask and dtype. The tensors are already on
    /// the device. A run is reset, attend and finalize, until the device is done. GFLOP/s count
    /// 4 x head dim for each visible pair and head. A wrong result gets no time.
    Bench(bench::BenchArgs),
    /// Finds the fastest attention kernel of a wgpu device for common shapes, and keeps the choice
    /// for later runs
    ///
    /// Tuning is optional: every device has a built-in choice, and KYKLOS_TUNE=off uses it. A
    /// candidate must agree with the f64 oracle and be 3 % faster than the built-in choice.
    /// Choices are kept in tuning.json in KYKLOS_CACHE_DIR, or in the user's cache folder.
    Tune(tune::TuneArgs),
    /// Runs `attend` or `bench strategies` with one process per rank on this host, connected over
    /// QUIC
    ///
    /// The processes get RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    /// MASTER_PORT, as torchrun sets them, and on standard input the identity that proves the
    /// rank to the others (under other launchers KYKLOS_IDENTITY names its file). Identities
    /// last as long as the job and are never on a disk. Lines on standard error get the rank as
    /// a prefix, except JSON progress, which has a field for it. Standard output passes unchanged.
    Launch(launch::LaunchArgs),
    /// Reads the records of all ranks of a run, and says which rank stopped first and which ranks
    /// waited for it
    ///
    /// Exit code 0: no problem found; 1: a problem found; 2: the files cannot be used.
    Doctor(doctor::DoctorArgs),
    /// Lets this machine's device compute a share of somebody else's attention: no model, no files
    ///
    /// The owner has the model and calls; this machine gets the queries, keys and values of some
    /// heads of a call, and returns their output. It waits for the owner as long as it takes, also
    /// when the owner starts again. Ctrl-C leaves in order: the owner then computes the share.
    HelpOut(help_out::HelpOutArgs),
    /// Invites helpers, and predicts what they would be worth
    Helpers(helpers::HelpersArgs),
    /// Creates the authority of a cluster and the identities of its ranks and hosts
    Certs(certs::CertsArgs),
    /// Prints what a shell completes after `kyklos`
    ///
    /// For bash: kyklos completions bash > ~/.local/share/bash-completion/completions/kyklos. For
    /// zsh: a file _kyklos in a folder of $fpath. For fish:
    /// ~/.config/fish/completions/kyklos.fish.
    Completions(completions::CompletionsArgs),
    /// Writes the manual pages: kyklos.1, and one for each command
    Man(man::ManArgs),
}

impl Cli {
    /// Reads the command line of this process.
    ///
    /// # Errors
    /// The parser's refusal, help or version.
    pub(crate) fn read() -> std::result::Result<Self, clap::Error> {
        let mut command = command();
        let matches = command.try_get_matches_from_mut(std::env::args_os())?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }
}

/// The command line as help, completions and manual pages show it.
fn command() -> clap::Command {
    help::with_short_help(Cli::command())
}

impl Command {
    /// Runs the command. Returns the exit code.
    pub(crate) fn run(&self) -> Result<u8> {
        let done = |()| 0;
        // `attend` and `launch` know whether their line is wanted; `help-out` has one of its own.
        if matches!(self, Self::Devices(_) | Self::Plan(_) | Self::Bench(_) | Self::Tune(_)) {
            activity::show();
        }
        match self {
            Self::Devices(args) => devices::devices(args).map(done),
            Self::Attend(args) => attend::attend(args).map(done),
            Self::Plan(args) => plan::plan(args).map(done),
            Self::Bench(args) => bench::bench(args).map(done),
            Self::Tune(args) => tune::tune(args).map(done),
            Self::Launch(args) => launch::launch(args, command()),
            Self::Doctor(args) => doctor::doctor(args),
            Self::HelpOut(args) => help_out::help_out(args).map(done),
            Self::Helpers(args) => helpers::helpers(args).map(done),
            Self::Certs(args) => certs::certs(args).map(done),
            Self::Completions(args) => completions::completions(args, command()).map(done),
            Self::Man(args) => man::man(args, command()).map(done),
        }
    }
}
