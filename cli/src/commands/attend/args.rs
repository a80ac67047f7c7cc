//! Options of `kyklos attend`.

use std::ffi::OsString;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;

use clap::{Args, Parser};

use crate::devices::DeviceRequest;
use crate::group::GroupArgs;
use crate::network::NetworkArgs;
use crate::observe::metrics::MetricsArgs;
use crate::options::{List, OnLoss, ProblemArgs, ProgressKind, TransportName};

#[derive(Clone, Debug, Args)]
pub(crate) struct AttendArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    /// safetensors file to write o and lse to; with {rank} in its name every rank writes its own part
    #[arg(long, value_name = "F")]
    pub(crate) output: Option<PathBuf>,
    /// Seed of made-up tensors
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "input")]
    pub(crate) seed: u64,
    /// auto, cpu, wgpu or cuda, the last two also by number (wgpu:1); a comma list goes by rank, its last entry repeats
    #[arg(long, value_name = "D,D,…", default_value = "auto")]
    pub(crate) device: List<DeviceRequest>,
    /// How ranks talk [default: in-process for --ranks, quic under a launcher]
    #[arg(long, value_enum)]
    pub(crate) transport: Option<TransportName>,
    /// Run N times; the wall time is the median, the other figures are those of the last run
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) repeat: NonZeroU64,
    /// Seconds after which a message that has not come is an error
    #[arg(long, value_name = "SECONDS", default_value = "600")]
    pub(crate) deadline: NonZeroU32,
    /// Under a launcher, when a rank dies or is stuck: every rank ends, or those who are left plan anew and begin again; with
    /// rejoin after a rank that was started anew with --rejoin has come, as kyklos launch does. With finish those who are left
    /// of a ring finish what all had begun, over the lost rank's keys too, once others have these (exit code 3); else they end,
    /// or shrink
    #[arg(long, value_enum, default_value_t = OnLoss::Stop)]
    pub(crate) on_loss: OnLoss,
    /// auto: a bar on a terminal; json: lines on standard error
    #[arg(long, value_enum, default_value_t = ProgressKind::Auto)]
    pub(crate) progress: ProgressKind,
    /// Compare sampled rows with the f64 oracle; a result outside the tolerance ends with exit code 1
    #[arg(long)]
    pub(crate) verify: bool,
    /// Write the timelines of all ranks as Perfetto/Chrome trace JSON, on one clock; with {rank} in its name a file for each
    #[arg(long, value_name = "F")]
    pub(crate) trace: Option<PathBuf>,
    /// Folder for a record of every rank (rank-R.jsonl), written when it ends and on SIGUSR1 [default: KYKLOS_RECORD_DIR]; kyklos doctor reads them
    #[arg(long, value_name = "DIR")]
    pub(crate) record: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) group: GroupArgs,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

impl AttendArgs {
    /// Reads the words of a command line from `attend` on.
    ///
    /// # Errors
    /// The parser's refusal.
    pub(crate) fn of_words(words: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Alone::try_parse_from(words).map(|Alone { args }| args)
    }
}

/// `attend` as a program of its own.
#[derive(Parser)]
#[command(name = "kyklos attend")]
struct Alone {
    #[command(flatten)]
    args: AttendArgs,
}
