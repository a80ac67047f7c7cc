//! Options of `kyklos bench`.

use std::num::NonZeroU32;

use clap::{Args, Subcommand};
use kyklos::{Dtype, Mask};

use super::against::Peer;
use super::plans::PlansArgs;
use super::strategies::StrategiesArgs;
use crate::devices::{self, DeviceRequest};
use crate::options::{KernelName, List, Shape, headings};

/// The combinations to time.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,
    #[arg(
        help_heading = headings::DEVICE,
        long,
        value_name = "D,D,…",
        default_value = "auto",
        help = format!("Devices to time: {}", devices::names())
    )]
    pub(crate) device: List<DeviceRequest>,
    /// auto, portable, subgroup, cooperative, or a kernel that `tune` lists. Only wgpu devices have
    /// several kernels
    #[arg(help_heading = headings::DEVICE, long, value_name = "K,K,…", default_value = "auto")]
    pub(crate) kernel: List<KernelName>,
    /// Batch, tokens, query heads, KV heads, head dim; repeatable
    #[arg(help_heading = headings::INPUT, long, value_name = "B,S,HQ,HKV,D", default_values = ["1,1024,8,8,64", "1,1024,8,2,128"])]
    pub(crate) shape: Vec<Shape>,
    /// A mask as in `attend`; repeatable
    #[arg(help_heading = headings::MASK, long, value_name = "MASK", default_values = ["full", "causal"])]
    pub(crate) mask: Vec<Mask>,
    /// f32, f16 or bf16
    #[arg(help_heading = headings::INPUT, long, value_name = "NAME,…", value_delimiter = ',', default_values = ["f32", "f16"])]
    pub(crate) dtype: Vec<Dtype>,
    /// Only the last N tokens are queries; 1 is the shape of decoding
    #[arg(help_heading = headings::INPUT, long, value_name = "N")]
    pub(crate) queries: Option<NonZeroU32>,
    /// Time the backward pass: the gradients of q, k and v from the output, its log-sum-exp and a
    /// random gradient of the output. The gradients of one head are compared with the oracle
    #[arg(help_heading = headings::INPUT, long, conflicts_with = "verify")]
    pub(crate) backward: bool,
    /// With --backward: time both passes of a ring of N ranks of this process, in turns with those
    /// of one rank on the same device. The ranks of a CPU share its threads
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "N", requires = "backward", group = "turns")]
    pub(crate) ranks: Option<NonZeroU32>,
    /// Timed runs of each combination, after one warm-up run
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "N", default_value = "9")]
    pub(crate) repeat: NonZeroU32,
    /// Instead of --repeat: runs for N ms, at least three, after N / 2 ms of runs that are not
    /// timed. An idle GPU has a low clock at first
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "N", conflicts_with_all = ["repeat", "turns"])]
    pub(crate) duration_ms: Option<NonZeroU32>,
    /// Compare every row of f16 and bf16 with the result of the same device in f32. Sampled rows
    /// are compared with the oracle in any case
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(crate) verify: bool,
    /// Another program to time in turns with this one, on one device; repeatable. COMMAND gets a
    /// case, such as 1,1024,8,8,64,causal,f32, with ,backward after it for --backward, and a
    /// number of calls; it prints {"first_ms":…,"times_ms":[…],"max_abs_error":…}
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "NAME=COMMAND", group = "turns")]
    pub(crate) against: Vec<Peer>,
    /// With --against or --ranks: number of turns of each program, or of each number of ranks
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "N", default_value = "3", requires = "turns")]
    pub(crate) rounds: NonZeroU32,
    /// Print one JSON array
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(crate) json: bool,
}

/// What else to time.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Times every strategy, mesh and placement on the ranks of a group, beside the predicted times
    ///
    /// A cell is a shape, batch, mask and dtype, and one way to run it. Cells that do not fit are
    /// listed with the reason. Sampled rows of each result are compared with the f64 oracle; a
    /// wrong result gets no time. A run that ended early goes on where it ended: a cell
    /// in which the program ended counts as failed.
    Strategies(Box<StrategiesArgs>),
    /// Times planning, proving and voting for 8 to 1024 ranks, and says how the times grow with the
    /// size of the plans; needs no device
    Plans(PlansArgs),
}
