//! Options of `kyklos bench strategies`.

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser};
use kyklos::{Dtype, Error, Mask, Mesh, PlacementKind};

use crate::devices::{self, DeviceRequest};
use crate::group::GroupArgs;
use crate::job::collective::CollectiveArgs;
use crate::network::NetworkArgs;
use crate::options::{ByteSize, List, StrategyName, TransportName, headings};

#[derive(Clone, Debug, Args)]
pub(crate) struct StrategiesArgs {
    /// Tokens, query heads, KV heads, head dim; repeatable
    #[arg(help_heading = headings::INPUT, long, value_name = "S,HQ,HKV,D", default_values = ["1024,8,8,64"])]
    pub(super) shape: Vec<TokenShape>,
    /// Batch entries; each shape runs with each of them
    #[arg(help_heading = headings::INPUT, long, value_name = "B,B,…", value_delimiter = ',', default_values = ["1", "2", "4", "8"])]
    pub(super) batch: Vec<NonZeroU32>,
    /// A mask as in `attend`; repeatable
    #[arg(help_heading = headings::MASK, long, value_name = "MASK", default_values = ["full"])]
    pub(super) mask: Vec<Mask>,
    /// f32, f16 or bf16
    #[arg(help_heading = headings::INPUT, long, value_name = "NAME,…", value_delimiter = ',', default_values = ["f32"])]
    pub(super) dtype: Vec<Dtype>,
    /// Only these strategies
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "NAME,…", value_delimiter = ',')]
    pub(super) strategy: Vec<StrategyName>,
    /// Only these meshes
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "UxR,…", value_delimiter = ',')]
    pub(super) mesh: Vec<Mesh>,
    /// Only these placements
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "KIND,…", value_delimiter = ',')]
    pub(super) placement: Vec<PlacementKind>,
    /// Run this many ranks in this process [default: 1, or under a launcher a rank for each
    /// process]
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "N")]
    pub(crate) ranks: Option<NonZeroU32>,
    /// How ranks send messages [default: in-process with --ranks, quic under a launcher]
    #[arg(help_heading = headings::NETWORK, long, value_enum)]
    pub(super) transport: Option<TransportName>,
    #[command(flatten)]
    pub(super) collective: CollectiveArgs,
    #[arg(
        help_heading = headings::DEVICE,
        long,
        value_name = "D,D,…",
        default_value = "auto",
        help = format!("One device for each rank; the last one repeats: {}", devices::names())
    )]
    pub(super) device: List<DeviceRequest>,
    /// Timed runs of each cell, after one run that compiles kernels and allocates memory
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "N", default_value = "3")]
    pub(super) repeat: NonZeroU32,
    /// Folder of the results, which rank 0 writes: cells.jsonl, strategies.csv, strategies.json,
    /// strategies.html. Cells that it already has are not run again
    #[arg(help_heading = headings::OUTPUT, long, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Run the cells again that have failed
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(crate) retry: bool,
    /// Refuse cells that need more memory on a machine [default: the memory of the machine]
    #[arg(help_heading = headings::DEVICE, long, value_name = "BYTES")]
    pub(super) memory: Option<ByteSize>,
    /// Refuse cells whose predicted time is more than this many seconds for each run
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "SECONDS")]
    pub(super) longest: Option<NonZeroU32>,
    /// End a cell that takes more than this many seconds, with all its runs, as failed
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "SECONDS", default_value = "1800")]
    pub(super) cell_limit: NonZeroU32,
    /// TOML file that describes devices and links, for the predicted times [default: rank 0
    /// measures them, where all ranks are on its machine]
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "F")]
    pub(super) hardware: Option<PathBuf>,
    /// A cell fails when an expected message does not arrive within this many seconds
    #[arg(help_heading = headings::RECOVERY, long, value_name = "SECONDS", default_value = "600")]
    pub(super) deadline: NonZeroU32,
    #[command(flatten)]
    pub(crate) group: GroupArgs,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

impl StrategiesArgs {
    /// Reads the words of a command line after `bench`, from `strategies` on.
    ///
    /// # Errors
    /// The parser's refusal.
    pub(crate) fn of_words(words: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Alone::try_parse_from(words).map(|Alone { args }| args)
    }

    /// Longest wait for one message.
    pub(super) fn deadline(&self) -> Duration {
        Duration::from_secs(u64::from(self.deadline.get()))
    }
}

/// `bench strategies` as a program of its own.
#[derive(Parser)]
#[command(name = "kyklos bench strategies")]
struct Alone {
    #[command(flatten)]
    args: StrategiesArgs,
}

/// `S,HQ,HKV,D`: tokens, query heads, KV heads, head dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenShape(pub(super) [u32; 4]);

impl FromStr for TokenShape {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let List(numbers) = text.parse::<List<u32>>()?;
        let count = numbers.len();
        numbers.try_into().map(Self).map_err(|_| {
            Error::request(
                format!("shape `{text}` of strategies has {count} numbers"),
                "give four: tokens, query heads, kv heads, head dim, such as 4096,8,2,64; --batch has the batch entries",
            )
        })
    }
}
