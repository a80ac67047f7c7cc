//! The command line. Its names are a contract: scripts use them.

mod values;

use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use kyklos::{Dtype, Mask, Mesh, PlacementKind, Strategy, WireFormat};

use crate::against::Peer;
use crate::certs::CertsArgs;
use crate::device::DeviceRequest;
use crate::doctor::DoctorArgs;
use crate::launch::LaunchArgs;
use crate::launchers::GroupArgs;
use crate::network::NetworkArgs;
use crate::on_loss::OnLoss;
use crate::support::SupportArgs;
use crate::tune::TuneArgs;
pub(crate) use values::{
    ByteSize, KernelName, List, ListItem, MaskArg, OrAuto, ProgressKind, Shape, SplitName, StrategyName,
    TokenRange, TransportName,
};

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
    Devices(DevicesArgs),
    /// Computes attention over a file or made-up tensors, on one or many ranks
    Attend(Box<AttendArgs>),
    /// Explains what `attend` would run, and what it would send and hold; needs no device
    Plan(PlanArgs),
    /// Times attention kernels on the devices of this machine; each is checked against the f64 oracle before its time counts
    ///
    /// Every device runs every kernel on every shape, mask and dtype. Tensors are on the device already; a run is reset,
    /// attend and finalize, until the device is done. GFLOP/s count 4 x head dim for each visible pair and head.
    Bench(BenchArgs),
    /// Finds the fastest attention kernel of a wgpu device for its usual shapes, and keeps the choice for later runs
    ///
    /// Nobody must tune: every device has a built-in choice, and KYKLOS_TUNE=off uses it. A candidate must equal the f64 oracle,
    /// and be 3 % faster than the built-in choice. Choices are kept in tuning.json in KYKLOS_CACHE_DIR, or in the user's cache folder.
    Tune(TuneArgs),
    /// Runs `attend` with one process per rank on this host, joined over QUIC
    ///
    /// The processes find each other through RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    /// the names that torchrun uses. KYKLOS_IDENTITY is the path of the file with which a process proves its rank to the
    /// others. Lines that a rank writes to standard error are prefixed
    /// with its rank, except JSON progress, which names it; standard output passes unchanged.
    Launch(LaunchArgs),
    /// Reads the records of all ranks of a run together, and says which rank stopped first and who waited for whom
    ///
    /// Exit code 0: nothing wrong found; 1: something found; 2: the files cannot be used.
    Doctor(DoctorArgs),
    /// Makes the authority of a cluster and the identities of its ranks and hosts
    Certs(CertsArgs),
    /// Prints one table of what is correct here and what is refused: every strategy, mask, option, dtype, placement, device and transport
    ///
    /// Small problems run on every combination, with memory that holds NaN before; all rows of each result are held to the f64 oracle,
    /// within twice what the device is off alone. Exit code 1: a cell is neither correct nor refused by the validator; its command line
    /// is printed.
    Support(SupportArgs),
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

fn strategy_help() -> String {
    format!("{}, or auto: without --hardware the strategy of the mesh", Strategy::names())
}

/// One line for each strategy.
fn strategy_long_help() -> String {
    let lines = Strategy::ALL.map(|strategy| format!("- {strategy}: {}", strategy.summary()));
    format!(
        "How the work is shared; auto: without --hardware the strategy of the mesh.\n{}",
        lines.join("\n")
    )
}

fn placement_help() -> String {
    format!(
        "{} or auto: without --hardware zigzag where a ring's mask works like causal",
        PlacementKind::names()
    )
}

/// One line for each placement.
fn placement_long_help() -> String {
    let lines = PlacementKind::ALL.map(|kind| format!("- {kind}: {}", kind.summary()));
    format!(
        "Which rank holds which tokens; auto: without --hardware zigzag where a ring's mask works like causal.\n{}",
        lines.join("\n")
    )
}

/// What is computed, and how it is shared: common to `attend` and `plan`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ProblemArgs {
    /// safetensors file with q, k, v, each [batch, seq, heads, dim]
    #[arg(long, value_name = "F")]
    pub(crate) input: Option<PathBuf>,
    /// Made-up tensors: batch, tokens, query heads, kv heads, head dim
    #[arg(long, value_name = "B,S,HQ,HKV,D", conflicts_with = "input")]
    pub(crate) shape: Option<Shape>,
    /// Number of ranks in this process [default: the mesh's, else 1]
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<NonZeroU32>,
    /// Description of devices and links: `auto` is then what the simulator finds fastest, and the time is predicted
    #[arg(long, value_name = "F")]
    pub(crate) hardware: Option<PathBuf>,
    /// Ulysses x ring, or auto: without --hardware the mesh that sends fewest bytes
    #[arg(long, value_name = "UxR|auto", default_value = "auto")]
    pub(crate) mesh: OrAuto<Mesh>,
    #[arg(long, value_name = "NAME", default_value = "auto", help = strategy_help(), long_help = strategy_long_help())]
    pub(crate) strategy: OrAuto<StrategyName>,
    #[arg(long, value_name = "KIND", default_value = "auto", help = placement_help(), long_help = placement_long_help())]
    pub(crate) placement: OrAuto<PlacementKind>,
    /// Share the tokens by these weights, one for each rank; with work: before them, the visible (query, key) pairs
    #[arg(long, value_name = "[work:]W,W,…", conflicts_with = "tokens")]
    pub(crate) split: Option<SplitName>,
    /// Share the tokens exactly like this, one number for each rank
    #[arg(long, value_name = "N,N,…")]
    pub(crate) tokens: Option<List<u32>>,
    #[arg(long, value_name = "MASK", default_value = "full", help = Mask::notation())]
    pub(crate) mask: MaskArg,
    /// same, f16 (for f32 tensors) or int8 (with scales): keys and values on their way between shards, rounded once;
    /// `kyklos plan` says how wrong that makes the result
    #[arg(long, value_name = "NAME", default_value = "same")]
    pub(crate) wire: WireFormat,
    /// Sum over tiles of 256 keys in one order: on one type of device the same bytes on any mesh; costs time
    #[arg(long)]
    pub(crate) fixed_order: bool,
    /// Keys A to B that every rank holds from the start, such as a prompt beside an image: never sent, met once
    #[arg(long, value_name = "A..B", default_value = "0..0")]
    pub(crate) replicated: TokenRange,
    /// Global position of query 0; key 0 is at position 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) q_offset: u32,
    /// Factor on q·k [default: 1/√dim]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f32>,
    /// Logits become X·tanh(logit/X)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) softcap: Option<f32>,
    /// With made-up tensors: make up a sink for each query head too (an input file brings its own as `sinks`)
    #[arg(long, conflicts_with = "input")]
    pub(crate) sinks: bool,
    /// f32, f16 or bf16 [default: the input's, else f32]
    #[arg(long, value_name = "NAME")]
    pub(crate) dtype: Option<Dtype>,
}

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
    /// Serve Prometheus metrics, /healthz and /readyz there, on loopback; ranks of one host take the ports that follow (0: any)
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Let --metrics be an address that other machines reach
    #[arg(long, requires = "metrics")]
    pub(crate) metrics_anywhere: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) group: GroupArgs,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    /// List every plan that could run, with predicted time, bytes, memory and idle share, and say why the first is first
    #[arg(long)]
    pub(crate) explain: bool,
    /// With --explain: measure the devices and the link of ranks in this process instead of reading a description
    #[arg(long, requires = "explain", conflicts_with = "hardware")]
    pub(crate) probe: bool,
    /// With --probe: run every plan so often too, in turns with the probe, and compare
    #[arg(long, value_name = "ROUNDS", requires = "probe")]
    pub(crate) measure: Option<NonZeroU32>,
    /// With --probe: write what was measured as a description for --hardware
    #[arg(long, value_name = "F", requires = "probe")]
    pub(crate) save: Option<PathBuf>,
    /// With --probe: auto, cpu or wgpu, as for `attend`
    #[arg(long, value_name = "D,D,…", default_value = "auto", requires = "probe")]
    pub(crate) device: List<DeviceRequest>,
    /// With --probe: how ranks talk
    #[arg(long, value_enum, default_value_t = TransportName::InProcess, requires = "probe")]
    pub(crate) transport: TransportName,
    /// Show the steps of this rank only [default: of all up to 4 ranks, else of rank 0]
    #[arg(long, value_name = "R")]
    pub(crate) rank: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is timed: every combination.
#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    /// auto, cpu, wgpu or cuda, the last two also by number
    #[arg(long, value_name = "D,D,…", default_value = "auto")]
    pub(crate) device: List<DeviceRequest>,
    /// auto, portable, subgroup, cooperative, or one that `tune` lists; all but auto are kernels of wgpu devices
    #[arg(long, value_name = "K,K,…", default_value = "auto")]
    pub(crate) kernel: List<KernelName>,
    /// Batch, tokens, query heads, kv heads, head dim; may be given again
    #[arg(long, value_name = "B,S,HQ,HKV,D", default_values = ["1,1024,8,8,64", "1,1024,8,2,128"])]
    pub(crate) shape: Vec<Shape>,
    /// As for `attend`; may be given again
    #[arg(long, value_name = "MASK", default_values = ["full", "causal"])]
    pub(crate) mask: Vec<MaskArg>,
    /// f32, f16, bf16; may be given again
    #[arg(long, value_name = "NAME", default_values = ["f32", "f16"])]
    pub(crate) dtype: Vec<Dtype>,
    /// Only the last N tokens are queries: 1 is the shape of decoding
    #[arg(long, value_name = "N")]
    pub(crate) queries: Option<NonZeroU32>,
    /// Timed runs of each combination, after the first one
    #[arg(long, value_name = "N", default_value = "9")]
    pub(crate) repeat: NonZeroU32,
    /// Hold every row of f16 and bf16 to what the same device makes of it in f32, which is held to the oracle on the rows that
    /// are sampled anyway
    #[arg(long)]
    pub(crate) verify: bool,
    /// Another program to take turns with on one device; may be given again. COMMAND is called with a case, such as
    /// 1,1024,8,8,64,causal,f32, and a number of calls, and prints {"first_ms":…,"times_ms":[…],"max_abs_error":…}
    #[arg(long, value_name = "NAME=COMMAND")]
    pub(crate) against: Vec<Peer>,
    /// With --against: how often everybody has a turn
    #[arg(long, value_name = "N", default_value = "3", requires = "against")]
    pub(crate) rounds: NonZeroU32,
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses the arguments of the program, its name first.
///
/// # Errors
/// What clap says, help and version among it.
pub(crate) fn parse(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(arguments)
}

/// clap's refusal on one line: what is wrong, its tips, and where to read more.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut parts: Vec<&str> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        if !line.is_empty() {
            parts.push(line.strip_prefix("error: ").unwrap_or(line));
        }
    }
    let (first, rest) = parts.split_first().map_or(("", &[][..]), |(first, rest)| (*first, rest));
    let joined = rest.iter().fold(first.to_owned(), |mut all, part| {
        all.push_str(if all.ends_with(':') { " " } else { "; " });
        all.push_str(part);
        all
    });
    match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand | ErrorKind::MissingRequiredArgument => {
            format!("{joined}; kyklos --help and kyklos <command> --help list what there is")
        }
        _ => joined,
    }
}
