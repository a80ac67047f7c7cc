//! Options of `kyklos attend`.

use std::ffi::OsString;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;

use clap::{Args, Parser};

use crate::devices::{self, DeviceRequest};
use crate::group::GroupArgs;
use crate::job::collective::CollectiveArgs;
use crate::network::NetworkArgs;
use crate::observe::live::WatchArgs;
use crate::observe::metrics::MetricsArgs;
use crate::options::{List, OnLoss, ProblemArgs, ProgressKind, TabArgs, TransportName, headings};

#[derive(Clone, Debug, Args)]
pub(crate) struct AttendArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    /// Seed of the random tensors
    #[arg(help_heading = headings::INPUT, long, value_name = "N", default_value_t = 0, conflicts_with = "input")]
    pub(crate) seed: u64,
    #[arg(
        help_heading = headings::DEVICE,
        long,
        value_name = "D,D,…",
        default_value = "auto",
        help = format!("One device for each rank; the last one repeats: {}", devices::names())
    )]
    pub(crate) device: List<DeviceRequest>,
    #[command(flatten)]
    pub(crate) tabs: TabArgs,
    /// How ranks send messages [default: in-process with --ranks, quic under a launcher]
    #[arg(help_heading = headings::NETWORK, long, value_enum)]
    pub(crate) transport: Option<TransportName>,
    #[command(flatten)]
    pub(crate) collective: CollectiveArgs,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
    #[command(flatten)]
    pub(crate) group: GroupArgs,
    /// Write o and lse, with --grad also dq, dk, dv and dsinks, to this safetensors file.
    /// With {rank} in the name, every rank writes a file of its own part
    #[arg(help_heading = headings::OUTPUT, long, value_name = "F")]
    pub(crate) output: Option<PathBuf>,
    /// Compare sampled rows with the f64 oracle. A result outside the tolerance ends with exit code
    /// 1
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(crate) verify: bool,
    /// Print one JSON object instead of the table
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(crate) json: bool,
    /// Run N times. The wall time is the median; other figures are of the last run
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "N", default_value = "1")]
    pub(crate) repeat: NonZeroU64,
    /// Fail when an expected message does not arrive within this many seconds
    #[arg(help_heading = headings::RECOVERY, long, value_name = "SECONDS", default_value = "600")]
    pub(crate) deadline: NonZeroU32,
    /// What to do when a rank fails or makes no progress (only under a launcher)
    #[arg(help_heading = headings::RECOVERY, long, value_enum, default_value_t = OnLoss::Stop)]
    pub(crate) on_loss: OnLoss,
    /// Progress on standard error: a line if it is a terminal (auto), one JSON object a line, or
    /// none
    #[arg(help_heading = headings::DIAGNOSIS, long, value_enum, default_value_t = ProgressKind::Auto)]
    pub(crate) progress: ProgressKind,
    /// Write the timelines of all ranks as a Perfetto/Chrome trace (JSON), on one clock.
    /// With {rank} in the name, every rank writes its own file
    #[arg(help_heading = headings::DIAGNOSIS, long, value_name = "F")]
    pub(crate) trace: Option<PathBuf>,
    /// Write the report with pictures as one HTML file: the mask and its owners, the timelines of
    /// all ranks, bytes between ranks, memory
    #[arg(help_heading = headings::DIAGNOSIS, long, value_name = "F")]
    pub(crate) report: Option<PathBuf>,
    /// Write a record of each rank (rank-R.jsonl) to this folder when the rank ends and on SIGUSR1;
    /// `kyklos doctor` reads records [default: KYKLOS_RECORD_DIR]
    #[arg(help_heading = headings::DIAGNOSIS, long, value_name = "DIR")]
    pub(crate) record: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
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
